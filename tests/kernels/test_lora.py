"""Low-rank updates against the reference, and their bits on all instruction sets, alone and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxr.kernels.context import Context, load_native
from mlxr.kernels.linear import LinearWeight, prepare
from mlxr.kernels.lora import AdapterRows, LoraPart, TablePart, add_lora, add_lora_rows, choose_rows, narrow, widen
from mlxr.kernels.lora import prepare as prepare_adapter
from mlxr.kernels.sources import Decoded

ISAS = load_native().available_isas()
KINDS = ("f32", "f16", "bf16")


def draw(chance: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Draw numbers that a type holds exactly and no narrower type does."""
    values = chance.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32) if kind == "bf16" else values


def make_weight(ctx: Context, columns: int, splits: Sequence[int]) -> LinearWeight:
    return prepare(ctx, [Decoded(f"w{i}", np.zeros((rows, columns), np.float32)) for i, rows in enumerate(splits)])


def make_parts(seed: int, columns: int, splits: Sequence[int], rank: int, kind: str) -> list[LoraPart]:
    """Updates of all parts of a weight but the second one."""
    chance, parts = np.random.default_rng(seed), []
    for index, rows in enumerate(splits):
        if index != 1:
            a, b = draw(chance, (rank, columns), kind), draw(chance, (rows, rank), kind)
            parts.append(LoraPart(sum(splits[:index]), a, b, 0.25 + seed))
    return parts


def run(ctx: Context, x: np.ndarray, out: np.ndarray, splits: Sequence[int], adapters: Sequence[Any]) -> np.ndarray:
    """`out` with the updates of adapters, each (rows, parts) or (rows, parts, factor)."""
    weight = make_weight(ctx, x.shape[1], splits)
    own = [
        AdapterRows(np.array(rows, np.int32), prepare_adapter(ctx, {weight: parts}), *factor)
        for rows, parts, *factor in adapters
    ]
    return add_lora(ctx, x, out.copy(), weight, own)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "splits", "rank", "tokens"),
    [(64, (64,), 4, 3), (70, (33, 8, 130), 1, 9), (96, (17, 5), 256, 2), (33, (200,), 19, 140), (1024, (512,), 16, 16)],
)
def test_updates_equal_the_reference_and_their_bits_stay(
    columns: int, splits: tuple[int, ...], rank: int, tokens: int, kind: str
) -> None:
    chance = np.random.default_rng(columns)
    x, out = (chance.standard_normal((tokens, size)).astype(np.float32) for size in (columns, sum(splits)))
    numbers = [make_parts(seed, columns, splits, rank, kind) for seed in range(3)]
    assert narrow(numbers[0][0].a, numbers[0][0].b)[0].dtype == {"f32": "f4", "f16": "f2", "bf16": "u2"}[kind]
    owners = chance.integers(-1, 3, tokens)
    adapters = [([row for row in range(tokens) if owners[row] == one], numbers[one]) for one in range(3)]
    mixed = [(rows, parts) for rows, parts in adapters if rows]
    wanted = run(Context("reference"), x, out, splits, mixed)
    contexts = [Context("cpu", threads=threads, isa=isa) for isa in ISAS for threads in (1, 3)]
    results = [run(ctx, x, out, splits, mixed) for ctx in contexts]
    assert np.abs(results[0] - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert np.abs(out - wanted).max() > 0.1 or all(owners < 0)
    for result in results[1:]:
        assert np.array_equal(result, results[0])
    for row in range(min(tokens, 8)):
        alone = [([0], numbers[owners[row]])] if owners[row] >= 0 else []
        got = run(Context("cpu", threads=1), x[row : row + 1], out[row : row + 1], splits, alone)
        assert np.array_equal(got[0], results[0][row])


@pytest.mark.parametrize("tokens", [4, 40])
def test_adapters_of_one_row_are_added_in_their_order(tokens: int) -> None:
    chance, splits = np.random.default_rng(7), (200, 9, 64)
    x, out = (chance.standard_normal((tokens, size)).astype(np.float32) for size in (96, sum(splits)))
    numbers = [make_parts(seed, 96, splits, 16, "f32") for seed in range(3)]
    rows = [*range(tokens)]
    adapters = [(rows, numbers[0], 0.3), (rows[1:], numbers[1], -1.7), ([0], numbers[2], 1.0), (rows[:2], numbers[2])]
    wanted = run(Context("reference"), x, out, splits, adapters)
    results = [
        run(Context("cpu", threads=threads, isa=isa), x, out, splits, adapters) for isa in ISAS for threads in (1, 3)
    ]
    assert np.abs(results[0] - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert all(np.array_equal(result, results[0]) for result in results[1:])
    one = Context("cpu", threads=1)
    for row in (0, 1, tokens - 1):
        step = out[row : row + 1]
        for own, parts, *factor in adapters:
            if row in own:
                step = run(one, x[row : row + 1], step, splits, [([0], parts, *factor)])
        assert np.array_equal(step[0], results[0][row])
    turned = run(one, x, out, splits, adapters[::-1])
    assert not np.array_equal(turned, results[0])
    assert np.abs(turned - results[0]).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_a_table_are_those_of_its_tokens(kind: str) -> None:
    chance = np.random.default_rng(5)
    table = TablePart(draw(chance, (50, 6), kind), draw(chance, (6, 70), kind), 0.5)
    out, ids = chance.standard_normal((9, 70)).astype(np.float32), chance.integers(0, 50, 9).astype(np.int32)
    rows = np.array([1, 4, 8], np.int32)
    wanted = out.copy()
    wanted[rows] += table.rows[ids[rows]] @ table.b * 0.5
    results = []
    for ctx in (Context("reference"), *(Context("cpu", threads=2, isa=isa) for isa in ISAS)):
        results.append(add_lora_rows(ctx, ids, out.copy(), [AdapterRows(rows, prepare_adapter(ctx, {}, table))]))
        np.testing.assert_allclose(results[-1], wanted, atol=1e-5)
    assert all(np.array_equal(result, results[1]) for result in results[2:])


def test_numbers_are_kept_exactly() -> None:
    chance = np.random.default_rng(1)
    for kind in KINDS:
        values = draw(chance, (5, 7), kind)
        assert np.array_equal(widen(narrow(values)[0]), values)
    assert narrow(np.array([[1e-30]], np.float32))[0].dtype == np.float32  # no f16


def test_rows_are_chosen_by_their_places() -> None:
    updates: Any = SimpleNamespace()
    adapters = [AdapterRows(np.array(rows, np.int32), updates) for rows in ([0, 1, 5], [2], [3, 4])]
    chosen = choose_rows(adapters, np.array([1, 4, 5], np.int32))
    assert [one.rows.tolist() for one in chosen] == [[0, 2], [1]]


@pytest.mark.parametrize("harm", ["columns", "outputs", "rank 0", "rank 257", "ranks", "row", "row twice", "twice"])
def test_what_does_not_fit_is_refused(harm: str) -> None:
    ctx = Context("cpu", threads=1)
    weight = make_weight(ctx, 32, (16,))
    rank = {"rank 0": 0, "rank 257": 257}.get(harm, 2)
    a = np.ones((rank, 33 if harm == "columns" else 32), np.float32)
    b = np.ones((16, rank + (harm == "ranks")), np.float32)
    parts = [LoraPart(1 if harm == "outputs" else 0, a, b, 1.0)] * (2 if harm == "twice" else 1)
    rows = np.array({"row": [4], "row twice": [1, 1]}.get(harm, [1]), np.int32)
    x, out = np.ones((3, 32), np.float32), np.ones((3, 16), np.float32)
    with pytest.raises(ValueError, match="lora"):
        add_lora(ctx, x, out, weight, [AdapterRows(rows, prepare_adapter(ctx, {weight: parts}))])
