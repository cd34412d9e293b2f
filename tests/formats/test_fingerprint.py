"""Fingerprints of tensors: equal for the same file, different after any change."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mlxr.formats import TensorSource, TensorToWrite, hash_tensors, open_gguf, write_gguf
from mlxr.formats.tensor import SAMPLE_BYTES, SAMPLES


def make_tensor(name: str, values: np.ndarray, shape: tuple[int, ...] | None = None) -> TensorSource:
    data = np.ascontiguousarray(values, np.float32)
    return TensorSource(name, "f32", shape or data.shape, data.reshape(-1).view(np.uint8))


def make_tensors(values: np.ndarray) -> dict[str, TensorSource]:
    return {"a": make_tensor("a", np.arange(8.0)), "b": make_tensor("b", values)}


VALUES = np.arange(3 * SAMPLES * SAMPLE_BYTES // 4, dtype=np.float32).reshape(2, -1)


def test_the_order_of_tensors_does_not_matter() -> None:
    tensors = make_tensors(VALUES)
    assert hash_tensors(tensors, ()) == hash_tensors(dict(reversed(tensors.items())), ())
    assert len(hash_tensors(tensors, ())) == 32


def test_names_types_and_shapes_count() -> None:
    known = hash_tensors({"a": make_tensor("a", np.zeros((4, 2)))}, ())
    assert hash_tensors({"b": make_tensor("b", np.zeros((4, 2)))}, ()) != known
    assert hash_tensors({"a": make_tensor("a", np.zeros((2, 4)))}, ()) != known
    integers = TensorSource("a", "i32", (4, 2), np.zeros(32, np.uint8))
    assert hash_tensors({"a": integers}, ()) != known


@pytest.mark.parametrize("place", [0, -1])
def test_first_and_last_values_are_sampled(place: int) -> None:
    values = VALUES.copy()
    values.flat[place] += 1
    assert hash_tensors(make_tensors(values), ()) != hash_tensors(make_tensors(VALUES), ())


def test_small_tensors_count_whole() -> None:
    known = hash_tensors(make_tensors(VALUES), ())
    for index in range(8):
        tensors = make_tensors(VALUES)
        tensors["a"] = make_tensor("a", np.arange(8.0) + (np.arange(8) == index))
        assert hash_tensors(tensors, ()) != known


def test_an_edited_file_is_another_and_a_moved_one_is_not(tmp_path: Path) -> None:
    path, moved = tmp_path / "a.gguf", tmp_path / "b.gguf"
    data = VALUES.view(np.uint8).reshape(-1)
    write_gguf(path, {"general.architecture": "llama"}, [TensorToWrite("w", "f32", VALUES.shape, lambda: iter([data]))])

    def fingerprint(place: Path) -> bytes:
        with open_gguf(place) as file:
            return hash_tensors(file.tensors, file.paths)

    known = fingerprint(path)
    assert fingerprint(path) == known
    status = path.stat()
    path.rename(moved)
    assert fingerprint(moved) == known
    os.utime(moved, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # whatever was changed, samples or not
    assert fingerprint(moved) != known
