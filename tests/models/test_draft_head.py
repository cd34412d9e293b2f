"""The draft layer of a model's file: its logits are those of `transformers`, and do not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
from random_model import make_head_weights, make_weights
from tiny_models import GOLDENS, Floats, TinyRun, build_head, make_hf_tensors, make_source, read_golden

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.models import Decoder, model_from_folder
from mlxr.models.draft_head import DraftHead
from mlxr.models.draft_layer import describe_draft_layer, take_draft_layer

CASES = ("qwen35", "qwen35moe", "glm4moe")
TOLERANCE = 1e-4


def run_head(model: Decoder, head: DraftHead, tokens: Floats, chunk_tokens: int = 100) -> Floats:
    """Logits after each pair of a state and the next token, and after one guess, which the head makes itself."""
    states = model.forward_hidden((run := TinyRun(model)).append({0: tokens}), run.arena)
    drafts, logits = TinyRun(head), []
    for start in range(0, len(tokens) - 1, chunk_tokens):
        given = tokens[1:][start : start + chunk_tokens]
        batch = drafts.append({0: given})
        own, made = head.forward(batch, states[start : start + len(given)], drafts.arena)
        logits.append(own)
    guess = [int(logits[-1][-1].argmax())]
    logits.append(head.forward(drafts.append({0: guess}), made[-1:], drafts.arena)[0])
    return np.concatenate(logits)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_tokens", [7, 100])
def test_the_reference_equals_the_golden(case: str, chunk_tokens: int) -> None:
    config, seed, tokens, _ = read_golden(case)
    with np.load(GOLDENS / case / "head.npz") as stored:
        golden = stored["logits"]
    model, head = build_head(Context("reference"), config, seed)
    logits = run_head(model, head, tokens, chunk_tokens)
    assert logits.shape == golden.shape
    assert np.abs(logits - golden).max() < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_its_bits_are_those_of_any_batch(case: str) -> None:
    config, seed, tokens, _ = read_golden(case)
    model, head = build_head(Context("cpu", threads=2), config, seed)
    whole = run_head(model, head, tokens)
    for chunk_tokens in (1, 5):
        np.testing.assert_array_equal(run_head(model, head, tokens, chunk_tokens), whole)


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"])
def test_each_tensor_around_the_layer_counts(name: str) -> None:
    config, seed, tokens, _ = read_golden("qwen35")
    with np.load(GOLDENS / "qwen35" / "head.npz") as stored:
        golden = stored["logits"]
    weights = make_weights(config, seed) | make_head_weights(config, seed)
    weights[name] = weights[name][::-1].copy()
    tensors = make_hf_tensors(weights, config)
    model = Decoder(Context("reference"), model_from_folder(config), tensors)
    layer = take_draft_layer(model.config, tensors)
    assert layer is not None
    assert np.abs(run_head(model, DraftHead(model, layer), tokens) - golden).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("lost", "given", "message"),
    [
        ("blk.4.nextn.enorm.weight", None, "tensor blk.4.nextn.enorm.weight is missing, of the layer that drafts"),
        ("blk.4.attn_k.weight", None, "tensor blk.4.attn_k.weight is missing"),
        ("blk.4.nextn.eh_proj.weight", (96, 96), r"tensor blk.4.nextn.eh_proj.weight has shape \(96, 96\), expected"),
        ("blk.4.ffn_up.weight", (3, 96), r"tensor blk.4.ffn_up.weight has shape \(3, 96\), expected \(160, 96\)"),
        ("blk.4.nextn.other.weight", (3, 3), r"tensor blk.4.nextn.other.weight has no place"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_by_name(lost: str, given: tuple[int, int] | None, message: str) -> None:
    config, seed, _, _ = read_golden("qwen35")
    tensors = make_hf_tensors(make_head_weights(config, seed), config)
    tensors.pop(lost, None)
    if given is not None:
        tensors[lost] = make_source(lost, np.zeros(given, np.float32))
    with pytest.raises(ModelError, match=message):
        take_draft_layer(model_from_folder(config), tensors)


def test_files_without_such_a_layer_have_none() -> None:
    config, seed, _, _ = read_golden("qwen35")
    tensors = make_hf_tensors(make_weights(config, seed), config)
    assert describe_draft_layer(model_from_folder(config), tensors) is None
    assert take_draft_layer(model_from_folder(config), tensors) is None
