"""Safetensors: what the `safetensors` library writes, folders with shards, and headers that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxr.core.errors import FormatError, NotFound
from mlxr.formats import open_safetensors

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16}


def make_tensors() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(2)
    return {
        "model.embed_tokens.weight": random.standard_normal((8, 16)).astype(np.float32),
        "model.norm.weight": random.standard_normal(16).astype(np.float16),
        "model.layers.0.mlp.up_proj.weight": random.standard_normal((4, 16)).astype(np.float16),
        "model.position_ids": np.arange(7),
    }


def write_raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file whose header is the given text, or any object as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def describe(dtype: str = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tensors = make_tensors()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file_name, chosen in shards.items():
        save_file({name: tensors[name] for name in chosen}, tmp_path / file_name)
    weight_map = {name: file_name for file_name, chosen in shards.items() for name in chosen}
    write_index(tmp_path, weight_map)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_whole(path: Path) -> None:
    with open_safetensors(path) as folder:
        assert folder.tensors.keys() == make_tensors().keys()
        for name, values in make_tensors().items():
            source = folder.tensors[name]
            assert (source.name, source.shape) == (name, values.shape)
            assert source.data.tobytes() == values.tobytes()
            assert not source.data.flags.owndata
            assert not source.data.flags.writeable
            assert np.array_equal(source.to_float32(), values.astype(np.float32))


class TestFolders:
    def test_one_file(self, tmp_path: Path) -> None:
        save_file(make_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert_whole(tmp_path / "model.safetensors")
        with open_safetensors(tmp_path / "model.safetensors") as folder:
            assert folder.config == {}
            assert folder.size_bytes == (tmp_path / "model.safetensors").stat().st_size
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        assert_whole(tmp_path)
        for path in (tmp_path, tmp_path / "model.safetensors"):
            with open_safetensors(path) as folder:
                assert folder.config == CONFIG
                assert folder.paths == [tmp_path / "model.safetensors"]

    def test_one_file_of_another_name(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        save_file(make_tensors(), tmp_path / "weights.safetensors")
        assert_whole(tmp_path)
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / "more.safetensors")
        with pytest.raises(NotFound, match="without it 2 files cannot be put together"):
            open_safetensors(tmp_path)

    def test_shards(self, sharded: Path) -> None:
        assert_whole(sharded)
        with open_safetensors(sharded) as folder:
            assert [path.name[:11] for path in folder.paths] == ["model-00001", "model-00002"]
            assert {source.type_name for source in folder.tensors.values()} == {"f32", "f16", "i64"}

    def test_views_outlive_the_folder(self, sharded: Path) -> None:
        folder = open_safetensors(sharded)
        source = folder.tensors["model.norm.weight"]
        folder.close()
        source.release()
        assert np.array_equal(source.to_float32(), make_tensors()["model.norm.weight"].astype(np.float32))

    def test_files_outside_the_index_are_left_alone(self, sharded: Path) -> None:
        (sharded / "consolidated.safetensors").write_bytes(b"broken")
        assert_whole(sharded)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"config\.json: no such file"):
            open_safetensors(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(NotFound, match=r"model\.safetensors: no such file; a model folder holds it, or"):
            open_safetensors(tmp_path)
        with pytest.raises(NotFound, match=r"missing\.safetensors: no such file"):
            open_safetensors(tmp_path / "missing.safetensors")

    def test_a_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(
            NotFound, match=r"00002-of-00002\.safetensors: no such file; .* says it holds 'model\.layers"
        ):
            open_safetensors(sharded)

    @pytest.mark.parametrize(
        "shard", ["../other/model.safetensors", "/etc/passwd", "a\\b.safetensors", "x\0.safetensors", "config.json", 7]
    )
    def test_shards_outside_the_folder(self, sharded: Path, shard: object) -> None:
        write_index(sharded, {"a": shard})
        with pytest.raises(FormatError, match=r"weight_map 'a': .* is no file of this folder"):
            open_safetensors(sharded)

    @pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
    def test_an_index_without_a_map(self, sharded: Path, weight_map: object) -> None:
        write_index(sharded, weight_map)
        with pytest.raises(FormatError, match="weight_map: is missing or no object with tensors in it"):
            open_safetensors(sharded)

    def test_an_index_that_lies(self, sharded: Path) -> None:
        write_index(sharded, {"other.weight": "model-00001-of-00002.safetensors"})
        with pytest.raises(FormatError, match=r"says model-00001-of-00002\.safetensors has tensor 'other\.weight'"):
            open_safetensors(sharded)

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        tensors = make_tensors()
        save_file({"model.norm.weight": tensors["model.norm.weight"]}, sharded / "model-00002-of-00002.safetensors")
        with pytest.raises(
            FormatError, match=r"tensor 'model\.norm\.weight': is in model-00001-of-00002\.safetensors too"
        ):
            open_safetensors(sharded)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("[1]", "is a JSON list, not an object"),
            ('{"a": 1, "b": 2, "a": 3}', "has the key 'a' twice"),
            ('{"a": ', "is not JSON: Expecting value"),
            ("[" * 200_000, "is nested too deeply"),
            ('{"a": ' * 200_000, "is nested too deeply"),
            ('{"a": ' + "1" * 5000 + "}", "is not JSON: Exceeds the limit"),
            ("", "is empty"),
        ],
    )
    def test_a_broken_config(self, sharded: Path, text: str, reason: str) -> None:
        (sharded / "config.json").write_text(text)
        with pytest.raises(FormatError, match=f"config.json: file at byte 0: {reason}"):
            open_safetensors(sharded)

    def test_a_config_that_is_no_text(self, sharded: Path) -> None:
        (sharded / "config.json").write_bytes(b'{"a": "\xff"}')
        with pytest.raises(FormatError, match=r"is not UTF-8 \(invalid start byte in its byte 7\)"):
            open_safetensors(sharded)


class TestHostileHeaders:
    def refuse(self, path: Path, field: str, offset: int, reason: str) -> None:
        with pytest.raises(FormatError) as caught:
            open_safetensors(path)
        assert (caught.value.field, caught.value.offset) == (field, offset), str(caught.value)
        assert reason in caught.value.reason
        assert caught.value.path == str(path)
        assert len(str(caught.value)) < 500

    def refuse_entry(self, tmp_path: Path, entry: object, field: str, reason: str) -> None:
        path = write_raw(tmp_path / "a.safetensors", {"t": entry}, bytes(16))
        self.refuse(path, f"tensor 't' {field}".rstrip(), 8, reason)

    @pytest.mark.parametrize("size", [0, 1, 7])
    def test_no_room_for_a_length(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(bytes(size))
        field, reason = ("header length", "wants 8 bytes") if size else ("file", "is empty")
        self.refuse(path, field, 0, reason)

    @pytest.mark.parametrize("length", [1000, 1 << 40, (1 << 64) - 1])
    def test_lying_lengths(self, tmp_path: Path, length: int) -> None:
        path = write_raw(tmp_path / "a.safetensors", {}, length=length)
        self.refuse(path, "header length", 0, f"is {length}, the file has 2 bytes left")

    def test_a_longer_header_than_allowed(self, tmp_path: Path) -> None:
        path = write_raw(tmp_path / "a.safetensors", {}, length=25_000_001)
        with path.open("r+b") as file:
            file.truncate(1 << 30)  # sparse
        self.refuse(path, "header length", 0, "25000000 are allowed")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b"", "is not JSON"),
            (b"[]", "is a JSON list"),
            (b'{"t": 1, "t": 2}', "has the key 't' twice"),
            (b'{"\xff": 1}', "is not UTF-8"),
            (b"[" * 100_000, "is nested too deeply"),
        ],
    )
    def test_headers_that_are_no_object(self, tmp_path: Path, text: bytes, reason: str) -> None:
        self.refuse(write_raw(tmp_path / "a.safetensors", text, bytes(8)), "header", 8, reason)

    @pytest.mark.parametrize("entry", [None, 1, [], {}, {"dtype": "F32"}, describe() | {"more": 1}])
    def test_entries_of_other_shape(self, tmp_path: Path, entry: object) -> None:
        self.refuse_entry(tmp_path, entry, "", "is not described by dtype, shape and data_offsets")

    @pytest.mark.parametrize("shape", [None, 4, [0], [-4], [4.0], [True], ["4"], [[4]], [1] * 9, [1 << 63]])
    def test_shapes(self, tmp_path: Path, shape: object) -> None:
        self.refuse_entry(tmp_path, describe(shape=shape), "shape", "up to 8 sizes, none zero, are allowed")

    @pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "U16", "F4", "f32", "", None, 7, ["F32"]])
    def test_types_that_are_not_supported(self, tmp_path: Path, dtype: Any) -> None:
        reason = f"{dtype!r} is not supported; weights may be F32, F16, BF16"
        self.refuse_entry(tmp_path, describe(dtype), "dtype", reason)

    @pytest.mark.parametrize("dtype", ["BOOL", "I8", "I32", "I64", "F64"])
    @pytest.mark.parametrize("name", ["weight", "a.weight", "a.qweight", "a.weight_packed"])
    def test_weights_in_whole_numbers(self, tmp_path: Path, name: str, dtype: str) -> None:
        path = write_raw(tmp_path / "a.safetensors", {name: describe(dtype)}, bytes(16))
        self.refuse(path, f"tensor {name!r} dtype", 8, f"'{dtype}' is not supported; weights may be F32, F16, BF16")

    @pytest.mark.parametrize(
        "offsets", [None, 16, [], [16], [0, 8, 16], [0, -16], [0, 16.0], [16, 0], [0, 15], [0, 1 << 62], [1, 17]]
    )
    def test_offsets(self, tmp_path: Path, offsets: object) -> None:
        self.refuse_entry(tmp_path, describe(offsets=offsets), "data_offsets", "are ")

    def test_products_that_overflow(self, tmp_path: Path) -> None:
        entry = describe(shape=[1 << 62, 1 << 62, 4], offsets=[0, 0])
        self.refuse_entry(tmp_path, entry, "data_offsets", "takes")

    def test_overlaps_gaps_and_leftovers(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        write_raw(path, {"a": describe(), "b": describe(offsets=(8, 24))}, bytes(24))
        self.refuse(path, "tensor 'b' data_offsets", 8, "tensors may neither overlap nor leave gaps")
        write_raw(path, {"a": describe(), "b": describe(offsets=(20, 36))}, bytes(36))
        self.refuse(path, "tensor 'b' data_offsets", 8, "but 'a' ends at")
        write_raw(path, {"a": describe(offsets=(4, 20))}, bytes(20))
        self.refuse(path, "tensor 'a' data_offsets", 8, "but the header ends at")
        write_raw(path, {"a": describe()}, bytes(20))
        self.refuse(path, "file", path.stat().st_size - 4, "the tensors end at")

    def test_a_scalar_is_a_vector_of_one(self, tmp_path: Path) -> None:
        data = struct.pack("<f", 2.5)
        path = write_raw(tmp_path / "a.safetensors", {"s": describe(shape=[], offsets=[0, 4])}, data)
        with open_safetensors(path) as folder:
            assert folder.tensors["s"].to_float32().tolist() == [2.5]

    def test_a_file_without_tensors(self, tmp_path: Path) -> None:
        with open_safetensors(write_raw(tmp_path / "a.safetensors", {"__metadata__": {"a": "b"}})) as folder:
            assert folder.tensors == {}


def test_bfloat16(tmp_path: Path) -> None:
    """The library's NumPy face has no bfloat16, so the file is made by hand: upper halves of float32."""
    values = np.array([1.5, -2.0, 3.0e38, 0.0], np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    path = write_raw(tmp_path / "a.safetensors", {"a.weight": describe("BF16", [2, 2], [0, 8])}, data)
    with open_safetensors(path) as folder:
        source = folder.tensors["a.weight"]
        assert (source.type_name, source.shape) == ("bf16", (2, 2))
        assert np.allclose(source.to_float32().reshape(-1), values, rtol=2**-8)
