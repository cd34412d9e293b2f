"""`rope_and_write_kv`: norms of each head and of all together, values that are keys, queries alone; equal bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import Floats, assert_equal_bits, random_floats, run_everywhere

from mlxr.kernels.attend import allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import QueryTemperature, RopeTable, build_table
from mlxr.kernels.rope_and_write_kv import HeadNormKind, HeadNorms, Projected, rope_and_write_kv

Doubles = NDArray[np.float64]
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, TOKENS = 6, 3, 24, 4, 11
EPS = 1e-4


@dataclass(frozen=True)
class Case:
    projected: Projected = "qkv"
    norms: HeadNorms | None = None
    rot_dim: int = 24
    temperature: QueryTemperature | None = None

    def table(self) -> RopeTable:
        return build_table(64, self.rot_dim, 100.0, interleaved=False, temperature=self.temperature)


def make_norms(kind: HeadNormKind = "each", *, values: bool = False) -> HeadNorms:
    q, k = (HEAD_DIM, HEAD_DIM) if kind in ("each", "turned") else (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    return HeadNorms(random_floats(1, q) + 1, random_floats(2, k) + 1, EPS, values, kind)


CASES = {
    "plain": Case(),
    "per head": Case(norms=make_norms()),
    "joint": Case(norms=make_norms("joint")),
    "layer norms": Case(norms=make_norms("layer")),
    "layer norms, values normed": Case("qk", make_norms("layer", values=True), rot_dim=10),
    "turned": Case(norms=make_norms("turned")),
    "turned, values are keys, normed": Case("qk", make_norms("turned", values=True), rot_dim=10),
    "values normed": Case(norms=make_norms(values=True)),
    "values are keys": Case("qk"),
    "values are keys, keys normed": Case("qk", make_norms("joint"), rot_dim=10),
    "values are keys, normed": Case("qk", make_norms(values=True)),
    "no rotation": Case(norms=make_norms(), rot_dim=0),
    "temperature": Case(temperature=QueryTemperature(0.5, 5)),
    "temperature without rotation": Case(rot_dim=0, temperature=QueryTemperature(0.5, 5)),
    "queries": Case("q", make_norms("joint"), temperature=QueryTemperature(0.5, 5)),
}


def make_batch(tokens: int = TOKENS, start: int = 3) -> RaggedBatch:
    """One sequence, whose pages are one after another."""
    positions = np.arange(start, start + tokens, dtype=np.int32)
    return RaggedBatch(
        token_ids=np.zeros(tokens, np.int32),
        positions=positions,
        slots=positions,
        query_starts=np.array([0, tokens], np.int32),
        context_lengths=np.array([start + tokens], np.int32),
        page_table=np.arange(16, dtype=np.int32)[None],
        output_rows=np.zeros(1, np.int32),
    )


def make_qkv(case: Case, tokens: int = TOKENS) -> Floats:
    return random_floats(7, tokens, (HEADS + (len(case.projected) - 1) * KV_HEADS) * HEAD_DIM)


def run(ctx: Context, case: Case, qkv: Floats | None = None, start: int = 3) -> Floats:
    """Queries, keys and values of each token, one after another (tokens, heads, head_dim); unwritten ones are zero."""
    qkv = make_qkv(case) if qkv is None else qkv
    batch, pools = make_batch(len(qkv), start), allocate_pools(ctx, 16, KV_HEADS, PAGE_SIZE, HEAD_DIM, "f32")
    q = rope_and_write_kv(ctx, qkv.copy(), HEADS, batch, case.table(), *pools, case.norms, projected=case.projected)
    written = [pool.transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, HEAD_DIM)[batch.slots] for pool in pools]
    assert sum(int(np.count_nonzero(pool)) for pool in pools) == sum(int(np.count_nonzero(part)) for part in written)
    return np.concatenate([q.reshape(len(qkv), HEADS, HEAD_DIM), *written], axis=1)


def compute_exactly(case: Case, qkv: Floats, start: int = 3) -> Doubles:
    """The same from the definition, in float64."""
    parts = qkv.astype(np.float64).reshape(len(qkv), -1, HEAD_DIM)
    q, k, v = parts[:, :HEADS], parts[:, HEADS : HEADS + KV_HEADS], parts[:, HEADS + KV_HEADS :]
    if case.projected == "qk":
        v = k
    positions, is_late = np.arange(start, start + len(qkv)), case.norms is not None and case.norms.kind == "turned"
    if is_late:
        q, k = turn(q, positions, case.rot_dim), turn(k, positions, case.rot_dim)
    if case.norms is not None:
        q = norm(q, case.norms.q, case.norms.kind)
        k = norm(k, case.norms.k, case.norms.kind) if case.projected != "q" else k
        v = norm(v, np.ones(HEAD_DIM, np.float32)) if case.norms.values else v
    if not is_late:
        q, k = turn(q, positions, case.rot_dim), turn(k, positions, case.rot_dim)
    if case.temperature is not None:
        q = q * (1 + case.temperature.beta * np.log(1 + positions // case.temperature.period))[:, None, None]
    if case.projected == "q":
        k = v = np.zeros((len(qkv), KV_HEADS, HEAD_DIM))
    return np.concatenate([q, k, v], axis=1)


def norm(x: Doubles, weight: Floats, kind: HeadNormKind = "each") -> Doubles:
    if kind == "layer":
        centred = x - x.mean(axis=2, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=2, keepdims=True) + EPS)
        return np.asarray(centred / deviation * weight.reshape(x.shape[1:]))
    rows = x.reshape(-1, len(weight))
    normed: Doubles = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPS) * weight
    return normed.reshape(x.shape)


def turn(x: Doubles, positions: NDArray[np.int64], rot_dim: int) -> Doubles:
    half, turned = rot_dim // 2, x.copy()
    angles = positions[:, None, None] * 100.0 ** (-2 * np.arange(half) / max(rot_dim, 1))
    a, b = x[:, :, :half], x[:, :, half:rot_dim]
    turned[:, :, :half] = a * np.cos(angles) - b * np.sin(angles)
    turned[:, :, half:rot_dim] = b * np.cos(angles) + a * np.sin(angles)
    return turned


@pytest.mark.parametrize("name", CASES)
def test_heads_are_right_and_have_equal_bits_everywhere(name: str) -> None:
    case = CASES[name]
    result, exact = run_everywhere(lambda ctx: run(ctx, case)), compute_exactly(case, make_qkv(case))
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(Context("reference"), case), exact, rtol=1e-5, atol=1e-5)
    for other in CASES.values():
        if other.projected == case.projected and other is not case:
            assert np.abs(result - compute_exactly(other, make_qkv(case))).max() > 0.05


@pytest.mark.parametrize("name", CASES)
def test_token_has_the_same_bits_alone(cpu: Context, name: str) -> None:
    case = CASES[name]
    qkv = make_qkv(case)
    parts = [run(cpu, case, qkv[i : i + 1], 3 + i) for i in range(TOKENS)]
    assert_equal_bits(np.concatenate(parts), run(cpu, case))


def test_what_does_not_fit_is_refused(cpu: Context) -> None:
    case = CASES["joint"]
    assert case.norms is not None
    with pytest.raises(ValueError, match="length of the norm of k is 24, expected 72"):
        run(cpu, replace(case, norms=replace(case.norms, k=np.ones(HEAD_DIM, np.float32))))
    with pytest.raises(ValueError, match="length of the norm of q is 48, expected 144"):
        run(cpu, replace(case, norms=replace(case.norms, q=np.ones(2 * HEAD_DIM, np.float32))))
    with pytest.raises(ValueError, match="columns of qkv is 288, expected 216"):
        run(cpu, Case("qk"), make_qkv(Case()))
    with pytest.raises(ValueError, match="projected is 'kv'"):
        run(cpu, Case("kv"), make_qkv(Case("qk")))  # type: ignore[arg-type]
