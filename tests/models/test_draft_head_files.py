"""Files with a draft layer, from a folder to GGUF, and their use by commands and engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from model_folder import train_tokenizer
from random_model import make_head_weights, make_tokens, make_weights
from test_draft_head import run_head
from tiny_models import read_golden

from mlxr import LLM, SamplingParams
from mlxr.cli.main import main
from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.engine.speculative.drafters import HeadDrafter
from mlxr.formats import open_gguf
from mlxr.loading import ASSETS, load, open_source
from mlxr.service.opening import build_engine, find_draft_config, open_model

CASES = ("qwen35", "qwen35moe", "glm4moe")
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps "
Weights = dict[str, np.ndarray]


def make_folder(folder: Path, case: str, change: Callable[[Weights], None] = lambda _: None) -> Path:
    """Make a folder of a golden model with a draft layer, and a tokenizer."""
    folder.mkdir()
    config, seed, _, _ = read_golden(case)
    config = {
        **config,
        "vocab_size": train_tokenizer(folder),
        "num_nextn_predict_layers": 1,
        "mtp_num_hidden_layers": 1,
    }
    weights = make_weights(config, seed) | make_head_weights(config, seed)
    change(weights)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / request.param, request.param)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def test_the_layer_goes_along_to_gguf(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It becomes one more block, under llama.cpp's names; its logits stay the same."""
    out = tmp_path / "out.gguf"
    run(capsys, "convert", made, out, "--type", "f32")
    with open_gguf(out) as file:
        name = file.metadata["general.architecture"]
        layers = read_golden(made.name)[0]["num_hidden_layers"]
        assert file.metadata[f"{name}.block_count"] == layers + 1
        assert file.metadata[f"{name}.nextn_predict_layers"] == 1
        own = {part for part in file.tensors if part.startswith(f"blk.{layers}.")}
        wanted = (
            "nextn.eh_proj",
            "nextn.enorm",
            "nextn.hnorm",
            "nextn.shared_head_norm",
            "attn_q",
            "post_attention_norm",
        )
        assert own >= {f"blk.{layers}.{part}.weight" for part in wanted}
    logits = []
    for path in (made, out):
        with load(path, device="reference") as loaded:
            head = loaded.load_head()
            assert head is not None
            tokens = make_tokens({"vocab_size": loaded.config.vocab_size}, 20, 3)
            logits.append(run_head(loaded.model, head, tokens))
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=2e-5)
    quantised = tmp_path / "q8_0.gguf"
    run(capsys, "convert", out, quantised, "--type", "q8_0")
    with load(quantised, device="cpu") as loaded:
        head = loaded.load_head()
        assert head is not None
        assert head.weight_bytes > 0


def test_show_names_the_layer(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, "show", made, "--json"))
    with load(made, device="reference") as loaded:
        head = loaded.load_head()
    assert head is not None
    table_bytes = loaded.config.vocab_size * loaded.config.hidden * 4 if made.name == "glm4moe" else 0
    assert shown["draft_bytes"] == pytest.approx(head.weight_bytes + table_bytes, rel=0.01)
    assert "by a layer of the file (mtp)" in run(capsys, "show", made)


def test_validate_counts_the_layer_and_compares_its_products(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run(capsys, "validate", made, "--threads", 1, "--device", "cpu", "--json"))
    assert result["passed"]
    with load(made, device="cpu", threads=1) as loaded, load(made, device="reference") as other:
        head, reference = loaded.load_head(), other.load_head()
        assert head is not None
        assert reference is not None
        assert result["draft_bytes"] == head.weight_bytes
        assert head.compare_products(reference) <= result["logits"]["product_error"]


def test_answers_are_those_without_and_the_layer_drafts(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[HeadDrafter] = []
    original = HeadDrafter.__init__

    def watch(drafter: HeadDrafter, *arguments: Any) -> None:
        original(drafter, *arguments)
        opened.append(drafter)

    monkeypatch.setattr(HeadDrafter, "__init__", watch)
    texts = []
    for draft in ("off", "auto", "mtp"):
        with LLM(made, device="cpu", threads=1, draft=draft, arena_bytes=2**22) as llm:
            params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True)
            texts.append([one.text for one in llm.generate([TEXT, TEXT + "in"], params)])
    assert texts[0] == texts[1] == texts[2]
    assert len(opened) == 4


def test_its_weights_and_pages_count(made: Path) -> None:
    settings = Settings(device="cpu", draft="mtp", threads=1, arena_bytes=2**22)
    with open_model(made, settings, needs_draft=True) as loaded, closing(build_engine(loaded, settings)) as engine:
        assert loaded.head is not None
        assert loaded.weight_bytes == loaded.model.weight_bytes + loaded.head.weight_bytes
        own = engine._arena.nbytes
        assert own < engine.stats().arena_bytes <= 2**22
        config = find_draft_config(made, settings)
        assert config is not None
        assert config.cache_layers == loaded.head.config.cache_layers


def test_a_layer_that_does_not_fit_is_left_unless_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "broken", "qwen35", lambda weights: weights.pop("mtp.pre_fc_norm_hidden.weight"))  # type: ignore[arg-type]
    message = "tensor blk.4.nextn.hnorm.weight is missing, of the layer that drafts"
    with open_model(folder, Settings(device="cpu", threads=1), needs_draft=True) as loaded:
        assert loaded.head is None
    assert message in caplog.text
    with pytest.raises(SettingError, match=message):
        open_model(folder, Settings(device="cpu", threads=1, draft="mtp"), needs_draft=True)
    run(capsys, "convert", folder, tmp_path / "out.gguf", "--type", "f32")
    with load(tmp_path / "out.gguf", device="reference") as loaded:
        assert loaded.load_head() is None


def test_models_without_such_a_layer_say_so() -> None:
    assert open_source(ASSETS / "demo.gguf").head_config is None
    with pytest.raises(SettingError, match="draft: mtp cannot be used: the model has no layer that drafts"):
        LLM("demo", device="cpu", threads=1, draft="mtp", arena_bytes=2**24)
