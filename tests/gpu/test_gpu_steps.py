"""Memory of recorded steps: pieces of a step lie apart, steps lie on top of one another."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mlxr.kernels.gpu.recording import CHUNK_BYTES, StepMemory


class Maker:
    """Gives addresses far from one another."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, size_bytes: int) -> int:
        self.sizes.append(size_bytes)
        return len(self.sizes) << 40


@pytest.mark.smoke
def test_pieces_of_a_step_lie_apart() -> None:
    memory = StepMemory(Maker().allocate)
    take = memory.open()
    sizes = [256, CHUNK_BYTES - 256, 256, 3 * CHUNK_BYTES + 256, 512, CHUNK_BYTES]
    places = sorted((take(size), size) for size in sizes)
    for (address, size), (following, _) in pairwise(places):
        assert address + size <= following


def test_steps_take_the_same_memory() -> None:
    maker = Maker()
    memory = StepMemory(maker.allocate)
    small = [CHUNK_BYTES // 4] * 3
    first = list(map(memory.open(), small))
    assert list(map(memory.open(), small)) == first
    assert memory.nbytes == CHUNK_BYTES
    large = memory.open()
    large(5 * CHUNK_BYTES)
    assert memory.nbytes == sum(maker.sizes) == 6 * CHUNK_BYTES
    again = memory.open()
    again(5 * CHUNK_BYTES)
    again(CHUNK_BYTES)
    assert memory.nbytes == 6 * CHUNK_BYTES
