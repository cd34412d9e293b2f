"""EAGLE-3 heads: their logits are those of a reference in NumPy, and text with them equals text without, to the bit."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from eagle_reference import Weights, compute_eagle, make_eagle, run_layer
from model_fields import look
from model_folder import make_folder
from random_model import make_weights
from test_draft_head_text import _no_lookup as _no_lookup  # all guesses are the head's
from test_draft_head_text import build, make_cyclic, make_engine, run_schedule
from tiny_models import TinyRun, build_hf, make_hf_tensors, read_golden

from mlxr import LLM, SamplingParams
from mlxr.core.errors import ModelError, SettingError
from mlxr.core.settings import Settings
from mlxr.engine.request import EngineRequest
from mlxr.formats import TensorSource
from mlxr.kernels.context import Context
from mlxr.models import Decoder, model_from_folder
from mlxr.models.draft_head import EagleHead, find_taps
from mlxr.service.opening import find_draft_config, open_model

TOLERANCE = 1e-4


def make_sources(weights: Weights) -> dict[str, TensorSource]:
    names = {"float32": "f32", "int64": "i64", "bool": "u8"}
    return {
        name: TensorSource(name, names[str(values.dtype)], values.shape, values.reshape(-1).view(np.uint8))
        for name, values in weights.items()
    }


@cache
def build_case(case: str, device: str = "cpu") -> Decoder:
    config, seed, _, _ = read_golden(case)
    return build_hf(Context("cpu", threads=2) if device == "cpu" else Context("reference"), config, seed)


def build_eagle(model: Decoder, case: str, **changes: Any) -> tuple[dict[str, Any], Weights, EagleHead]:
    config, weights = make_eagle(read_golden(case)[0], 5, **changes)
    return config, weights, EagleHead(model, config, make_sources(weights))


@pytest.mark.parametrize("case", ["qwen35", "gemma3", "glm4moe", "granite"])
@pytest.mark.parametrize("taps", [(1, 2, 3), (0, 2), (2, 2)])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_tap_is_what_a_model_of_fewer_layers_gives(case: str, taps: tuple[int, ...], device: str) -> None:
    """Reading the states between layers changes no bit of the result."""
    config, _, tokens, _ = read_golden(case)
    model = build_case(case, device)
    whole = model.forward_hidden((run := TinyRun(model)).append({0: tokens}), run.arena)
    states, tapped = model.forward_tapped((run := TinyRun(model)).append({0: tokens}), run.arena, taps)
    np.testing.assert_array_equal(states, whole)
    assert tapped.shape == (len(tokens), len(taps) * config["hidden_size"])
    _, more = model.forward_tapped((run := TinyRun(model)).append({0: tokens}), run.arena, (1,))
    taps_of_both = 1, len(model.config.layers)
    ends = model.forward_tapped((run := TinyRun(model)).append({0: tokens}), run.arena, taps_of_both)[1]
    np.testing.assert_array_equal(ends[:, : config["hidden_size"]], more)
    if 1 in taps:
        place = taps.index(1) * config["hidden_size"]
        np.testing.assert_array_equal(tapped[:, place : place + config["hidden_size"]], more)
    last = ends[:, config["hidden_size"] :]
    scaled = last / np.sqrt(np.square(last).mean(axis=1, keepdims=True) + look(model.config, "rms_eps"))
    assert np.abs(scaled * model.weights.norm.weight - whole).max() < TOLERANCE


def test_a_tap_before_a_layer_is_the_stream_of_a_shorter_model() -> None:
    config, seed, tokens, _ = read_golden("qwen35")
    model = build_case("qwen35", "reference")
    _, tapped = model.forward_tapped((run := TinyRun(model)).append({0: tokens}), run.arena, (3,))
    shorter = {**config, "num_hidden_layers": 3, "layer_types": config["layer_types"][:3]}
    tensors = make_hf_tensors(make_weights(shorter, seed), config)
    short = Decoder(Context("reference"), model_from_folder(shorter), tensors)
    states = short.forward_hidden((run := TinyRun(short)).append({0: tokens}), run.arena)
    scaled = tapped / np.sqrt(np.square(tapped).mean(axis=1, keepdims=True) + look(model.config, "rms_eps"))
    assert np.abs(scaled * model.weights.norm.weight - states).max() < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}],
)
@pytest.mark.parametrize("chunk_tokens", [7, 100])
def test_the_head_is_that_of_the_reference(changes: Mapping[str, Any], chunk_tokens: int) -> None:
    """It also continues from the result of its own layer, in place of the model's state."""
    _, _, tokens, _ = read_golden("qwen35")
    model = build_case("qwen35", "reference")
    config, weights, head = build_eagle(model, "qwen35", **changes)
    assert head.taps == tuple(config["eagle_aux_hidden_state_layer_ids"])
    _, tapped = model.forward_tapped((run := TinyRun(model)).append({0: tokens}), run.arena, head.taps)
    wanted, stream = compute_eagle(config, weights, tokens[1:], tapped[:-1])
    drafts, logits = TinyRun(head), []
    for start in range(0, len(tokens) - 1, chunk_tokens):
        given = tokens[1:][start : start + chunk_tokens]
        fused = head.fuse(tapped[start : start + len(given)])
        own, made = head.forward(drafts.append({0: given}), fused, drafts.arena)
        logits.append(own)
    assert np.abs(np.concatenate(logits) - wanted).max() < TOLERANCE
    assert np.abs(made[-1] - stream[-1]).max() < TOLERANCE
    guess = head.name_tokens([int(wanted[-1].argmax())])
    states = head.fuse(tapped[:-1])
    further, _ = run_layer(config, weights, np.array([*tokens[1:], *guess]), np.concatenate([states, stream[-1:]]))
    own, _ = head.forward(drafts.append({0: guess}), made[-1:], drafts.arena)
    assert np.abs(own[-1] - further[-1]).max() < TOLERANCE


def test_its_tokens_are_those_of_the_map() -> None:
    model = build_case("qwen35")
    _, weights, head = build_eagle(model, "qwen35")
    assert head.name_tokens(list(range(40))) == np.flatnonzero(weights["t2d"]).tolist()
    assert head.weight_bytes > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["qwen35", "glm4moe"])
@pytest.mark.slow
def test_text_is_the_same_whatever_happens_to_pages_and_states(case: str) -> None:
    model, _ = build(case)
    layers = len(model.config.layers)
    _, _, head = build_eagle(model, case, eagle_aux_hidden_state_layer_ids=[0, 1, layers])
    drafted = sum(run_schedule(random.Random(seed), case, head) for seed in range(4))
    assert drafted > 0


def test_a_head_that_knows_is_accepted() -> None:
    """A head whose output is the next token of a cycle, for a model that goes round in it."""
    model, _ = make_cyclic("qwen35")
    vocabulary, hidden = model.config.vocab_size, model.config.hidden
    sizes = {"hidden_size": hidden, "draft_vocab_size": vocabulary}
    config, weights = make_eagle(read_golden("qwen35")[0], 5, **sizes)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][:] = 0.0
    # the stream before any layer is the embedding of the token before; its row of the output is two places further
    table = model.weights.table.to_float32()
    weights["fc.weight"][:] = np.eye(hidden, 3 * hidden)
    weights["norm.weight"][:] = 1.0
    weights["lm_head.weight"] = np.roll(table, 2, axis=0)
    head = EagleHead(model, config, make_sources(weights))
    with closing(make_engine((model, head), 1, pages=40)) as engine:
        request = engine.submit(EngineRequest([3, 9, 4, 7], SamplingParams(max_tokens=60)))
        events = []
        while engine.has_work:
            events += engine.step()
        stats = engine.stats()
    tokens = [event.token_id for event in events if event.sequence_id == request]
    assert tokens == [(8 + place) % vocabulary for place in range(60)]
    assert stats.accepted_tokens == stats.drafted_tokens > 20


@pytest.mark.parametrize(
    ("lost", "changes", "message"),
    [
        ("fc.weight", {}, "tensor fc.weight is missing, which an EAGLE-3 head needs"),
        ("d2t", {}, "tensor d2t is missing, which names the 40 tokens"),
        ("lm_head.weight", {}, "tensor lm_head.weight is missing, as the model's output does not fit"),
        ("embed_tokens.weight", {}, "tensor embed_tokens.weight is missing, as the model's table does not fit"),
        (None, {"num_hidden_layers": 2}, "of more than one layer, or with biases, is not supported"),
        (None, {"attention_bias": True}, "of more than one layer, or with biases, is not supported"),
        (None, {"intermediate_size": 80}, r"tensor mlp.gate_proj.weight has shape \(96, 64\), expected \(80, 64\)"),
        (None, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"is \[1, 2, 9\], expected numbers of the model's 4"),
        (None, {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, r"is \[2, 1, 3\], expected .* in rising order"),
        (None, {"draft_vocab_size": 4000}, "draft_vocab_size is 4000"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(lost: str | None, changes: dict[str, Any], message: str) -> None:
    model = build_case("qwen35")
    config, weights = make_eagle(read_golden("qwen35")[0], 5)
    weights.pop(lost or "", None)
    with pytest.raises(ModelError, match=message):
        EagleHead(model, {**config, **changes}, make_sources(weights))


@pytest.mark.parametrize("value", [-200, 2**63 - 1, 130])
def test_a_map_beyond_the_vocabulary_is_refused(value: int) -> None:
    model = build_case("qwen35")
    config, weights = make_eagle(read_golden("qwen35")[0], 5)
    weights["d2t"][7] = value
    with pytest.raises(ModelError, match="tensor d2t leads beyond the 131 tokens of the model"):
        EagleHead(model, config, make_sources(weights))


def test_the_layers_that_it_reads_are_numbered_in_three_ways() -> None:
    assert find_taps({}, 32) == (2, 16, 29)
    assert find_taps({"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}, 32) == (3, 4, 5)
    assert find_taps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32) == (2, 16, 29)


def write_eagle(folder: Path, target: Mapping[str, Any], **changes: Any) -> Path:
    folder.mkdir()
    config, weights = make_eagle(target, 5, eagle_aux_hidden_state_layer_ids=[0, 1, 2], **changes)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, str(folder / "model.safetensors"))
    return folder


def test_a_folder_is_a_draft_like_any_other(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "target")
    sizes = json.loads((target / "config.json").read_text())
    eagle = write_eagle(tmp_path / "eagle", sizes)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True)
    texts = []
    for draft in ("off", str(eagle)):
        with LLM(target, device="cpu", threads=1, draft=draft, arena_bytes=2**22) as llm:
            texts.append([one.text for one in llm.generate(["the quick brown fox", "the lazy dog"], params)])
    assert texts[0] == texts[1]
    settings = Settings(device="cpu", threads=1, draft=str(eagle))
    with open_model(target, settings, needs_draft=True) as loaded:
        assert isinstance(loaded.head, EagleHead)
        assert loaded.weight_bytes == loaded.model.weight_bytes + loaded.head.weight_bytes
        own = find_draft_config(target, settings)
        assert own is not None
        assert own.cache_layers == loaded.head.config.cache_layers


def test_a_folder_for_another_model_is_refused_by_name(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "target")
    sizes = json.loads((target / "config.json").read_text())
    eagle = write_eagle(tmp_path / "eagle", {**sizes, "hidden_size": 96})
    message = r"eagle: tensor fc.weight has shape \(64, 288\), expected \(64, 192\)"
    with pytest.raises(SettingError, match=message):
        open_model(target, Settings(device="cpu", threads=1, draft=str(eagle)), needs_draft=True)
