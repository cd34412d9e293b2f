"""A whole step in one native call: the bits and the counts of its operators one by one, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from model_fields import look
from numpy.typing import NDArray
from ran import count_apart
from random_model import make_weights
from tiny_models import PAGE_SIZE, make_hf_tensors, read_golden

from mlxr.cache.arena import Arena
from mlxr.kernels.context import Context, load_native
from mlxr.kernels.forward import Ends
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models import Decoder, model_from_folder

CONFIG, SEED, TOKENS, _ = read_golden("llama-gqa-64")
MODEL = model_from_folder(CONFIG)


def build(ctx: Context, type_name: str = "q8_0") -> Decoder:
    return Decoder(ctx, MODEL, make_hf_tensors(make_weights(CONFIG, SEED), CONFIG, type_name))


def make_arena(ctx: Context, pages: int) -> Arena:
    return Arena(ctx, len(MODEL.layers), pages, MODEL.kv_heads, PAGE_SIZE, look(MODEL, "head_dim"), "f32")


def make_step(token_ids: list[int], positions: list[int]) -> RaggedBatch:
    """One token of each sequence, two pages for each, dealt out back to front."""
    pages = np.arange(2 * len(token_ids), dtype=np.int32)[::-1].reshape(len(token_ids), 2).copy()
    slots = [int(own[at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for own, at in zip(pages, positions, strict=True)]
    return RaggedBatch.of_single_tokens(token_ids, positions, slots, pages)


@pytest.mark.parametrize("isa", load_native().available_isas())
@pytest.mark.parametrize("sequences", [1, 3, 9])
def test_equal_to_the_operators_one_by_one(isa: str, sequences: int) -> None:
    batch = make_step([int(token) for token in TOKENS[:sequences]], [7 * s for s in range(sequences)])
    results, counts = [], []
    for threads, in_one in ((1, False), (1, True), (3, True)):
        model = build(Context(threads=threads, isa=isa))
        arena = make_arena(model.ctx, 2 * sequences)
        for _ in range(2):  # the second time after what a step leaves the threads to do
            logits = model.forward(batch, arena) if in_one else model.project(model.forward_hidden(batch, arena))
        results.append([logits.tobytes(), *(pool.tobytes() for pool in (*arena.k_pools, *arena.v_pools))])
        counts.append(count_apart(model.ctx))
        assert logits.std() > 0.01
    assert results[0] == results[1] == results[2]
    assert counts[0] == counts[1] == counts[2]


ENDS = [Ends(27.5), Ends(1.0, 0.25), Ends(1.0, 1.0, 0.5), Ends(8.0, 2.0, 0.8)]


def build_with_ends(ctx: Context, ends: Ends, type_name: str = "q8_0") -> Decoder:
    model = build(ctx, type_name)
    model._weights = replace(model._weights, ends=ends)
    return model


@pytest.mark.parametrize("isa", load_native().available_isas())
@pytest.mark.parametrize("ends", ENDS)
def test_scales_and_cap_of_the_ends_have_the_bits_of_the_operators(isa: str, ends: Ends) -> None:
    batch = make_step([int(token) for token in TOKENS[:3]], [0, 7, 14])
    results, counts = [], []
    for threads, in_one in ((1, False), (1, True), (3, True)):
        model = build_with_ends(Context(threads=threads, isa=isa), ends)
        arena = make_arena(model.ctx, 6)
        logits = model.forward(batch, arena) if in_one else model.project(model.forward_hidden(batch, arena))
        results.append(logits.tobytes())
        counts.append(count_apart(model.ctx))
    assert results[0] == results[1] == results[2]
    assert counts[0] == counts[1] == counts[2]


def test_each_end_is_noticed() -> None:
    def run(ctx: Context, ends: Ends) -> NDArray[np.float32]:
        model = build_with_ends(ctx, ends, "f32")
        return model.forward(make_step([int(token) for token in TOKENS[:3]], [0, 7, 14]), make_arena(ctx, 6))

    plain, results = run(Context(), Ends()), [run(Context(), ends) for ends in ENDS]
    np.testing.assert_array_equal(results[1], plain * np.float32(0.25))
    np.testing.assert_allclose(results[2], 0.5 * np.tanh(plain / 0.5), rtol=1e-5)
    for index, result in enumerate(results):
        assert np.abs(result - run(Context("reference"), ENDS[index])).max() < 1e-3 * np.abs(result).max()
        for other in [plain, *results[:index], *results[index + 1 :]]:
            assert np.abs(result - other).max() > 0.1 * np.abs(result).max()


def test_a_step_of_single_tokens_is_the_batch_that_it_stands_for() -> None:
    step = make_step([5, 6, 7], [3, 40, 0])
    fields = ("token_ids", "positions", "slots", "query_starts", "context_lengths", "page_table", "output_rows")
    arrays: dict[str, NDArray[np.int32]] = {name: getattr(step, name) for name in fields}
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays.values())
    assert step.query_starts.tolist() == [0, 1, 2, 3]
    assert step.context_lengths.tolist() == [4, 41, 1]
    assert RaggedBatch(**arrays).longest_context == step.longest_context == 41


def test_what_does_not_fit_is_refused() -> None:
    cpu = Context(threads=2)
    model = build(cpu)
    with pytest.raises(ValueError, match="token id 100000 is outside the table's"):
        model.forward(make_step([100000], [0]), make_arena(cpu, 2))
    with pytest.raises(ValueError, match=r"slots\[0\] is"):
        model.forward(make_step([1], [0]), make_arena(cpu, 1))
    with pytest.raises(ValueError, match=r"positions\[0\] is -1"):
        model.forward(replace_positions(make_step([1], [0]), -1), make_arena(cpu, 2))


def replace_positions(batch: RaggedBatch, position: int) -> RaggedBatch:
    return RaggedBatch.of_single_tokens(batch.token_ids.tolist(), [position], batch.slots.tolist(), batch.page_table)
