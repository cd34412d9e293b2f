"""Residual streams side by side, and rows that n-grams name: exact, equal bits everywhere, however texts are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from mixer_cases import make_batch, sigmoid
from variants import Floats, assert_equal_bits, random_floats, run_everywhere

from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import (
    balance_streams,
    blend_streams,
    cut_gates,
    level_streams,
    match_streams,
    mix_streams,
    spread_streams,
)
from mlxr.kernels.embed import Ngrams, embed_ngrams
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.norms import rms_norm
from mlxr.kernels.ragged import RaggedBatch

REFERENCE = Context("reference")
SHAPES = [(1, 2, 1), (3, 4, 37), (60, 3, 256)]
GRAMS = Ngrams(5, (1_000_003, 77_777, 9_999_991), (13, 17, 19, 23), (0, 13, 30, 49))


@pytest.mark.parametrize(("rows", "streams", "columns"), SHAPES)
def test_streams(rows: int, streams: int, columns: int) -> None:
    x, gates = random_floats(1, rows, streams * columns), 3 * random_floats(2, rows, streams * columns)
    row, own, base = random_floats(3, rows, columns), 5 * random_floats(4, rows, streams), random_floats(5, *x.shape)
    gates[0, 0] = -200
    exact = (x * sigmoid(gates.astype(np.float64))).reshape(rows, streams, columns).mean(axis=1)

    def mix(ctx: Context) -> Floats:
        return mix_streams(ctx, x, gates, streams)

    for made in (run_everywhere(mix), mix(REFERENCE)):
        np.testing.assert_allclose(made, exact, rtol=1e-5, atol=1e-6)
    shares = 2 * sigmoid(own.astype(np.float64) / streams)
    exact = (row[:, None] * shares[:, :, None]).reshape(rows, -1)

    def spread(ctx: Context) -> Floats:
        return spread_streams(ctx, row, streams, own, base, factor=2.0, gate_scale=1 / streams)

    for made in (run_everywhere(spread), spread(REFERENCE)):
        np.testing.assert_allclose(made, base + exact, rtol=1e-5, atol=1e-6)
    assert_equal_bits(run_everywhere(lambda ctx: spread_streams(ctx, row, streams)), np.tile(row, (1, streams)))
    sums = (x.astype(np.float64) * base).reshape(rows, streams, columns).sum(axis=2) * 0.3
    exact = np.sign(sums) * np.sqrt(np.maximum(np.abs(sums), 1e-6))

    def match(ctx: Context) -> Floats:
        return match_streams(ctx, x, base, streams, scale=0.3)

    for made in (run_everywhere(match), match(REFERENCE)):
        np.testing.assert_allclose(made, exact, rtol=1e-4, atol=1e-3)
    assert not match_streams(Context("cpu"), np.zeros_like(x), base, streams, scale=1.0).any()
    assert_equal_bits(match(Context("cpu"))[:1], match_streams(Context("cpu"), x[:1], base[:1], streams, scale=0.3))


@pytest.mark.parametrize(("rows", "streams", "columns", "turns"), [(1, 2, 1, 1), (3, 4, 37, 20), (60, 8, 256, 3)])
def test_balanced_streams(cpu: Context, rows: int, streams: int, columns: int, turns: int) -> None:
    width, count, eps = (2 + streams) * streams, 2 * streams, 1e-3
    x, scale, base = 3 * random_floats(1, rows, width), 1 + random_floats(2, 3), random_floats(3, width)
    x[0, ::5] = -300
    held, added = random_floats(4, rows, streams * columns), random_floats(5, rows, columns)

    def balance(ctx: Context) -> Floats:
        return balance_streams(ctx, x, scale, base, streams, turns=turns, eps=eps)

    y = x * scale.repeat((streams, streams, streams**2)).astype(np.float64) + base
    mixed = y[:, count:].reshape(rows, streams, streams)
    mixed = np.exp(mixed - mixed.max(axis=2, keepdims=True))
    mixed = mixed / mixed.sum(axis=2, keepdims=True) + eps
    for turn in range(turns):
        mixed = mixed / (mixed.sum(axis=2, keepdims=True) + eps) if turn else mixed
        mixed = mixed / (mixed.sum(axis=1, keepdims=True) + eps)
    exact = np.concatenate(
        [sigmoid(y[:, :streams]) + eps, 2 * sigmoid(y[:, streams:count]), mixed.reshape(rows, -1)], 1
    )
    gains = run_everywhere(balance)
    for made in (gains, balance(REFERENCE)):
        np.testing.assert_allclose(made, exact, rtol=1e-4, atol=1e-6)
    assert_equal_bits(gains[:1], balance_streams(cpu, x[:1], scale, base, streams, turns=turns, eps=eps))
    parts = held.reshape(rows, streams, columns).astype(np.float64)
    own, gone = gains[:, streams:count, None] * added[:, None], gains[:, count:].reshape(mixed.shape)
    follow = (own + np.einsum("tsd,tsc->tdc", gone, parts)).reshape(rows, -1)
    read = (gains[:, :streams, None] * parts).sum(axis=1)
    for given, wanted in (((), parts.mean(axis=1)), ((gains,), read), ((gains, added), follow)):
        results = run_everywhere(lambda ctx, given=given: blend_streams(ctx, held, streams, *given))
        for result in (results, blend_streams(REFERENCE, held, streams, *given)):
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "streams", "columns"), [(1, 2, 1), (3, 4, 37), (40, 4, 256), (2, 3, 1000)])
def test_streams_become_as_long_as_the_first(cpu: Context, rows: int, streams: int, columns: int) -> None:
    x, base = random_floats(1, rows, streams * columns), 3 * random_floats(2, rows, columns)
    x[0, columns : 2 * columns] = 1e-4  # whose square is below the least
    parts = x.reshape(rows, streams, columns).astype(np.float64)
    squares, wanted = (parts**2).mean(axis=2), (base.astype(np.float64) ** 2).mean(axis=1)
    exact = parts * np.sqrt(wanted[:, None] / np.maximum(squares, 1e-5))[:, :, None]
    exact[:, 0] = base
    made = run_everywhere(lambda ctx: level_streams(ctx, x, base, streams))
    for result in (made, level_streams(REFERENCE, x, base, streams)):
        np.testing.assert_allclose(result, exact.reshape(x.shape), rtol=1e-5, atol=1e-6)
    assert_equal_bits(made[:1], level_streams(cpu, x[:1], base[:1], streams))


@pytest.mark.parametrize(("rows", "columns", "others"), [(1, 1, 1), (3, 37, 37), (40, 256, 256), (2, 1000, 3)])
@pytest.mark.parametrize("factor", [1.6448536, 0.0, -0.5])
def test_what_of_gates_does_not_stand_out_is_zero(
    cpu: Context, rows: int, columns: int, others: int, factor: float
) -> None:
    x = random_floats(1, rows, columns + others) + np.float32(2)
    part = x[:, :columns].astype(np.float64)
    cut = part.mean(axis=1, keepdims=True) + factor * part.std(axis=1, keepdims=True)
    exact = np.concatenate([np.maximum(part - cut, 0), x[:, columns:]], axis=1)
    made = run_everywhere(lambda ctx: cut_gates(ctx, x, columns, factor))
    for result in (made, cut_gates(REFERENCE, x, columns, factor)):
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=2e-6)
    assert_equal_bits(made[:1], cut_gates(cpu, x[:1], columns, factor))
    assert (made[:, columns:] == x[:, columns:]).all()


def test_a_norm_with_weights_of_each_part(cpu: Context) -> None:
    x, weight = random_floats(1, 6, 40), random_floats(2, 3 * 40)
    made = run_everywhere(lambda ctx: rms_norm(ctx, x, weight, 1e-5)[0])
    for index in range(6):
        own = np.ascontiguousarray(weight[index % 3 * 40 : (index % 3 + 1) * 40])
        assert_equal_bits(made[index : index + 1], rms_norm(cpu, x[index : index + 1], own, 1e-5)[0])
    np.testing.assert_allclose(rms_norm(REFERENCE, x, weight, 1e-5)[0], made, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="rms_norm: columns of x is 80, expected 81"):
        rms_norm(cpu, x, random_floats(2, 81), 1e-5)


def make_table() -> TensorSource:
    values = random_floats(7, 80, 32)
    return TensorSource("table", "q8_0", values.shape, encode_tensor("q8_0", values))


def name_rows(ids: Sequence[int]) -> list[list[int]]:
    """Return the rows that the tokens of a text name, by the definition."""
    rows = []
    for at in range(len(ids)):
        seen, ended = [ids[at]], False
        for back in (1, 2):
            ended = ended or at - back < 0 or ids[at - back] == GRAMS.end
            seen.append(GRAMS.end if ended else ids[at - back])
        two = seen[0] * GRAMS.multipliers[0] ^ seen[1] * GRAMS.multipliers[1]
        three = two ^ seen[2] * GRAMS.multipliers[2]
        own = [two, two, three, three]
        rows.append([mixed % GRAMS.sizes[head] + GRAMS.offsets[head] for head, mixed in enumerate(own)])
    return rows


def run_ngrams(ctx: Context, ids: Sequence[int], cuts: Sequence[int], pool: Floats) -> Floats:
    """One text in parts that end at `cuts`."""
    made, slot, start, table = [], -1, 0, make_table()
    for stop in cuts:
        batch, after = make_batch([stop - start], [slot], [0 if slot else 1]), 0 if slot else 1
        batch = with_ids(batch, ids[start:stop])
        made.append(embed_ngrams(ctx, table, GRAMS, batch, pool, at=3))
        slot, start = after, stop
    return np.concatenate(made)


def with_ids(batch: RaggedBatch, ids: Sequence[int]) -> RaggedBatch:
    object.__setattr__(batch, "token_ids", np.array(ids, np.int32))
    return batch


def test_rows_of_ngrams(cpu: Context) -> None:
    ids = [7, 5, 9, 0, 3, 5, 5, 8, 2, 2, 2, 6]
    table = make_table().to_float32()
    exact = table[np.array(name_rows(ids))].reshape(len(ids), -1)
    for ctx in (cpu, REFERENCE):
        for cuts in ([12], range(1, 13), [2, 3, 12]):
            pool = np.full((9, 8), 4, np.float32)
            assert_equal_bits(run_ngrams(ctx, ids, list(cuts), pool), exact)
            assert pool[(len(cuts) + 1) % 2].tolist() == [4, 4, 4, 3, 7, 4, 4, 4]
    counts = {(row.operator, row.variant) for row in cpu.ledger.snapshot().dispatches}
    assert ("embed", "q8_0") in counts
    both = with_ids(make_batch([2, 3], [-1, 5], [0, 1]), [*ids[:2], *ids[4:7]])
    pool = np.zeros((9, 5), np.float32)
    pool[5] = [0, 0, 0, ids[2] + 1, ids[3] + 1]
    made = embed_ngrams(cpu, make_table(), GRAMS, both, pool, at=3)
    assert_equal_bits(made, exact[[0, 1, 4, 5, 6]])


def test_what_does_not_fit_is_refused(cpu: Context) -> None:
    x = random_floats(1, 2, 12)
    for ctx in (cpu, REFERENCE):
        with pytest.raises(ValueError, match="mix_streams: streams is 5, expected a divisor"):
            mix_streams(ctx, x, x, 5)
        with pytest.raises(ValueError, match="mix_streams: gates is of shape"):
            mix_streams(ctx, x, random_floats(2, 3, 12), 4)
        with pytest.raises(ValueError, match="spread_streams: base is of shape"):
            spread_streams(ctx, x, 2, base=x)
        with pytest.raises(ValueError, match="balance_streams: columns of x is 12, expected 24"):
            balance_streams(ctx, x, x[0, :3], x[0], 4, turns=2, eps=1e-6)
        with pytest.raises(ValueError, match="blend_streams: gains is of shape"):
            blend_streams(ctx, x, 2, x)
        with pytest.raises(ValueError, match="level_streams: base is of shape"):
            level_streams(ctx, x, x, 2)
        with pytest.raises(ValueError, match="cut_gates: columns is 13, expected 1 to 12"):
            cut_gates(ctx, x, 13, 1.0)
        with pytest.raises(ValueError, match="blend_streams: gains is None, expected given"):
            blend_streams(ctx, x, 2, None, np.ascontiguousarray(x[:, :6]))
    batch, pool = with_ids(make_batch([1], [-1], [0]), [1]), np.zeros((9, 2), np.float32)
    with pytest.raises(ValueError, match="ngrams: sizes and offsets, expected rows of the table"):
        embed_ngrams(cpu, make_table(), Ngrams(5, GRAMS.multipliers, GRAMS.sizes, (0, 13, 30, 58)), batch, pool)
    mix_streams(cpu, x, x, 4)
    assert Dispatch("streams", "cpu", "mix", 1) in cpu.ledger.snapshot().dispatches
