"""What one step gives to all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import PoolArray


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """A batch, the rotation tables that layers name by their number, and one K and one V pool for each layer."""

    batch: RaggedBatch
    ropes: Sequence[RopeTable]
    k_pools: Sequence[PoolArray]
    v_pools: Sequence[PoolArray]
