"""The native `write_pages`: every f16, rounding, views, and slots that do not exist."""

from __future__ import annotations

import numpy as np
import pytest
from variants import Floats, Ints, assert_equal_bits, native_contexts, random_floats, run_everywhere

from mlxr.kernels.attend import KVType, allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.rope_and_write_kv import write_pages


def round_to_half(ctx: Context, values: Floats) -> np.ndarray:
    """The f16 that the pools hold after `values` were written."""
    k_pool, v_pool = allocate_pools(ctx, 1, 1, 1, values.size, "f16")
    rows = np.ascontiguousarray(values.reshape(1, 1, -1))
    write_pages(ctx, rows, rows, k_pool, v_pool, np.zeros(1, np.int32))
    assert_equal_bits(k_pool, v_pool)
    return k_pool.reshape(-1)


def test_every_half_and_every_middle_rounds_as_ieee_says() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = np.append((halves[1:] + halves[:-1]) / 2, np.float32(65520.0))
    up, down = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))
    tiny = np.array([0.0, 1e-45, 1e-30, 2**-25, 2**-24], np.float32)
    large = np.array([65504, 65519, 1e10, 3.4e38, np.inf], np.float32)
    values = np.concatenate([halves, middles, up, down, tiny, large])
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert_equal_bits(run_everywhere(lambda ctx: round_to_half(ctx, values)), expected)


def test_any_float_rounds_as_numpy_rounds() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 100_003, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert_equal_bits(run_everywhere(lambda ctx: round_to_half(ctx, values)), expected)


def write_as_bf16(ctx: Context, values: Floats) -> np.ndarray:
    """The bf16 that the pools hold after `values` were written, in pages of one position: packed in plain order."""
    k_pool, v_pool = allocate_pools(ctx, 1, 1, 1, values.size, "bf16")
    rows = np.ascontiguousarray(values.reshape(1, 1, -1))
    write_pages(ctx, rows, rows, k_pool, v_pool, np.zeros(1, np.int32))
    assert_equal_bits(k_pool, v_pool)
    return k_pool.reshape(-1)


def test_bf16_rounds_to_the_nearest_and_of_two_to_the_even() -> None:
    numbers = np.arange(0x7F80, dtype=np.uint32) << 16
    raw = np.concatenate([numbers, numbers + 0x7FFF, numbers + 0x8000, numbers + 0x8001, [0x7F800000]])
    raw = np.concatenate([raw, raw | 0x80000000]).astype(np.uint32)
    low, high = raw >> 16, (raw >> 16) + 1
    to_low, to_high = (raw & 0xFFFF).astype(np.int64), 0x10000 - (raw & 0xFFFF).astype(np.int64)
    expected = np.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high).astype(np.uint16)
    assert_equal_bits(run_everywhere(lambda ctx: write_as_bf16(ctx, raw.view(np.float32))), expected)
    assert_equal_bits(write_as_bf16(Context("reference"), raw.view(np.float32)), expected)


def test_bf16_pages_are_packed_in_pairs() -> None:
    """Spelled out for one page of 17 positions and 4 dimensions: number 100 p + d at position p and dimension d."""
    k = (100 * np.arange(17)[:, None, None] + np.arange(4)[None, None]).astype(np.float32)
    k[k > 255] %= 256  # bf16 holds whole numbers up to 256

    def write(ctx: Context) -> np.ndarray:
        pools = allocate_pools(ctx, 1, 1, 17, 4, "bf16")
        write_pages(ctx, k, k, *pools, np.arange(17, dtype=np.int32))
        return np.stack(pools)

    keys, values = (write(Context("reference")).astype(np.uint32) << 16).view(np.float32).reshape(2, -1)
    groups = [k[:16, 0].reshape(16, 2, 2).transpose(1, 0, 2), k[16:, 0].reshape(1, 2, 2).transpose(1, 0, 2)]
    np.testing.assert_array_equal(keys, np.concatenate([group.reshape(-1) for group in groups]))
    pairs = k[:16, 0].reshape(8, 2, 4).transpose(0, 2, 1)
    np.testing.assert_array_equal(values, np.concatenate([pairs.reshape(-1), k[16, 0]]))
    assert_equal_bits(run_everywhere(write), write(Context("reference")))


def test_not_a_number_stays_so() -> None:
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F802000, 0xFFFFFFFF], np.uint32).view(np.float32)
    for ctx in native_contexts():
        assert np.isnan(round_to_half(ctx, patterns)).all()
        assert np.isnan((write_as_bf16(ctx, patterns).astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32", "q8"])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "page_size", "head_dim"),
    [(1, 1, 1, 1), (7, 2, 5, 20), (33, 3, 32, 80), (21, 2, 27, 17), (64, 8, 16, 64), (200, 2, 64, 128)],
)
def test_agrees_with_the_reference(kv_type: KVType, tokens: int, kv_heads: int, page_size: int, head_dim: int) -> None:
    pages = tokens // page_size + 4
    slots = np.random.default_rng(1).permutation(pages * page_size)[:tokens].astype(np.int32)
    k, v = random_floats(2, tokens, kv_heads, head_dim), random_floats(3, tokens, kv_heads, head_dim)

    def write(ctx: Context) -> np.ndarray:
        pools = np.stack(allocate_pools(ctx, pages, kv_heads, page_size, head_dim, kv_type))
        pools[...] = 7  # what is not written must stay
        write_pages(ctx, k, v, pools[0], pools[1], slots)
        return pools

    assert_equal_bits(run_everywhere(write), write(Context("reference")))


def test_views_of_a_fused_projection(cpu: Context) -> None:
    fused = random_floats(4, 9, 10 * 16)
    k = fused[:, 96:128].reshape(9, 2, 16)
    v = fused[:, 128:].reshape(9, 2, 16)
    k_pool, v_pool = allocate_pools(cpu, 3, 2, 4, 16, "f32")
    write_pages(cpu, k, v, k_pool, v_pool, np.arange(9, dtype=np.int32))
    assert_equal_bits(k_pool.transpose(0, 2, 1, 3).reshape(12, 2, 16)[:9], k)
    assert_equal_bits(v_pool.transpose(0, 2, 1, 3).reshape(12, 2, 16)[:9], v)


def test_the_later_of_two_tokens_with_one_slot_stays() -> None:
    tokens = 3000  # enough to be spread over threads
    rows = np.arange(tokens, dtype=np.float32).repeat(4 * 16).reshape(tokens, 4, 16)

    def write(ctx: Context) -> np.ndarray:
        k_pool, v_pool = allocate_pools(ctx, 1, 4, 2, 16, "f32")
        write_pages(ctx, rows, rows, k_pool, v_pool, np.ones(tokens, np.int32))
        return k_pool

    pool = run_everywhere(write)
    np.testing.assert_array_equal(pool[0, :, 1], tokens - 1)
    np.testing.assert_array_equal(pool[0, :, 0], 0)


@pytest.mark.parametrize("bad", [-1, 12, 2**31 - 1, -(2**31)])
def test_slot_outside_is_refused_before_anything_is_written(cpu: Context, bad: int) -> None:
    pools = allocate_pools(cpu, 3, 2, 4, 16)
    rows = random_floats(5, 3, 2, 16)
    with pytest.raises(ValueError, match=rf"write_pages: slots\[1\] is {bad}, expected 0 to 11"):
        write_pages(cpu, rows, rows, *pools, np.array([0, bad, 1], np.int32))
    assert not pools[0].any()


def native_write(ctx: Context, k: Floats, pools: tuple[np.ndarray, np.ndarray], slots: Ints) -> None:
    ctx.module.write_pages(ctx.native, k, k, *pools, slots)


def test_native_call_checks_shapes_and_types_itself(cpu: Context) -> None:
    k, slots = random_floats(6, 2, 2, 16), np.zeros(2, np.int32)
    pools = allocate_pools(cpu, 3, 2, 4, 16)
    with pytest.raises(ValueError, match="write_pages: tokens of k and v is 1, expected 2"):
        native_write(cpu, k[:1], pools, slots)
    with pytest.raises(ValueError, match="write_pages: heads of k and v is 1, expected 2"):
        native_write(cpu, np.ascontiguousarray(k[:, :1]), pools, slots)
    with pytest.raises(ValueError, match="write_pages: head_dim of k and v is 8, expected 16"):
        native_write(cpu, np.ascontiguousarray(k[:, :, :8]), pools, slots)
    with pytest.raises(ValueError, match="write_pages: axis 0 of v_pool is 2, expected 3"):
        native_write(cpu, k, (pools[0], pools[1][:2]), slots)
    with pytest.raises(ValueError, match="write_pages: v_pool is of another type than k_pool"):
        native_write(cpu, k, (pools[0], pools[1].astype(np.float32)), slots)
    with pytest.raises(ValueError, match="write_pages: k_pool is of another type"):
        native_write(cpu, k, (pools[0].astype(np.float64), pools[1]), slots)
    with pytest.raises(ValueError, match="write_pages: k is strided"):
        native_write(cpu, random_floats(7, 2, 4, 16)[:, ::2], pools, slots)
    pools[1].flags.writeable = False
    with pytest.raises(TypeError):
        native_write(cpu, k, pools, slots)


def test_ledger_names_the_type(cpu: Context) -> None:
    rows = random_floats(8, 1, 1, 8)
    write_pages(cpu, rows, rows, *allocate_pools(cpu, 1, 1, 1, 8), np.zeros(1, np.int32))
    assert cpu.ledger.snapshot().dispatches == [Dispatch("write_pages", "cpu", "bf16", 1)]
