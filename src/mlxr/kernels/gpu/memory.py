"""Memory of a GPU: what is left of it, and what is stated of the workspace.

The workspace is all but weights and arena: what the arrays of a step of many tokens take, which is bounded since the
host is never more than a few layers ahead of the device (`Gpu.start`); what is held for good (the memory of recorded
steps, expanded weights); and OTHER_BYTES. MLX keeps freed arrays for reuse; it may keep as much as that and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OTHER_BYTES = 64 * 2**20  # logits of some rows, tables of rotations, what a batch places
LOADING_BYTES = 512 * 2**20  # of freed arrays that MLX may keep before there was a step


def read_free_bytes(mx: Any, device: str) -> int | None:
    """Bytes that arrays on the GPU may still take, what MLX keeps for reuse included; None where it does not tell."""
    info = mx.device_info()
    if device == "cuda":
        free_bytes = info.get("free_memory")
        if free_bytes is None:
            return None
        rest_bytes = int(mx.get_memory_limit() - mx.get_active_memory())
        return max(0, min(int(free_bytes) + int(mx.get_cache_memory()), rest_bytes))
    limit_bytes = info.get("max_recommended_working_set_size")
    return None if limit_bytes is None else max(0, int(limit_bytes) - int(mx.get_active_memory()))


class Workspace:
    """What is stated for the largest step so far; `count_held` gives the bytes that are held for good."""

    def __init__(self, mx: Any, count_held: Callable[[], int]) -> None:
        self._mx, self._count_held = mx, count_held
        self._step_bytes = self._full_bytes = 0
        mx.set_cache_limit(LOADING_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes that are stated as in use."""
        return OTHER_BYTES + self._step_bytes + self._count_held()

    def cover(self, step_bytes: int, layer_bytes: int) -> None:
        """A step begins, whose arrays take `step_bytes` when `layer_bytes`, those of a layer, are added at the last."""
        self._full_bytes = self._mx.get_active_memory() + step_bytes - layer_bytes
        if step_bytes > self._step_bytes:
            self._step_bytes = step_bytes
            self._mx.set_cache_limit(self.nbytes)
            self._mx.clear_cache()  # of what loading left, which may lie in the host's memory

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another layer of the step: what is done with has not come back yet."""
        return bool(self._mx.get_active_memory() > self._full_bytes)
