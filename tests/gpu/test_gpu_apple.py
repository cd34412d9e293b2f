"""Kernels that only an Apple GPU runs, and the emulator as an Apple GPU: its limits, and the words of metal.h.

`pytest --apple` runs the other tests here in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_cases import (
    QUANTISED,
    REFERENCE,
    Scene,
    expect_product,
    make_tensor,
    note_launches,
    play,
    random_floats,
    relative_error,
    run_layer,
    skip_unless_emulated,
)
from moe_cases import compare

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.device import find_most_squared
from mlxr.kernels.gpu.emulator import LEAST_THREADS, MOST_SHARED_BYTES, MOST_THREADS, Emulator, count_threads
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.launcher import Launcher
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.blocks import TILES
from mlxr.kernels.linear.parts import LAYOUTS, Extras
from mlxr.kernels.linear.squares import PLANS, SquarePlan, choose_squares, multiply_squares
from mlxr.kernels.moe.products import choose_width

EXACT = 2e-6
HALVED = 6e-4  # weights rounded to f16
NARROW = 6e-3  # queries, keys and values rounded, too


@cache
def make_apple() -> Context:
    return Context("emulated", emulator=Emulator(words="apple"))


@pytest.fixture
def apple() -> Context:
    """The emulator as an Apple GPU."""
    skip_unless_emulated()
    return make_apple()


@pytest.fixture
def squared(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context that multiplies squares, with the words of its own device."""
    if gpu.device == "cuda":
        pytest.skip("multiplies no squares")
    monkeypatch.setattr(gpu.gpu, "has_squares", True)
    return gpu


def launch(ctx: Context, folder: Path, body: str, inputs: int = 1, threads: int = 32) -> Any:
    (folder / "kernel.body").write_text(body + "\n")
    names = tuple(f"x{number}" for number in range(inputs))
    kernel, mx = Kernel("tried", folder, "kernel.body", names, ("out",)), ctx.gpu.mx
    given = [mx.arange(64.0)] * inputs
    (out,) = ctx.gpu.launcher.launch(
        kernel, given, groups=(1, 1, 1), threads=threads, outputs=[((threads,), mx.float32)]
    )
    return np.asarray(out)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("body", "named", "message"),
    [
        ("SHARED float s[8193]; s[thread_id] = x0[0]; barrier(); out[thread_id] = s[31 - thread_id];", {},
         f"takes 32772 bytes of threadgroup memory; an Apple GPU has {MOST_SHARED_BYTES}"),
        ("out[thread_id] = x30[thread_id];", {"inputs": 31}, "takes 32 buffers; an Apple GPU has 31"),
        ("out[thread_id] = x0[0];", {"threads": 1056}, f"takes 1056 threads.*has {MOST_THREADS}"),
        ("float kept[250]; for (int i = 0; i < 250; ++i) kept[i] = sum_lanes(x0[i % 64]);\n"
         "float sum = 0.0f; for (int i = 249; i >= 0; --i) sum += kept[i] * shuffle_xor(kept[i], 1);\n"
         "out[thread_id] = sum;", {"threads": 416}, f"takes 416 threads that keep .* bytes.*has {LEAST_THREADS}"),
    ],
    ids=["memory", "buffers", "threads", "registers"],
)  # fmt: skip
def test_an_apple_gpu_has_limits(
    apple: Context, tmp_path: Path, body: str, named: dict[str, int], message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        launch(apple, tmp_path, body, **named)


def test_what_is_within_the_limits_runs(apple: Context, tmp_path: Path) -> None:
    body = "SHARED float s[8192]; s[thread_id] = x0[thread_id]; barrier(); out[thread_id] = s[63 - thread_id];"
    assert launch(apple, tmp_path, body, inputs=30, threads=64).tolist() == [*range(63, -1, -1)]
    assert [count_threads(kept) for kept in (0, 200, 400, 512, 4000)] == [1024, 1024, 512, 416, 384]
    with pytest.raises(TypeError, match="linear_tiles is only launched on CUDA"):
        apple.gpu.launcher.launch(
            TILES, [apple.gpu.mx.zeros(8)] * 8, groups=(1, 1, 1), threads=32, outputs=[((1,), apple.gpu.mx.float32)]
        )


def test_squares_are_not_launched_on_cuda(apple: Context) -> None:
    kernel = Kernel("own", Path(), "own.body", ("x",), ("out",), metal_only=True)
    with pytest.raises(TypeError, match="own is only launched on Metal"):
        Launcher(apple.gpu.mx, "cuda").launch(
            kernel, [], groups=(1, 1, 1), threads=32, outputs=[((1,), apple.gpu.mx.float32)]
        )


WORK: dict[str, Callable[[Context], Any]] = {
    "squares": lambda ctx: multiply(ctx, [make_tensor("iq4_xs", 70, 512), make_tensor("iq2_s", 35, 512)], 20),
    "experts": lambda ctx: compare(ctx, 40, 2, 5, "iq4_nl", (64, 64)),
    "attention of prompts": lambda ctx: play(ctx, Scene(4, 2, 64, 16, (70, 33), (20, 33), window=21, sunk=True)),
    "attention of tokens": lambda ctx: play(ctx, Scene(6, 2, 80, 8, (9, 20), (1, 1), softcap=0.5)),
}


@pytest.mark.parametrize("name", WORK)
def test_metals_words_give_the_same_bits(apple: Context, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the words that bring integers into floats, for which Metal has another way."""
    own = Context("emulated", emulator=Emulator(words="emulated"))
    monkeypatch.setattr(own.gpu, "has_squares", True)
    monkeypatch.setattr(own.gpu, "is_apple", True)
    monkeypatch.setattr(own.gpu, "machine", None)
    assert np.array_equal(WORK[name](own), WORK[name](apple))


def multiply(ctx: Context, tensors: list[Any], tokens: int, plan: SquarePlan | None = None, **named: Any) -> Any:
    """Multiply by squares; with `expects` return the relative error."""
    mx, gate, expects = ctx.gpu.mx, named.get("gate", 0), named.get("expects", False)
    x = random_floats(3, tokens, tensors[0].shape[1])
    biases = [random_floats(9, tensor.shape[0]) for tensor in tensors] if named.get("biased") else None
    parts, bias = prepare(ctx, tensors, biases).payload
    expected, residual = expect_product(tensors, x, biases, gate, named.get("added", False))
    extras = Extras(gate, bias, residual=None if residual is None else mx.array(residual))
    weights = [(LAYOUTS[part.type_name].number, part.rows, part.raw) for part in parts]
    made = multiply_squares(ctx.gpu, mx.array(x), weights, extras, mx.float32, plan)
    return relative_error(made, expected) if expects else np.asarray(made)


@pytest.mark.smoke
@pytest.mark.parametrize("type_name", QUANTISED)
def test_squares_of_every_type(squared: Context, type_name: str) -> None:
    assert multiply(squared, [make_tensor(type_name, 37, 512)], 5, expects=True) < HALVED


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_squares_of_every_plan(squared: Context, plan: SquarePlan) -> None:
    """x has more rows than a threadgroup, and one launch does all the steps."""
    assert plan.shared_bytes <= MOST_SHARED_BYTES
    for tensors, named in (
        ([make_tensor("q4_k", 70, 256), make_tensor("q6_k", 35, 256)], {"biased": True, "added": True}),
        ([make_tensor("q8_0", 2 * 45, 96)], {"gate": 1, "biased": True}),
    ):
        assert multiply(squared, tensors, plan.tokens + 3, plan, expects=True, **named) < HALVED


def test_few_rows_are_one_threadgroup_of_each_weight() -> None:
    assert [choose_squares(tokens).tokens for tokens in (5, 8, 9, 17, 33, 65, 512)] == [8, 8, 16, 32, 64, 128, 128]
    assert [plan.shared_bytes for plan in PLANS] == [8192, 8192, 10240, 14336, 24576]
    assert [choose_width(tokens, 8, 128, False, 4, True) for tokens in (1, 16, 96, 512, 1024)] == [1, 4, 16, 32, 64]
    told = ("applegpu_g13s", "applegpu_g16p", "applegpu_g17g", "", None)
    assert [find_most_squared({"architecture": name}) < 2**31 for name in told] == [False, False, True, False, False]


@pytest.mark.parametrize("tokens", [4, 5, 20])
def test_a_layer_goes_through_squares(squared: Context, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launches(squared, monkeypatch)
    x, weight = random_floats(1, tokens, 256), random_floats(2, 256)
    up, down = [make_tensor("q5_k", 2 * 256, 256)], [make_tensor("q8_0", 256, 256)]
    expected = run_layer(REFERENCE, x, weight, up, down)[1]
    assert relative_error(run_layer(squared, squared.gpu.mx.array(x), weight, up, down)[1], expected) < 2 * HALVED
    ways = ["linear_rows"] * 2 if tokens == 4 else ["rms_norm", *["linear_squares"] * 2]
    assert launched[: len(ways)] == ways


def test_one_row_is_read_without_a_barrier(apple: Context) -> None:
    """Norm, gate and sum of one row, for which each SIMD-group reads x itself, and the rows of many outputs."""
    x, weight = random_floats(1, 1, 256), random_floats(2, 256)
    up, down = [make_tensor("q4_k", 2 * 2304, 256)], [make_tensor("q6_k", 256, 2304)]
    expected = run_layer(REFERENCE, x, weight, up, down)[1]
    assert relative_error(run_layer(apple, apple.gpu.mx.array(x), weight, up, down)[1], expected) < 2 * EXACT


@pytest.mark.parametrize(
    "named", [{}, {"biased": True, "up_type": "q4_0"}, {"down_type": "q8_0", "gated": False}], ids=str
)
def test_experts_go_through_squares(squared: Context, named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launches(squared, monkeypatch)
    assert compare(squared, 70, 2, 5, "mxfp4", (96, 160), **named) < 2 * HALVED
    assert launched.count("moe_squares") == 2


SCENES = {
    "prompts": Scene(4, 2, 64, 16, (40, 7, 21), (40, 7, 21)),
    "chunk, seven heads to one, f16": Scene(14, 2, 128, 24, (70, 33, 9), (20, 33, 1), kv_type="f16"),
    "forty heads to one": Scene(40, 1, 32, 8, (40,), (9,)),
    "heads of 80, window": Scene(4, 2, 80, 16, (90, 40), (30, 11), window=21),
    "heads of 256, sinks, capped": Scene(2, 1, 256, 16, (70,), (37,), softcap=0.7, sunk=True),
    "texts": Scene(4, 4, 32, 16, (40, 1, 90), (40, 1, 90), symmetric=True, kv_type="f16"),
    "pictures, window": Scene(4, 2, 96, 16, (150, 70), (130, 20), window=33, picture=(55, 66)),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_prompts_attend_by_squares(apple: Context, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launches(apple, monkeypatch)
    assert relative_error(play(apple, scene), play(REFERENCE, scene)) < NARROW
    assert "attend_squares" in launched
    assert "attend_gather" not in launched


def test_a_weight_has_less_than_4_gib(apple: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets have 32 bits there, so a larger one is refused, and floats are left to MLX."""
    monkeypatch.setattr("mlxr.kernels.linear.parts.MOST_APPLE_BYTES", 4096)
    assert prepare(apple, [make_tensor("q4_k", 28, 256)]).payload[0][0].raw is not None
    with pytest.raises(DeviceError, match=r"tensor w has 4176 bytes .* take less than 4096; use device 'cpu'"):
        prepare(apple, [make_tensor("q4_k", 29, 256)])
    x, tensor = random_floats(1, 1, 256), make_tensor("f16", 64, 256)
    made = settle(linear(apple, apple.gpu.mx.array(x), prepare(apple, [tensor])))
    assert relative_error(made, linear(REFERENCE, x, prepare(REFERENCE, [tensor]))) < EXACT


def test_a_scratch_array_is_not_filled_before_it_was_read(apple: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the product that reads it was of the step before."""
    monkeypatch.setattr(apple.gpu, "most_squared", 8)
    array, weight = apple.gpu.mx.array(random_floats(1, 9, 256)), prepare(apple, [make_tensor("q4_k", 37, 256)])
    apple.gpu.last_expanded = None
    first = settle(linear(apple, array, weight))
    apple.gpu.forget_placed()
    assert apple.gpu.last_expanded is not None
    settle(linear(apple, array, weight))
    assert apple.gpu.last_expanded is not first
