"""The native `rope`: both pairings, views, partial rotation; and fused multiply-add, which it shows bare."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from variants import Floats, Ints, any_floats, assert_equal_bits, native_contexts, random_floats, run_everywhere

from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.rope import QueryTemperature, RopeTable, build_table, rope


def rotate(ctx: Context, x: Floats, positions: Ints, table: RopeTable) -> Floats:
    rotated = x.copy()
    rope(ctx, rotated, positions, table)
    return rotated


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rot_dim"),
    [(1, 1, 2, 2), (3, 2, 8, 6), (5, 3, 64, 64), (4, 2, 80, 32), (2, 5, 96, 96), (7, 1, 256, 256), (150, 9, 128, 64)],
)
def test_agrees_with_the_reference(tokens: int, heads: int, head_dim: int, rot_dim: int, interleaved: bool) -> None:
    table = build_table(500, rot_dim, 10000.0, interleaved=interleaved)
    x = random_floats([tokens, head_dim], tokens, heads, head_dim)
    positions = np.random.default_rng(1).integers(0, 500, tokens).astype(np.int32)
    result = run_everywhere(lambda ctx: rotate(ctx, x, positions, table))
    np.testing.assert_allclose(result, rotate(Context("reference"), x, positions, table), rtol=1e-6, atol=1e-6)
    assert_equal_bits(result[:, :, rot_dim:], x[:, :, rot_dim:])


@pytest.mark.parametrize("interleaved", [True, False])
def test_view_of_a_fused_projection_is_rotated_in_place(cpu: Context, interleaved: bool) -> None:
    tokens, heads, kv_heads, head_dim = 6, 4, 2, 40
    fused = random_floats(3, tokens, (heads + 2 * kv_heads) * head_dim)
    before = fused.copy()
    table = build_table(10, 40, 10000.0, interleaved=interleaved)
    positions = np.arange(tokens, dtype=np.int32)
    queries = fused[:, : heads * head_dim].reshape(tokens, heads, head_dim)
    keys = fused[:, heads * head_dim : (heads + kv_heads) * head_dim].reshape(tokens, kv_heads, head_dim)
    assert queries.base is not None
    rope(cpu, queries, positions, table)
    rope(cpu, keys, positions, table)
    expected = rotate(cpu, before[:, : 6 * head_dim].reshape(tokens, 6, head_dim).copy(), positions, table)
    assert_equal_bits(fused[:, : 6 * head_dim], expected.reshape(tokens, -1))
    assert_equal_bits(fused[:, 6 * head_dim :], before[:, 6 * head_dim :])


@pytest.mark.parametrize("interleaved", [True, False])
def test_token_has_the_same_bits_alone_and_in_a_batch(cpu: Context, interleaved: bool) -> None:
    table = build_table(400, 64, 10000.0, interleaved=interleaved)
    x, positions = random_floats(4, 300, 4, 64), np.arange(300, dtype=np.int32)
    together = rotate(cpu, x, positions, table)
    for chunk in (1, 7, 32):
        parts = [rotate(cpu, x[i : i + chunk], positions[i : i + chunk], table) for i in range(0, 300, chunk)]
        assert_equal_bits(np.concatenate(parts), together, chunk)


def bare_table(cos: Floats, sin: Floats, interleaved: bool) -> RopeTable:
    return RopeTable(np.ascontiguousarray(cos), np.ascontiguousarray(sin), interleaved, 2 * cos.shape[1])


@pytest.mark.parametrize("interleaved", [True, False])
def test_any_numbers_have_the_same_bits_on_every_instruction_set(interleaved: bool) -> None:
    """Also where a tier has to emulate fma: subnormal results, overflow, cancellation."""
    positions = np.arange(200, dtype=np.int32)
    x = any_floats(5, 200, 2, 64)
    wild = bare_table(any_floats(6, 200, 32), any_floats(7, 200, 32), interleaved)
    tiny = bare_table(any_floats(8, 200, 32), np.full((200, 32), 1e-30, np.float32), interleaved)
    with np.errstate(all="ignore"):
        for table in (wild, tiny):
            results = [rotate(ctx, x, positions, table) for ctx in native_contexts()]
            for result in results[1:]:
                np.testing.assert_array_equal(result, results[0])  # not-a-number may differ in its payload
                numbers = ~np.isnan(result)
                assert_equal_bits(result[numbers], results[0][numbers])


def round_exactly(value: Fraction) -> np.float32:
    """Nearest float32, ties to even; the double on the way is only the first guess."""
    guess = np.float32(float(value))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - value), int(np.float32(f).view(np.uint32)) & 1))


def test_multiply_add_rounds_once() -> None:
    """x0 * cos - x1 * sin with sums that lie on, or just beside, the middle between two floats."""
    rng = np.random.default_rng(9)
    ones = (rng.integers(2**23, 2**24, 400) * 2.0**-23).astype(np.float32)  # all 24 bits in use
    factors = (1 + rng.integers(0, 4096, 400) * 2.0**-12).astype(np.float32)
    addends = np.array([2.0**-k for k in (24, 25, 30, 48, 60, 100)], np.float32)
    x = np.zeros((400, 6, 2), np.float32)
    x[:, :, 0], x[:, :, 1] = ones[:, None], addends[None] * np.where(rng.integers(0, 2, (400, 6)), 1, -1)
    table = bare_table(factors[:, None], np.ones((400, 1), np.float32), True)
    result = run_everywhere(lambda ctx: rotate(ctx, x, np.arange(400, dtype=np.int32), table))
    for token, head in np.ndindex(400, 6):
        exact = Fraction(float(ones[token])) * Fraction(float(factors[token])) - Fraction(float(x[token, head, 1]))
        assert result[token, head, 0] == round_exactly(exact)


@pytest.mark.parametrize("other", [1 - 2.0**-23, 1 - 2.0**-12 + 2.0**-24])
def test_multiply_add_rounds_once_where_floats_are_subnormal(other: float) -> None:
    """A product just below or above half the smallest number, which a double loses beside the other addend."""
    factor = (2.0 - other if other == 1 - 2.0**-23 else 1 + 2.0**-12) * 2.0**-75
    x = np.zeros((200, 1, 2), np.float32)
    x[:, 0, 0] = factor
    x[:, 0, 1] = -np.arange(2**21, 2**21 + 200, dtype=np.uint32).view(np.float32)
    table = bare_table(np.full((200, 1), other * 2.0**-75, np.float32), np.ones((200, 1), np.float32), True)
    result = run_everywhere(lambda ctx: rotate(ctx, x, np.arange(200, dtype=np.int32), table))
    product = Fraction(factor) * Fraction(other * 2.0**-75)
    assert 0 < abs(product - Fraction(2) ** -150) < Fraction(2) ** -185
    for token in range(200):
        assert result[token, 0, 0] == round_exactly(product - Fraction(float(x[token, 0, 1])))


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_position_beyond_the_table_is_refused_before_anything_moves(cpu: Context, bad: int) -> None:
    table = build_table(10, 16, 10000.0, interleaved=True)
    x = random_floats(10, 3, 1, 16)
    before = x.copy()
    with pytest.raises(ValueError, match=rf"rope: positions\[2\] is {bad}, expected 0 to 9"):
        rope(cpu, x, np.array([0, 1, bad], np.int32), table)
    assert_equal_bits(x, before)


def test_native_call_checks_lengths_itself(cpu: Context) -> None:
    x, cos = random_floats(11, 3, 2, 16), np.ones((5, 8), np.float32)
    positions = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="rope: length of positions is 2, expected 3"):
        cpu.module.rope(cpu.native, x, positions[:2], cos, cos, True)
    with pytest.raises(ValueError, match="rope: rows of sin is 4, expected 5"):
        cpu.module.rope(cpu.native, x, positions, cos, cos[:4], True)
    with pytest.raises(ValueError, match="rope: rot_dim of table is 18"):
        cpu.module.rope(cpu.native, x, positions, *([np.ones((5, 9), np.float32)] * 2), True)
    with pytest.raises(ValueError, match="rope: x is strided"):
        cpu.module.rope(cpu.native, random_floats(12, 3, 4, 16)[:, ::2], positions, cos, cos, True)
    x.flags.writeable = False
    with pytest.raises(TypeError):
        cpu.module.rope(cpu.native, x, positions, cos, cos, True)


def test_ledger_names_the_pairing(cpu: Context) -> None:
    rotate(cpu, random_floats(13, 1, 1, 8), np.zeros(1, np.int32), build_table(1, 8, 1e4, interleaved=False))
    assert cpu.ledger.snapshot().dispatches == [Dispatch("rope", "cpu", "halves", 1)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rot_dim", [0, 10, 33 * 2])
def test_queries_are_multiplied_by_the_factor_of_their_position(rot_dim: int, interleaved: bool) -> None:
    temperature = QueryTemperature(0.3, 50, 1)
    table = build_table(200, rot_dim, 1e4, interleaved=interleaved, temperature=temperature)
    plain = build_table(200, rot_dim, 1e4, interleaved=interleaved)
    x, positions = random_floats(5, 40, 3, 67), np.arange(0, 200, 5, dtype=np.int32)

    def run(ctx: Context, table: RopeTable, *, queries: bool) -> Floats:
        rotated = x.copy()
        rope(ctx, rotated, positions, table, queries=queries)
        return rotated

    factors = (1 + 0.3 * np.log(1 + (positions + 1) // 50)).astype(np.float32)
    assert factors[0] == 1
    assert factors[-1] > 1.4
    turned = run_everywhere(lambda ctx: run(ctx, plain, queries=True))
    assert_equal_bits(run_everywhere(lambda ctx: run(ctx, table, queries=False)), turned)
    result = run_everywhere(lambda ctx: run(ctx, table, queries=True))
    assert_equal_bits(result, turned * factors[:, None, None])
    np.testing.assert_allclose(result, run(Context("reference"), table, queries=True), rtol=1e-6, atol=1e-6)


def test_table_without_rotation_leaves_all_as_it_is(cpu: Context) -> None:
    x = random_floats(5, 4, 3, 16)
    assert_equal_bits(rotate(cpu, x, np.arange(4, dtype=np.int32), build_table(9, 0, 1e4, interleaved=False)), x)
    assert cpu.ledger.snapshot().dispatches == []


def test_native_call_checks_the_factors(cpu: Context) -> None:
    table, x = build_table(10, 16, 1e4, interleaved=False), random_floats(1, 2, 1, 16)
    short = np.ones(9, np.float32)
    with pytest.raises(ValueError, match="rope: length of factors is 9, expected 10"):
        cpu.module.rope(cpu.native, x, np.zeros(2, np.int32), table.cos, table.sin, False, short)
