"""`mlxr imatrix` and `mlxr convert --imatrix`: how much a model uses columns of its weights, in llama.cpp's file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as peer
import numpy as np
import pytest

from mlxr.conversion import read_importance, write_importance
from mlxr.core.errors import ModelError
from mlxr.formats import TensorToWrite, open_gguf, write_gguf
from mlxr.formats.quants_encode import WEIGHTED
from mlxr.loading import load

Run = Callable[..., str]
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT)
    return path


def test_matrix_is_what_weights_were_multiplied_by(gguf: Path, text: Path, tmp_path: Path, mlxr: Run) -> None:
    out = tmp_path / "imatrix.gguf"
    report = json.loads(mlxr("imatrix", gguf, text, out, "--context", 64, "--json"))
    scored = json.loads(mlxr("perplexity", gguf, text, "--context", 64, "--json", "--device", "cpu"))
    assert report["perplexity"] == pytest.approx(scored["perplexity"], rel=1e-6)
    file = peer.GGUFReader(out)  # llama.cpp's own reading
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] == [str(text)]
    assert fields["imatrix.chunk_size"] == 64
    assert fields["imatrix.chunk_count"] == report["tokens"] // 64
    read = {tensor.name: tensor for tensor in file.tensors}
    with open_gguf(gguf) as model:
        weights = [name for name, one in model.tensors.items() if name.startswith("blk.") and len(one.shape) == 2]
        assert {name for name in read if name.endswith(".in_sum2")} == {f"{name}.in_sum2" for name in weights}
    with load(gguf, device="reference") as loaded:
        tokens = loaded.tokenizer.encode(TEXT, add_special=False)
        bos, step = [loaded.tokenizer.bos_id] * loaded.tokenizer.add_bos, 64 - loaded.tokenizer.add_bos
        windows = [bos + tokens[at : at + step] for at in range(0, len(tokens), step)]
        ids = [one for window in windows for one in window[:-1]]  # nothing follows a window's last token
        tensors = loaded.file.tensors
        rows = tensors["token_embd.weight"].to_float32()[ids]
        normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + loaded.config.layers[0].norms.eps)
        sums = ((normed * tensors["blk.0.attn_norm.weight"].to_float32()) ** 2).sum(axis=0)
    for name in ("attn_q", "attn_k", "attn_v"):
        own = read[f"blk.0.{name}.weight.in_sum2"]
        assert list(own.shape) == [len(sums), 1]  # as ggml counts
        np.testing.assert_allclose(np.array(own.data).reshape(-1), sums, rtol=1e-3)
        assert np.array(read[f"blk.0.{name}.weight.counts"].data).reshape(-1).tolist() == [len(ids)]
    again = tmp_path / "twice.gguf"
    mlxr("imatrix", gguf, text, again, "--context", 64, "--add", out)
    both, one = read_importance(again), read_importance(out)
    assert all((both.counts[name] == 2 * one.counts[name]).all() for name in one.sums)
    assert both.datasets == (str(text), str(text))


def test_experts_have_sums_of_their_own(moe_gguf: Path, text: Path, tmp_path: Path, mlxr: Run) -> None:
    mlxr("imatrix", moe_gguf, text, tmp_path / "moe.gguf", "--context", 64)
    read = read_importance(tmp_path / "moe.gguf")
    tokens = read.counts["blk.0.attn_q.weight"][0]
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        counts = read.counts[f"blk.1.{name}.weight"]
        assert counts.shape == (8,)
        assert counts.sum() == 2 * tokens
        assert ((read.sums[f"blk.1.{name}.weight"].sum(axis=1) > 0) == (counts > 0)).all()
    mlxr("convert", moe_gguf, tmp_path / "q3.gguf", "--type", "q3_k_m", "--imatrix", tmp_path / "moe.gguf")


def test_columns_that_count_lose_less(tmp_path: Path, mlxr: Run, synthetic: Any) -> None:
    path, out = tmp_path / "f32.gguf", tmp_path / "imatrix.gguf"
    assert synthetic.main(["--shape", "tiny-spm", "--type", "f32", "--out", str(path)]) == 0
    rng, types = np.random.default_rng(3), sorted(WEIGHTED)
    with open_gguf(path) as file:
        names = [name for name, one in file.tensors.items() if name.startswith("blk.") and len(one.shape) == 2]
        source = {name: file.tensors[name].to_float32() for name in names[: len(types)]}
    means = {name: np.exp(2 * rng.standard_normal(one.shape[1])).astype(np.float32) for name, one in source.items()}
    tensors = []
    for name, one in means.items():
        tensors.append(TensorToWrite.from_array(f"{name}.in_sum2", "f32", 7 * one[None]))
        tensors.append(TensorToWrite.from_array(f"{name}.counts", "f32", np.full((1, 1), 7, np.float32)))
    write_gguf(out, {"general.type": "imatrix"}, tensors)
    own = [f"--tensor-type={name}={kind}" for name, kind in zip(source, types, strict=True)]
    mlxr("convert", path, tmp_path / "plain.gguf", "--type", "f32", *own)
    mlxr("convert", path, tmp_path / "weighted.gguf", "--type", "f32", *own, "--imatrix", out)
    with open_gguf(tmp_path / "plain.gguf") as plain, open_gguf(tmp_path / "weighted.gguf") as weighted:
        assert weighted.metadata["quantize.imatrix.file"] == str(out)
        assert weighted.metadata["quantize.imatrix.entries_count"] == len(source)
        for (name, values), kind in zip(source.items(), types, strict=True):
            first, second = (file.tensors[name] for file in (plain, weighted))
            assert first.type_name == second.type_name == kind
            before, after = ((means[name] * (one.to_float32() - values) ** 2).sum() for one in (first, second))
            assert after < 0.97 * before, kind


def test_what_is_no_matrix_is_refused(gguf: Path, tmp_path: Path, refused: Run) -> None:
    bad = tmp_path / "bad.gguf"

    def write(**arrays: np.ndarray) -> None:
        write_gguf(
            bad, {}, [TensorToWrite.from_array(name.replace("__", "."), "f32", one) for name, one in arrays.items()]
        )

    ones, three = np.ones((1, 256), np.float32), np.ones((3, 1), np.float32)
    for arrays, message in (
        ({"x": ones}, "no importance matrix"),
        ({"w__in_sum2": ones}, "w.in_sum2 has no f32 w.counts beside it"),
        ({"w__in_sum2": ones, "w__counts": three}, "does not fit its 3 counts"),
        ({"w__in_sum2": ones * np.nan, "w__counts": ones[:, :1]}, "holds no sums"),
        ({"w__in_sum2": -ones, "w__counts": ones[:, :1]}, "holds no sums"),
    ):
        write(**arrays)
        with pytest.raises(ModelError, match=message):
            read_importance(bad)
    write(w__in_sum2=ones, w__counts=ones[:, :1])
    assert "of another model" in refused("convert", gguf, tmp_path / "x.gguf", "--type", "q4_k_m", "--imatrix", bad)
    wide = {"blk.0.attn_q.weight.in_sum2": np.ones((1, 3), np.float32), "blk.0.attn_q.weight.counts": ones[:, :1]}
    write_gguf(bad, {}, [TensorToWrite.from_array(name, "f32", one) for name, one in wide.items()])
    line = refused("convert", gguf, tmp_path / "x.gguf", "--type", "q4_k_m", "--imatrix", bad)
    assert "blk.0.attn_q.weight is of shape (1, 3)" in line
    write_importance(bad, read_importance(bad))
    assert "must end in .gguf" in refused("imatrix", gguf, tmp_path / "missing.txt", tmp_path / "x.dat")
