"""Which part of a model's experts is in memory where there is no room for all: a budget of bytes that layers share.

Each layer keeps the experts that were used last, as many as its share holds. The others stay in the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.core.errors import DeviceError, SettingError

FULL_PERCENT = 90  # of the free memory: weights that take more leave too little for the cache
TAKEN_PERCENT = 70  # of the free memory: what weights take where not all of them are in memory


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """Bytes for the experts of all layers; `sizes` are what those of each layer take in the file."""

    nbytes: int
    sizes: tuple[int, ...]

    def count_slots(self, layer: int, expert_bytes: int, experts: int) -> int:
        """Count the experts of a layer that may be in memory, each of so many bytes. SettingError where it is none."""
        share = self.nbytes * self.sizes[layer] // sum(self.sizes)
        if share >= expert_bytes:
            return min(experts, share // expert_bytes)
        least = expert_bytes * sum(self.sizes) // self.sizes[layer] + len(self.sizes)
        raise SettingError(
            f"expert_bytes: one expert of each layer takes {least:,} bytes, and there is room for {self.nbytes:,}; set "
            "it higher, free memory or take a smaller model"
        )


def plan_experts(
    sizes: Sequence[int], total_bytes: int, device: str, expert_bytes: int | None, free_bytes: int | None
) -> ExpertBudget | None:
    """The budget of a model of `total_bytes`, the experts of whose layers take `sizes`; None where all are in memory.

    `expert_bytes` is what the setting says; None means all experts, unless the free memory, where it is known, has no
    room for the model. Raises DeviceError for a setting on a device that has all weights in memory.
    """
    if expert_bytes is not None and device != "cpu":
        raise DeviceError(
            f"expert_bytes: experts stay in their file on device 'cpu' only, not on {device!r}; leave it out there"
        )
    experts = sum(sizes)
    free = None if device != "cpu" else free_bytes
    if expert_bytes is None and free is not None and total_bytes > free * FULL_PERCENT // 100:
        expert_bytes = max(0, free * TAKEN_PERCENT // 100 - (total_bytes - experts))
    return None if expert_bytes is None or not experts else ExpertBudget(expert_bytes, tuple(sizes))
