"""`mlxr convert`: the same model comes out, whatever went in."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf as peer
import numpy as np
import pytest
from model_folder import make_folder

from mlxr.cli.convert import convert
from mlxr.cli.main import main
from mlxr.conversion import find_layer
from mlxr.core.errors import MlxrError
from mlxr.core.settings import Settings
from mlxr.formats import open_gguf
from mlxr.formats.recipes import RECIPES
from mlxr.loading import load
from mlxr.service.opening import build_engine
from mlxr.service.validation import LogitsTap

TEXT = "the quick brown fox sleeps in the sun"
Run = Callable[..., str]


def compute_logits(path: Path) -> np.ndarray:
    """Logits of the reference backend after every token of TEXT."""
    with load(path, device="reference") as loaded:
        tap = LogitsTap(loaded.model)
        build_engine(loaded, Settings(max_sequences=1), tap).score(loaded.tokenizer.encode(TEXT))
        return np.concatenate(tap.rows)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}},
        {"num_key_value_heads": 4},
    ],
    ids=["plain", "biases", "tied", "llama3", "no-gqa"],
)  # fmt: skip
def test_a_folder_as_gguf_is_the_same_model(changes: dict[str, object], tmp_path: Path, mlxr: Run) -> None:
    folder, out = make_folder(tmp_path / "model", **changes), tmp_path / "out.gguf"
    mlxr("convert", folder, out, "--type", "f32")
    np.testing.assert_allclose(compute_logits(out), compute_logits(folder), rtol=0, atol=2e-5)


def test_the_tokenizer_goes_along(folder: Path, tmp_path: Path, mlxr: Run) -> None:
    out = tmp_path / "out.gguf"
    mlxr("convert", folder, out, "--type", "f16")
    with load(folder, device="reference") as source, load(out, device="reference") as target:
        for text in (TEXT, "  two  spaces\n\ttab 12345 don't <|im_end|> \u00e9\U0001f600", ""):
            ids = source.tokenizer.encode(text, parse_special=True)
            assert target.tokenizer.encode(text, parse_special=True) == ids
            assert target.tokenizer.decode(ids) == source.tokenizer.decode(ids)
        assert target.tokenizer.eos_ids == source.tokenizer.eos_ids
        messages = [{"role": "user", "content": "hello"}]
        assert source.chat_template is not None
        assert target.chat_template is not None
        assert target.chat_template.render(messages) == source.chat_template.render(messages)


def test_types_of_single_weights_go_before_the_recipe(folder: Path, gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    out, plain = tmp_path / "out.gguf", tmp_path / "plain.gguf"
    mlxr("convert", gguf, plain, "--type", "q8_0")
    own = ["--tensor-type", r"blk\.1\.ffn_down=bf16", "--tensor-type", "FFN=q5_1", "--tensor-type", "norm|output=f16"]
    mlxr("convert", gguf, out, "--type", "q8_0", *own)
    with open_gguf(out) as file, open_gguf(plain) as other:
        for name, tensor in file.tensors.items():
            wanted = other.tensors[name].type_name
            if len(tensor.shape) > 1:
                wanted = "f16" if "output" in name else "q5_1" if "ffn" in name else wanted
                wanted = "bf16" if name == "blk.1.ffn_down.weight" else wanted
            assert tensor.type_name == wanted, name
    for pair, message in (
        ("ffn_down_exps=q6_k", "no weight has 'ffn_down_exps' in its name"),
        ("q4_k", "'q4_k' is no PATTERN=TYPE"),
        ("(=q4_k", "is no pattern of tensors' names"),
        ("ffn=q9_k", "type q9_k is not supported"),
        ("ffn=tq2_0", r"cannot be written as tq2_0, which is read only"),
        ("attn_q=q4_k", r"tensor blk\.0\.attn_q\.weight has rows of \d+ numbers, q4_k takes 256"),
    ):
        with pytest.raises(MlxrError, match=message):
            convert(str(folder), tmp_path / "no.gguf", "q8_0", [pair])


@pytest.mark.parametrize("recipe", [recipe.name for recipe in RECIPES])
def test_every_type_is_written_and_read_by_the_gguf_package(recipe: str, gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    out = tmp_path / "out.gguf"
    report = json.loads(mlxr("convert", gguf, out, "--type", recipe, "--json"))
    reader = peer.GGUFReader(out)
    types = [tensor.tensor_type.name.lower() for tensor in reader.tensors]
    assert report["size_bytes"] == out.stat().st_size
    assert report["tensors_by_type"] == {name: types.count(name) for name in set(types)}
    row = next(row for row in RECIPES if row.name == recipe)
    assert reader.fields["general.file_type"].contents() == row.file_type
    assert row.usual in types
    with load(out) as loaded:
        assert len(loaded.config.layers) == 2


def test_gguf_to_gguf_keeps_the_metadata(gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    out = tmp_path / "out.gguf"
    mlxr("convert", gguf, out, "--type", "q8_0")
    with open_gguf(gguf) as source, open_gguf(out) as target:
        assert {**source.metadata, "general.file_type": 7} == target.metadata
        assert source.metadata_types == target.metadata_types
        assert list(source.tensors) == list(target.tensors)


def test_the_same_type_is_the_same_bytes(gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    out = tmp_path / "out.gguf"
    mlxr("convert", gguf, out, "--type", "q4_k_m")
    assert out.read_bytes() == gguf.read_bytes()


def test_an_existing_file_is_kept_unless_forced(folder: Path, tmp_path: Path, mlxr: Run, refused: Run) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    assert "--force" in refused("convert", folder, out, "--type", "f16")
    assert out.read_text() == "precious"
    mlxr("convert", folder, out, "--type", "f16", "--force")
    assert out.read_bytes()[:4] == b"GGUF"


def test_a_model_is_not_written_over_itself(gguf: Path, tmp_path: Path, refused: Run) -> None:
    own = shutil.copy(gguf, tmp_path / "own.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to(own)
    before = own.read_bytes()
    assert "source itself" in refused("convert", own, link, "--type", "q8_0", "--force")
    assert own.read_bytes() == before


def test_bad_targets_and_types_are_refused(folder: Path, tmp_path: Path, refused: Run) -> None:
    assert "q4_k_m" in refused("convert", folder, tmp_path / "a.gguf", "--type", "q4_k_x")
    assert ".gguf" in refused("convert", folder, tmp_path / "a.bin", "--type", "f16")
    assert "does not exist" in refused("convert", folder, tmp_path / "no" / "a.gguf", "--type", "f16")
    assert "--type" in refused("convert", folder, tmp_path / "a.gguf")
    (tmp_path / "d.gguf").mkdir()
    assert "folder" in refused("convert", folder, tmp_path / "d.gguf", "--type", "f16", "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.gguf"]


def test_layers_are_read_from_names_that_anybody_wrote() -> None:
    names = {"blk.17.attn_q.weight": 17, "blk.x.y": 0, "blk.": 0, "blk": 0, "blk.99999999999.y": 0, "output.weight": 0}
    assert {name: find_layer(name) for name in names} == names


def test_quantising_twice_is_pointed_out(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(gguf), str(tmp_path / "out.gguf"), "--type", "q8_0"]) == 0
    assert "quantised already (q4_k, q6_k)" in capsys.readouterr().err


def test_memory_does_not_grow_with_the_model(synthetic: ModuleType, tmp_path: Path, mlxr: Run) -> None:
    shape = synthetic.Shape(4, 1024, 8, 8, 4096, 512, 512, synthetic.make_spm_vocabulary)
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    size_bytes = synthetic.write_model(source, shape, "f16", 0, lambda done, total: None)
    tracemalloc.start()
    mlxr("convert", source, out, "--type", "q8_0")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size_bytes > 130 << 20
    assert out.stat().st_size > 69 << 20
    assert peak_bytes < 60 << 20


def test_a_source_with_missing_tensors_is_refused(tmp_path: Path, refused: Run) -> None:
    folder = make_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 99}))
    assert "blk." in refused("convert", folder, tmp_path / "out.gguf", "--type", "f16")
    assert not (tmp_path / "out.gguf").exists()
