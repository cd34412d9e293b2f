"""Ranks give each other numbers: two processes, each with a device of its own, emulated or on NVIDIA GPUs."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from gpu_cases import list_group_devices, skip_unless_emulated

from mlxr.kernels.context import Context
from mlxr.kernels.gather_ranks import gather_ranks
from mlxr.kernels.gather_ranks.reference import join
from mlxr.kernels.gpu.ranks import join_ranks, make_inbox
from mlxr.kernels.packing import round_to_bf16, widen_bf16
from mlxr.kernels.rms_norm.reference import rms_norm
from mlxr.kernels.rms_norm.scales import Scales
from mlxr.kernels.sum_ranks import sum_ranks
from mlxr.kernels.sum_ranks.gpu import OwnPart, sum_and_norm
from mlxr.kernels.sum_ranks.reference import add_up
from mlxr.service.ranks import VISIBLE, order_devices

COUNT = 2
REFERENCE = Context("reference")


def make_numbers(rank: int, *shape: int) -> Any:
    return np.random.default_rng([rank, *shape]).standard_normal(shape).astype(np.float32)


def work(
    device: str, rank: int, cases: list[tuple[str, tuple[int, ...]]], pipes: list[Connection], out: Connection
) -> None:
    """What one rank does of all cases; it sends what each gave, as bytes."""
    os.environ[VISIBLE] = order_devices(rank, COUNT)
    ctx = Context(device)  # type: ignore[arg-type]
    gpu = ctx.gpu
    inbox = make_inbox(gpu, COUNT)
    for pipe in pipes:
        pipe.send_bytes(inbox.handle)
    handles = [pipe.recv_bytes() for pipe in pipes]
    handles.insert(rank, inbox.handle)
    gpu.ranks = join_ranks(gpu, inbox, rank, handles)
    for pipe in pipes:
        pipe.send_bytes(b"joined")
    for pipe in pipes:
        pipe.recv_bytes()
    inbox.unlink()
    for kind, shape in cases:
        out.send(run_case(ctx, kind, rank, shape))


def run_case(ctx: Context, kind: str, rank: int, shape: tuple[int, ...]) -> Any:
    mx = ctx.gpu.mx
    own = mx.array(make_numbers(rank, *shape))
    if kind in ("sum", "halves"):
        return np.array(sum_ranks(ctx, own if kind == "sum" else own.astype(mx.bfloat16)))
    if kind == "norm":
        rows, columns = shape[-2:]
        x, gain = mx.array(make_numbers(7, rows, columns)), mx.array(make_numbers(8, columns))
        normed, summed = sum_and_norm(ctx, x, OwnPart(own), gain, 1e-5)
        return np.array(normed), np.array(summed)
    columns = shape[1], shape[1] + 6
    own = mx.array(make_numbers(rank, shape[0], columns[rank])).astype(mx.bfloat16 if kind == "narrow" else mx.float32)
    return np.array(gather_ranks(ctx, own, columns).astype(mx.float32))


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
        return rms_norm(REFERENCE, x, gain, 1e-5, whole, Scales())
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
    """What each rank got, case by case."""
    if request.param == "emulated":
        skip_unless_emulated()
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    outs = [spawn.Pipe() for _ in range(COUNT)]
    processes = [
        spawn.Process(target=work, args=(request.param, rank, CASES, [ends[rank]], outs[rank][1]), daemon=True)
        for rank in range(COUNT)
    ]
    for process in processes:
        process.start()
    for _, theirs in outs:
        theirs.close()
    found = [[own.recv() for own, _ in outs] for _ in CASES]
    for process in processes:
        process.join()
    return found


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
