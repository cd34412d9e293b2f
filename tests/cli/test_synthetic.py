"""bench/synthetic.py writes models that are whole, in every type, without holding them in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import ModuleType

import gguf as peer
import numpy as np
import pytest

from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.formats.recipes import RECIPES
from mlxr.llm import LLM
from mlxr.loading import load
from mlxr.service.opening import build_engine
from mlxr.service.validation import LogitsTap

TEXT = "Hello the world, 42 t\u00efmes\n"


MODELS = [("tiny-bpe", recipe.name) for recipe in RECIPES]
MODELS += [("tiny-moe", "q4_k_m"), ("tiny-oss", "mxfp4"), ("tiny-delta", "q4_k_m")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shape", "recipe"), MODELS)
def test_every_type_gives_finite_logits(shape: str, recipe: str, synthetic: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert synthetic.main(["--shape", shape, "--type", recipe, "--out", str(path)]) == 0
    with load(path) as loaded:
        tap = LogitsTap(loaded.model)
        build_engine(loaded, Settings(max_sequences=1), tap).score(loaded.tokenizer.encode(TEXT))
    logits = np.concatenate(tap.rows)
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize("shape", ["tiny-spm", "tiny-bpe"])
def test_any_text_goes_through_the_vocabulary(shape: str, synthetic: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    synthetic.main(["--shape", shape, "--type", "f16", "--out", str(path)])
    with LLM(path) as llm:
        ids = llm.tokenize(TEXT)
        assert llm.detokenize(ids) == TEXT
        assert len(ids) > 10
        assert len(llm.generate(TEXT, SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("name", ["tinyllama-1.1b", "llama-3-8b"])
def test_vocabularies_are_full_and_without_twins(name: str, synthetic: ModuleType) -> None:
    shape = synthetic.SHAPES[name]
    metadata = shape.vocabulary(shape.vocab_size)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == len(metadata["tokenizer.ggml.token_type"]) == shape.vocab_size


def test_the_large_shape_is_tinyllama(synthetic: ModuleType) -> None:
    tensors = dict(synthetic.SHAPES["tinyllama-1.1b"].list_tensors())
    assert sum(int(np.prod(shape)) for shape in tensors.values()) == 1_100_048_384
    assert tensors["blk.21.attn_k.weight"] == (256, 2048)
    assert tensors["blk.21.ffn_down.weight"] == (2048, 5632)


def test_gpt_oss_has_the_shape_of_the_one_with_20b(synthetic: ModuleType) -> None:
    tensors = dict(synthetic.SHAPES["gpt-oss-20b"].list_tensors())
    assert sum(int(np.prod(shape)) for shape in tensors.values()) == 20_914_757_184
    assert tensors["blk.23.ffn_down_exps.weight"] == (32, 2880, 2880)
    assert tensors["blk.23.attn_q.weight"] == (4096, 2880)
    assert tensors["blk.23.attn_sinks.weight"] == (64,)
    assert tensors["blk.23.post_attention_norm.weight"] == (2880,)
    types = {
        (type_name, "_exps." in name) for name, type_name, *_ in synthetic.SHAPES["gpt-oss-20b"].plan_tensors("mxfp4")
    }
    assert types == {("mxfp4", True), ("f32", True), ("q8_0", False), ("f32", False)}


def test_files_repeat_with_their_seed_and_suit_the_gguf_package(synthetic: ModuleType, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path, seed in zip(paths, ("1", "1", "2"), strict=True):
        synthetic.main(["--shape", "tiny-spm", "--type", "q4_0", "--out", str(path), "--seed", seed])
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    reader = peer.GGUFReader(paths[0])
    assert len(reader.tensors) == 21
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2


def test_memory_does_not_grow_with_the_file(synthetic: ModuleType, tmp_path: Path) -> None:
    big = synthetic.Shape(8, 1024, 8, 8, 4096, 512, 512, synthetic.make_spm_vocabulary)
    path = tmp_path / "model.gguf"
    tracemalloc.start()
    size_bytes = synthetic.write_model(path, big, "f16", 0, lambda done, total: None)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size_bytes > 250 << 20
    assert peak_bytes < 100 << 20


def test_errors_are_one_line(synthetic: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = synthetic.main(["--shape", "tiny-spm", "--type", "f16", "--out", str(tmp_path / "no" / "x.gguf")])
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1
