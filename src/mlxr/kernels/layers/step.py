"""What one step gives to all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.kernels.lora import AdapterRows, choose_rows
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.tensor import PoolArray


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """A batch, the rotation tables that layers name by their number, and for each layer its part of the cache.

    That is one K and one V pool, None for a layer without them, and the pool of a recurrent layer's `states`, (slots,
    floats) in f32, of which the batch's `state_reads` and `state_writes` name the slots; None for other layers.

    `adapters` update the products of some rows, in their order.
    """

    batch: RaggedBatch
    ropes: Sequence[RopeTable]
    k_pools: Sequence[PoolArray]
    v_pools: Sequence[PoolArray]
    states: Sequence[PoolArray | None] = ()
    adapters: Sequence[AdapterRows] = ()

    @property
    def output_adapters(self) -> Sequence[AdapterRows]:
        """The adapters of the batch's output rows, by the places that these have among themselves."""
        return choose_rows(self.adapters, self.batch.output_rows) if self.adapters else ()

    def cut(self, start: int, stop: int) -> StepInput:
        """What the layers from number `start` to before `stop` get."""
        pools = self.k_pools[start:stop], self.v_pools[start:stop]
        return StepInput(self.batch, self.ropes, *pools, self.states[start:stop], self.adapters)
