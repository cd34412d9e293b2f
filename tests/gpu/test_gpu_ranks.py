"""Ranks give each other numbers: two processes, each with a device of its own, emulated or on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import list_group_devices, skip_unless_emulated
from rank_processes import COUNT, run_ranks

from mlxr.kernels.collectives import add_up, all_gather, all_reduce, join
from mlxr.kernels.collectives.gpu import OwnPart, sum_and_norm
from mlxr.kernels.context import Context
from mlxr.kernels.norms import rms_norm
from mlxr.kernels.tensor import round_to_bf16, widen_bf16

REFERENCE = Context("reference")


def make_numbers(rank: int, *shape: int) -> Any:
    return np.random.default_rng([rank, *shape]).standard_normal(shape).astype(np.float32)


def run_one(ctx: Context, case: tuple[str, tuple[int, ...]]) -> Any:
    """Return a rank's result of a case."""
    return run_case(ctx, case[0], ctx.gpu.ranks.rank, case[1])


def run_case(ctx: Context, kind: str, rank: int, shape: tuple[int, ...]) -> Any:
    mx = ctx.gpu.mx
    own = mx.array(make_numbers(rank, *shape))
    if kind in ("sum", "halves"):
        return np.array(all_reduce(ctx, own if kind == "sum" else own.astype(mx.bfloat16)))
    if kind == "norm":
        rows, columns = shape[-2:]
        x, gain = mx.array(make_numbers(7, rows, columns)), mx.array(make_numbers(8, columns))
        normed, summed = sum_and_norm(ctx, x, OwnPart(own), gain, 1e-5)
        return np.array(normed), np.array(summed)
    columns = shape[1], shape[1] + 6
    own = mx.array(make_numbers(rank, shape[0], columns[rank])).astype(mx.bfloat16 if kind == "narrow" else mx.float32)
    return np.array(all_gather(ctx, own, columns).astype(mx.float32))


def expect(kind: str, shape: tuple[int, ...]) -> Any:
    if kind in ("sum", "halves", "norm"):
        parts = [make_numbers(rank, *shape) for rank in range(COUNT)]
        if kind == "halves":
            return add_up([widen_bf16(round_to_bf16(part)) for part in parts])
        whole = add_up([part.sum(axis=0, dtype=np.float32) if part.ndim == 3 else part for part in parts])
        if kind == "sum":
            return whole
        rows, columns = shape[-2:]
        x, gain = make_numbers(7, rows, columns), make_numbers(8, columns)
        return rms_norm(REFERENCE, x, gain, 1e-5, whole)
    parts = [make_numbers(rank, shape[0], columns) for rank, columns in enumerate((shape[1], shape[1] + 6))]
    return join(parts)


CASES = [
    ("sum", (1, 64)),
    ("sum", (3, 34)),
    ("norm", (1, 64)),
    ("norm", (2, 3, 96)),
    ("sum", (130, 64)),
    ("norm", (131, 4352)),
    ("gather", (1, 8)),
    ("narrow", (3, 5)),
    ("gather", (40, 4000)),
    ("halves", (5, 96)),
    ("halves", (2, 34)),
    ("sum", (1, 64)),
]


@pytest.fixture(scope="module", params=list_group_devices())
def results(request: pytest.FixtureRequest) -> list[list[Any]]:
    """The ranks' results, case by case."""
    if request.param == "emulated":
        skip_unless_emulated()
    return run_ranks(request.param, run_one, CASES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ranks_get_the_same_and_the_right_numbers(results: list[list[Any]], number: int) -> None:
    kind, shape = CASES[number]
    expected = expect(kind, shape)
    for first, second, right in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (*results[number], expected)),
        strict=True,
    ):
        assert first.tobytes() == second.tobytes()
        np.testing.assert_allclose(first, right, rtol=8e-3 if kind == "narrow" else 2e-5, atol=2e-5)
