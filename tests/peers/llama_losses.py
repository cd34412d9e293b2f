"""Losses of a text's tokens in llama.cpp, for comparison with `mlxr perplexity`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llama_cpp
import numpy as np
from numpy.typing import NDArray

ROWS = 64  # logits that are read at once: vocabularies are large


@llama_cpp.llama_log_callback
def ignore_log(level: int, text: bytes, data: object) -> None:
    """Drop what llama.cpp would log."""


def open_llama(model: Path, context_tokens: int, **options: Any) -> llama_cpp.Llama:
    """A model that keeps the logits of all tokens."""
    llama_cpp.llama_log_set(ignore_log, ctypes.c_void_p(0))
    plain = llama_cpp.llama_model_default_params()
    plain.use_extra_bufts = False  # weights arranged for AMX have products by groups abort (latent attention)
    with patch("llama_cpp.llama_cpp.llama_model_default_params", lambda: plain):
        return llama_cpp.Llama(
            str(model),
            n_ctx=context_tokens,
            n_batch=min(context_tokens, 512),
            logits_all=True,
            verbose=False,
            **options,
        )


def compute_losses(llama: llama_cpp.Llama, window: Sequence[int]) -> NDArray[np.float64]:
    """Compute the loss in nats of each token of a window but the first."""
    llama.reset()
    llama.eval(window)
    losses = [
        loss_of(np.asarray(llama.scores[at : min(at + ROWS, len(window) - 1)], np.float64), window[at + 1 :])
        for at in range(0, len(window) - 1, ROWS)
    ]
    return np.concatenate(losses)


def loss_of(logits: NDArray[np.float64], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Compute the loss of each token from its row of logits."""
    rows = np.arange(len(logits))
    peak = logits.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0] - logits[rows, tokens[: len(rows)]])


def list_windows(llama: llama_cpp.Llama, tokens: Sequence[int], context_tokens: int) -> list[list[int]]:
    """Return the windows of `mlxr perplexity`: not overlapping, BOS first if the model wants it."""
    bos = [llama.token_bos()] if llama_cpp.llama_vocab_get_add_bos(llama._model.vocab) else []
    step = context_tokens - len(bos)
    windows = [[*bos, *tokens[start : start + step]] for start in range(0, len(tokens), step)]
    return [window for window in windows if len(window) > 1]
