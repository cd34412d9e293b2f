"""What the engine tells of a text besides an answer: one vector for it, or how likely each of its tokens is.

`Pool` makes a vector of the hidden states of a text, chunk by chunk; they are added up one after another in float64, so
that neither the chunks nor the batch can change a bit. A text by itself (`score_tokens`) and the prompt of a request
(`PromptScores`) get the log-probability of every token after the first; both go through the same pages, batches and
forward pass as any prompt. Logits are made for some tokens at a time, so that MAX_LOGITS_BYTES are all that is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mlxr.cache.page_table import SequenceTable
from mlxr.core.events import TokenInfo
from mlxr.core.types import TokenLogprob
from mlxr.engine.request import Pooling
from mlxr.engine.runner import BatchPart, Floats, Runner

MAX_LOGITS_BYTES = 32 * 2**20  # of one chunk; the float64 work on it takes a few times as much
Doubles = npt.NDArray[np.float64]


class Pool:
    """Hidden states of one text after the final norm: their mean, the last one, or the first (`cls`)."""

    __slots__ = ("_pooling", "_tokens", "_total")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: npt.NDArray[np.float64] | None = None
        self._tokens = 0

    def count_wanted(self, tokens: int, *, is_first: bool, completes: bool) -> int:
        """Return the number of states that are needed at the end of a chunk of `tokens` tokens.

        `is_first` if it begins the text, `completes` if it ends it.
        """
        if self._pooling == "last":
            return int(completes)
        return tokens if self._pooling == "mean" or is_first else 0

    def add(self, hidden: Floats, *, is_first: bool) -> None:
        """The wanted states of the next chunk, (tokens, hidden size). The first comes again after a preemption."""
        if is_first:
            self._total, self._tokens = None, 0
        hidden = hidden[:1] if self._pooling == "cls" else hidden
        for state in hidden.astype(np.float64):
            self._total = state if self._total is None else self._total + state
        self._tokens += len(hidden)

    def read(self) -> Floats:
        """Return the mean of what was added, a vector (hidden size,)."""
        if self._total is None:
            raise ValueError("nothing was added to the pool")
        return (self._total / self._tokens).astype(np.float32)


def choose_chunk_tokens(vocab_size: int, max_batch_tokens: int) -> int:
    """Tokens of a chunk whose logits stay within MAX_LOGITS_BYTES."""
    return max(1, min(max_batch_tokens, MAX_LOGITS_BYTES // (4 * vocab_size)))


def score_tokens(runner: Runner, table: SequenceTable, token_ids: Sequence[int], chunk_tokens: int) -> Doubles:
    """Natural log-probability of token_ids[1:], each given all before it, (len(token_ids) - 1,).

    `table` is an empty page table; the caller releases it. The prefix index is passed by: it would have no use, since
    the logits of all tokens are wanted, and texts that are scored should not drive out what requests share.
    """
    scores = np.empty(len(token_ids) - 1, dtype=np.float64)
    for start in range(0, len(scores), chunk_tokens):
        stop = min(start + chunk_tokens, len(scores))
        part = BatchPart(table, token_ids[start:stop], output_tokens=stop - start)
        runner.reserve(table, stop - start)
        logits = runner.forward([part]).logits
        runner.commit(table, token_ids, stop - start)
        scores[start:stop] = _pick_logprobs(logits, token_ids[start + 1 : stop + 1])
    return scores


class PromptScores:
    """Takes down how likely each of `token_ids` is after those before it, and the `top` likeliest in its place.

    `project` makes logits of hidden states, of at most `chunk_tokens` at a time.
    """

    def __init__(
        self, token_ids: Sequence[int], top: int, project: Callable[[Floats], Floats], chunk_tokens: int
    ) -> None:
        self._token_ids, self._top, self._project, self._chunk_tokens = token_ids, top, project, chunk_tokens
        self._scored: list[TokenInfo] = []

    @property
    def is_open(self) -> bool:
        """Whether states are needed: not all tokens are scored."""
        return len(self._scored) < len(self._token_ids)

    def add(self, hidden: Floats, *, is_first: bool) -> None:
        """The states of the next tokens, (tokens, hidden size). The first come again after a preemption."""
        if is_first:
            self._scored = [TokenInfo(TokenLogprob(self._token_ids[0], math.nan))]  # nothing is before it
        done = len(self._scored)
        targets = self._token_ids[done : done + len(hidden)]
        for first in range(0, len(targets), self._chunk_tokens):
            chosen = targets[first : first + self._chunk_tokens]
            logprobs = _normalise(self._project(hidden[first : first + len(chosen)]))
            self._scored += [self._describe(row, token_id) for row, token_id in zip(logprobs, chosen, strict=True)]

    def read(self) -> tuple[TokenInfo, ...]:
        """All tokens; the log-probability of the first is not a number."""
        return tuple(self._scored)

    def _describe(self, row: Doubles, token_id: int) -> TokenInfo:
        return TokenInfo(TokenLogprob(token_id, float(row[token_id])), _find_top(row, self._top))


def _find_top(row: Doubles, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` likeliest tokens, the best first; of equally likely ones the lower number."""
    if count == 0:
        return ()
    least = np.partition(row, -count)[-count:].min()
    best = np.flatnonzero(row >= least)
    order = best[np.argsort(-row[best], kind="stable")][:count]
    return tuple(TokenLogprob(int(token_id), float(row[token_id])) for token_id in order)


def _pick_logprobs(logits: Floats, token_ids: Sequence[int]) -> Doubles:
    """Row by row log softmax(logits)[token], in float64."""
    chosen: Doubles = _normalise(logits)[np.arange(len(token_ids)), np.asarray(token_ids)]
    return chosen


def _normalise(logits: Floats) -> Doubles:
    """Row by row log softmax(logits), in float64."""
    shifted = np.asarray(logits).astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
