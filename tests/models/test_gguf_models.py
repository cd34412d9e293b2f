"""Families that are known only from GGUF files: logits of tiny models against llama.cpp's, which
tests/peers/test_gguf_files.py keeps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf_models import GOLDENS, MODELS, make_tokens
from tiny_models import TinyRun
from tiny_models import build_file as build

from mlxr.kernels.context import Context


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_llamacpp(name: str) -> None:
    """llama.cpp computes activations without a gate by a table of f16."""
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


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nanbeige", {"num_loops": 1}),
        ("nanbeige", {"skip_loop_final_norm": True}),
        ("spark2_5", {"rope.dimension_count_swa": 16}),
        ("spark2_5", {"rope.freq_base_swa": 20000.0}),
        ("laguna", {"router_logit_softcapping": 0.5}),
        ("mimo2", {"attention.value_scale": 1.0}),
    ],
)
def test_what_a_file_states_matters(name: str, changes: dict[str, Any]) -> None:
    golden, tokens = np.load(GOLDENS / f"{name}.npy"), np.array(make_tokens(name), np.int32)
    logits = TinyRun(build(Context("reference"), name, **changes), longest=64).run(tokens)
    assert np.abs(logits - golden).max() > 0.05 * np.abs(golden).max()
