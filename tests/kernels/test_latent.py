"""Latent attention: values that are in keys, products of parts of rows, and equal bits whatever runs beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stories import (
    REFERENCE,
    Story,
    compute,
    compute_exactly,
    compute_rounded,
    fill_cache,
    make_story,
    round_story_to_q8,
    whole,
)
from variants import Floats, assert_equal_bits, random_floats, run_everywhere

from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.attend import KVType, allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.latent import Parts, make_parts, project_parts, rope_and_write_latent
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import build_table

SHAPES = [
    # contexts, heads, numbers that rotate, rank, page_size
    ([1], 1, 2, 1, 1),
    ([33, 1, 64], 4, 8, 24, 32),
    ([300, 20], 16, 16, 64, 32),
    ([270], 5, 6, 17, 7),
    ([45], 128, 64, 512, 32),
]


def take_values(story: Story, rank: int) -> Story:
    """The story with the last numbers of its keys as values."""
    return replace(story, values=[keys[:, :, -rank:] for keys in story.keys])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_type", ["bf16", "f16", "f32", "q8"])
@pytest.mark.parametrize(("contexts", "heads", "turned", "rank", "page_size"), SHAPES)
def test_values_in_keys_are_right_and_have_equal_bits_everywhere(
    contexts: list[int], heads: int, turned: int, rank: int, page_size: int, kv_type: KVType
) -> None:
    story = make_story(contexts, heads, 1, turned + rank)
    story = round_story_to_q8(story) if kv_type == "q8" else story
    cache, scale = fill_cache(story, page_size, kv_type), 0.3 if rank < 64 else 0.04
    result = run_everywhere(lambda ctx: compute(ctx, story, cache, whole(story), scale=scale, value_dim=rank))
    meant, sequences = take_values(story, rank), range(len(contexts))
    exact = np.concatenate([compute_exactly(meant, sequence, None, scale) for sequence in sequences])
    if kv_type in ("bf16", "q8"):
        assert np.sqrt(np.mean((result - exact) ** 2)) < 0.01 * np.sqrt(np.mean(exact**2)) + 1e-6
    else:
        np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-6)
    if kv_type == "bf16":
        rounded = np.concatenate([compute_rounded(meant, sequence, None, scale) for sequence in sequences])
        assert np.abs(result - rounded).max() < 4e-3


@pytest.mark.parametrize("kv_type", ["bf16", "f16"])
def test_token_has_the_same_bits_however_the_prompt_is_cut(cpu: Context, kv_type: KVType) -> None:
    story = make_story([600], 16, 1, 80)
    cache = fill_cache(story, 32, kv_type)
    together = compute(cpu, story, cache, whole(story), value_dim=64)
    for chunk in (1, 7, 257):
        cuts = [(0, first, min(first + chunk, 600)) for first in range(520 if chunk == 1 else 0, 600, chunk)]
        parts = [compute(cpu, story, cache, [cut], value_dim=64) for cut in cuts]
        assert_equal_bits(np.concatenate(parts), together[cuts[0][1] :], f"chunks of {chunk}")


def make_matrices(ctx: Context, count: int, rows: int, columns: int, type_name: str) -> Parts:
    """Random matrices of a type."""
    weights = []
    for index in range(count):
        values = random_floats([index, rows], rows, columns) / np.float32(columns**0.5)
        source = TensorSource(f"m{index}", type_name, values.shape, encode_tensor(type_name, values))
        weights.append(prepare(ctx, [source]))
    return make_parts(ctx, weights)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("passed", [0, 8])
@pytest.mark.parametrize("type_name", ["f32", "bf16", "f16", "q8_0", "q4_0"])
def test_parts_are_products_one_by_one(type_name: str, passed: int) -> None:
    """Products of few tokens, of some and of many: each part by itself gives the same as all together."""
    x = random_floats(1, 150, 3 * (64 + passed))

    def run(ctx: Context) -> Floats:
        parts = make_matrices(ctx, 3, 48, 64, type_name)
        made = project_parts(ctx, x, parts, passed)
        cut = np.concatenate([project_parts(ctx, x[first:last], parts, passed) for first, last in ((0, 1), (1, 40))])
        assert_equal_bits(cut, made[:40])
        rows, out = x.reshape(150, 3, -1), made.reshape(150, 3, -1)
        assert_equal_bits(out[:, :, :passed], rows[:, :, 64:])
        for index, weight in enumerate(parts.weights):
            alone = linear(ctx, np.ascontiguousarray(rows[:, index, :64]), weight)
            assert_equal_bits(np.ascontiguousarray(out[:, index, passed:]), alone)
        return made

    made = run_everywhere(run)
    expected = project_parts(REFERENCE, x, make_matrices(REFERENCE, 3, 48, 64, type_name), passed)
    assert np.abs(made - expected).max() < (1e-5 if type_name == "f32" else 0.03)


def test_keys_are_what_rotates_and_then_the_normed_latent_vector() -> None:
    heads, turned, rank, tokens = 2, 4, 6, 3
    table = build_table(16, turned, 100.0, interleaved=True)
    q, latent = random_floats(1, tokens, heads * 10), random_floats(2, tokens, 10)
    norm, positions = random_floats(3, rank), np.array([5, 6, 7], np.int32)
    batch = RaggedBatch(
        token_ids=np.zeros(tokens, np.int32),
        positions=positions,
        slots=np.array([9, 2, 12], np.int32),
        query_starts=np.array([0, tokens], np.int32),
        context_lengths=np.array([8], np.int32),
        page_table=np.zeros((1, 2), np.int32),
        output_rows=np.zeros(1, np.int32),
    )

    def run(ctx: Context) -> Floats:
        pool, same = allocate_pools(ctx, 4, 1, 4, 10, "f32", values_in_keys=True)
        assert pool is same
        queries = rope_and_write_latent(ctx, q.copy(), latent, batch, table, pool, norm, 1e-6)
        return np.concatenate([queries.reshape(tokens, -1), pool.reshape(16, 10)[batch.slots]], axis=1)

    result = run_everywhere(run)
    np.testing.assert_allclose(result, run(REFERENCE), rtol=1e-5, atol=1e-6)
    keys = result[:, heads * 10 :]
    squares = np.mean(latent[:, :rank] ** 2, axis=1, keepdims=True)
    np.testing.assert_allclose(keys[:, turned:], latent[:, :rank] / np.sqrt(squares + 1e-6) * norm, rtol=1e-5)
    pairs = latent[:, rank:].reshape(tokens, -1, 2)
    turn = np.exp(1j * positions[:, None] * 100.0 ** (-np.arange(2) / 2))
    spun = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    np.testing.assert_allclose(keys[:, :turned:2] + 1j * keys[:, 1:turned:2], spun, rtol=1e-4, atol=1e-5)


def test_latent_pages_keep_keys_alone(cpu: Context) -> None:
    k_pool, v_pool = allocate_pools(cpu, 2, 1, 32, 80, "bf16", values_in_keys=True)
    assert k_pool is v_pool
    assert k_pool.nbytes == 2 * 32 * 80 * 2
