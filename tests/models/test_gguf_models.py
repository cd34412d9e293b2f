"""Families that only GGUF files are known of: logits of tiny models against those of llama.cpp, which
tests/peers/test_gguf_files.py keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf_models import GOLDENS, MODELS, make, make_tokens
from tiny_models import TinyRun, make_source

from mlxr.kernels.context import Context
from mlxr.models import Decoder, list_unknown_keys, model_from_gguf


def build(ctx: Context, name: str, **changes: Any) -> Decoder:
    """A model of the table, with these keys besides."""
    stated, arrays = make(name)
    tensors = {key: make_source(key, values) for key, values in arrays.items()}
    metadata = {f"{name}.{key}": value for key, value in (stated | changes).items()} | {"general.architecture": name}
    assert list_unknown_keys(metadata, tensors) == []
    return Decoder(ctx, model_from_gguf(metadata, tensors), tensors)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_llamacpp(name: str) -> None:
    """The activation of those without a gate comes from a table of f16 there."""
    golden = np.load(GOLDENS / f"{name}.npy")
    tokens = np.array(make_tokens(name), np.int32)
    logits = TinyRun(build(Context("reference"), name), longest=64).run(tokens)
    assert np.abs(logits - golden).max() < 0.02 * np.abs(golden).max()


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_chunks_are_equal(name: str) -> None:
    model, tokens = build(Context("cpu", threads=2), name), np.array(make_tokens(name), np.int32)
    whole = TinyRun(model, longest=64).run(tokens)
    np.testing.assert_array_equal(TinyRun(model, longest=64).run(tokens, chunk_tokens=7), whole)
    reference = TinyRun(build(Context("reference"), name), longest=64).run(tokens)
    assert np.abs(whole - reference).max() < 0.02 * np.abs(reference).max()
