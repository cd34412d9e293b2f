"""Memory of a GPU: what is left of it, and what arrays between operators take, which is the workspace.

A step's workspace is bounded, since the host is never more than a few layers ahead of the device in steps of many
tokens (`Gpu.start`). MLX keeps freed arrays for reuse; it may keep as much as the workspace and no more.
"""

from __future__ import annotations

from typing import Any

KEPT_BYTES = 512 * 2**20  # expanded tiles of weights, logits, shares of attention; also what loading a weight takes


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
    """`nbytes` is the most that arrays between operators take, for the largest step so far."""

    def __init__(self, mx: Any) -> None:
        self._mx, self.nbytes = mx, KEPT_BYTES
        mx.set_cache_limit(KEPT_BYTES)

    def cover(self, step_bytes: int) -> None:
        """Make room for a step whose arrays take `step_bytes`, beside what is kept in any case."""
        if KEPT_BYTES + step_bytes > self.nbytes:
            self.nbytes = KEPT_BYTES + step_bytes
            self._mx.set_cache_limit(self.nbytes)
            self._mx.clear_cache()  # of what loading left, which may lie in the host's memory
