"""What recorded launches run on, whatever the target. A machine is used by one thread at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from mlxr.kernels.gpu.recording import Launch, Product
from mlxr.kernels.gpu.step_memory import StepMemory
from mlxr.kernels.gpu.steps import Results

AnyArray = npt.NDArray[Any]


class Machine(Protocol):
    """Where recorded launches run; `multiplies` says whether products are among them, `memory` is for their results.

    `has_boxes`: kernels may bring boxes of matrices into their memory, and multiply them there (`Box`).

    `processors` are the multiprocessors that share the threadgroups of a launch, each with `room_bytes` for one
    threadgroup; 0 where threadgroups run one after another.
    """

    multiplies: bool
    has_boxes: bool
    memory: StepMemory
    processors: int
    room_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that it holds."""

    def drop(self, prepared: Mapping[str, Any]) -> None:
        """Let go of prepared launches."""

    def prepare(self, launches: Sequence[Launch | Product]) -> Any:
        """The launches in a form that `start` takes."""

    def start(self, prepared: Any) -> None:
        """Run prepared launches after what was given before."""

    def write(self, address: int, values: AnyArray) -> None:
        """Copy numbers to the device."""

    def read(self, address: int, size: int, dtype: npt.DTypeLike) -> Results:
        """Have `size` numbers copied to the host."""

    def synchronize(self) -> None:
        """Wait until all is done."""
