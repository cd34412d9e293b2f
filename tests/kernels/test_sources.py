"""Tensors that are some rows or columns of others: only what is asked for is decoded."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.sources import Picked, Reordered, part_groups

ROWS, COLUMNS = 24, 64


class Watched(TensorSource):
    """Notes which rows are decoded."""

    seen: ClassVar[list[tuple[int | None, int | None]]] = []

    def to_float32(self, start: int | None = None, stop: int | None = None) -> np.ndarray:
        self.seen.append((start, stop))
        return TensorSource.to_float32(self, start, stop)


def make_matrix() -> Watched:
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    matrix = Watched("w", "q8_0", values.shape, encode_tensor("q8_0", values))
    Watched.seen.clear()
    return matrix


def test_groups_of_rows_fall_into_parts() -> None:
    first, second = part_groups(3, (2, 1))
    assert first.tolist() == [0, 1, 3, 4, 6, 7]
    assert second.tolist() == [2, 5, 8]


def test_picked_rows_are_decoded_run_by_run() -> None:
    matrix = make_matrix()
    whole = TensorSource.to_float32(matrix)
    rows, _ = part_groups(3, (5, 3))
    picked = Picked(matrix, rows)
    for start, stop in ((None, None), (0, 5), (3, 12), (4, 4)):
        assert np.array_equal(picked.to_float32(start, stop), whole[rows[start:stop]])
    assert matrix.seen == [(0, 5), (8, 13), (16, 21), (0, 5), (3, 5), (8, 13), (16, 18), (0, 0)]
    own = TensorSource("p", "q8_0", picked.shape, picked.data)
    assert np.array_equal(own.to_float32(), whole[rows])


def test_columns_are_put_in_order_a_piece_at_a_time() -> None:
    matrix = make_matrix()
    whole, order = TensorSource.to_float32(matrix), np.random.default_rng(2).permutation(COLUMNS).astype(np.int32)
    ordered = Reordered(matrix, order)
    assert (ordered.shape, ordered.type_name, ordered.nbytes) == ((ROWS, COLUMNS), "f32", 4 * ROWS * COLUMNS)
    assert np.array_equal(ordered.to_float32(3, 9), whole[3:9][:, order])
    assert matrix.seen == [(3, 9)]
    assert np.array_equal(ordered.data.view(np.float32).reshape(ordered.shape), whole[:, order])
    assert np.array_equal(ordered.take_rows(2, 4).to_float32(), whole[2:4][:, order])
    with pytest.raises(ValueError, match="w has no part 0"):
        ordered.take_matrix(0)
    ordered.release()


def test_scattered_rows_are_decoded_at_once() -> None:
    matrix = make_matrix()
    rows = np.arange(4, 16, dtype=np.int32).reshape(2, 6).T.reshape(-1)
    picked = Picked(matrix, rows)
    assert np.array_equal(picked.to_float32(), TensorSource.to_float32(matrix)[rows])
    assert matrix.seen == [(4, 16)]


def test_whole_blocks_keep_their_type() -> None:
    matrix = make_matrix()
    order = np.arange(COLUMNS, dtype=np.int32).reshape(-1, 32)[::-1].reshape(-1)
    ordered = Reordered(matrix, order)
    assert (ordered.type_name, ordered.nbytes) == (matrix.type_name, matrix.nbytes)
    own = TensorSource("p", ordered.type_name, ordered.shape, ordered.data)
    assert np.array_equal(own.to_float32(), TensorSource.to_float32(matrix)[:, order])
