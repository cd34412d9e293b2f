"""Reading GGUF: files written by the `gguf` package, every kind of metadata, split models, views and their lifetime."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import STRING, U16, make_gguf, pack_entry, pack_info, pack_text, sample_gguf

from mlxr.core.errors import FormatError, NotFound
from mlxr.formats import TensorSource, TensorToWrite, by_name, open_gguf, write_gguf


def write_with_gguf(path: Path, tensors: dict[str, np.ndarray], split_at: int = 0) -> None:
    """Write a file with the `gguf` package; `split_at` splits the model into parts with so many tensors."""
    writer = gguf.GGUFWriter(None if split_at else path, "llama", split_max_tensors=split_at)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "\n"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.25])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {
        "token_embd.weight": random.standard_normal((6, 64)).astype(np.float32),
        "blk.0.attn_q.weight": random.standard_normal((64, 64)).astype(np.float16),
        "output_norm.weight": random.standard_normal(64).astype(np.float32),
        "experts.weight": random.standard_normal((3, 4, 32)).astype(np.float32),
        "ids": np.arange(5, dtype=np.int32),
    }


def test_reads_what_gguf_writes(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_with_gguf(tmp_path / "model.gguf", tensors)
    with open_gguf(tmp_path / "model.gguf") as file:
        assert file.version == 3
        assert file.paths == [tmp_path / "model.gguf"]
        assert file.size_bytes == (tmp_path / "model.gguf").stat().st_size
        assert file.metadata == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.tokens": ["<s>", "é", "\n"],
            "tokenizer.ggml.scores": [0.0, -1.5, 2.25],
            "tokenizer.ggml.add_bos_token": True,
        }
        assert list(file.tensors) == list(tensors)
        for name, values in tensors.items():
            source = file.tensors[name]
            assert source.name == name
            assert source.shape == values.shape
            assert source.nbytes == values.nbytes
            assert source.data.tobytes() == values.tobytes()
            assert np.array_equal(source.to_float32(), values.astype(np.float32))
        assert [source.type_name for source in file.tensors.values()] == ["f32", "f16", "f32", "f32", "i32"]


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sample_gguf())
    with open_gguf(path) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "u8": 7,
            "i8": -7,
            "u16": 65000,
            "i16": -3,
            "general.alignment": 32,
            "i32": -70000,
            "f32": pytest.approx(1e-5),
            "bool": True,
            "u64": 1 << 40,
            "i64": -(1 << 40),
            "f64": 3.25,
            "tokens": ["a", "é", ""],
            "scores": [0.5, -1.0, 2.0],
            "flags": [False, True],
            "nested": [[1], []],
        }
        kinds = {type(value) for value in file.metadata.values()}
        assert kinds == {str, int, float, bool, list}
        assert file.metadata_types["tokens"] == "array[string]"
        assert file.metadata_types["nested"] == "array[array[i32]]"
        assert file.metadata_types["u16"] == "u16"
        assert {name: source.type_name for name, source in file.tensors.items()} == {
            f"{kind}.weight": kind for kind in ("f32", "q4_k", "q8_0", "f16", "mxfp4")
        }


def test_version_2(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(make_gguf([pack_entry("a", STRING, pack_text("b"))], version=2))
    with open_gguf(path) as file:
        assert (file.version, file.metadata, file.tensors) == (2, {"a": "b"}, {})


def test_long_numeric_arrays_stay_arrays(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("long", list(range(1024)))
    writer.add_array("short", list(range(1023)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with open_gguf(path) as file:
        long, short = file.metadata["long"], file.metadata["short"]
        assert isinstance(long, np.ndarray)
        assert long.dtype == np.int32
        assert long.tolist() == list(range(1024))
        assert short == list(range(1023))


def test_gaps_between_tensors_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(make_gguf([], [pack_info("b", [4], 0, 64), pack_info("a", [4], 0, 0)], bytes(range(80))))
    with open_gguf(path) as file:
        assert list(file.tensors) == ["b", "a"]
        assert file.tensors["a"].data.tobytes() == bytes(range(16))
        assert file.tensors["b"].data.tobytes() == bytes(range(64, 80))


@pytest.mark.parametrize("written", ["q2_0", "pq2_0"])
def test_blocks_of_q2_0_are_told_by_the_room_of_tensors(tmp_path: Path, written: str) -> None:
    """Files with blocks of 64 and of 128 columns give both the number 42."""
    random, size = np.random.default_rng(3), by_name(written).row_bytes(512)
    raw = {name: random.integers(0, 256, rows * size, np.uint8) for name, rows in (("a", 3), ("b", 5))}
    tensors = [
        TensorToWrite(name, written, (data.size // size, 512), partial(list, [data])) for name, data in raw.items()
    ]
    path = tmp_path / "x.gguf"
    write_gguf(path, {"general.alignment": 32}, tensors)
    path.write_bytes(path.read_bytes().replace((142).to_bytes(4, "little"), (42).to_bytes(4, "little")))
    with open_gguf(path) as file:
        for name, data in raw.items():
            assert file.tensors[name].type_name == written
            assert np.array_equal(file.tensors[name].data, data)


def test_data_is_a_read_only_view_that_outlives_the_file(tmp_path: Path) -> None:
    write_with_gguf(tmp_path / "model.gguf", make_tensors())
    file = open_gguf(tmp_path / "model.gguf")
    source = file.tensors["token_embd.weight"]
    before = source.to_float32()
    assert not source.data.flags.owndata
    assert not source.data.flags.writeable
    source.release()
    assert np.array_equal(source.to_float32(), before)
    file.close()
    source.release()
    assert np.array_equal(source.to_float32(), before)
    assert file.tensors == {}


def test_rows_are_decoded_alone(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(sample_gguf())
    with open_gguf(tmp_path / "model.gguf") as file:
        source = file.tensors["q4_k.weight"]
        whole = source.to_float32()
        assert whole.shape == (2, 256)
        assert whole.flags.owndata or whole.base is not source.data
        assert np.array_equal(source.to_float32(1, 2), whole[1:])
        assert np.array_equal(source.to_float32(-1), whole[-1:])
        assert source.to_float32(2).shape == (0, 256)
        assert source.to_float32(1, 0).shape == (0, 256)


def test_rows_of_vectors_and_stacks() -> None:
    stack = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    source = TensorSource("stack", "f32", stack.shape, stack.reshape(-1).view(np.uint8))
    assert np.array_equal(source.to_float32(1, 3), stack[1:3])
    source.release()  # memory of our own: nothing to give back
    vector = TensorSource("vector", "f32", (24,), stack.reshape(-1).view(np.uint8))
    assert np.array_equal(vector.to_float32(5, 7), [5, 6])


@pytest.mark.parametrize("name", ["q4_k.weight", "f16.weight"])
def test_rows_are_a_tensor_of_their_own_without_a_copy(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(sample_gguf())
    with open_gguf(tmp_path / "model.gguf") as file:
        source = file.tensors[name]
        last = source.take_rows(1, 2)
        assert (last.name, last.type_name, last.shape) == (name, source.type_name, (1, *source.shape[1:]))
        assert np.shares_memory(last.data, source.data)
        last.release()
        assert np.array_equal(last.to_float32(), source.to_float32()[1:2])


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"missing.gguf: no such file"):
        open_gguf(tmp_path / "missing.gguf")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFound, match="no such file"):
        open_gguf(tmp_path / "file" / "model.gguf")


class TestSplit:
    """A model in three parts, as the `gguf` package splits it."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        write_with_gguf(tmp_path / "model.gguf", make_tensors(), split_at=2)
        found = sorted(tmp_path.glob("*.gguf"))
        assert [path.name for path in found] == [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
        return found

    def test_any_part_opens_the_whole(self, parts: list[Path]) -> None:
        for part in parts:
            with open_gguf(part) as file:
                assert file.paths == parts
                assert file.size_bytes == sum(path.stat().st_size for path in parts)
                assert file.metadata["llama.block_count"] == 2
                assert not [key for key in file.metadata if key.startswith("split.")]
                assert file.metadata_types.keys() == file.metadata.keys()
                for name, values in make_tensors().items():
                    assert np.array_equal(file.tensors[name].to_float32(), values.astype(np.float32))

    def test_a_missing_part(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(NotFound, match=r"00002-of-00003.gguf: part 2 of 3 is missing"):
            open_gguf(parts[0])

    def test_a_renamed_part(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("model.gguf"))
        with pytest.raises(FormatError, match=r"'split.count' at byte .* give it its own name back"):
            open_gguf(renamed)

    def test_parts_in_the_wrong_order(self, parts: list[Path]) -> None:
        spare = parts[1].rename(parts[1].with_name("spare"))
        parts[2].rename(parts[1])
        spare.rename(parts[2])
        with pytest.raises(FormatError, match=r"'split.no' at byte .*: is not 1"):
            open_gguf(parts[0])

    def test_a_part_of_another_model(self, parts: list[Path]) -> None:
        parts[1].write_bytes(make_gguf([pack_entry("split.count", U16, b"\x02\x00")]))
        with pytest.raises(FormatError, match=r"00002-of-00003.gguf: .*differs from the 3 of"):
            open_gguf(parts[0])

    def test_a_tensor_in_two_parts(self, parts: list[Path]) -> None:
        entries = [pack_entry("split.count", U16, b"\x03\x00"), pack_entry("split.no", U16, b"\x02\x00")]
        parts[2].write_bytes(make_gguf(entries, [pack_info("token_embd.weight", [4], 0, 0)], bytes(16)))
        with pytest.raises(FormatError, match=r"tensor 'token_embd.weight' at byte .*: is in an earlier part too"):
            open_gguf(parts[0])

    def test_tensors_that_are_not_there(self, parts: list[Path]) -> None:
        entries = [pack_entry("split.count", U16, b"\x03\x00"), pack_entry("split.no", U16, b"\x02\x00")]
        parts[2].write_bytes(make_gguf(entries))
        with pytest.raises(FormatError, match=r"'split.tensors.count' at byte .*: is 5, the parts hold 4 tensors"):
            open_gguf(parts[0])

    def test_a_count_that_is_no_count(self, parts: list[Path]) -> None:
        parts[0].write_bytes(make_gguf([pack_entry("split.count", STRING, pack_text("3"))]))
        with pytest.raises(FormatError, match=r"'split.count' at byte 24: is 3, not a count"):
            open_gguf(parts[0])
