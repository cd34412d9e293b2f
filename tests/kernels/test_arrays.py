"""Memory of large results: used again once it is free, never before."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from mlxr.kernels.arrays import LARGE, empty
from mlxr.kernels.context import Context, load_native

pytest.importorskip("mlxr._native", reason="the native module is not built")

ROWS, COLUMNS = 512, LARGE // 256


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.skipif(hasattr(load_native(), "read_stray"), reason="under sanitizers memory is never used again")
def test_memory_comes_back() -> None:
    ctx = Context("cpu", threads=1)
    first = empty(ctx, ROWS, COLUMNS)
    assert first.shape == (ROWS, COLUMNS)
    assert first.dtype == np.float32
    assert first.flags.c_contiguous
    assert first.flags.writeable
    at = address(first)
    del first
    gc.collect()
    again = empty(ctx, ROWS, COLUMNS)
    assert address(again) == at


def test_arrays_and_views_keep_their_memory() -> None:
    ctx = Context("cpu", threads=1)
    held = [empty(ctx, ROWS, COLUMNS) for _ in range(5)]
    for number, array in enumerate(held):
        array[:] = number
    held[2] = held[2][100:, 1:]
    gc.collect()
    late = empty(ctx, ROWS, COLUMNS)
    late[:] = -1
    for number, array in enumerate(held):
        assert (array == number).all()


def test_arrays_outlive_their_context() -> None:
    ctx = Context("cpu", threads=2)
    array = empty(ctx, ROWS, COLUMNS)
    array[:] = 7
    del ctx
    gc.collect()
    assert (array == 7).all()


def test_much_larger_memory_is_not_used_for_less() -> None:
    ctx = Context("cpu", threads=1)
    large = empty(ctx, 64 * ROWS, COLUMNS)
    at = address(large)
    del large
    gc.collect()
    assert address(empty(ctx, ROWS, COLUMNS)) != at


def test_a_size_beyond_memory_is_refused() -> None:
    ctx = Context("cpu", threads=1)
    with pytest.raises(MemoryError):
        empty(ctx, 1 << 60, 1 << 20)
