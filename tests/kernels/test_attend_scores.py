"""Softcap and sinks of `attend`: right by their definition, equal bits everywhere, and noticed when they change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amounts import choose_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
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
from variants import Floats, assert_equal_bits, native_contexts, random_floats, run_everywhere

from mlxr.kernels.attend import KVType, attend
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch

SHAPES = [
    # contexts, heads, kv_heads, head_dim, page_size, window
    ([1], 2, 1, 1, 1, None),
    ([70, 5], 4, 2, 64, 32, None),
    ([40, 90], 6, 2, 80, 16, 33),
    ([50, 31], 4, 1, 100, 5, None),
    ([65], 2, 2, 256, 32, 7),
    ([38], 71, 1, 64, 32, None),
    ([610], 2, 2, 64, 1000, 259),
]
KINDS = [(1.5, False), (None, True), (0.8, True)]


def make_sinks(heads: int) -> Floats:
    """Make sinks around the size of scores; the first head's takes nearly all weight, the last one's nothing."""
    sinks = random_floats(5, heads)
    sinks[0], sinks[-1] = 9.0, -200.0
    return sinks


def list_exactly(story: Story, window: int | None, softcap: float | None, sinks: Floats | None) -> Floats:
    parts = [
        compute_exactly(story, sequence, window, 0.3, softcap=softcap, sinks=sinks)
        for sequence in range(len(story.contexts))
    ]
    return np.concatenate(parts).astype(np.float32)


@pytest.mark.parametrize(("shape", "kind", "kv_type"), choose_pairs(SHAPES, KINDS, ["bf16", "f16", "f32", "q8"]))
def test_are_right_and_have_equal_bits_everywhere(
    shape: tuple[list[int], int, int, int, int, int | None], kind: tuple[float | None, bool], kv_type: KVType
) -> None:
    (contexts, heads, kv_heads, head_dim, page_size, window), (softcap, sunk) = shape, kind
    story = make_story(contexts, heads, kv_heads, head_dim)
    if kv_type == "q8":
        story = round_story_to_q8(story)
    sinks = make_sinks(heads) if sunk else None
    cache = fill_cache(story, page_size, kv_type)
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story), window, softcap=softcap, sinks=sinks))
    exact = list_exactly(story, window, softcap, sinks)
    if kv_type in ("f16", "f32"):
        np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-6)
        return
    assert np.sqrt(np.mean((result - exact) ** 2)) < 0.01 * np.sqrt(np.mean(exact**2)) + 1e-6
    if kv_type == "bf16":
        sequences = range(len(contexts))
        rounded = [compute_rounded(story, i, window, 0.3, softcap=softcap, sinks=sinks) for i in sequences]
        error = np.abs(result - np.concatenate(rounded))
        assert np.median(error) < 2e-6
        assert error.max() < 4e-3


def test_reference_is_the_definition() -> None:
    story = make_story([37, 12], 4, 2, 24)
    sinks = make_sinks(4)
    result = compute(REFERENCE, story, fill_zeros(story), whole(story), 9, softcap=2.0, sinks=sinks)
    np.testing.assert_allclose(result, list_exactly(story, 9, 2.0, sinks), rtol=1e-5, atol=1e-6)


def fill_zeros(story: Story) -> Cache:
    """A cache whose unused slots are zero: the reference multiplies hidden values by zero."""
    cache = fill_cache(story, 16, "f32")
    for pool in cache.pools:
        pool[np.isnan(pool)] = 0
    return cache


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_type", ["bf16", "f16", "q8"])
@pytest.mark.parametrize(("softcap", "sunk"), KINDS)
def test_token_has_the_same_bits_however_it_is_computed(
    cpu: Context, softcap: float | None, sunk: bool, kv_type: KVType
) -> None:
    """Chunks of a prompt, single tokens, other requests beside it."""
    story = make_story([600, 45], 6, 2, 64)
    cache, sinks = fill_cache(story, 32, kv_type), make_sinks(6) if sunk else None

    def run(parts: list[tuple[int, int, int]]) -> Floats:
        return compute(cpu, story, cache, parts, 290, softcap=softcap, sinks=sinks)

    together = run([(0, 0, 600)])
    for chunk in (7, 257):
        cuts = [run([(0, first, min(first + chunk, 600))]) for first in range(0, 600, chunk)]
        assert_equal_bits(np.concatenate(cuts), together, f"chunks of {chunk}")
    for position in (0, 31, 32, 289, 290, 511, 599):
        assert_equal_bits(run([(0, position, position + 1)]), together[position : position + 1], position)
    beside = run([(1, 0, 45), (0, 400, 600)])
    assert_equal_bits(beside[45:], together[400:])


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
def test_long_context_is_split_over_threads_with_the_same_bits(kv_type: KVType) -> None:
    """The sink joins after the shares of all threads did."""
    story, sinks = make_story([2600], 8, 2, 64), make_sinks(8)
    cache, parts = fill_cache(story, 32, kv_type), [(0, 2597, 2600)]
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, parts, softcap=3.0, sinks=sinks))
    exact = compute_exactly(story, 0, None, 0.3, first=2597, softcap=3.0, sinks=sinks)
    np.testing.assert_allclose(result, exact, rtol=5e-5, atol=3e-2 if kv_type == "bf16" else 3e-6)


@pytest.mark.parametrize("kv_type", ["bf16", "f32"])
def test_a_changed_cap_or_sink_is_noticed(cpu: Context, kv_type: KVType) -> None:
    story = make_story([50], 4, 2, 32)
    cache, sinks = fill_cache(story, 16, kv_type), random_floats(3, 4)
    others = [(2.0, sinks), (2.1, sinks), (None, sinks), (2.0, None), (None, None), (2.0, sinks + np.float32(0.05))]
    results = [compute(cpu, story, cache, whole(story), softcap=cap, sinks=sunk) for cap, sunk in others]
    for index, (result, (cap, sunk)) in enumerate(zip(results, others, strict=True)):
        exact = list_exactly(story, None, cap, sunk)
        for other in [*results[:index], *results[index + 1 :]]:
            assert np.abs(result - exact).mean() < 0.5 * np.abs(other - exact).mean()


def test_a_sink_belongs_to_its_query_head(cpu: Context) -> None:
    story = make_story([20], 6, 2, 16)
    cache, sinks = fill_cache(story, 16, "f32"), random_floats(3, 6)
    before = compute(cpu, story, cache, whole(story), sinks=sinks).reshape(20, 6, 16)
    sinks[4] += 1
    after = compute(cpu, story, cache, whole(story), sinks=sinks).reshape(20, 6, 16)
    others = [0, 1, 2, 3, 5]
    assert_equal_bits(after[:, others], before[:, others])
    assert (np.abs(after[:, 4]) < np.abs(before[:, 4]))[before[:, 4] != 0].all()


def test_huge_scores_and_sinks(cpu: Context) -> None:
    """Nothing overflows: scores of 1e30 are the cap, and sinks far above or below all scores take all or nothing."""
    story = make_story([90], 3, 1, 32)
    cache = fill_cache(story, 16, "f16")
    for scale in (1e-30, 1e30):
        result = compute(cpu, story, cache, whole(story), scale=scale, softcap=5.0)
        np.testing.assert_allclose(result, compute_exactly(story, 0, None, scale, softcap=5.0), rtol=1e-4, atol=1e-5)
    plain = compute(cpu, story, cache, whole(story)).reshape(90, 3, 32)
    sunk = compute(cpu, story, cache, whole(story), sinks=np.array([1e30, -1e30, -np.inf], np.float32))
    assert not sunk.reshape(90, 3, 32)[:, 0].any()
    np.testing.assert_allclose(sunk.reshape(90, 3, 32)[:, 1:], plain[:, 1:], rtol=1e-6)


def test_tanh_is_exact_to_a_few_units_and_bounded(cpu: Context) -> None:
    """One position to itself, whose weight against a sink of zero tells its capped score: 1 / (1 + e**-score)."""
    x = np.concatenate([np.geomspace(1e-6, 60, 4000), -np.geomspace(1e-6, 60, 4000)]).astype(np.float32)
    story = Story([x[:, None, None]], [np.ones((len(x), 1, 1), np.float32)], [np.ones((len(x), 1, 1), np.float32)])
    cache = fill_cache(story, 8, "f32")
    sinks = np.zeros(1, np.float32)
    result = compute(cpu, story, cache, whole(story), 1, scale=1.0, softcap=2.0, sinks=sinks)[:, 0]
    exact = 1 / (1 + np.exp(-2.0 * np.tanh(x.astype(np.float64) / 2.0)))
    np.testing.assert_allclose(result, exact, rtol=5e-7)


def test_ledger_names_them(cpu: Context) -> None:
    story, sinks = make_story([40], 2, 1, 16), np.zeros(2, np.float32)
    compute(cpu, story, fill_cache(story, 32, "f16"), whole(story), softcap=1.0)
    compute(cpu, story, fill_cache(story, 32, "bf16"), whole(story), 8, softcap=1.0, sinks=sinks)
    assert cpu.ledger.snapshot().dispatches == [
        Dispatch("attend", "cpu", "packed bf16+window+softcap+sinks", 1),
        Dispatch("attend", "cpu", "tiles f16+softcap", 1),
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_is_right(data: st.DataObject) -> None:
    group, kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    head_dim, page_size = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    window, softcap = data.draw(st.none() | st.integers(1, 60)), data.draw(st.none() | st.floats(0.1, 60))
    sinks = data.draw(st.none() | st.just(make_sinks(group * kv_heads)))
    kv_type: KVType = data.draw(st.sampled_from(["bf16", "f16", "f32"]))
    story = make_story(contexts, group * kv_heads, kv_heads, head_dim, seed=data.draw(st.integers(0, 99)))
    cache = fill_cache(story, page_size, kv_type)
    results = [
        compute(ctx, story, cache, whole(story), window, softcap=softcap, sinks=sinks) for ctx in native_contexts()[::2]
    ]
    tolerance = 0.03 if kv_type == "bf16" else 1e-5
    np.testing.assert_allclose(results[0], list_exactly(story, window, softcap, sinks), rtol=1e-4, atol=tolerance)
    for result in results[1:]:
        assert_equal_bits(result, results[0])


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_what_makes_no_sense_is_refused(device: str) -> None:
    ctx = Context(device)  # type: ignore[arg-type]
    story = make_story([4], 4, 2, 16)
    cache = fill_cache(story, 16, "f32")
    for softcap in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="attend: softcap is"):
            compute(ctx, story, cache, whole(story), softcap=softcap)
    with pytest.raises(ValueError, match="length of sinks is 2, expected 4"):
        compute(ctx, story, cache, whole(story), sinks=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="sinks"):
        compute(ctx, story, cache, whole(story), sinks=np.zeros(4, np.float64))  # type: ignore[arg-type]


def test_native_call_checks_by_itself(cpu: Context) -> None:
    story = make_story([4], 4, 2, 16)
    cache = fill_cache(story, 16, "f32")
    q, table, out = story.queries[0], cache.page_table[:1], np.empty((4, 64), np.float32)
    starts, lengths = np.array([0, 4], np.int32), np.array([4], np.int32)

    def run(softcap: float, sinks: Floats | None) -> None:
        cpu.module.attend(cpu.native, q, *cache.pools, starts, lengths, table, 0.3, 0, out, softcap, sinks)

    with pytest.raises(ValueError, match="length of sinks is 3, expected 4"):
        run(0.0, np.zeros(3, np.float32))
    for softcap in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="softcap is"):
            run(softcap, None)
    run(0.0, None)
    assert_equal_bits(out, attend(cpu, q, *cache.pools, cut_batch(cache, whole(story)), scale=0.3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32", "q8"])
@pytest.mark.parametrize(("span", "symmetric"), [(7, True), (400, True), (7, False), (400, False)])
def test_biases_by_the_distance_of_keys(kv_type: KVType, span: int, symmetric: bool) -> None:
    story, biases = make_story([300, 1, 33], 6, 2, 64), random_floats(9, 6, 2 * span + 1)
    if kv_type == "q8":
        story = round_story_to_q8(story)
    cache, contexts = fill_cache(story, 32, kv_type), range(3)
    more: dict[str, Any] = {"symmetric": symmetric, "biases": biases}
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story), **more))
    exact = np.concatenate([compute_exactly(story, one, None, 0.3, **more) for one in contexts])
    if kv_type in ("bf16", "q8"):
        assert np.sqrt(np.mean((result - exact) ** 2)) < 0.01 * np.sqrt(np.mean(exact**2))
    else:
        np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-6 if symmetric else 5e-6)
    plain = fill_cache(story, 32, "f32")
    alone = [compute(REFERENCE, story, plain, [part], **more) for part in whole(story)]
    np.testing.assert_allclose(np.concatenate(alone), exact, rtol=2e-5, atol=2e-6 if symmetric else 5e-6)
    with pytest.raises(ValueError, match="softcap"):
        compute(REFERENCE, story, plain, whole(story), softcap=1.0, **more)
