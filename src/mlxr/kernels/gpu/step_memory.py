"""Memory of recorded steps: the same for all of them, since they run one after another.

A step takes pieces from the beginning when it is recorded; what it takes beyond the largest one so far is added. So all
steps together hold hardly more than the largest. Knows only addresses.
"""

from __future__ import annotations

from collections.abc import Callable

CHUNK_BYTES = 2 * 2**20  # a driver gives no less


class StepMemory:
    """`allocate(bytes)` gives the address of new memory, which stays for good."""

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._chunks: list[tuple[int, int]] = []  # addresses and sizes

    @property
    def nbytes(self) -> int:
        """Bytes that are held for steps."""
        return sum(size for _, size in self._chunks)

    def open(self) -> Callable[[int], int]:
        """What gives one step its pieces, by their bytes."""
        rests = [list(chunk) for chunk in self._chunks]

        def take(size_bytes: int) -> int:
            rest = next((rest for rest in rests if rest[1] >= size_bytes), None)
            if rest is None:
                chunk_bytes = -(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES
                self._chunks.append((self._allocate(chunk_bytes), chunk_bytes))
                rests.append(rest := list(self._chunks[-1]))
            address = rest[0]
            rest[0] += size_bytes
            rest[1] -= size_bytes
            return address

        return take
