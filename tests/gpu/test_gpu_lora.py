"""Low-rank updates on the GPU against the reference, alone and in models."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gpu_cases import REFERENCE, relative_error

from mlxr.core.errors import DeviceError
from mlxr.formats import read_adapter
from mlxr.kernels.context import Context
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.lora import AdapterRows, LoraPart, TablePart, add_lora, add_lora_rows
from mlxr.kernels.lora import prepare as prepare_adapter
from mlxr.kernels.sources import Decoded
from mlxr.models.adapter import make_adapter

MODELS = Path(__file__).parents[1] / "models"
sys.path.insert(0, str(MODELS))
from tiny_models import TinyRun, build_hf, read_golden  # noqa: E402 -- needs the path above

ADAPTERS = MODELS / "adapter_goldens"
EXACT, NARROW = 3e-6, 1e-2  # of f32, and where floats are held in 16 bits
COLUMNS, SPLITS = 70, (33, 40)


def draw(seed: int, *shape: int, is_short: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32) if is_short else values


def run(ctx: Context, tokens: int, rank: int, *, is_short: bool) -> np.ndarray:
    """Multiply by two weights; one adapter updates both, another one only the second."""
    weight = prepare(ctx, [Decoded(f"w{i}", draw(i, rows, COLUMNS)) for i, rows in enumerate(SPLITS)])
    first, second = (
        LoraPart(sum(SPLITS[:i]), draw(5 + i, rank, COLUMNS, is_short=is_short), draw(7 + i, rows, rank), 0.5)
        for i, rows in enumerate(SPLITS)
    )
    rows = [np.arange(0, tokens, 2, dtype=np.int32), np.arange(1, tokens, 4, dtype=np.int32)]
    adapters = [
        AdapterRows(own, prepare_adapter(ctx, {weight: parts}))
        for own, parts in zip(rows, ([first, second], [second]), strict=True)
        if len(own)
    ]
    x = draw(9, tokens, COLUMNS)
    placed = x if ctx.gpu is None else ctx.gpu.mx.array(x)
    return np.asarray(add_lora(ctx, placed, linear(ctx, placed, weight), weight, adapters))


@pytest.mark.smoke
@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 1), (3, 16), (19, 9), (40, 256)])
def test_updates_are_those_of_the_reference(gpu: Context, tokens: int, rank: int, is_short: bool) -> None:
    wanted = run(REFERENCE, tokens, rank, is_short=is_short)
    assert relative_error(run(gpu, tokens, rank, is_short=is_short), wanted) < (NARROW if gpu.gpu.narrow else EXACT)


def run_table(ctx: Context) -> np.ndarray:
    table, ids = TablePart(draw(1, 50, 6), draw(2, 6, COLUMNS), 0.5), np.array([3, 49, 0, 7, 7], np.int32)
    rows = AdapterRows(np.array([1, 2, 4], np.int32), prepare_adapter(ctx, {}, table))
    out = draw(3, 5, COLUMNS)
    return np.asarray(add_lora_rows(ctx, ids, out if ctx.gpu is None else ctx.gpu.mx.array(out), [rows]))


def test_updates_of_embeddings_are_those_of_the_reference(gpu: Context) -> None:
    assert relative_error(run_table(gpu), run_table(REFERENCE)) < EXACT


def test_updates_stay_within_their_arrays(sanitized: Context) -> None:
    assert relative_error(run(sanitized, 3, 5, is_short=True), run(REFERENCE, 3, 5, is_short=True)) < EXACT
    assert relative_error(run_table(sanitized), run_table(REFERENCE)) < EXACT


@pytest.mark.parametrize("case", ["bf16", "scaled-embeddings", "output", "joined", "mixture", "recurrent"])
def test_models_have_the_logits_of_the_reference(gpu: Context, case: str) -> None:
    """One sequence with the adapter beside one without, in a prompt and in steps of single tokens."""
    with np.load(ADAPTERS / case / "logits.npz") as stored:
        base, tokens, golden = str(stored["base"]), stored["tokens"], stored["logits"]
    config, seed, _, _ = read_golden(base)
    model = build_hf(gpu, config, seed)
    file, weights = read_adapter(ADAPTERS / case), model.linear_weights()
    adapter = make_adapter(case, file.pairs, gpu, weights, model.config, is_gguf=False)
    both, alone = TinyRun(model, sequences=2, adapters=[adapter, None]), TinyRun(model)
    prompt, rest = tokens[:12], tokens[12:]
    got = [np.asarray(both.step({0: prompt, 1: prompt}))]
    got += [np.asarray(both.step({0: rest[at : at + 1], 1: rest[at : at + 1]})) for at in range(len(rest))]
    plain = [np.asarray(alone.step({0: prompt})), *(np.asarray(alone.step({0: [token]})) for token in rest)]
    adapted = np.concatenate([got[0][:12], *(step[:1] for step in got[1:])])
    beside = np.concatenate([got[0][12:], *(step[1:] for step in got[1:])])
    bound = (2e-2 if gpu.gpu.narrow else 2e-4) * max(1.0, np.abs(golden).max())
    # With 16 bits a router in doubt takes another expert for a token now and then.
    worst = np.median if gpu.gpu.narrow and case == "mixture" else np.max
    assert worst(np.abs(adapted - golden).max(axis=1)) < bound
    assert worst(np.abs(beside - np.concatenate(plain)).max(axis=1)) < bound


def test_adapters_of_experts_are_refused_by_name(gpu: Context) -> None:
    config, seed, _, _ = read_golden("mixtral")
    file, model = read_adapter(ADAPTERS / "experts-numbered"), build_hf(gpu, config, seed)
    with pytest.raises(DeviceError, match=r"experts\.0\.w\d is a weight of experts.*on device 'cpu' alone"):
        make_adapter("own", file.pairs, gpu, model.linear_weights(), model.config, is_gguf=False)
