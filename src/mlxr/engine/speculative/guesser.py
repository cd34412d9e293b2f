"""Who guesses for answers, token after token: a small model, or a head that reads another model's states.

Both have a cache of their own, whose tables the drafters hold. Knows no costs: what is computed when is decided by
`DraftModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.engine.batch import BatchPart, build_batch, build_single
from mlxr.engine.runner import Floats, ModelShape, Runner, reserve_pages
from mlxr.engine.speculative.drafters import HeadDrafter, ModelDrafter
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sample import SampleResult, SampleRow, fetch_logits, sample, sample_chain

Guesses = list[list[SampleResult]]  # by place, one for each answer


class HeadModel(Protocol):
    """A head that drafts: `mlxr.models.draft_head` has the real ones."""

    @property
    def config(self) -> ModelShape:
        """Its sizes, as those of a model."""

    @property
    def read_share(self) -> float:
        """About how much of the model's time for some tokens the head takes to read as many."""

    @property
    def taps(self) -> tuple[int, ...] | None:
        """The layers before which the model's stream is its state, one beside the other; None: after the last norm."""

    def fuse(self, states: Floats) -> Floats:
        """Turn states of the model, tokens by rows, into those that `forward` reads."""

    def forward(self, batch: RaggedBatch, states: Floats, arena: ModelArena) -> tuple[Floats, Floats]:
        """Logits (R, n) after the output rows, and what stands for the states of these."""

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """The token ids of columns of the logits."""


class Guesser(Protocol):
    """Computes the guesses of a `DraftModel`, whose drafters have tables with room for the positions to be written."""

    cache: KVCache

    @property
    def read_share(self) -> float:
        """As that of a head, before anything is measured."""

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Make room for `tokens` more positions; OutOfPages if it fails."""

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        """Compute the next `tokens` inputs of an answer."""

    def start(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """Compute all inputs of answers that are not in their tables; the likeliest column after the last ones.

        So many places are likely to be asked for. A GPU may give several of them at once, those after the first as if
        each answer had taken the one before.
        """

    def go_on(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """Compute the last drafted token of each answer; the likeliest column after it, and maybe more places."""

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """The token ids of columns of the logits."""


class ModelGuesser:
    """A small model behind `runner`."""

    read_share = 1.0

    def __init__(self, ctx: Context, runner: Runner, cache: KVCache) -> None:
        self._ctx, self._runner, self.cache = ctx, runner, cache

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Make room for `tokens` more positions; OutOfPages if it fails."""
        self._runner.reserve(table, tokens)

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        """Compute the next `tokens` inputs of an answer."""
        table = drafter.open
        outputs = self._runner.forward([BatchPart(table, drafter.inputs[table.length_tokens :][:tokens], 1)])
        fetch_logits(self._ctx, outputs.logits)  # as a GPU has but begun, and the time counts

    def start(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """The likeliest column after all inputs."""
        pending = [drafter.inputs[drafter.open.length_tokens :] for drafter in drafters]
        parts = [BatchPart(drafter.open, own, len(own)) for drafter, own in zip(drafters, pending, strict=True)]
        logits, ends = self._runner.forward(parts).logits, np.cumsum([len(own) for own in pending]) - 1
        if logits.shape[0] == len(drafters):
            return sample_chain(self._ctx, logits, places)
        return [_choose(self._ctx, logits, ends.tolist())]

    def go_on(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """The likeliest column after the last drafted tokens."""
        return sample_chain(self._ctx, self._runner.forward_single(*_list_last(drafters)), places)

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """The columns are the tokens."""
        return numbers


class HeadGuesser:
    """A head with the arena and the books of its pages; its drafters are `HeadDrafter`s."""

    def __init__(self, ctx: Context, head: HeadModel, arena: ModelArena, cache: KVCache) -> None:
        self._ctx, self._head, self._arena, self.cache = ctx, head, arena, cache
        self.read_share = head.read_share

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Make room for `tokens` more positions; OutOfPages if it fails."""
        reserve_pages(self.cache, self._arena, table, tokens)

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        """Compute the next `tokens` inputs of an answer."""
        self._compute([drafter], tokens, outputs=0)

    def start(self, drafters: Sequence[ModelDrafter], _places: int) -> Guesses:
        """The likeliest column after all inputs; the drafters get what stands for the states there."""
        return [_choose(self._ctx, self._compute(drafters, None, outputs=1), range(len(drafters)))]

    def go_on(self, drafters: Sequence[ModelDrafter], _places: int) -> Guesses:
        """The likeliest column after the last drafted tokens."""
        states = np.stack([state for drafter in _as_heads(drafters) if (state := drafter.state) is not None])
        logits, made = self._head.forward(build_single(*_list_last(drafters)), states, self._arena)
        return [_choose(self._ctx, self._leave(drafters, logits, made), range(len(drafters)))]

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """The token ids of columns of the logits."""
        return self._head.name_tokens(numbers)

    def _compute(self, drafters: Sequence[ModelDrafter], tokens: int | None, outputs: int) -> Floats:
        parts, states = [], []
        for drafter in _as_heads(drafters):
            pending = drafter.inputs[drafter.open.length_tokens :][:tokens]
            parts.append(BatchPart(drafter.open, pending, outputs))
            states.append(drafter.read_states()[: len(pending)])
        fused = self._head.fuse(np.concatenate(states))
        logits, made = self._head.forward(build_batch(parts), fused, self._arena)
        return self._leave(drafters if outputs else [], logits, made)

    @staticmethod
    def _leave(drafters: Sequence[ModelDrafter], logits: Floats, made: Floats) -> Floats:
        for drafter, state in zip(_as_heads(drafters), made, strict=True):
            drafter.state = state
        return logits


def _choose(ctx: Context, logits: Floats, ends: Sequence[int]) -> list[SampleResult]:
    """The likeliest column of each of these rows, and how likely it is."""
    if isinstance(logits, np.ndarray) and len(ends) < len(logits):
        logits, ends = logits[list(ends)], range(len(ends))
    drawn = sample(ctx, logits, [SampleRow()] * logits.shape[0], goes_on=False)
    return [drawn[end] for end in ends]


def _as_heads(drafters: Sequence[ModelDrafter]) -> list[HeadDrafter]:
    return [drafter for drafter in drafters if isinstance(drafter, HeadDrafter)]


def _list_last(drafters: Sequence[ModelDrafter]) -> tuple[list[SequenceTable], list[int], list[int]]:
    """Tables, last drafted tokens, and the places where these belong."""
    return (
        [drafter.open for drafter in drafters],
        [drafter.drafted[-1] for drafter in drafters],
        [len(drafter.inputs) + len(drafter.drafted) - 1 for drafter in drafters],
    )
