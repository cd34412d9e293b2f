"""Loading: names, paths, and errors that suggest similar names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from model_folder import make_folder

from mlxr.core.errors import DeviceError, FormatError, MlxrError, ModelError, NotFound, TokenizerError
from mlxr.formats import open_gguf, write_gguf
from mlxr.loading import ASSETS, NAMED_MODELS, find_model, list_native_operators, load, open_source


def test_named_models_are_packaged() -> None:
    for name, file_name in NAMED_MODELS.items():
        assert find_model(name) == ASSETS / file_name


def test_paths_are_found(folder: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(folder) == folder
    assert find_model(str(gguf)) == gguf
    monkeypatch.setenv("HOME", str(gguf.parent))
    assert find_model(f"~/{gguf.name}") == gguf


def test_what_is_not_there_is_compared_with_what_is(folder: Path, gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="did you mean demo"):
        find_model("dem")
    with pytest.raises(NotFound, match=f"did you mean {gguf.name}"):
        find_model(gguf.parent / "tiny_spm.gguf")
    with pytest.raises(NotFound, match=f"did you mean {folder.name}"):
        find_model(folder.parent / "tinyllama")
    with pytest.raises(NotFound, match="does not exist either"):
        find_model(tmp_path / "no" / "model.gguf")
    with pytest.raises(NotFound, match=r"no config\.json"):
        find_model(tmp_path)
    with pytest.raises(NotFound, match=rf"no config\.json.*did you mean .*{gguf.name}"):
        find_model(gguf.parent)
    with pytest.raises(NotFound, match="give the folder"):
        find_model(folder / "model.safetensors")


def test_a_loaded_model_knows_its_sizes(gguf: Path) -> None:
    calls: list[tuple[int, int]] = []
    with load(gguf, threads=1, progress=lambda done, total: calls.append((done, total))) as loaded:
        assert (loaded.name, loaded.path) == (str(gguf), gguf)
        assert (loaded.ctx.device, loaded.ctx.threads) == ("cpu", 1)
        assert loaded.chat_template is None
        assert loaded.load_s > 0
        assert gguf.stat().st_size * 0.9 < loaded.file_bytes < gguf.stat().st_size
        assert loaded.weight_bytes > 0
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_devices(gguf: Path) -> None:
    assert load(gguf, device="auto").ctx.device == load(gguf, device="cpu", isa="portable").ctx.device == "cpu"
    assert load(gguf, device="reference").ctx.device == "reference"
    with pytest.raises(DeviceError, match="gpu"):
        load(gguf, device="gpu")


def test_a_truncated_file_names_itself(gguf: Path, tmp_path: Path) -> None:
    data = gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in (0, 3, 20, 5000, len(data) - 1):
        broken.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"broken\.gguf"):
            load(broken)


def test_other_kinds_of_model_are_refused_by_name(gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    with open_gguf(gguf) as source:
        write_gguf(other, {**source.metadata, "general.architecture": "rwkv7"}, [])
        for use in (load, open_source):
            with pytest.raises(ModelError, match=r"^\S*/other\.gguf: general\.architecture is 'rwkv7'"):
                use(other)
        write_gguf(other, source.metadata, [])
        with pytest.raises(ModelError, match=r"token_embd\.weight"):
            load(other)
        plain = {key: value for key, value in source.metadata.items() if not key.startswith("tokenizer.")}
        write_gguf(other, plain, [])
        with pytest.raises(MlxrError, match=r"other\.gguf: .*tokenizer"):
            load(other)


def test_a_folder_without_its_parts_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, kind in (("tokenizer.json", NotFound), ("model.safetensors", NotFound), ("config.json", NotFound)):
        copy = tmp_path / name.replace(".", "-")
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        with pytest.raises(kind, match=name.split(".")[0]):
            load(copy)
    (tmp_path / "model-safetensors" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        load(tmp_path / "model-safetensors")
    (tmp_path / "tokenizer-json" / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load(tmp_path / "tokenizer-json")


def test_a_tied_folder_with_a_copy_stays_tied(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path / "tied", tie_word_embeddings=True))
    assert "output.weight" not in source.tensors
    assert "output.weight" in open_source(make_folder(tmp_path / "untied")).tensors


def test_native_operators_are_those_with_a_cpu_module() -> None:
    assert list_native_operators() >= {"linear", "attend", "embed", "rms_norm", "rope", "write_pages", "sample"}
    assert "choice" not in list_native_operators()
