"""A folder and the GGUF file converted from it are one model: the same metadata, and logits of the same bits."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folder import train_tokenizer
from random_model import make_head_weights, make_weights
from safetensors.numpy import save_file
from tiny_models import CASES, Floats, TinyRun, read_golden

from mlxr.conversion import plan_tensors, write_model
from mlxr.formats import open_gguf, open_safetensors
from mlxr.loading import load, open_source
from mlxr.model_files.files import Contents, read_contents

WITH_HEADS = ("qwen35", "qwen35moe", "glm4moe")  # which have a layer that drafts
# Fields of a tiny folder besides its golden case, for which GGUF has no keys.
CHANGES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [0, 1, 1, 1, 0]},
    "exaone4": {"layer_types": ["full_attention"] * 5},  # with a window, so none of them rotates
    "gpt-oss": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "qwen2-window": {"max_window_layers": 1},
    "qwen3moe": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "nemotron-h-moe": {"hybrid_override_pattern": "ME*-M"},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a tokenizer, and the size of its vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, train_tokenizer(folder)


def write_folder(folder: Path, tokenizer: tuple[Path, int], case: str, change: Mapping[str, object]) -> Path:
    """A folder of a golden model whose matrices are f16."""
    shutil.copytree(tokenizer[0], folder)
    config, seed, _, _ = read_golden(case)
    config = config | {"vocab_size": tokenizer[1]} | change
    weights = make_weights(config, seed) | (make_head_weights(config, seed) if case in WITH_HEADS else {})
    (folder / "config.json").write_text(json.dumps(config))
    halved = {name: values.astype(np.float16) if values.ndim > 1 else values for name, values in weights.items()}
    save_file({name: np.ascontiguousarray(values) for name, values in halved.items()}, folder / "model.safetensors")
    return folder


def run(path: Path, tokens: list[int]) -> Floats:
    with load(path, device="cpu", threads=1) as loaded:
        return TinyRun(loaded.model).run(np.array(tokens, np.int32))


def convert(folder: Path, out: Path) -> None:
    source = open_source(folder)
    with source.file:
        write_model(source, plan_tensors(source, None), None, out)


def compare(folder: Path, out: Path, tokens: list[int]) -> None:
    convert(folder, out)
    with open_safetensors(folder) as opened, open_gguf(out) as file:
        mapped, written = read_contents(opened), read_contents(file)
        assert simplify(mapped) == {key: value for key, value in simplify(written).items() if key in mapped.metadata}
        assert mapped.config == written.config
    np.testing.assert_array_equal(run(folder, tokens), run(out, tokens))


def simplify(contents: Contents) -> dict[str, object]:
    return {key: np.asarray(value).tolist() for key, value in contents.metadata.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_folder_is_file(case: str, tokenizer: tuple[Path, int], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", tokenizer, case, {})
    compare(folder, tmp_path / "model.gguf", read_golden(case)[2].tolist())


@pytest.mark.parametrize("case", CHANGES)
def test_what_gguf_has_no_keys_for_survives(
    case: str, tokenizer: tuple[Path, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path / "model", tokenizer, case, CHANGES[case])
    tokens = read_golden(case)[2].tolist()
    with caplog.at_level(logging.WARNING):
        compare(folder, tmp_path / "model.gguf", tokens)
    if case == "nemotron-h-moe":
        return  # routers tell other programs which layers have experts
    assert "in keys of mlxr's own, which other programs do not read" in caplog.text
    plain = write_folder(tmp_path / "plain", tokenizer, case, {})
    assert np.abs(run(folder, tokens) - run(plain, tokens)).max() > 1e-2
