"""One row streamed in integers, against decoding everything in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from amounts import choose_each
from gpu_cases import (
    REFERENCE,
    STREAMED,
    expect_product,
    make_tensor,
    note_launches,
    random_floats,
    relative_error,
    run_layer,
)

from mlxr.formats import TensorSource
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.cuda.machine import open_launches
from mlxr.kernels.gpu.kernel import OPENS, Kernel, Variant, make_cuda_source
from mlxr.kernels.gpu.recording import Launch
from mlxr.kernels.linear import prepare
from mlxr.kernels.linear.blocks import (
    DOUBLE,
    STREAM,
    WHOLE_COLUMNS,
    StreamPlan,
    StreamShape,
    describe,
    multiply_stream,
    plan_stream,
    share_groups,
)
from mlxr.kernels.linear.parts import LAYOUTS, Extras
from mlxr.kernels.norms import rms_norm

CLOSE = 4e-4  # x in 16 bits
ROOM_BYTES = 227 * 1024


def run(
    gpu: Context,
    tensors: list[TensorSource],
    plan: StreamPlan | None = None,
    *,
    gate: int = 0,
    biased: bool = False,
    added: bool = False,
    normed: bool = False,
    x: np.ndarray | None = None,
) -> float:
    """Multiply on the GPU and on the host; returns the relative error."""
    mx, columns = gpu.gpu.mx, tensors[0].shape[1]
    x = random_floats(3, 1, columns) if x is None else x
    gain = random_floats(4, columns)
    biases = [random_floats(9, tensor.shape[0]) for tensor in tensors] if biased else None
    inputs = rms_norm(REFERENCE, x, gain, 1e-5)[0] if normed else x
    expected, residual = expect_product(tensors, inputs, biases, gate, added)
    parts, bias = prepare(gpu, tensors, biases).payload
    weights = [(LAYOUTS[part.type_name].number, part.rows, part.raw) for part in parts]
    plan = plan or plan_stream(describe(weights, columns, gate), 3, ROOM_BYTES)
    assert plan is not None
    result = multiply_stream(
        gpu.gpu,
        mx.array(x),
        weights,
        Extras(
            gate, bias, (mx.array(gain), 1e-5) if normed else None, None if residual is None else mx.array(residual)
        ),
        mx.float32,
        plan,
    )
    return relative_error(result, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", STREAMED)
def test_every_type(gpu: Context, type_name: str) -> None:
    assert run(gpu, [make_tensor(type_name, 48, 1024)]) < CLOSE


COLUMNS = (256, 700, 896, 1200, 2880)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("type_name", STREAMED)
def test_rows_without_a_whole_number_of_units(gpu: Context, type_name: str, columns: int) -> None:
    check_columns(gpu, type_name, columns)


@pytest.mark.parametrize(("type_name", "columns"), choose_each(STREAMED, COLUMNS))
def test_rows_of_any_columns_stay_within_their_arrays(sanitized: Context, type_name: str, columns: int) -> None:
    check_columns(sanitized, type_name, columns)


def check_columns(ctx: Context, type_name: str, columns: int) -> None:
    """Products, also with all that may come before and after, of about so many columns."""
    kind = LAYOUTS[type_name].number
    columns = max(columns + -columns % WHOLE_COLUMNS[kind], 512 if kind in DOUBLE else 256)
    assert run(ctx, [make_tensor(type_name, 48, columns)]) < CLOSE
    assert run(ctx, [make_tensor(type_name, 32, columns)], gate=1, biased=True, normed=True) < CLOSE


@pytest.mark.parametrize("type_name", ["q5_k", "q8_0"])
def test_gate_of_other_types(gpu: Context, type_name: str) -> None:
    assert run(gpu, [make_tensor(type_name, 2 * 24, 512)], gate=1, normed=True) < CLOSE


@pytest.mark.parametrize("type_name", ["q4_k", "q6_k"])
@pytest.mark.parametrize("plan", [StreamPlan((3, 0)), StreamPlan((1, 0), 4, 3), StreamPlan((4, 0), 2, 1)], ids=str)
def test_every_plan(gpu: Context, type_name: str, plan: StreamPlan) -> None:
    assert run(gpu, [make_tensor(type_name, 112, 1536)], plan) < CLOSE


@pytest.mark.parametrize("type_name", ["q4_k", "q6_k"])
@pytest.mark.parametrize("gate", [1, 2])
def test_gate_with_norm_and_bias(gpu: Context, type_name: str, gate: int) -> None:
    assert run(gpu, [make_tensor(type_name, 2 * 56, 512)], gate=gate, biased=True, normed=True) < CLOSE


def test_parts_of_two_types_with_biases_and_sum(gpu: Context) -> None:
    tensors = [make_tensor("q4_k", 64, 1024), make_tensor("q6_k", 48, 1024)]
    assert run(gpu, tensors, biased=True, added=True) < CLOSE


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_stays_so(gpu: Context, value: float) -> None:
    x = random_floats(1, 1, 1024)
    x[0, 700] = value
    assert not np.isfinite(run(gpu, [make_tensor("q4_k", 32, 1024)], x=x))


def test_blocks_of_zeros_and_of_large_numbers(gpu: Context) -> None:
    x = random_floats(1, 1, 1024)
    x[0, :256], x[0, 300] = 0.0, 3e4
    assert run(gpu, [make_tensor("q6_k", 32, 1024)], x=x) < CLOSE


@pytest.mark.parametrize("types", [("q4_k", "q6_k"), ("q5_k", "q8_0"), ("iq4_xs", "q5_0")], ids="+".join)
def test_stays_within_its_arrays(sanitized: Context, types: tuple[str, str]) -> None:
    tensors = [make_tensor(types[0], 48, 1024), make_tensor(types[1], 32, 1024)]
    assert run(sanitized, tensors, normed=True, added=True) < CLOSE


def test_layer_is_streamed(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, product with gate, and product with sum, as the operators call for them; other numbers of rows are not."""
    for name, value in {"has_tiles": True, "processors": 3, "room_bytes": ROOM_BYTES}.items():
        monkeypatch.setattr(gpu.gpu, name, value)
    monkeypatch.setattr(gpu.gpu, "operands", gpu.gpu.mx.bfloat16)
    launched = note_launches(gpu, monkeypatch)
    weight, up, down = random_floats(2, 512), [make_tensor("q4_k", 1024, 512)], [make_tensor("q6_k", 512, 512)]

    for tokens in (1, 2):
        x = random_floats(1, tokens, 512)
        expected = run_layer(REFERENCE, x, weight, up, down)[1]
        found = run_layer(gpu, gpu.gpu.mx.array(x), weight, up, down)[1]
        assert relative_error(found, expected) < 8e-3
    assert launched == ["linear_stream", "linear_stream", "rms_norm", "linear_tiles", "linear_tiles"]


def test_what_is_not_streamed() -> None:
    takes = StreamShape((12, 12), (4096, 0), 4096)
    assert plan_stream(takes, 132, ROOM_BYTES) == StreamPlan((132, 0))
    assert plan_stream(takes, 132, 64 * 1024) is None
    assert plan_stream(takes, 0, 0) is None
    assert plan_stream(StreamShape((10, 10), (4096, 0), 4096), 132, ROOM_BYTES) is None
    assert plan_stream(StreamShape((2, 2), (4096, 0), 14336), 132, ROOM_BYTES) == StreamPlan((132, 0), stages=5)
    assert plan_stream(StreamShape((12, 12), (4096, 0), 4352), 132, ROOM_BYTES) is not None
    assert plan_stream(StreamShape((12, 14), (4096, 0), 4352), 132, ROOM_BYTES) is None
    assert plan_stream(StreamShape((12, 12), (4100, 0), 4096), 132, ROOM_BYTES) is None
    assert plan_stream(StreamShape((8, 8), (4096, 0), 2880), 132, ROOM_BYTES) is not None
    assert plan_stream(StreamShape((8, 8), (4096, 0), 2912), 132, ROOM_BYTES) is None
    assert plan_stream(StreamShape((8, 8), (4096, 0), 192), 132, ROOM_BYTES) is None


def test_launches_let_the_next_one_in_beside_streams() -> None:
    kinds = ("float32",) * len(STREAM.inputs)
    variant = Variant((("THREADS", 32),), (), kinds, ("float32",))
    plain, streamed = (Launch(STREAM, variant, (), (1, 1, 1), 32, room) for room in (0, 4096))
    assert open_launches([plain, plain]) == [plain, plain]
    assert [dict(launch.variant.constants).get(OPENS) for launch in open_launches([plain, streamed])] == [1, 1]
    late = replace(STREAM, opens_late=True)
    assert find_openings(STREAM, variant.opening()) == (True, False)
    assert find_openings(late, variant.opening()) == (False, True)
    assert find_openings(STREAM, variant) == find_openings(late, variant) == (False, False)


def find_openings(kernel: Kernel, variant: Variant) -> tuple[bool, bool]:
    """Return two flags: the source lets the next launch begin at its own beginning, and once it has waited."""
    source = make_cuda_source(kernel, variant, starts_early=True)
    return "launch_dependents" in source.partition('extern "C"')[2], "#define MLXR_OPENS_LATE" in source


def test_threadgroups_are_shared_out_by_bytes() -> None:
    first, second = share_groups(StreamShape((12, 14), (5120, 1024), 4096), 132)
    assert first + second <= 132
    assert max(-(-320 // first) * 144, -(-64 // second) * 210) == 4 * 144
