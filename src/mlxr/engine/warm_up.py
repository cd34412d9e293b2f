"""Warm-up: steps that make a GPU compile and record what requests will need, before the first one comes.

The model runs as always, over pages that are given back at once. Sequences that decode come in powers of two, once with
a short page table and once with the longest, as recorded steps are made for such classes of batches; prompts are long
enough for each kernel that goes by the number of rows, and two come at once, so that two of their rows are drawn from.
Nothing is counted. Steps that check drafts or have adapters are left to the first request that brings some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from mlxr.cache.kv_cache import KVCache
from mlxr.core.errors import OutOfPages
from mlxr.core.types import SamplingParams
from mlxr.engine.batch import BatchPart
from mlxr.engine.runner import Runner
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import MAX_SEQUENCES
from mlxr.kernels.sample import SampleRow, sample

Progress = Callable[[int, int], None]
FEW_TOKENS = (*range(2, 9), *range(16, 65, 8))  # of a prompt: rows that some kernels have variants for
DRAWS = (SampleRow(), SampleRow(params=SamplingParams(temperature=1.0), uniform=0.5))


class WarmUp:
    """The steps of at most `max_sequences` sequences with `context_tokens` each, and of prompts in pieces of at most
    `chunk_tokens`."""

    def __init__(
        self,
        ctx: Context,
        runner: Runner,
        cache: KVCache,
        max_sequences: int,
        chunk_tokens: int,
        context_tokens: int,
    ) -> None:
        self._ctx, self._runner, self._cache = ctx, runner, cache
        self._max_sequences, self._chunk_tokens = min(max_sequences, MAX_SEQUENCES), chunk_tokens
        self._context_tokens = context_tokens

    def run(self, max_sequences: int | None = None, progress: Progress | None = None, *, is_brief: bool = False) -> int:
        """Run all steps, of at most `max_sequences` sequences; how many there were, 0 where nothing is compiled.

        Those for which there are too few pages are left out. If it `is_brief`, there are one prompt and one token after
        it. `progress` is called with (steps done, steps in all).
        """
        if not self._ctx.compiles:
            return 0
        most = self._max_sequences if max_sequences is None else min(max_sequences, self._max_sequences)
        longest = min(self._chunk_tokens, self._context_tokens)
        steps = [(1, 1, 1), (1, longest, longest)] if is_brief else [*self._list_steps(most)]
        with self._ctx.rehearse():
            for number, step in enumerate(steps):
                self._run_step(*step)
                if progress is not None:
                    progress(number + 1, len(steps))
        self._cache.forget_peak()
        return len(steps)

    def _list_steps(self, max_sequences: int) -> Iterator[tuple[int, int, int]]:
        """Sequences, tokens of each, and tokens for which each has pages."""
        for sequences in self._list_powers(1, max_sequences):
            yield sequences, 1, 1
            pages = min(self._cache.available_pages, default=0) // sequences
            if pages > 1:
                yield sequences, 1, min(self._context_tokens, pages * self._cache.page_size)
        longest = min(self._chunk_tokens, self._context_tokens)
        few = [tokens for tokens in FEW_TOKENS if tokens <= longest]
        for tokens in [*few, *self._list_powers(128, longest)]:
            yield 1, tokens, tokens
        if max_sequences > 1 and few:
            yield 2, few[0], few[0]

    @staticmethod
    def _list_powers(first: int, most: int) -> Iterator[int]:
        """`first`, doubled as often as it stays below `most`, and `most`."""
        while first < most:
            yield first
            first *= 2
        if first < 2 * most:
            yield most

    def _run_step(self, sequences: int, tokens: int, room_tokens: int) -> None:
        with ExitStack() as held:
            parts = []
            for _ in range(sequences):
                table = self._cache.open_private_table()
                held.callback(self._cache.release, table)
                try:
                    self._runner.reserve(table, room_tokens)
                except OutOfPages:
                    return
                parts.append(BatchPart(table, [0] * tokens, output_tokens=1))
            logits = self._runner.forward(parts).logits
            for row in DRAWS:
                sample(self._ctx, logits, [row] * sequences, goes_on=False)
