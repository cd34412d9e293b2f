"""Inputs for the GPU kernels, and NumPy's results for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlxr.cache.arena import Arena
from mlxr.core.errors import DeviceError
from mlxr.core.tables import WEIGHT_TYPES
from mlxr.formats import TensorSource, by_name
from mlxr.formats.ggml_types import make_random_blocks
from mlxr.kernels.activate import activate
from mlxr.kernels.attend import KVType, attend
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.cuda.driver import CudaDriver
from mlxr.kernels.gpu.emulator import find_compiler
from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.gpu.mlx import find_gpu, load_mlx
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.blocks import STAGE_WORDS
from mlxr.kernels.linear.parts import TYPE_NAMES
from mlxr.kernels.norms import rms_norm
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import QueryTemperature, RopeTable, build_table
from mlxr.kernels.rope_and_write_kv import HeadNormKind, HeadNorms, Projected, rope_and_write_kv

Floats = NDArray[np.float32]
REFERENCE = Context("reference")
QUANTISED = tuple(row.name for row in WEIGHT_TYPES if row.block_size > 1)
STREAMED = tuple(TYPE_NAMES[number] for number in STAGE_WORDS)


def skip_unless_emulated() -> None:
    """Skip with the reason where kernels cannot be emulated."""
    try:
        load_mlx("emulated")
        find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))


def list_group_devices(count: int = 2) -> list[str]:
    """List devices that can form a group of this size: the emulated one, and NVIDIA's if this machine has enough."""
    if find_gpu() != "cuda":
        return ["emulated"]
    try:
        return ["emulated", "cuda"] if CudaDriver().count_devices() >= count else ["emulated"]
    except DeviceError:
        return ["emulated"]


def make_tensor(type_name: str, rows: int, columns: int, seed: int = 0) -> TensorSource:
    """Random blocks that use every bit of every field, with scales of sensible size and both signs."""
    rng = np.random.default_rng([seed, rows, columns, *type_name.encode()])
    kind = by_name(type_name)
    if type_name not in QUANTISED:
        values = rng.standard_normal((rows, columns)).astype(np.float32) / np.float32(np.sqrt(columns))
        return TensorSource("w", type_name, (rows, columns), kind.encode(values.reshape(-1, 1)).reshape(-1))  # type: ignore[misc]
    row = next(row for row in WEIGHT_TYPES if row.name == type_name)
    blocks = make_random_blocks(row, rows * columns // row.block_size, rng)
    return TensorSource("w", type_name, (rows, columns), blocks.reshape(-1))


def random_floats(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(result: Any, expected: Floats) -> float:
    """Return the root mean square of the difference over that of the expected numbers; NaN if a number is NaN."""
    if "bfloat16" in str(getattr(result, "dtype", "")):  # which NumPy does not have
        result = result.astype(load_mlx("emulated").float32)
    difference = np.asarray(result).astype(np.float64) - expected
    assert difference.shape == expected.shape
    return float(np.sqrt((difference**2).mean() / (expected.astype(np.float64) ** 2).mean()))


def expect_product(
    tensors: Sequence[TensorSource], x: Floats, biases: Sequence[Floats] | None, gate: int, added: bool
) -> tuple[Floats, Floats | None]:
    """Return NumPy's product, gated (1 silu, 2 gelu), plus a random residual if `added`; and the residual."""
    expected = linear(REFERENCE, x, prepare(REFERENCE, tensors, biases))
    if gate:
        expected = activate(REFERENCE, expected, "silu" if gate == 1 else "gelu_tanh")
    if not added:
        return expected, None
    residual = random_floats(5, *expected.shape)
    return expected + residual, residual


def note_launches(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from now on, one after another."""
    launched: list[str] = []
    launch = gpu.gpu.launcher.launch

    def note(kernel: Kernel, *arguments: object, **named: object) -> object:
        launched.append(kernel.name)
        return launch(kernel, *arguments, **named)

    monkeypatch.setattr(gpu.gpu.launcher, "launch", note)
    return launched


def run_layer(
    ctx: Context, x: Any, gain: Floats, up: Sequence[TensorSource], down: Sequence[TensorSource]
) -> tuple[Any, Any]:
    """Run norm, product with gate, product with sum, norm, as operators call them: the normed rows and the sum."""
    normed, stream = rms_norm(ctx, x, gain, 1e-5)
    made = activate(ctx, linear(ctx, normed, prepare(ctx, up)), "silu")
    return rms_norm(ctx, stream, gain, 1e-5, linear(ctx, made, prepare(ctx, down)))


@dataclass(frozen=True)
class Scene:
    """Sequences with some context in the cache, and the next tokens of each."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    rot_dim: int = 0  # 0: all of the head, below 0: nothing
    interleaved: bool = False
    normed: bool = False
    window: int | None = None
    kv_type: KVType = "bf16"
    softcap: float | None = None
    sunk: bool = False
    head_norms: HeadNormKind = "each"
    values_normed: bool = False
    projected: Projected = "qkv"
    temperature: QueryTemperature | None = None
    symmetric: bool = False
    picture: tuple[int, int] | None = None  # start and end of a picture in all texts, seen both ways

    def table(self) -> RopeTable:
        rot_dim = self.head_dim if self.rot_dim == 0 else max(self.rot_dim, 0)
        temperature, interleaved = self.temperature, self.interleaved
        return build_table(max(self.contexts), rot_dim, 1e4, interleaved=interleaved, temperature=temperature)

    def norms(self) -> HeadNorms | None:
        if not self.normed:
            return None
        q_heads, k_heads = (1, 1) if self.head_norms in ("each", "turned") else (self.heads, self.kv_heads)
        q, k = random_floats(1, q_heads * self.head_dim), random_floats(2, k_heads * self.head_dim)
        return HeadNorms(q + 1, k + 1, 1e-5, self.values_normed, self.head_norms)

    def batches(self) -> list[RaggedBatch]:
        """One batch that fills the caches, then one with the queries."""
        before = [context - count for context, count in zip(self.contexts, self.queries, strict=True)]
        filled = [index for index, count in enumerate(before) if count]
        return [
            *([self._cut(filled, [0] * len(filled), [before[i] for i in filled])] if filled else []),
            self._cut(range(len(before)), before, self.contexts),
        ]

    def _cut(self, chosen: Sequence[int], firsts: Sequence[int], lasts: Sequence[int]) -> RaggedBatch:
        width = -(-max(self.contexts) // self.page_size)
        order = np.random.default_rng(7).permutation(width * len(self.contexts)).astype(np.int32)
        table = np.ascontiguousarray(order.reshape(len(self.contexts), width)[list(chosen)])
        positions = np.concatenate([np.arange(a, b) for a, b in zip(firsts, lasts, strict=True)]).astype(np.int32)
        counts = np.subtract(lasts, firsts)
        owners = np.repeat(np.arange(len(counts)), counts)
        slots = table[owners, positions // self.page_size] * self.page_size + positions % self.page_size
        batch = RaggedBatch(
            token_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            slots=slots.astype(np.int32),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lengths=np.asarray(lasts, np.int32),
            page_table=table,
            output_rows=np.arange(len(positions), dtype=np.int32),
        )
        if self.picture is None:
            return batch
        start, stop = self.picture
        inside = (positions >= start) & (positions < stop)
        ends = np.where(inside, np.minimum(stop, np.asarray(lasts)[owners]), positions + 1).astype(np.int32)
        return batch.with_pictures(None, np.zeros((3, 0), np.int32), ends)


def play(ctx: Context, scene: Scene, repeat: int = 1) -> Floats:
    """Return attention for the queries of the scene, after all keys and values went through the pages."""
    pages = -(-max(scene.contexts) // scene.page_size) * len(scene.contexts)
    arena = Arena(ctx, 1, pages, scene.kv_heads, scene.page_size, scene.head_dim, scene.kv_type)
    table, norms, result = scene.table(), scene.norms(), None
    for index, batch in enumerate(scene.batches()):
        columns = (scene.heads + (len(scene.projected) - 1) * scene.kv_heads) * scene.head_dim
        qkv = random_floats(index, batch.tokens, columns)
        array: Any = qkv if ctx.gpu is None else ctx.gpu.mx.array(qkv)
        pools = arena.k_pools[0], arena.v_pools[0]
        q = rope_and_write_kv(ctx, array, scene.heads, batch, table, *pools, norms, projected=scene.projected)
        if ctx.gpu is not None:
            ctx.gpu.submit(q)
        result = attend(
            ctx,
            q,
            arena.k_pools[0],
            arena.v_pools[0],
            batch,
            scale=scene.head_dim**-0.5,
            sliding_window=scene.window,
            softcap=scene.softcap,
            sinks=random_floats(3, scene.heads) if scene.sunk else None,
            symmetric=scene.symmetric,
            whole_pictures=scene.picture is not None,
        )
    return np.asarray(result)
