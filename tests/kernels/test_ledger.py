"""The native code counts what it runs: kernels are named where they are chosen."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ran import list_ran

from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.context import ISAS, Context, load_native
from mlxr.kernels.linear import LinearWeight, linear, prepare
from mlxr.kernels.norms import layer_norm
from mlxr.kernels.tensor import FloatArray

COLUMNS = 256
WIDE = ("avx512", "avx512bf16", "amx")  # tiers with kernels for a few tokens


def make_weight(ctx: Context, *types: str, rows: int = 64) -> LinearWeight:
    rng = np.random.default_rng(len(types))
    tensors = []
    for index, name in enumerate(types):
        values = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
        tensors.append(TensorSource(f"weight {index}", name, values.shape, encode_tensor(name, values)))
    return prepare(ctx, tensors)


def make_input(tokens: int) -> FloatArray:
    return np.random.default_rng(tokens).standard_normal((tokens, COLUMNS)).astype(np.float32)


def test_products_are_named_by_the_kernel(cpu: Context) -> None:
    for name in ("q4_0", "f32", "bf16"):
        weight = make_weight(cpu, name)
        for tokens in (1, 63, 64):
            linear(cpu, make_input(tokens), weight)
    ran = list_ran(cpu, "linear")
    assert ran.pop("dense f32") == ran.pop("pairs bf16") == 3
    few = {"rows q4_0": 1, "strips q4_0": 1} if cpu.isa in WIDE else {"rows q4_0": 2}
    assert ran == few | {"panels q4_0": 1}


def test_a_kernel_that_is_ruled_out_is_not_counted() -> None:
    """The same call by other kernels: the same bits, and the ledger says which kernel it was."""
    isa = load_native().available_isas()[-1]
    taken = set()
    for name in ("q8_0", "q4_k", "q6_k", "q2_k"):
        ctx = Context("cpu", threads=2, isa=isa)
        weight, x = make_weight(ctx, name), make_input(40)
        strips = linear(ctx, x, weight)
        taken |= {variant.removesuffix(f" {name}") for variant in list_ran(ctx, "linear")}
        ctx.native.takes_strips = False
        ctx.ledger.reset()
        assert linear(ctx, x, weight).tobytes() == strips.tobytes()
        assert list_ran(ctx, "linear") == {f"rows {name}": 1}
    if isa in WIDE:
        assert taken == {"strips", "double rows"}


def test_parts_of_a_weight_are_named_together(cpu: Context) -> None:
    linear(cpu, make_input(1), make_weight(cpu, "q4_k", "q6_k", "q4_k"))
    linear(cpu, make_input(70), make_weight(cpu, "q4_k", "f32"))
    assert list_ran(cpu, "linear") == {"rows q4_k+q6_k": 1, "panels q4_k, dense f32": 1}


def test_more_kinds_than_fit_into_a_name_are_left_out(cpu: Context) -> None:
    types = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "f16")
    linear(cpu, make_input(1), make_weight(cpu, *types))
    assert list_ran(cpu, "linear") == {f"rows {'+'.join(types[:5])}": 1}


def test_calls_of_the_binding_itself_are_counted(cpu: Context) -> None:
    """Calls of native code are counted, whoever makes them; Python takes no part."""
    weight = make_weight(cpu, "q8_0")
    out = np.empty((1, 64), np.float32)
    for _ in range(3):
        cpu.module.linear(cpu.native, make_input(1), weight.payload, out)
    assert list_ran(cpu, "linear") == {"rows q8_0": 3}


def test_a_reset_forgets_native_counts_and_keeps_the_rest_going(cpu: Context) -> None:
    x, weight = make_input(2), np.ones(COLUMNS, np.float32)
    layer_norm(cpu, x, weight, 1e-5)
    cpu.ledger.reset()
    assert cpu.ledger.snapshot().dispatches == []
    layer_norm(cpu, x, weight, 1e-5, x)
    assert list_ran(cpu, "layer_norm") == {"f32+residual": 1}


def test_counts_may_be_read_while_kernels_run(cpu: Context) -> None:
    weight, x, seen = make_weight(cpu, "q4_0", rows=512), make_input(1), []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(sum(list_ran(cpu, "linear").values()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(300):
        linear(cpu, x, weight)
    stop.set()
    watcher.join()
    assert seen == sorted(seen)
    assert list_ran(cpu, "linear") == {"rows q4_0": 300}


@pytest.mark.parametrize("isa", ISAS)
def test_a_profile_times_calls_and_ends(isa: str) -> None:
    if isa not in load_native().available_isas():
        pytest.skip(f"this machine or build lacks instruction set {isa}")
    ctx = Context("cpu", threads=2, isa=isa)
    weight, x = make_weight(ctx, "q8_0"), make_input(3)
    linear(ctx, x, weight)
    assert [row[4:] for row in ctx.native.list_ran()] == [(0, 0, 0)]
    ctx.native.start_profile(2)
    for _ in range(3):
        linear(ctx, x, weight)
    events = ctx.native.stop_profile()
    linear(ctx, x, weight)
    ((index, operator, variant, calls, nanoseconds, nbytes, macs),) = ctx.native.list_ran()
    assert (operator, variant, calls) == ("linear", "rows q8_0", 5)
    assert nbytes == 3 * (weight.nbytes + 4 * 3 * (COLUMNS + 64))
    assert macs == 3 * 3 * COLUMNS * 64
    assert len(events) == 2  # as many as were asked for
    assert all(event[0] == index and event[1] < event[2] for event in events)
    assert events[0][2] <= events[1][1]
    assert sum(event[2] - event[1] for event in events) <= nanoseconds
    with pytest.raises(ValueError, match="profile: events is 5000000, expected at most 4194304"):
        ctx.native.start_profile(5_000_000)
