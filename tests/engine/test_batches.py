"""Batches that are made in short ways equal those that are made in full, down to the last integer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mlxr.engine import runner as batches
from mlxr.engine.runner import BatchPart, build_batch
from mlxr.kernels.gpu.graph import pad_batch
from mlxr.kernels.gpu.steps import StepPools, advance_batch
from mlxr.kernels.ragged import RaggedBatch

FIELDS = ("token_ids", "positions", "slots", "query_starts", "context_lengths", "page_table", "output_rows")
PAGES, PAGE_SIZE = 64, 4


@dataclass
class FakePages:
    pages: list[int]


@dataclass
class FakeTable:
    """The parts of a table that batches read: the pages of each group, and how many positions are written."""

    paged: list[FakePages]
    length_tokens: int
    page_size: int = PAGE_SIZE
    states: None = None


@dataclass
class FakePool:
    shape: tuple[int, ...] = (PAGES, 1, PAGE_SIZE, 4)
    graphs: dict[object, object] = field(default_factory=dict)


def make_parts(chance: random.Random, groups: int, most: int) -> list[Any]:
    """Make sequences of some length with room for more, each with a few tokens that come next, all of them wanted."""
    parts = []
    for _ in range(chance.randrange(1, 4)):
        length, count = chance.randrange(30), chance.randrange(1, most + 1)
        columns = (length + count) // PAGE_SIZE + 1
        table: Any = FakeTable([FakePages(chance.sample(range(PAGES), columns)) for _ in range(groups)], length)
        parts.append(BatchPart(table, [chance.randrange(50) for _ in range(count)], count))
    return parts


def expect_same(found: RaggedBatch, wanted: RaggedBatch) -> None:
    assert (found.longest_context, found.longest_run) == (wanted.longest_context, wanted.longest_run)
    for one, other in zip(found.groups, wanted.groups, strict=True):
        for name in FIELDS:
            array = getattr(one, name)
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
            np.testing.assert_array_equal(array, getattr(other, name), name)


def expect_sound(batch: RaggedBatch) -> None:
    """Assert that a batch is the one that is made of the same arrays with all checks."""
    for group in batch.groups:
        arrays = {name: getattr(group, name) for name in FIELDS}
        assert RaggedBatch(**arrays).longest_context == batch.longest_context


@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("most", [1, 5, 16])
def test_a_few_tokens_make_the_batch_of_any_tokens(monkeypatch: pytest.MonkeyPatch, groups: int, most: int) -> None:
    for seed in range(20):
        parts = make_parts(random.Random(seed), groups, most)
        found = build_batch(parts)
        with monkeypatch.context() as patch:
            patch.setattr(batches, "FEW", 0)
            expect_same(found, build_batch(parts))


def test_a_sequence_without_tokens_is_refused_in_every_way() -> None:
    parts = make_parts(random.Random(0), 1, 5)
    parts.append(BatchPart(parts[0].table, [], 0))
    with pytest.raises(ValueError, match="no sequence empty"):
        build_batch(parts)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("most", [1, 5])
def test_padded_batches_and_those_that_follow_are_sound(groups: int, most: int) -> None:
    pools: Any = StepPools([FakePool() for _ in range(groups)])
    for seed in range(20):
        batch = build_batch(make_parts(random.Random(seed), groups, most))
        padded = pad_batch(batch if most == 1 else batch.split_rows(), pools)
        assert padded.longest_run == (1 if most == 1 else 16)
        assert padded.tokens == 1 << (batch.tokens - 1).bit_length()
        expect_sound(padded)
        following = advance_batch(padded, batch.tokens, pools)
        assert (following is None) == (most > 1)
        if following is not None:
            expect_sound(following)
            assert following.positions[: batch.tokens].tolist() == (batch.positions + 1).tolist()
