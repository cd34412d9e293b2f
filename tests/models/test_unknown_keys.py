"""Keys that nothing reads: warned of if they may matter, refused if they change answers, otherwise ignored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folder import write_with
from random_model import make_weights
from tiny_models import CASES, make_gguf, read_golden

from mlxr.core.errors import ModelError
from mlxr.loading import ASSETS, load, read_unknown_keys
from mlxr.model_files.files import find_model
from mlxr.models import list_unknown_keys, model_from_folder, model_from_gguf


def take(case: str) -> tuple[dict[str, object], dict[str, Any]]:
    config, seed, _, _ = read_golden(case)
    return make_gguf(make_weights(config, seed), config)


@pytest.mark.parametrize("case", CASES)
def test_all_keys_of_a_family_are_known(case: str) -> None:
    metadata, tensors = take(case)
    assert list_unknown_keys(metadata, tensors) == []
    name = metadata["general.architecture"]
    noise = {"general.quantized_by": "x", "split.count": 1, "quantize.imatrix.file": "x", f"{name}.pooling_type": 1}
    noise |= {f"{name}.attention.group_norm_groups": 0, f"{name}.new.switch": False}
    assert list_unknown_keys(metadata | noise, tensors) == []
    assert model_from_gguf(metadata | noise, tensors) == model_from_gguf(metadata, tensors)


@pytest.mark.parametrize("path", [ASSETS / "demo.gguf", ASSETS / "demo-draft.gguf"], ids=lambda path: path.stem)
def test_files_that_are_here_have_no_unknown_keys(path: Path) -> None:
    assert read_unknown_keys(find_model(path)) == []


def test_what_nobody_reads_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"llama__attention__new_thing": 3, "llama__extra": [0, 0.5], "prism__format": "x", "mine__note": "y"}
    path = write_with(ASSETS / "demo-draft.gguf", tmp_path / "m.gguf", **keys)
    wanted = ["llama.attention.new_thing", "llama.extra", "prism.format"]
    assert read_unknown_keys(path) == wanted
    with caplog.at_level(logging.WARNING), load(path, device="reference"):
        assert f"{path}: has keys that mlxr does not know and that have no effect: {', '.join(wanted)}" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prism.rotation", "r1"),
        ("quarot.block", 64),
        ("llama.attention.rotation", "r1"),
        ("ik.spinquant.r3", True),
        ("diffusion.shift_logits", True),
        ("xielu.alpha_p", [0.5]),
        ("llama.moe_every_n_layers", 2),
        ("llama.attention.kv_lora_rank", 512),
        ("llama.embedding_length_per_layer_input", 256),
        ("llama.router_logit_softcapping", 30.0),
        ("llama.attention.output_scale", 0.5),
    ],
)
def test_what_changes_answers_is_refused_by_name(key: str, value: object) -> None:
    metadata, tensors = take("llama-mha")
    with pytest.raises(ModelError, match=f"{key} is "):
        model_from_gguf(metadata | {key: value}, tensors)
    for harmless in (0, False, "", [], np.zeros(3)):
        model_from_gguf(metadata | {key: harmless}, tensors)


def test_what_a_family_reads_itself_is_not_refused() -> None:
    metadata, tensors = take("llama-mha")
    model_from_gguf(metadata | {"llama.moe_every_n_layers": 1, "llama.rope.dimension_sections": None}, tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_bidirectional_attention", True),
        ("is_causal", False),
        ("alibi", True),
        ("attention_chunk_size", 8192),
        ("attn_temperature_tuning", True),
        ("quarot", {"bits": 4}),
    ],
)
@pytest.mark.parametrize("case", ["llama-mha", "qwen3", "gemma3"])
def test_a_folder_that_states_other_computations_is_refused(case: str, key: str, value: object) -> None:
    config, _, _, _ = read_golden(case)
    with pytest.raises(ModelError, match=f"{key} is "):
        model_from_folder(config | {key: value})
    assert model_from_folder(config | {key: None}) == model_from_folder(config)
