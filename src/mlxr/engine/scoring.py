"""How likely the model finds a given text: the log-probability of every token after the first.

The tokens go through the same pages, batches and forward pass as a prompt, a chunk at a time, so that the logits of
one chunk are all that is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlxr.cache.page_table import PageTable
from mlxr.engine.batch import BatchPart
from mlxr.engine.runner import Floats, Runner

MAX_LOGITS_BYTES = 32 * 2**20  # of one chunk; the float64 work on it takes a few times as much
Doubles = npt.NDArray[np.float64]


def choose_chunk_tokens(vocab_size: int, max_batch_tokens: int) -> int:
    """Tokens of a chunk whose logits stay within MAX_LOGITS_BYTES."""
    return max(1, min(max_batch_tokens, MAX_LOGITS_BYTES // (4 * vocab_size)))


def score_tokens(runner: Runner, table: PageTable, token_ids: Sequence[int], chunk_tokens: int) -> Doubles:
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
        table.commit(stop - start)
        scores[start:stop] = _pick_logprobs(logits, token_ids[start + 1 : stop + 1])
    return scores


def _pick_logprobs(logits: Floats, token_ids: Sequence[int]) -> Doubles:
    """Row by row log softmax(logits)[token], in float64."""
    shifted = np.asarray(logits).astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    chosen: Doubles = shifted[np.arange(len(token_ids)), np.asarray(token_ids)]
    total: Doubles = np.exp(shifted, out=shifted).sum(axis=1)
    return chosen - np.log(total)
