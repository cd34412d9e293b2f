"""Models with two lists of factors for their rotation: the list that counts, and what the cache finds again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from model_folder import train_tokenizer

from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.formats import open_gguf
from mlxr.loading import load
from mlxr.service.opening import build_engine, open_model
from mlxr.service.validation import compute_reference

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from random_model import make_weights

ORIGINAL = 64
CONFIG = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": ORIGINAL,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1 + pair / 64 for pair in range(18)],
        "long_factor": [1 + 2.0 * pair for pair in range(18)],
    },
    "sliding_window": 50,
    "tie_word_embeddings": True,
}
TOKENS = list(range(5, 45))
Run = Callable[..., str]


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny Phi."""
    folder = tmp_path_factory.mktemp("phi")
    config = CONFIG | {"vocab_size": train_tokenizer(folder)}
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(make_weights(config, 7), str(folder / "model.safetensors"))
    return folder


def score(model: Path, context_tokens: int | None) -> np.ndarray:
    settings = Settings(device="reference", context_tokens=context_tokens, kv_type="f32", arena_bytes=2**22)
    with open_model(model, settings) as loaded, closing(build_engine(loaded, settings)) as engine:
        return np.asarray(engine.score(TOKENS))


def test_the_context_that_is_served_decides_and_not_the_text(phi: Path) -> None:
    short, long = score(phi, ORIGINAL), score(phi, None)
    np.testing.assert_array_equal(short, score(phi, len(TOKENS)))
    np.testing.assert_array_equal(long, score(phi, ORIGINAL + 1))
    assert np.abs(short - long).max() > 0.01


def test_a_converted_model_keeps_its_joined_tensors_and_both_lists(phi: Path, tmp_path: Path, mlxr: Run) -> None:
    out = tmp_path / "out.gguf"
    mlxr("convert", phi, out, "--type", "f32")
    with open_gguf(out) as file:
        assert {name.split(".")[-2] for name in file.tensors if name.startswith("blk.1.")} == {
            *("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
        }
        assert file.tensors["blk.1.attn_qkv.weight"].shape == (192 + 2 * 96, 192)
        assert file.tensors["blk.1.ffn_up.weight"].shape == (2 * 160, 192)
        factors = CONFIG["rope_scaling"]
        assert isinstance(factors, dict)
        for kind in ("short", "long"):
            np.testing.assert_array_equal(
                file.tensors[f"rope_factors_{kind}.weight"].to_float32(), np.float32(factors[f"{kind}_factor"])
            )
    for context_tokens in (ORIGINAL, None):
        np.testing.assert_allclose(score(out, context_tokens), score(phi, context_tokens), rtol=0, atol=2e-5)


def test_validation_compares_with_a_reference_that_serves_the_same_context(phi: Path) -> None:
    for context_tokens in (ORIGINAL, None):
        settings = Settings(device="cpu", context_tokens=context_tokens, kv_type="f32")
        with open_model(phi, settings) as loaded:
            reference = compute_reference(loaded, settings, TOKENS)
        shifted = reference.rows - reference.rows.max(axis=1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        found = logprobs[np.arange(len(TOKENS) - 1), TOKENS[1:]]
        np.testing.assert_allclose(found, score(phi, context_tokens), rtol=0, atol=1e-4)


def test_pages_of_one_list_are_not_found_by_an_engine_with_the_other(phi: Path, tmp_path: Path) -> None:
    def answer(context_tokens: int | None) -> int:
        """Answer once; return how many tokens of the prompt came from the store."""
        settings = Settings(
            device="cpu",
            context_tokens=context_tokens,
            arena_bytes=2**22,
            page_size=8,
            store_bytes=2**24,
            store_folder=str(tmp_path),
        )
        with open_model(phi, settings) as loaded, closing(build_engine(loaded, settings)) as engine:
            engine.submit(EngineRequest(TOKENS, SamplingParams(max_tokens=2, ignore_eos=True)))
            events = []
            while engine.has_work:
                events += engine.step()
            return events[-1].usage.cached_tokens

    assert answer(ORIGINAL) == 0
    assert answer(None) == 0
    assert answer(ORIGINAL + 1) == answer(ORIGINAL - 10) == 32
    prints = set()
    for context_tokens in (None, ORIGINAL + 1, ORIGINAL, 10):
        with load(phi, device="cpu", context_tokens=context_tokens) as loaded:
            prints.add(loaded.fingerprint)
    assert len(prints) == 2
