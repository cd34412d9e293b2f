"""Writing GGUF: files that the `gguf` package and our reader read back, streaming, and failures that leave no file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_bytes import sample_gguf

from mlxr.core.errors import FormatError, ModelError
from mlxr.formats import TensorSource, TensorToWrite, by_name, encode_tensor, open_gguf, write_gguf
from mlxr.formats.ggml_types import GGML_TYPES

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "negative": -5,
    "large": 1 << 40,
    "largest": (1 << 64) - 1,
    "yes": True,
    "tokens": ["<s>", "é", ""],
    "scores": [0.5, 1, -2.25],
    "types": [1, 2, 3],
    "flags": [True, False],
    "empty": [],
    "long": np.arange(2000, dtype=np.float32),
    "number": np.uint16(9),
    "nested": [["a"], ["b", "c"]],
}
TYPES = {
    "general.architecture": "string",
    "llama.block_count": "u32",
    "llama.rope.freq_base": "f32",
    "negative": "i32",
    "large": "i64",
    "largest": "u64",
    "yes": "bool",
    "tokens": "array[string]",
    "scores": "array[f32]",
    "types": "array[i32]",
    "flags": "array[bool]",
    "empty": "array[i32]",
    "long": "array[f32]",
    "number": "u16",
    "nested": "array[array[string]]",
}


def weights(rows: int = 8, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((rows, columns)).astype(np.float32)


def test_metadata_comes_back(tmp_path: Path) -> None:
    size = write_gguf(tmp_path / "model.gguf", METADATA, [])
    assert size == (tmp_path / "model.gguf").stat().st_size
    with open_gguf(tmp_path / "model.gguf") as file:
        assert file.metadata_types == TYPES
        long = file.metadata.pop("long")
        assert isinstance(long, np.ndarray)
        assert np.array_equal(long, METADATA["long"])
        assert file.metadata == {key: value for key, value in METADATA.items() if key != "long"}


def test_gguf_reads_metadata(tmp_path: Path) -> None:
    flat = {key: value for key, value in METADATA.items() if key not in ("nested", "empty", "long")}
    write_gguf(tmp_path / "model.gguf", flat, [])
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    for key, value in flat.items():
        assert fields[key].contents() == value, key


def test_gguf_reads_every_type(tmp_path: Path) -> None:
    rows = [row for row in GGML_TYPES if row.encode is not None]
    tensors = [TensorToWrite.from_array(f"{row.name}.weight", row.name, weights()) for row in rows]
    tensors.append(TensorToWrite.from_array("vector", "f32", weights()[0]))
    tensors.append(TensorToWrite.from_array("stack", "q8_0", weights().reshape(2, 4, 256)))
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, tensors)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert list(read) == [tensor.name for tensor in tensors]
    for row in rows:
        tensor = read[f"{row.name}.weight"]
        assert tensor.tensor_type.value == row.id
        assert tensor.shape.tolist() == [256, 8]
        assert tensor.data_offset % 32 == 0
        assert tensor.data.tobytes() == encode_tensor(row.name, weights()).tobytes()
    assert read["vector"].shape.tolist() == [256]
    assert read["stack"].shape.tolist() == [256, 4, 2]


def test_types_are_kept_when_named(tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(sample_gguf())
    with open_gguf(tmp_path / "old.gguf") as old:
        tensors = [
            TensorToWrite.from_source(source, name=name, type_name=source.type_name)
            for name, source in old.tensors.items()
        ]
        write_gguf(tmp_path / "new.gguf", old.metadata, tensors, metadata_types=old.metadata_types)
        with open_gguf(tmp_path / "new.gguf") as new:
            assert new.metadata == old.metadata
            assert new.metadata_types == old.metadata_types
            for name, source in old.tensors.items():
                assert new.tensors[name].data.tobytes() == source.data.tobytes()


def test_alignment_is_obeyed(tmp_path: Path) -> None:
    tensors = [TensorToWrite.from_array(f"t{number}", "f32", weights()[0, :5]) for number in range(3)]
    write_gguf(tmp_path / "model.gguf", {"general.alignment": 256}, tensors)
    offsets = [tensor.data_offset for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors]
    assert offsets == [offsets[0], offsets[0] + 256, offsets[0] + 512]
    assert offsets[0] % 256 == 0
    with pytest.raises(FormatError, match=r"'general.alignment': is 48; it must be a power of two"):
        write_gguf(tmp_path / "model.gguf", {"general.alignment": 48}, tensors)


def test_conversion_changes_type_and_row_order() -> None:
    values = weights()
    source = TensorSource("a", "f32", values.shape, values.reshape(-1).view(np.uint8))
    order = np.array([7, 0, 1, 2, 3, 6, 5, 4])
    moved = TensorToWrite.from_source(source, name="b", type_name="q8_0", row_order=order)
    assert np.array_equal(np.concatenate(list(moved.chunks())), encode_tensor("q8_0", values[order]))
    kept = TensorToWrite.from_source(source, name="b", type_name="f32", row_order=order)
    assert np.concatenate(list(kept.chunks())).tobytes() == values[order].tobytes()
    assert list(kept.chunks())  # a second time too


def test_conversion_streams(tmp_path: Path) -> None:
    """Converting 64 MiB takes a small part of that in memory."""
    values = np.zeros((16384, 1024), np.float32)
    source = TensorSource("a", "f32", values.shape, values.reshape(-1).view(np.uint8))
    tracemalloc.start()
    write_gguf(tmp_path / "model.gguf", {}, [TensorToWrite.from_source(source, name="a", type_name="q8_0")])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tensors = [TensorToWrite.from_array(name, "f32", weights()) for name in "ab"]
    size = write_gguf(tmp_path / "model.gguf", {}, tensors, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


@pytest.mark.parametrize(
    ("value", "words", "reason"),
    [
        (300, "u8", "does not fit u8"),
        (-1, "u64", "does not fit u64"),
        (1 << 64, None, "18446744073709551616 does not fit 64 bits"),
        ("x", "u32", "'x' is not of type u32"),
        (1.5, "i32", "1.5 is not of type i32"),
        (1, "bool", "1 is not of type bool"),
        (1, "string", "1 is not a string"),
        (1, "array[i32]", "1 is not an array"),
        ([1, "a"], None, "mixes f32 and string"),
        ([1], "array[u128]", "'u128' is not a GGUF type"),
        (1, "int", "'int' is not a GGUF type"),
        ({"a": 1}, None, "a dict has no GGUF type"),
        (None, None, "a NoneType has no GGUF type"),
        (np.zeros(3, np.complex64), None, "NumPy type complex64 has no GGUF type"),
        ([[1], 2], "array[array[i32]]", "2 is not an array"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, value: object, words: str | None, reason: str) -> None:
    types = {} if words is None else {"key": words}
    with pytest.raises(FormatError, match=f"metadata 'key': .*{reason}"):
        write_gguf(tmp_path / "model.gguf", {"key": value}, [], metadata_types=types)
    assert list(tmp_path.iterdir()) == []


def test_bad_tensors_are_refused(tmp_path: Path) -> None:
    def refuse(reason: str, *tensors: TensorToWrite) -> None:
        with pytest.raises(FormatError, match=reason):
            write_gguf(tmp_path / "model.gguf", {}, tensors)
        assert list(tmp_path.iterdir()) == []

    good = TensorToWrite.from_array("good", "f32", weights())
    refuse("tensor 'good': is there twice", good, good)
    refuse("has a name of 64 bytes", TensorToWrite.from_array("n" * 64, "f32", weights()))
    refuse("has a name of 0 bytes", TensorToWrite.from_array("", "f32", weights()))
    refuse(r"has shape \(0, 4\)", TensorToWrite("empty", "f32", (0, 4), list))
    refuse(r"has shape \(1, 1, 1, 1, 1\)", TensorToWrite("deep", "f32", (1, 1, 1, 1, 1), list))
    refuse("tensor 'x': has rows of 32; q4_k takes 256s", TensorToWrite.from_array("x", "q4_k", weights(2, 32)))
    refuse("was given 0 instead of 16 bytes", good, TensorToWrite("short", "f32", (4,), list))
    refuse("was given more than 4 bytes", TensorToWrite("long", "f32", (1,), lambda: [np.zeros(5, np.uint8)]))


def test_bad_weights_are_named(tmp_path: Path) -> None:
    values = weights()
    values[0, 0] = np.nan
    with pytest.raises(ModelError, match=r"tensor blk.0.x: the weights hold nan, which cannot be written as q4_k"):
        write_gguf(tmp_path / "model.gguf", {}, [TensorToWrite.from_array("blk.0.x", "q4_k", values)])
    assert list(tmp_path.iterdir()) == []


class TestAllOrNothing:
    """Whatever goes wrong, the old file stays and no part of the new one is left."""

    def fail_after(self, tmp_path: Path, error: BaseException) -> None:
        def chunks() -> Iterator[np.ndarray]:
            yield np.zeros(512, np.uint8)
            raise error

        path = tmp_path / "model.gguf"
        path.write_bytes(b"old")
        try:
            write_gguf(path, {}, [TensorToWrite("a", "f32", (256,), chunks)])
        finally:
            assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
            assert path.read_bytes() == b"old"

    def test_a_full_disk(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"model.gguf: file: the disk is full .*; nothing was left behind"):
            self.fail_after(tmp_path, OSError(errno.ENOSPC, "No space left on device"))

    def test_another_error_of_the_system(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="cannot be written: Input/output error; nothing was left behind"):
            self.fail_after(tmp_path, OSError(errno.EIO, "Input/output error"))

    def test_an_interrupt(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.fail_after(tmp_path, KeyboardInterrupt())

    def test_too_little_room_is_said_before_the_work(self, tmp_path: Path) -> None:
        def work() -> Iterator[np.ndarray]:
            raise AssertionError("started although the disk cannot hold the result")

        with pytest.raises(FormatError, match=r"the disk is full .* bytes are free"):
            write_gguf(tmp_path / "model.gguf", {}, [TensorToWrite("a", "f32", (1 << 30, 1 << 28), work)])
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="cannot be written: No such file or directory"):
            write_gguf(tmp_path / "missing" / "model.gguf", {}, [])

    def test_success_replaces_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        write_gguf(path, {"a": 1}, [TensorToWrite.from_array("t", "f32", weights())])
        with open_gguf(path) as old:
            source = old.tensors["t"]
            write_gguf(path, {"a": 2}, [TensorToWrite.from_source(source, name="t", type_name="f16")])
            assert np.array_equal(source.to_float32(), weights())  # the old file lives on under its mapping
        with open_gguf(path) as new:
            assert (new.metadata, new.tensors["t"].type_name) == ({"a": 2}, "f16")
        assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
        assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()

    def test_a_real_write_that_fails(self, tmp_path: Path) -> None:
        """A limit on the size of files, which the kernel enforces in the middle of the write."""
        script = (
            "import resource; import numpy as np; from mlxr.formats import TensorToWrite, write_gguf\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "big = TensorToWrite.from_array('a', 'f32', np.zeros((64, 4096), np.float32))\n"
            f"write_gguf({str(tmp_path / 'model.gguf')!r}, {{}}, [big])\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 1
        assert "the disk is full or a limit is reached (File too large)" in done.stderr
        assert list(tmp_path.iterdir()) == []


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_sizes_of_tensors_to_write() -> None:
    tensor = TensorToWrite.from_array("a", "q4_k", weights())
    assert tensor.nbytes == 8 * by_name("q4_k").type_size
