"""The arena's size follows its settings, its bytes add up, and copied pages equal their originals."""

from __future__ import annotations

import numpy as np
import pytest

from mlxr.cache.arena import Arena, measure_page_bytes, parse_kv_type
from mlxr.cache.page_table import PageCopy
from mlxr.cache.shapes import FREE_MEMORY_PERCENT, CacheShape, PageNeeds, choose_pages
from mlxr.core.errors import SettingError
from mlxr.kernels.attend import KVType, attend
from mlxr.kernels.context import Context, Device
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope_and_write_kv import write_pages

PAGE_BYTES = 1000


@pytest.mark.parametrize(("kv_type", "row_bytes"), [("bf16", 12), ("f16", 12), ("f32", 24), ("q8", 10)])
def test_bytes_add_up(kv_type: KVType, row_bytes: int) -> None:
    ctx = Context("reference")
    arena = Arena(ctx, layers=3, pages=5, kv_heads=2, page_size=8, head_dim=6, kv_type=kv_type)
    assert arena.page_bytes == 3 * 2 * 2 * 8 * row_bytes == measure_page_bytes(ctx, 3, 2, 8, 6, kv_type)
    assert arena.nbytes == 5 * arena.page_bytes
    assert len(arena.k_pools) == len(arena.v_pools) == 3
    assert len({id(pool) for pool in (*arena.k_pools, *arena.v_pools)}) == 6


def test_names_of_kv_types() -> None:
    assert [parse_kv_type(name) for name in (None, "bf16", "f16", "f32", "q8")] == [None, "bf16", "f16", "f32", "q8"]
    with pytest.raises(SettingError, match="kv_type: must be one of bf16, f16, f32, q8; got 'q8_0'"):
        parse_kv_type("q8_0")


def test_copied_pages() -> None:
    ctx = Context("reference")
    arena = Arena(ctx, layers=2, pages=4, kv_heads=1, page_size=2, head_dim=3)
    pools = (*arena.k_pools, *arena.v_pools)
    for number, pool in enumerate(pools):
        pool[:] = np.arange(pool.size).reshape(pool.shape) + 1000 * number
    before = [pool.copy() for pool in pools]
    arena.copy_pages([PageCopy(source=1, target=3), PageCopy(source=0, target=1)])
    for pool, old in zip(pools, before, strict=True):
        assert np.array_equal(pool, old[[0, 0, 2, 1]])
    assert ctx.ledger.snapshot().copied_bytes == 2 * arena.page_bytes


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32", "q8"])
@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("page_size", [7, 32])
def test_exported_pages_mean_the_same_in_another_place(device: Device, kv_type: KVType, page_size: int) -> None:
    ctx = Context(device)
    one, other = (Arena(ctx, 2, 3, kv_heads=2, page_size=page_size, head_dim=16, kv_type=kv_type) for _ in range(2))
    assert one.layout == other.layout
    assert kv_type in one.layout
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, page_size, 2, 16)).astype(np.float32)
    slots = np.arange(page_size, 2 * page_size, dtype=np.int32)  # page 1
    for pools in zip(one.k_pools, one.v_pools, strict=True):
        write_pages(ctx, keys, values, *pools, slots)
    kept = np.empty(one.page_bytes, np.uint8)
    one.export_page(1, kept)
    other.import_page(2, kept)
    queries = rng.standard_normal((1, 4, 16)).astype(np.float32)
    results = []
    for arena, page in ((one, 1), (other, 2)):
        batch = RaggedBatch(
            token_ids=np.zeros(1, np.int32),
            positions=np.array([page_size - 1], np.int32),
            slots=np.zeros(1, np.int32),
            query_starts=np.array([0, 1], np.int32),
            context_lengths=np.array([page_size], np.int32),
            page_table=np.array([[page]], np.int32),
            output_rows=np.zeros(1, np.int32),
        )
        for pools in zip(arena.k_pools, arena.v_pools, strict=True):
            results.append(attend(ctx, queries, *pools, batch, scale=0.25))
    assert np.abs(results[0]).max() > 0.01
    for result in results[1:]:
        assert np.array_equal(result, results[0])


def test_refused_memory_names_the_setting() -> None:
    with pytest.raises(SettingError, match="arena_bytes: the system refused memory for 67108863 pages"):
        Arena(Context("reference"), layers=4, pages=2**26 - 1, kv_heads=2**12, page_size=32, head_dim=2**12)


def choose_one(wanted_pages: int, page_bytes: int = PAGE_BYTES, **given: int | None) -> int:
    """Pages of a model with one group, which keeps everything."""
    needs = PageNeeds([CacheShape(1, 1)], 32, sequences=1, context_tokens=wanted_pages * 32, step_tokens=512)
    (pages,) = choose_pages([page_bytes], needs, **given)  # type: ignore[arg-type]
    return pages


@pytest.mark.parametrize(("arena_bytes", "pages"), [(1000, 1), (1999, 1), (2000, 2), (10_500, 10)])
def test_bytes_are_rounded_down_to_pages(arena_bytes: int, pages: int) -> None:
    chosen = choose_one(3, arena_bytes=arena_bytes, available_bytes=10_500)
    assert chosen == pages


def test_more_bytes_than_are_free_are_refused() -> None:
    with pytest.raises(SettingError, match=r"arena_bytes: 194560 MiB are more than the 23552 MiB .* lower arena_bytes"):
        choose_one(3, arena_bytes=190 * 2**30, available_bytes=23 * 2**30)


def test_bytes_for_no_page_are_refused() -> None:
    with pytest.raises(SettingError, match=r"arena_bytes: 999 bytes hold no page.*32 tokens.*1000 bytes"):
        choose_one(3, arena_bytes=999, available_bytes=10**9)


def test_default_is_what_is_wanted() -> None:
    assert choose_one(7, available_bytes=10**9) == 7


def test_default_is_bounded_by_free_memory() -> None:
    pages = choose_one(10**9, available_bytes=1_000_000)
    assert pages == 1_000_000 * FREE_MEMORY_PERCENT // 100 // PAGE_BYTES


def test_the_share_of_free_memory_is_a_setting() -> None:
    chosen = choose_one(10**9, available_bytes=1_000_000, available_percent=7)
    assert chosen == 70
    with pytest.raises(SettingError, match="arena_percent: must be from 1 to 100, got 101"):
        choose_one(7, available_bytes=10**9, available_percent=101)


def test_default_without_free_memory_is_refused() -> None:
    with pytest.raises(SettingError, match="arena_bytes"):
        choose_one(7, available_bytes=100)


def test_unknown_free_memory_asks_for_the_setting() -> None:
    with pytest.raises(SettingError, match="set arena_bytes"):
        choose_one(7, available_bytes=None)
    assert choose_one(7, arena_bytes=5000, available_bytes=None) == 5


def test_number_of_pages() -> None:
    assert choose_one(7, pages=9, available_bytes=None) == 9
    with pytest.raises(SettingError, match="at least 1 page, got 0"):
        choose_one(7, pages=0, available_bytes=None)
    with pytest.raises(SettingError, match="not both"):
        choose_one(7, pages=9, arena_bytes=9000, available_bytes=None)


def test_slots_fit_in_32_bits() -> None:
    with pytest.raises(SettingError, match="67108864 pages of 32 tokens"):
        choose_one(7, pages=2**26, available_bytes=None)
    assert choose_one(2**40, page_bytes=1, available_bytes=2**50) * 32 < 2**31


GEMMA = PageNeeds([CacheShape(1, 256), CacheShape(1, 256, 512)], 32, sequences=8, context_tokens=8192, step_tokens=512)
GEMMA_BYTES = [1000, 5000]  # one layer in six keeps everything


def test_a_window_needs_its_own_length_and_that_of_a_step() -> None:
    full, window = choose_pages(GEMMA_BYTES, GEMMA, available_bytes=10**9)
    assert full == 8 * 256
    assert window == 8 * 17 + 17 + 17  # resting, one step, an eighth for the ends of earlier texts
    assert 1000 * full + 5000 * window < (8 * 256) * 6000 / 4


def test_groups_share_what_memory_there_is() -> None:
    sizes = range(6000, 10**7, 9973)
    chosen = [choose_pages(GEMMA_BYTES, GEMMA, arena_bytes=size, available_bytes=None) for size in sizes]
    for (full, window), size in zip(chosen, sizes, strict=True):
        assert size - 110_000 < full * 1000 + window * 5000 <= size
        assert full >= window
    assert chosen == sorted(chosen)
    assert [window for _, window in chosen] == sorted(window for _, window in chosen)


def test_more_bytes_than_the_context_needs_are_for_more_texts() -> None:
    full, window = choose_pages(GEMMA_BYTES, GEMMA, arena_bytes=10**8, available_bytes=None)
    assert full > 8 * 8 * 256
    assert window > 8 * 8 * 17


def test_bytes_are_used_where_all_layers_have_a_window() -> None:
    needs = PageNeeds([CacheShape(1, 256, 512)], 32, sequences=2, context_tokens=8192, step_tokens=512)
    (pages,) = choose_pages([1000], needs, arena_bytes=10**7, available_bytes=None)
    assert 10**7 - 20_000 < 1000 * pages <= 10**7
    assert choose_pages([1000], needs, available_bytes=10**9) == (2 * 17 + 17 + 4,)


def test_a_number_of_pages_is_for_groups_that_keep_everything() -> None:
    assert choose_pages(GEMMA_BYTES, GEMMA, pages=1000, available_bytes=None) == (1000, 170)
    assert choose_pages(GEMMA_BYTES, GEMMA, pages=100, available_bytes=None) == (100, 100)
