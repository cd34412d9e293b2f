"""Memory of a GPU: pools stay in place, free memory bounds the arena, and the workspace bounds what MLX keeps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_cases import skip_unless_emulated

from mlxr.core.errors import SettingError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.memory_plan import bound_free_bytes
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.mlx import LOADING_BYTES, OTHER_BYTES, Workspace, read_free_bytes
from mlxr.kernels.layers import NormWeight, prepare_layers
from mlxr.kernels.layers.gpu import Sizes, count_layer_bytes
from mlxr.kernels.layers.operators import (
    Activate,
    AddResidual,
    Attend,
    Heads,
    MatMul,
    Norm,
    Operator,
    RopeAndWriteKV,
    Scale,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import build_hf, read_golden

PAGES, PAGE_SIZE = 6000, 16
MIB = 2**20


def watch_decode(ctx: Context) -> tuple[int, int, int]:
    """Return the bytes of one pool, the most that decode steps took besides, and the copied bytes in the ledger."""
    config, seed, tokens, _ = read_golden("llama-gqa-80-tied")
    mx, model = ctx.gpu.mx, build_hf(ctx, config, seed, "f32")
    engine = Engine(model, ctx, ModelSettings(page_size=PAGE_SIZE, max_sequences=4), eos_ids=(), pages=PAGES)
    for start in range(3):
        engine.submit(
            EngineRequest(tokens.reshape(-1).tolist()[start : start + 3], SamplingParams(max_tokens=6, temperature=0))
        )
    engine.step()
    pools = [*engine._arena.k_pools, *engine._arena.v_pools]
    before = [locate(ctx, pool) for pool in pools]
    mx.clear_cache()
    mx.reset_peak_memory()
    active_bytes = mx.get_active_memory()
    ctx.ledger.reset()
    while engine.has_work:
        engine.step()
    assert engine.stats().decode_tokens >= 15
    assert [locate(ctx, pool) for pool in pools] == before
    return pools[0].nbytes, mx.get_peak_memory() - active_bytes, ctx.ledger.snapshot().copied_bytes


def locate(ctx: Context, pool: Any) -> int:
    """Return the address of a pool's memory; on a GPU, the array's identity, since looking would move it."""
    if ctx.gpu.narrow:
        return id(pool.array)
    array = pool.array.view(ctx.gpu.mx.uint16) if pool.kind == "bf16" else pool.array
    return int(np.asarray(array).ctypes.data)


@pytest.mark.smoke
@pytest.mark.slow
def test_decode_copies_no_pool(gpu: Context) -> None:
    pool_bytes, taken_bytes, copied_bytes = watch_decode(gpu)
    assert copied_bytes == 0
    assert taken_bytes < pool_bytes / 4


def test_mlx_operations_copy_no_pool() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    pool_bytes, taken_bytes, _ = watch_decode(Context("mlx-cpu"))  # it gathers the pages that are in use
    assert taken_bytes < pool_bytes / 4


class FakeMlx:
    """A stand-in for the functions of `mlx.core` about memory."""

    def __init__(self, **info: int) -> None:
        self.info, self.limits, self.active = info, list[int](), 30 * MIB

    def device_info(self) -> dict[str, int]:
        return self.info

    def get_memory_limit(self) -> int:
        return 100 * MIB

    def get_active_memory(self) -> int:
        return self.active

    def get_cache_memory(self) -> int:
        return 5 * MIB

    def set_cache_limit(self, limit: int) -> None:
        self.limits.append(limit)

    def clear_cache(self) -> None:
        self.limits.append(0)


@pytest.mark.parametrize(
    ("device", "info", "expected"),
    [
        ("cuda", {"free_memory": 40 * MIB}, 45 * MIB),
        ("cuda", {"free_memory": 200 * MIB}, 70 * MIB),
        ("cuda", {"total_memory": 200 * MIB}, None),
        ("metal", {"max_recommended_working_set_size": 64 * MIB}, 34 * MIB),
        ("metal", {}, None),
    ],
)
def test_free_memory_is_that_of_the_device(device: str, info: dict[str, int], expected: int | None) -> None:
    assert read_free_bytes(FakeMlx(**info), device) == expected


class FakeContext:
    """A device with or without memory of its own."""

    def __init__(self, free_bytes: int | None, uses_host_memory: bool) -> None:
        self._free_bytes, self.uses_host_memory = free_bytes, uses_host_memory

    def read_free_bytes(self) -> int | None:
        return self._free_bytes


@pytest.mark.smoke
def test_the_arena_is_bounded_by_where_it_lies() -> None:
    assert bound_free_bytes(FakeContext(2**50, uses_host_memory=False), None) == 2**50  # no host has so much
    assert bound_free_bytes(FakeContext(2**50, uses_host_memory=False), 2**40) == 2**40
    assert bound_free_bytes(FakeContext(2**50, uses_host_memory=True), None) < 2**50
    assert bound_free_bytes(FakeContext(MIB, uses_host_memory=True), 2**40) == MIB
    assert bound_free_bytes(FakeContext(None, uses_host_memory=False), None) is None


def test_a_device_that_does_not_tell_wants_a_setting(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "read_free_bytes", lambda _self: None)
    monkeypatch.setattr(Context, "uses_host_memory", False)
    config, seed, _, _ = read_golden("llama-gqa-80-tied")
    with pytest.raises(SettingError, match=r"arena_bytes: .* does not tell its free memory; set arena_bytes"):
        Engine(build_hf(gpu, config, seed, "f32"), gpu, eos_ids=())


def test_mlx_keeps_no_more_than_the_workspace() -> None:
    fake, held = FakeMlx(), [0]
    workspace = Workspace(fake, lambda: held[0])
    for step_bytes in (7 * MIB, 3 * MIB, 9 * MIB):
        workspace.cover(step_bytes, 2 * MIB)
        held[0] += MIB
    assert fake.limits == [LOADING_BYTES, OTHER_BYTES + 7 * MIB, 0, OTHER_BYTES + 11 * MIB, 0]
    assert workspace.nbytes == OTHER_BYTES + 12 * MIB


def test_a_step_is_full_when_its_last_layer_is_to_come() -> None:
    fake = FakeMlx()
    workspace = Workspace(fake, lambda: 0)
    workspace.cover(9 * MIB, 2 * MIB)
    fake.active += 7 * MIB
    assert not workspace.is_full
    fake.active += 1
    assert workspace.is_full


def make_layer(*types: str, residual_scale: float = 1.0, output_scale: float = 1.0) -> tuple[Operator, ...]:
    """Make operators of a layer of Llama 3 8B: queries and keys of the first type, values and down of the other one."""
    hidden, heads, kv, ffn = 4096, 4096, 1024, 14336

    def product(columns: int, **rows: int) -> Any:
        parts = [SimpleNamespace(type_name=name, rows=count, upload=FLOATS_16) for name, count in rows.items()]
        return SimpleNamespace(
            in_features=columns, out_features=sum(rows.values()), payload=(parts, None), is_share=False
        )

    qk, v = types
    qkv = product(hidden, **{qk: heads + 2 * kv}) if qk == v else product(hidden, **{qk: heads + kv, v: kv})
    norm = NormWeight(np.ones(hidden, np.float32), 1e-5)
    attention = Heads(32, 8, 128, scale=1.0)
    up, down = product(hidden, **{qk: 2 * ffn}), product(ffn, **{v: hidden})
    scaled: tuple[Operator, ...] = () if residual_scale == 1.0 else (Scale(residual_scale, "delta"),)
    return (
        Norm(norm, "stream", "normed"),
        MatMul(qkv, "normed", "x"),
        RopeAndWriteKV(attention),
        Attend(attention),
        MatMul(product(heads, **{qk: hidden}), "x", "delta"),
        *scaled,
        Norm(norm, "stream", "normed"),
        MatMul(up, "normed", "x"),
        Activate("silu", ffn, is_gated=True),
        MatMul(down, "x", "delta"),
        *scaled,
        *(() if output_scale == 1.0 else (AddResidual(output_scale),)),
    )


FLOATS_16 = SimpleNamespace(array=SimpleNamespace(itemsize=2))


def test_a_layer_of_a_long_prompt_takes_what_was_measured() -> None:
    """On an H200 the peak of 2,048 tokens grew by 360 MiB (bf16) for each layer in flight; blocks: queries in f32."""
    assert 2048 * count_layer_bytes(make_layer("bf16", "bf16"), Sizes(2, 2, 2)) == 360 * MIB
    assert 2048 * count_layer_bytes(make_layer("q4_k", "q6_k"), Sizes(4, 2, 2)) == 392 * MIB
    plain = count_layer_bytes(make_layer("q4_k", "q4_k"), Sizes(4, 2, 2))
    assert plain == 392 * MIB // 2048  # parts of two types are expanded behind one another
    scaled = count_layer_bytes(make_layer("q4_k", "q4_k", residual_scale=0.2, output_scale=0.5), Sizes(4, 2, 2))
    assert scaled == plain + 3 * 4 * 4096  # what each block adds, and the sum of the last one


def test_inputs_of_layers_are_counted_once() -> None:
    """They are made before the first layer and belong to no layer: six layers have 32 features each."""
    skip_unless_emulated()
    config, seed, _, _ = read_golden("gemma4e")
    ctx = Context("emulated")
    layers = build_hf(ctx, config, seed, "f32")._weights.layers
    without = prepare_layers(ctx, [replace(layer, before=()) for layer in layers.layers])
    made, plain = layers.payload.bytes, without.payload.bytes
    assert made.layer == plain.layer
    row, scaled, product, normed, joined = 4, 4, 4, 4 + 4, 4
    assert made.before - plain.before == 6 * 32 * (row + scaled + product + normed + joined)


def test_a_prompt_makes_the_workspace_larger(gpu: Context) -> None:
    config, seed, tokens, _ = read_golden("llama-gqa-80-tied")
    context = Context(gpu.device)  # its workspace has seen no step
    engine = Engine(build_hf(context, config, seed, "f32"), context, ModelSettings(page_size=8), eos_ids=(), pages=16)
    before = context.gpu.workspace.nbytes
    engine.submit(EngineRequest(tokens.reshape(-1).tolist()[:12], SamplingParams(max_tokens=1)))
    engine.step()
    assert context.gpu.workspace.nbytes > before
