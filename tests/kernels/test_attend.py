"""The native `attend`: right against the reference, and equal bits for a token however it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amounts import choose_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from stories import (
    REFERENCE,
    Cache,
    Story,
    compute,
    compute_exactly,
    compute_rounded,
    cut_batch,
    fill_cache,
    make_story,
    round_story_to_q8,
    whole,
)
from variants import Floats, assert_equal_bits, native_contexts, run_everywhere

from mlxr.kernels.attend import KVType, allocate_pools, attend
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.ragged import NO_AXES
from mlxr.kernels.tensor import SCALE_BYTES

SHAPES = [
    # contexts, heads, kv_heads, head_dim, page_size, window
    ([1], 1, 1, 1, 1, None),
    ([33, 1, 64], 2, 1, 16, 32, None),
    ([70, 5], 4, 2, 64, 32, None),
    ([40, 90], 6, 2, 80, 16, None),
    ([100], 3, 3, 96, 64, None),
    ([50, 31], 4, 1, 100, 5, None),
    ([45], 8, 2, 128, 32, 7),
    ([300, 20], 4, 2, 64, 32, 33),
    ([290], 2, 1, 40, 100, 260),
    ([65], 2, 2, 256, 32, None),
    ([38], 71, 1, 64, 32, None),  # one key head, more query heads than a block has rows
    ([35], 2, 1, 17, 7, 1),  # sees itself only
    ([530], 7, 1, 48, 48, None),  # rows of one position in several groups
    ([301], 1, 1, 33, 31, 77),
    ([610], 2, 2, 64, 1000, 259),  # one page, whose tiles begin anywhere in a chunk
]


def assert_close_to_bf16(result: Floats, story: Story, window: int | None) -> None:
    """Assert the definition's result with the same roundings; half-way between two numbers a weight may round either
    way.
    """
    rounded = np.concatenate([compute_rounded(story, i, window, 0.3) for i in range(len(story.contexts))])
    error = np.abs(result - rounded)
    assert np.median(error) < 2e-6
    assert error.max() < 4e-3
    exact = np.concatenate([compute_exactly(story, i, window, 0.3) for i in range(len(story.contexts))])
    assert np.sqrt(np.mean((result - exact) ** 2)) < 0.01 * exact.std() + 1e-6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32", "q8"])
@pytest.mark.parametrize(("contexts", "heads", "kv_heads", "head_dim", "page_size", "window"), SHAPES)
def test_is_right_and_has_equal_bits_everywhere(
    contexts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    kv_type: KVType,
) -> None:
    story = make_story(contexts, heads, kv_heads, head_dim)
    if kv_type == "q8":
        story = round_story_to_q8(story)
    cache = fill_cache(story, page_size, kv_type)
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story), window))
    if kv_type == "q8":
        exact = np.concatenate([compute_exactly(story, i, window, 0.3) for i in range(len(contexts))])
        assert np.sqrt(np.mean((result - exact) ** 2)) < 0.01 * np.sqrt(np.mean(exact**2))
        return
    if kv_type == "bf16":
        assert_close_to_bf16(result, story, window)
        return
    exact = np.concatenate([compute_exactly(story, sequence, window, 0.3) for sequence in range(len(contexts))])
    np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32", "q8"])
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 64, 32), (3, 3, 17, 7), (6, 1, 32, 32)]
)
def test_symmetric_attention_sees_what_follows(
    kv_type: KVType, window: int | None, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    story = make_story([300, 1, 33, 64], heads, kv_heads, head_dim)
    if kv_type == "q8":
        story = round_story_to_q8(story)
    cache = fill_cache(story, page_size, kv_type)
    together = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story), window, symmetric=True))
    contexts = range(len(story.contexts))
    exact = np.concatenate([compute_exactly(story, one, window, 0.3, symmetric=True) for one in contexts])
    if kv_type in ("bf16", "q8"):
        assert np.sqrt(np.mean((together - exact) ** 2)) < 0.01 * np.sqrt(np.mean(exact**2))
    else:
        np.testing.assert_allclose(together, exact, rtol=2e-5, atol=2e-6)
    alone = [
        compute(REFERENCE, story, fill_cache(story, page_size, "f32"), [part], window, symmetric=True)
        for part in whole(story)
    ]
    np.testing.assert_allclose(np.concatenate(alone), exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kv_type", ["bf16", "f32", "q8"])
def test_a_chunk_is_a_window_that_begins_where_it_does(kv_type: KVType) -> None:
    story = make_story([700, 41], 4, 2, 64)
    cache = fill_cache(story, 32, kv_type)

    def see(ctx: Context, *parts: tuple[int, int, int]) -> Floats:
        q = np.concatenate([story.queries[sequence][first:end] for sequence, first, end in parts])
        options: dict[str, Any] = {"scale": 0.3, "sliding_window": 70, "chunked": True}
        return attend(ctx, q, *cache.pools, cut_batch(cache, parts), **options)

    together = run_everywhere(lambda ctx: see(ctx, *whole(story)))
    np.testing.assert_allclose(
        together, see(REFERENCE, *whole(story)), rtol=2e-5, atol=2e-6 if kv_type == "f32" else 3e-2
    )
    for own in (0, 1, 69, 70, 71, 139, 140, 300, 699):
        alone = compute(native_contexts()[0], story, cache, [(0, own, own + 1)], own % 70 + 1)
        assert_equal_bits(alone, together[own : own + 1], f"position {own}")
    part = run_everywhere(lambda ctx: see(ctx, (0, 60, 500)))
    assert_equal_bits(part, together[60:500])


@pytest.mark.parametrize("kv_type", ["bf16", "f32", "q8"])
def test_tokens_of_a_picture_see_all_of_it(kv_type: KVType) -> None:
    story = make_story([300, 41], 4, 2, 64)
    cache = fill_cache(story, 32, kv_type)
    ends = [np.arange(1, count + 1, dtype=np.int32) for count in story.contexts]
    for sequence, first, stop in ((0, 10, 45), (0, 200, 290), (1, 0, 41)):
        ends[sequence][first:stop] = stop

    def see(ctx: Context, parts: list[tuple[int, int, int]], window: int | None) -> Floats:
        q = np.concatenate([story.queries[sequence][first:end] for sequence, first, end in parts])
        seen = np.concatenate([ends[sequence][first:end] for sequence, first, end in parts])
        batch = cut_batch(cache, parts).with_pictures(None, NO_AXES, seen)
        options: dict[str, Any] = {"scale": 0.3, "sliding_window": window, "whole_pictures": True}
        return attend(ctx, q, *cache.pools, batch, **options)

    for window in (None, 30):
        together = run_everywhere(lambda ctx, window=window: see(ctx, whole(story), window))
        tolerance = 2e-6 if kv_type == "f32" else 2e-2
        np.testing.assert_allclose(together, see(REFERENCE, whole(story), window), rtol=2e-5, atol=tolerance)
        for part in ((0, 10, 45), (0, 260, 290), (0, 290, 300), (1, 5, 41)):  # also from inside of a picture
            first = part[1] + (300 if part[0] else 0)
            alone = run_everywhere(lambda ctx, part=part, window=window: see(ctx, [part], window))
            assert_equal_bits(alone, together[first : first + len(alone)])
    plain = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story)))
    assert_equal_bits(plain[:10], see(native_contexts()[0], whole(story), None)[:10])
    assert not np.array_equal(plain[10:45], see(native_contexts()[0], whole(story), None)[10:45])
    ends[0][44] = 44
    with pytest.raises(ValueError, match=r"ends\[44\].*44.*45 to 300"):
        see(native_contexts()[0], whole(story), None)


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "q8"])
def test_agrees_with_the_reference(kv_type: KVType) -> None:
    story = make_story([60, 9, 130], 6, 3, 48)
    cache = fill_cache(story, 32, kv_type)
    for pool in cache.pools:  # the reference multiplies hidden values by zero
        if kv_type == "q8":
            scales = pool.reshape(*pool.shape[:2], -1)[:, :, -32 * SCALE_BYTES :]
            scales[np.isnan(np.ascontiguousarray(scales).view(np.float32)).repeat(SCALE_BYTES, axis=2)] = 0
        else:
            pool[pool == 0x7FC0 if kv_type == "bf16" else np.isnan(pool)] = 0
    parts = [(0, 59, 60), (1, 0, 9), (2, 100, 130)]
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, parts, 50))
    tolerance = 2e-2 if kv_type in ("bf16", "q8") else 2e-6
    np.testing.assert_allclose(result, compute(REFERENCE, story, cache, parts, 50), rtol=2e-5, atol=tolerance)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kv_type", "window", "shape"), choose_pairs(["bf16", "f16", "q8"], [None, 100], [(8, 2, 64), (3, 1, 80)])
)
def test_token_has_the_same_bits_however_the_prompt_is_cut(
    cpu: Context, kv_type: KVType, window: int | None, shape: tuple[int, int, int]
) -> None:
    story = make_story([600], *shape)
    cache = fill_cache(story, 32, kv_type)
    together = compute(cpu, story, cache, whole(story), window)
    for chunk in (7, 32, 257):
        cuts = [(0, first, min(first + chunk, 600)) for first in range(0, 600, chunk)]
        parts = [compute(cpu, story, cache, [cut], window) for cut in cuts]
        assert_equal_bits(np.concatenate(parts), together, f"chunks of {chunk}")
    for position in (0, 1, 31, 32, 99, 100, 101, 255, 256, 257, 511, 512, 599):  # a decode step each
        alone = compute(cpu, story, cache, [(0, position, position + 1)], window)
        assert_equal_bits(alone, together[position : position + 1], f"position {position}")


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "q8"])
def test_sequence_has_the_same_bits_alone_and_in_a_batch(cpu: Context, kv_type: KVType) -> None:
    contexts = [1, 700, 33, 256, 2, 31, 64, 65, *range(3, 43)]
    story = make_story(contexts, 4, 2, 32)
    cache = fill_cache(story, 32, kv_type)
    queries = [min(context, (sequence * 7) % 40 + 1) for sequence, context in enumerate(contexts)]
    parts = [(i, context - queries[i], context) for i, context in enumerate(contexts)]
    together = compute(cpu, story, cache, parts)
    alone = [compute(cpu, story, cache, [part]) for part in parts]
    assert_equal_bits(np.concatenate(alone), together)
    backwards = compute(cpu, story, cache, parts[::-1])
    ends = np.cumsum(queries[::-1])
    again = [backwards[end - count : end] for end, count in zip(ends, queries[::-1], strict=True)]
    assert_equal_bits(np.concatenate(again[::-1]), together)


@pytest.mark.parametrize("head_dim", [64, 72])
def test_size_and_type_of_pages_change_no_bits(cpu: Context, head_dim: int) -> None:
    story = make_story([330, 41], 4, 2, head_dim)
    results = [
        compute(cpu, story, fill_cache(story, page_size, kv_type), [(0, 300, 330), (1, 0, 41)])
        for page_size in (1, 5, 32, 48, 64, 512)
        for kv_type in ("f16", "f32")
    ]
    for result in results[1:]:
        assert_equal_bits(result, results[0])


@pytest.mark.parametrize("head_dim", [64, 72, 5])
def test_size_of_packed_pages_changes_no_bits(cpu: Context, head_dim: int) -> None:
    story = make_story([330, 41], 4, 2, head_dim)
    results = [
        compute(cpu, story, fill_cache(story, page_size, "bf16"), [(0, 300, 330), (1, 0, 41)])
        for page_size in (1, 2, 5, 15, 16, 17, 32, 48, 64, 512)
    ]
    for result in results[1:]:
        assert_equal_bits(result, results[0])


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
@pytest.mark.parametrize("window", [None, 1000])
def test_long_context_is_split_over_threads_with_the_same_bits(window: int | None, kv_type: KVType) -> None:
    story = make_story([2600], 8, 2, 64)
    cache = fill_cache(story, 32, kv_type)
    parts = [(0, 2597, 2600)]
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, parts, window))
    exact = compute_exactly(story, 0, window, 0.3, first=2597)
    np.testing.assert_allclose(result, exact, rtol=5e-5, atol=3e-2 if kv_type == "bf16" else 3e-6)
    mixed = [(0, 2597, 2600), (0, 10, 40), (0, 2000, 2001)]  # with others, the split is another one
    together = run_everywhere(lambda ctx: compute(ctx, story, cache, mixed, window))
    assert_equal_bits(together[:3], result)


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
def test_pages_before_the_window_need_not_be_there(cpu: Context, kv_type: KVType) -> None:
    story = make_story([400], 4, 2, 64)
    cache = fill_cache(story, 32, kv_type)
    parts = [(0, 390, 400)]
    expected = compute(cpu, story, cache, parts, 70)
    first_seen = 390 - 70 + 1
    cache.page_table[0, : first_seen // 32] = -1
    assert_equal_bits(compute(cpu, story, cache, parts, 70), expected)
    cache.page_table[0, first_seen // 32] = -1
    with pytest.raises(ValueError, match=rf"attend: page_table\[0, {first_seen // 32}\] is -1, expected 0 to 15"):
        compute(cpu, story, cache, parts, 70)


def test_pages_are_shared_and_read_in_any_order(cpu: Context) -> None:
    story = make_story([96], 2, 1, 32)
    cache = fill_cache(story, 32, "f16")
    batch = cut_batch(cache, [(0, 95, 96), (0, 95, 96)])
    q = np.concatenate([story.queries[0][95:]] * 2)
    result = attend(cpu, q, *cache.pools, batch, scale=0.3)
    assert_equal_bits(result[:1], result[1:])


def test_subnormal_and_huge_numbers_have_equal_bits_everywhere() -> None:
    """Keys, values and queries of every exponent: too small numbers become zero on every instruction set alike."""
    story = make_story([70], 3, 1, 64)
    rng = np.random.default_rng(3)
    for rows in (story.queries, story.keys, story.values):
        exponents = rng.integers(-140, -20, rows[0].shape)
        rows[0][...] = np.ldexp(np.sign(rows[0]) + rows[0] / 8, exponents)
    story.values[0][:, :, ::3] = np.ldexp(1.0, -126) * rng.integers(-9, 9, story.values[0][:, :, ::3].shape)
    story.values[0][5:9] *= np.float32(2.0**30)
    run_everywhere(lambda ctx: compute(ctx, story, fill_cache(story, 32, "bf16"), whole(story), scale=1.0))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 50.0, 1e30])
def test_sharp_and_flat_softmax(scale: float) -> None:
    story = make_story([90], 2, 1, 32)
    cache = fill_cache(story, 32, "f16")
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story), scale=scale))
    np.testing.assert_allclose(result, compute_exactly(story, 0, None, scale), rtol=1e-3, atol=1e-5)


def test_falling_scores_rescale_nothing_and_rising_scores_all(cpu: Context) -> None:
    for direction in (1, -1):
        story = make_story([300], 1, 1, 16)
        slope = direction * np.arange(300, dtype=np.float32) / 16
        story.keys[0][...] = 0
        story.keys[0][:, 0, 0] = slope
        story.queries[0][...] = 1
        cache = fill_cache(story, 32, "f32")
        result = compute(cpu, story, cache, whole(story))
        np.testing.assert_allclose(result, compute_exactly(story, 0, None, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_not_a_number_reaches_only_those_who_see_it(cpu: Context, part: str, kv_type: KVType) -> None:
    story = make_story([64, 64], 2, 1, 32)
    cache = fill_cache(story, 32, kv_type)
    clean = compute(cpu, story, cache, whole(story))
    getattr(story, part)[0][40] = np.nan
    result = compute(cpu, story, fill_cache(story, 32, kv_type), whole(story))
    assert np.isnan(result[40:64]).all()
    assert_equal_bits(np.delete(result, range(40, 64), axis=0), np.delete(clean, range(40, 64), axis=0))


def test_query_may_be_a_view_of_a_fused_projection(cpu: Context) -> None:
    story = make_story([20], 4, 2, 16)
    cache = fill_cache(story, 32, "f16")
    fused = np.zeros((20, 8 * 16), np.float32)
    fused[:, :64] = story.queries[0].reshape(20, 64)
    view = fused[:, :64].reshape(20, 4, 16)
    assert view.base is not None
    result = attend(cpu, view, *cache.pools, cut_batch(cache, whole(story)), scale=0.3)
    assert_equal_bits(result, compute(cpu, story, cache, whole(story)))


def test_ledger_shows_the_native_kernel_and_no_copies(cpu: Context) -> None:
    story = make_story([40], 2, 1, 16)
    compute(cpu, story, fill_cache(story, 32, "f16"), whole(story))
    compute(cpu, story, fill_cache(story, 32, "f32"), whole(story), 8)
    compute(cpu, story, fill_cache(story, 32, "bf16"), whole(story))
    snapshot = cpu.ledger.snapshot()
    assert snapshot.dispatches == [
        Dispatch("attend", "cpu", "packed bf16", 1),
        Dispatch("attend", "cpu", "tiles f16", 1),
        Dispatch("attend", "cpu", "tiles f32+window", 1),
    ]
    assert snapshot.copied_bytes == 0


def test_pools_start_empty_and_default_to_bf16(cpu: Context) -> None:
    k_pool, v_pool = allocate_pools(cpu, 3, 2, 32, 64)
    assert k_pool.shape == v_pool.shape == (3, 2, 32, 64)
    assert k_pool.dtype == v_pool.dtype == np.uint16
    assert not k_pool.any()
    assert not np.shares_memory(k_pool, v_pool)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_has_the_bits_of_its_tokens(data: st.DataObject) -> None:
    """Random shapes and cuts: right, and the same bits as each sequence computed whole, on any context."""
    group, kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    head_dim, page_size = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    window = data.draw(st.none() | st.integers(1, 60))
    kv_type: KVType = data.draw(st.sampled_from(["bf16", "f16", "f32", "q8"]))
    story = make_story(contexts, group * kv_heads, kv_heads, head_dim, seed=data.draw(st.integers(0, 99)))
    if kv_type == "q8":
        story = round_story_to_q8(story)
    cache = fill_cache(story, page_size, kv_type)
    parts = []
    for sequence, context in enumerate(contexts):
        end = data.draw(st.integers(1, context))
        parts.append((sequence, data.draw(st.integers(0, end - 1)), end))
    results = [compute(ctx, story, cache, parts, window) for ctx in native_contexts()[::2]]
    start = 0
    for sequence, first, end in parts:
        part = results[0][start : start + end - first]
        if kv_type in ("bf16", "q8"):
            rounded = compute_rounded(story, sequence, window, 0.3)[first:end]
            np.testing.assert_allclose(part, rounded, rtol=0, atol=0.02)
        else:
            exact = compute_exactly(story, sequence, window, 0.3)[first:end]
            np.testing.assert_allclose(part, exact, rtol=1e-4, atol=1e-5)
        complete = compute(native_contexts()[-1], story, cache, [(sequence, 0, contexts[sequence])], window)
        assert_equal_bits(results[0][start : start + end - first], complete[first:end])
        start += end - first
    for result in results[1:]:
        assert_equal_bits(result, results[0])


# What follows changes arrays behind the batch's back or calls the native module directly: it must check by itself.


def native_attend(ctx: Context, story: Story, cache: Cache, **changes: NDArray[Any]) -> Floats:
    batch = cut_batch(cache, whole(story))
    arguments: dict[str, Any] = {
        "q": np.concatenate(story.queries),
        "k_pool": cache.pools[0],
        "v_pool": cache.pools[1],
        "query_starts": batch.query_starts,
        "context_lengths": batch.context_lengths,
        "page_table": batch.page_table,
    }
    arguments |= changes
    tokens, heads, head_dim = arguments["q"].shape
    out = np.empty((tokens, heads * head_dim), np.float32)
    ctx.module.attend(ctx.native, *arguments.values(), 0.3, 0, out)
    return out


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_starts": ints(0, 2**30, 50)}, r"query_starts\[0\] is 0 before 1073741824, expected ascending"),
        ({"query_starts": ints(0, -5, 50)}, r"query_starts\[0\] is 0 before -5"),
        ({"query_starts": ints(1, 40, 50)}, "first of query_starts is 1, expected 0"),
        ({"query_starts": ints(0, 40, 51)}, "last of query_starts is 51, expected 50"),
        ({"query_starts": ints(0, 50)}, "length of query_starts is 2, expected 3"),
        ({"context_lengths": ints(39, 10)}, r"context_lengths\[0\] is 39, expected 40 to 96"),
        ({"context_lengths": ints(40, 97)}, r"context_lengths\[1\] is 97, expected 10 to 96"),
        ({"context_lengths": ints(40, -1)}, r"context_lengths\[1\] is -1"),
        ({"page_table": ints(0, 6, 0, 0, 0, 0).reshape(2, 3)}, r"page_table\[0, 1\] is 6, expected 0 to 5"),
        ({"page_table": ints(0, 1, 0, -1, 0, 0).reshape(2, 3)}, r"page_table\[1, 0\] is -1"),
        ({"page_table": ints(0, 1, 0).reshape(1, 3)}, "rows of page_table is 1, expected 2"),
        ({"page_table": np.zeros((2, 0), np.int32)}, r"context_lengths\[0\] is 40, expected 40 to 0"),
        ({"q": np.zeros((50, 3, 16), np.float32)}, "heads of q is 3, expected a multiple of the 2 key heads"),
        ({"q": np.zeros((50, 4, 15), np.float32)}, "head_dim of q is 15, expected 16"),
        ({"q": np.zeros((50, 8, 16), np.float32)[:, ::2]}, "q is strided"),
        ({"v_pool": np.zeros((6, 2, 32, 15), np.float16)}, "axis 3 of v_pool is 15, expected 16"),
        ({"v_pool": np.zeros((6, 2, 32, 16), np.float32)}, "v_pool is of another type than k_pool"),
        (
            {"k_pool": np.zeros((6, 2, 32, 16), np.float64)},
            "k_pool is of another type, expected float16, float",
        ),
    ],
)
def test_hostile_arguments_are_refused_by_name(cpu: Context, changes: dict[str, NDArray[Any]], message: str) -> None:
    story = make_story([40, 10], 4, 2, 16)
    cache = fill_cache(story, 32, "f16")
    native_attend(cpu, story, cache)
    with pytest.raises(ValueError, match=f"attend: {message}"):
        native_attend(cpu, story, cache, **changes)


def test_wrong_kinds_of_arrays_are_never_converted(cpu: Context) -> None:
    story = make_story([40, 10], 4, 2, 16)
    cache = fill_cache(story, 32, "f16")
    for name, array in (
        ("query_starts", np.array([0, 40, 50], np.int64)),
        ("page_table", np.zeros((2, 6), np.int32)[:, ::2]),
        ("q", np.zeros((50, 4, 16), np.float64)),
        ("k_pool", np.zeros((6, 2, 32, 32), np.float16)[:, :, :, ::2]),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            native_attend(cpu, story, cache, **{name: array})
