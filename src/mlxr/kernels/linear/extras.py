"""What a product may do in its own launch besides: a bias, the norm of x before it, a gate or a sum after it.

Every kernel of products takes the arrays for that behind the weights, and constants say which of them are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from mlxr.core.tables import Activation
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.tensor import DeviceArray

Weights = list[tuple[int, int, DeviceArray]]  # one or two: number of its type, rows, planes
GATES: Mapping[str, int] = {kind: code for code, kind in enumerate(get_args(Activation), 1)}


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What one product does besides; None and 0 are nothing.

    `gate`, one of GATES: the upper half of the outputs gates the lower one. `norm`, weight and epsilon, is of x.
    """

    gate: int = 0
    bias: DeviceArray | None = None
    norm: tuple[DeviceArray, float] | None = None
    residual: DeviceArray | None = None

    def list_inputs(self, gpu: Gpu) -> list[DeviceArray]:
        """The bias, the norm's weight, the residual, and the norm's epsilon; zeros stand for what is not there."""
        numbers = gpu.launcher.numbers
        none = numbers(0.0)
        weight, eps = (none, none) if self.norm is None else (self.norm[0], numbers(self.norm[1]))
        bias = none if self.bias is None else self.bias
        return [bias, weight, none if self.residual is None else self.residual, eps]

    @property
    def constants(self) -> dict[str, int]:
        """What of it a kernel is compiled for."""
        return flag_extras(
            self.gate, is_normed=self.norm is not None, is_biased=self.bias is not None, adds=self.residual is not None
        )


def flag_extras(gate: int, *, is_normed: bool = False, is_biased: bool = False, adds: bool = False) -> dict[str, int]:
    """`Extras.constants` where there are no arrays yet."""
    return {"NORM": int(is_normed), "BIAS": int(is_biased), "GATE": gate, "RESIDUAL": int(adds)}
