"""Low-rank updates of experts: a token's bits are those of the dense steps for it alone, whatever stands beside it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_moe import FEATURES, HIDDEN, KINDS, Floats, Ints, draw_routes, make_weights
from variants import assert_equal_bits, random_floats

from mlxr.formats import TensorSource
from mlxr.formats.tensor import MappedFile
from mlxr.kernels.activate import activate
from mlxr.kernels.context import Context, load_native
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.lora import AdapterRows, AdapterWeights, LoraPart, Parts, add_lora, choose_rows, prepare
from mlxr.kernels.moe import Experts, make_experts, mix

ISAS = load_native().available_isas()
RANKS = (1, 7, 16)


def make_parts(experts: Experts, number: int) -> dict[LinearWeight, list[LoraPart]]:
    """Updates of some experts' matrices: gate and up of one rank, up alone, down alone, or all of them."""
    chance, rank, parts = np.random.default_rng(number), RANKS[number], {}
    gated = experts.is_gated

    def draw(rows: int, columns: int, first: int = 0) -> LoraPart:
        a, b = (chance.normal(0, 0.2, shape).astype(np.float32) for shape in ((rank, columns), (rows, rank)))
        return LoraPart(first, a, b, 0.5 + number)

    for expert, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
        kind = (expert + number) % 5
        if kind in (0, 1):
            parts[up] = [draw(FEATURES, HIDDEN, side * FEATURES) for side in range(1 + gated)]
        if kind == 2:
            parts[up] = [draw(FEATURES, HIDDEN, FEATURES * gated)]
        if kind in (0, 3):
            parts[down] = [draw(HIDDEN, FEATURES)]
    return parts


def make_all(ctx: Context, kind: str, **options: bool) -> tuple[Experts, list[AdapterWeights]]:
    experts = make_experts(ctx, *make_weights(ctx, kind, gated=kind != "f16", **options))
    parts: list[Parts] = [make_parts(experts, number) for number in range(len(RANKS))]
    return experts, [prepare(ctx, own) for own in parts]


def draw_rows(tokens: int, adapters: list[AdapterWeights]) -> list[AdapterRows]:
    """Make rows of four tokens: one has no adapter, two have one, and one has two, in mixed order."""
    rows = np.arange(tokens, dtype=np.int32)
    chosen = ((0, rows % 4 == 1, 1.0), (1, rows % 4 == 2, -0.7), (2, rows % 4 == 3, 1.0), (0, rows % 4 == 3, 0.3))
    return [AdapterRows(rows[has], adapters[number], factor) for number, has, factor in chosen if has.any()]


def mix_steps(
    ctx: Context, x: Floats, chosen: Ints, shares: Floats, experts: Experts, adapters: list[AdapterRows]
) -> Floats:
    """Token by token and rank by rank, each step by itself."""
    out = np.empty_like(x)
    for token in range(len(x)):
        row, own = x[token : token + 1], choose_rows(adapters, np.array([token], np.int32))
        total: Floats | None = None
        for expert, share in zip(chosen[token], shares[token], strict=True):
            up, down = experts.up[expert], experts.down[expert]
            projected = add_lora(ctx, row, linear(ctx, row, up), up, own)
            inner = activate(ctx, projected, experts.activation, gated=experts.is_gated)
            made = add_lora(ctx, inner, linear(ctx, inner, down), down, own)[0]
            exact = share.astype(np.float64) * made
            total = (exact if total is None else exact + total).astype(np.float32)
        out[token] = total
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_bits_are_those_of_each_step_alone(kind: str, isa: str) -> None:
    ctx = Context("cpu", threads=2, isa=isa)
    experts, adapters = make_all(ctx, kind, bias=kind in ("mxfp4", "q4_0"))
    for tokens, skew in ((1, 0.0), (4, 0.0), (90, 0.0), (260, 2.0)):
        x = random_floats(4, tokens, HIDDEN)
        chosen, shares = draw_routes(tokens, tokens, skew)
        rows = draw_rows(tokens, adapters)
        if tokens == 1:
            rows = [AdapterRows(np.array([0], np.int32), adapters[0])]
        result = mix(ctx, x, chosen, shares, experts, rows)
        few = slice(0, min(tokens, 12))
        own = [AdapterRows(one.rows[one.rows < few.stop], one.updates, one.factor) for one in rows]
        expected = mix_steps(ctx, x[few], chosen[few], shares[few], experts, own)
        assert_equal_bits(result[few], expected, (kind, tokens))
        plain = mix(ctx, x, chosen, shares, experts)
        without = ~np.isin(np.arange(tokens), np.concatenate([one.rows for one in rows]))
        assert_equal_bits(result[without], plain[without], (kind, tokens))
        assert np.abs(result - plain).max() > 0.01


@pytest.mark.parametrize("kind", ["q4_k", "f16", "mxfp4"])
def test_bits_do_not_depend_on_threads_tiers_and_cuts(kind: str) -> None:
    tokens, results = 140, []
    x = random_floats(9, tokens, HIDDEN)
    chosen, shares = draw_routes(tokens, 1)
    for isa in ISAS:
        for threads in (1, 3):
            ctx = Context("cpu", threads=threads, isa=isa)
            experts, adapters = make_all(ctx, kind)
            rows = draw_rows(tokens, adapters)
            results.append(mix(ctx, x, chosen, shares, experts, rows))
            cuts, parts = (0, 1, 34, 35, 99, tokens), []
            for first, last in pairwise(cuts):
                own = choose_rows(rows, np.arange(first, last, dtype=np.int32))
                parts.append(mix(ctx, x[first:last], chosen[first:last], shares[first:last], experts, own))
            assert_equal_bits(np.concatenate(parts), results[-1])
    for result in results[1:]:
        assert_equal_bits(result, results[0])


@pytest.mark.parametrize("tokens", [3, 120])
def test_sums_equal_the_reference(tokens: int) -> None:
    x = random_floats(2, tokens, HIDDEN)
    chosen, shares = draw_routes(tokens, 3)
    results = []
    for ctx in (Context("cpu", threads=2), Context("reference")):
        experts, adapters = make_all(ctx, "f32")
        results.append(mix(ctx, x, chosen, shares, experts, draw_rows(tokens, adapters)))
    assert np.abs(results[0] - results[1]).max() <= 3e-3 * np.abs(results[1]).max()  # down narrows its input to bf16


@pytest.mark.parametrize("slots", [1, 2])
def test_experts_that_stay_in_their_file_have_the_same_bits(slots: int, tmp_path: Path) -> None:
    def put(tensor: TensorSource) -> TensorSource:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        path.write_bytes(b"head" + tensor.data.tobytes())
        mapping = MappedFile(path)
        return TensorSource(tensor.name, tensor.type_name, tensor.shape, mapping.bytes[4:], mapping)

    ctx, results = Context("cpu", threads=2), []
    x, (chosen, shares) = random_floats(5, 50, HIDDEN), draw_routes(50, 5)
    left = make_experts(ctx, *make_weights(ctx, "q8_0", file=put), slots)
    held = make_experts(ctx, *make_weights(ctx, "q8_0"))
    for experts in (left, held):
        adapters = [prepare(ctx, make_parts(experts, number)) for number in range(len(RANKS))]
        results.append(mix(ctx, x, chosen, shares, experts, draw_rows(50, adapters)))
    assert_equal_bits(*results)
