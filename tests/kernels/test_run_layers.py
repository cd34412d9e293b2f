"""Layers in one native call: the same bits and the same ledger as the operators one by one, and refusals."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import amounts
import numpy as np
import pytest
from numpy.typing import NDArray
from ran import count_apart, list_ran

from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.activate import Activation
from mlxr.kernels.attend import KVType, allocate_pools
from mlxr.kernels.context import Context, load_native
from mlxr.kernels.layers import Layer, Layers, StepInput, prepare_layers, run_layers
from mlxr.kernels.layers import cpu as native_layers
from mlxr.kernels.layers import reference as one_by_one
from mlxr.kernels.layers.operators import Activate, MatMul, NormKind, RopeAndWriteKV
from mlxr.kernels.linear import prepare
from mlxr.kernels.moe import RoutingRule
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import QueryTemperature, build_table
from mlxr.kernels.rope_and_write_kv import HeadNormKind, Projected
from mlxr.models import components
from mlxr.models.components import (
    NO_ROPE,
    AltUp,
    Attention,
    DenseAndExperts,
    Experts,
    FeedForward,
    GatedDelta,
    LayerInputs,
    Mamba,
    Mamba2,
    Norms,
    ParallelMixers,
    ShortConv,
    Weights,
)
from mlxr.models.components.weights import NormPlaces, Shape

HIDDEN, HEADS, KV_HEADS, DIM, PAGE, INPUTS = 128, 4, 2, 64, 32, 32
LAYERS = 3
Floats = NDArray[np.float32]


@dataclass
class Kind:
    """A kind of layer: all that layers may differ in."""

    weight_type: str = "q8_0"
    down_type: str | None = None  # None: as the others
    hidden: int = HIDDEN
    forward: int = 192
    activation: Activation = "silu"
    gated: bool = True
    norms_heads: bool = False
    window: int | None = None
    interleaved: bool = False
    bias: bool = False
    groups: bool = False  # every other layer has pages of its own, and this window
    other_window: int | None = None
    norms: NormPlaces = "before"
    norm_kind: NormKind = "rms"
    head_norms: HeadNormKind = "each"
    values: bool = False  # are normed, too
    projected: Projected = "qkv"
    parallel: bool = False
    residual_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None
    clamp: float | None = None
    sinks: bool = False
    ropes: tuple[int, ...] = (0,)  # numbers of the layers' tables, one after another
    inputs: bool = False  # what layers get for each token besides the stream
    experts: int = 0  # beside one block that all tokens have
    recurrent: str = ""  # conv, delta, scan, mamba: the mixer of the first layer and the last
    beside: bool = False  # attention in all layers, then
    streams: int = 0  # of alternating updates
    cut: float | None = None  # of gates


@cache
def encode(type_name: str, shape: tuple[int, ...], values: bytes) -> TensorSource:
    """Encode a weight; all cases share a few, as some types take longer to encode than to multiply with."""
    array = np.frombuffer(values, np.float32).reshape(shape)
    return TensorSource("w", type_name, shape, encode_tensor(type_name, array))


def make_values(rng: np.random.Generator, kind: Kind, name: str, shape: Shape) -> Floats:
    """Numbers as a trained model may have them."""
    if name == "layer_output_scale.weight":
        return np.full(shape, kind.output_scale, np.float32)
    if name in ("ssm_a", "ssm_d", "ssm_dt.bias"):
        values = rng.uniform(0.1, 2, shape)
        return (-values if name == "ssm_a" else values).astype(np.float32)
    if "norm" in name or name in ("attn_sinks.weight", "exp_probs_b.bias", "ssm_conv1d.bias"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    is_product = len(shape) > 1 and "conv" not in name and name != "per_layer_token_embd.weight"
    return (rng.standard_normal(shape) / (np.sqrt(shape[-1]) if is_product else 1)).astype(np.float32)


def make_tensor(rng: np.random.Generator, kind: Kind, name: str, shape: Shape) -> TensorSource:
    values = make_values(rng, kind, name, shape)
    exact = "norm", "gate_inp", "conv1d", "shortconv.conv", "altup_router", "_coef"
    is_product = len(shape) > 1 and not any(part in name for part in exact)
    weight_type = kind.weight_type if is_product and name not in ("ssm_a", "ssm_d") else "f32"
    if is_product and "ffn_down" in name:
        weight_type = kind.down_type or kind.weight_type
    if name == "per_layer_token_embd.weight":
        weight_type = "q8_0"
    return encode(weight_type, shape, values.tobytes())


def make_zeros(layer: components.Layer, hidden: int) -> dict[str, TensorSource]:
    """Tensors of the right shapes."""
    return {f"blk.0.{name}": encode("f32", shape, bytes(4 * prod(shape))) for name, shape in layer.tensors(hidden)}


def describe_layers(kind: Kind) -> list[components.Layer]:
    rule = RoutingRule(2, "sigmoid", renormalises=True)
    numbers = (1.1, 0.7, 0.5, -0.003) if kind.activation == "xielu" else ()
    dense = FeedForward(
        kind.forward, kind.activation, bias=kind.bias, gated=kind.gated, parameters=numbers, cut=kind.cut
    )
    second: components.FeedForward | Experts | DenseAndExperts = dense
    if kind.experts:
        experts = Experts(kind.experts, kind.forward, kind.activation, rule, choice_bias=True)
        is_beside = kind.norms == "both"
        second = (
            DenseAndExperts(dense, experts)
            if is_beside
            else replace(experts, shared_features=kind.forward, shared_gate=True)
        )
    recurrent = {
        "conv": ShortConv(192, 3),
        "delta": GatedDelta(1, 4, 32, 16, 3),
        "scan": Mamba(160, 16, 32, 3, "weighted", 1e-5),
        "mamba": Mamba2(4, 32, 2, 16, 3),
    }
    inputs = LayerInputs(INPUTS, kind.activation, table_scale=0.6, scale=0.7, eps=1e-3) if kind.inputs else None
    norms = Norms(1e-5, kind.norm_kind, bias=kind.norm_kind == "layer", places=kind.norms)
    streams = {"streams": AltUp(kind.streams, 32)} if kind.streams else {}
    layers = []
    for index in range(LAYERS):
        attention = Attention(
            HEADS,
            KV_HEADS,
            DIM,
            float(DIM**-0.5),
            NO_ROPE,
            window=kind.other_window if kind.groups and index % 2 else kind.window,
            softcap=kind.softcap,
            clamp=kind.clamp,
            head_norms=kind.head_norms if kind.norms_heads else None,
            projected=kind.projected,
            qkv_bias=kind.bias,
            output_bias=kind.bias,
            norms_values=kind.values and kind.norms_heads,
            sinks=kind.sinks,
        )
        mixer: components.layer.Mixer = attention
        if kind.recurrent and kind.beside:
            mixer = ParallelMixers(attention, recurrent[kind.recurrent])
        elif kind.recurrent and index != 1:
            mixer = recurrent[kind.recurrent]
        scales = {"residual_scale": kind.residual_scale, "scales_output": kind.output_scale != 1.0}
        ends = {"is_last": index + 1 == LAYERS}
        layers.append(components.Layer(mixer, second, norms, kind.parallel, **scales, inputs=inputs, **streams, **ends))
    return layers


def make_tensors(kind: Kind, seed: int = 5) -> dict[str, TensorSource]:
    rng, made = np.random.default_rng(seed), {}
    for index, layer in enumerate(describe_layers(kind)):
        for name, shape in layer.tensors(kind.hidden):
            made[f"blk.{index}.{name}"] = make_tensor(rng, kind, name, shape)
        if layer.inputs is not None and not index:
            for name, shape in layer.inputs.model_tensors(LAYERS, kind.hidden, 7):
                made[name] = make_tensor(rng, kind, name, shape)
        if layer.streams is not None and not index:
            for name, shape in layer.streams.model_tensors(kind.hidden):
                made[name] = make_tensor(rng, kind, name, shape)
    return made


def load_layers(ctx: Context, kind: Kind, tensors: dict[str, TensorSource]) -> list[Layer]:
    weights = Weights(ctx, tensors)
    return [
        layer.load(
            weights, index, kind.hidden, rope=kind.ropes[index % len(kind.ropes)], group=index % 2 if kind.groups else 0
        )
        for index, layer in enumerate(describe_layers(kind))
    ]


def make_layers(ctx: Context, kind: Kind, seed: int = 5) -> list[Layer]:
    return load_layers(ctx, kind, make_tensors(kind, seed))


def make_batch(queries: list[int], before: list[int]) -> RaggedBatch:
    """Sequences of `queries` new tokens after `before` others, pages in disorder."""

    def ints(values: object) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    lengths = [old + new for old, new in zip(before, queries, strict=True)]
    width = -(-max(lengths) // PAGE)
    pages = np.random.default_rng(3).permutation(len(queries) * width).reshape(len(queries), width).astype(np.int32)
    at = [(s, old + i) for s, (old, new) in enumerate(zip(before, queries, strict=True)) for i in range(new)]
    return RaggedBatch(
        token_ids=ints([place % 7 for place in range(len(at))]),
        positions=ints([position for _, position in at]),
        slots=ints([pages[s, position // PAGE] * PAGE + position % PAGE for s, position in at]),
        query_starts=ints(np.concatenate([[0], np.cumsum(queries)])),
        context_lengths=ints(lengths),
        page_table=pages,
        output_rows=ints([]),
    )


def add_group(batch: RaggedBatch, window: int) -> RaggedBatch:
    """Add a second group of layers, with pages of its own; pages that no query sees are gone."""
    count = batch.page_table.size
    pages = np.random.default_rng(4).permutation(count).reshape(batch.page_table.shape).astype(np.int32)
    owners = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
    slots = (pages[owners, batch.positions // PAGE] * PAGE + batch.positions % PAGE).astype(np.int32)
    for row, start in zip(pages, batch.positions[batch.query_starts[:-1]], strict=True):
        row[: max(0, start - window + 1) // PAGE] = -1
    return batch.with_groups([(slots, pages)])


def add_states(batch: RaggedBatch) -> RaggedBatch:
    """Add slots in disorder for the states of all sequences; one state begins with zeros."""
    slots = np.random.default_rng(6).permutation(2 * batch.sequences).astype(np.int32).reshape(2, -1)
    reads, writes = slots.copy()
    reads[batch.sequences // 2] = -1
    return batch.with_states(reads, writes)


def make_states(kind: Kind, batch: RaggedBatch) -> list[Floats | None]:
    """The pools of recurrent layers."""
    rng, states = np.random.default_rng(8), []
    for layer in describe_layers(kind):
        shape = None if layer.recurrence is None else (2 * batch.sequences, layer.recurrence.state_floats)
        states.append(None if shape is None else rng.standard_normal(shape).astype(np.float32))
    return states


def make_pools(ctx: Context, batch: RaggedBatch, kv_type: KVType | None) -> list[tuple[NDArray[np.generic], ...]]:
    """Pools of all layers: keys, then values."""
    pools = [allocate_pools(ctx, batch.page_table.size, KV_HEADS, PAGE, DIM, kv_type) for _ in range(LAYERS)]
    return [tuple(pool) for pool in zip(*pools, strict=True)]


BATCHES = {
    "one token": ([1], [0]),
    "a step of three": ([1, 1, 1], [70, 3, 31]),
    "a prompt": ([75], [0]),
    "prompts and steps": ([1, 40, 1, 9], [300, 20, 64, 0]),
    "a long prompt": ([530], [0]),
}
KINDS = {
    "llama": Kind(),
    "qwen3": Kind("f16", norms_heads=True),
    "mistral": Kind("q4_0", window=40, interleaved=True),
    "geglu": Kind("q8_0", activation="gelu_tanh", bias=True),
    "clamped": Kind("q4_0", activation="clamped_swiglu", bias=True),
    "starcoder2": Kind("q8_0", norm_kind="layer", activation="gelu_tanh", gated=False, bias=True),
    "ungated and squared": Kind("q4_k", "q6_k", hidden=256, forward=768, activation="relu_squared", gated=False),
    "squared": Kind("q8_0", activation="relu_squared"),
    "xielu": Kind("q8_0", activation="xielu", gated=False),
    "xielu with a gate": Kind("q8_0", activation="xielu"),
    "q4_k_m": Kind("q4_k", "q6_k", hidden=256, forward=768),
    "two groups of layers": Kind(groups=True, other_window=40),
    "gemma2": Kind("q8_0", norms="both", activation="gelu_tanh", softcap=5.0, groups=True, other_window=40),
    "gemma3": Kind("f16", norms="both", norms_heads=True, window=40, ropes=(0, 1)),
    "olmo2": Kind("q4_0", norms="after", norms_heads=True, head_norms="joint"),
    "hunyuan": Kind("q8_0", norms_heads=True, head_norms="turned"),
    "hunyuan, values are keys": Kind("f16", norms_heads=True, head_norms="turned", projected="qk", values=True),
    "command r+": Kind(
        "q8_0", norm_kind="layer", parallel=True, norms_heads=True, head_norms="layer", interleaved=True
    ),
    "cohere": Kind("q8_0", norm_kind="layer", parallel=True, interleaved=True, ropes=(0, 2)),
    "granite": Kind("q4_k", "q6_k", hidden=256, forward=768, residual_scale=0.22),
    "gemma4": Kind(
        "q8_0",
        norms="both",
        norms_heads=True,
        values=True,
        projected="qk",
        output_scale=0.7,
        groups=True,
        other_window=40,
    ),
    "gemma4e": Kind(
        "q8_0", norms="both", activation="gelu_tanh", norms_heads=True, values=True, output_scale=0.7, inputs=True
    ),
    "gemma3n": Kind(
        "q8_0",
        norms="both",
        activation="gelu_tanh",
        norms_heads=True,
        values=True,
        groups=True,
        other_window=40,
        inputs=True,
        streams=4,
        cut=0.4,
    ),
    "experts": Kind("q8_0", experts=4),
    "experts beside a block": Kind("q8_0", norms="both", activation="gelu_tanh", output_scale=0.7, experts=4),
    "experts of two types": Kind("q4_k", "q6_k", hidden=256, forward=256, experts=5, residual_scale=0.22),
    "inputs and scales": Kind("f16", residual_scale=0.22, inputs=True),
    "keys as values": Kind("q8_0", norms_heads=True, values=True, projected="qk", sinks=True),
    "raw keys as values": Kind("f16", projected="qk"),
    "clamped queries, keys and values": Kind("q8_0", clamp=0.6),
    "clamped and normed": Kind("f16", clamp=0.6, norms_heads=True, values=True),
    "queries alone": Kind("q8_0", norms_heads=True, projected="q"),
    "lfm2": Kind("q8_0", recurrent="conv", norms_heads=True),
    "qwen3.5": Kind("q4_0", "q8_0", recurrent="delta", norms_heads=True),
    "jamba": Kind("q8_0", recurrent="scan", experts=4),
    "granite 4 h": Kind("f16", recurrent="mamba", residual_scale=0.22, experts=4),
    "falcon-h1": Kind("q8_0", recurrent="mamba", beside=True),
    "spans and groups": Kind("q2_k", "q8_0", hidden=256, forward=544),
}


SLOW_KINDS = ("llama", "q4_k_m", "gemma2")  # that a long prompt goes through without vector instructions, at least


def list_cases() -> list[tuple[str, str, str]]:
    slow = "a long prompt", "portable"
    cases = amounts.choose_pairs(list(KINDS), list(BATCHES), load_native().available_isas())
    wanted = [(shape, kind, isa) for kind, shape, isa in cases if amounts.is_exhaustive or (shape, isa) != slow]
    return wanted if amounts.is_exhaustive else [*wanted, *(("a long prompt", kind, "portable") for kind in SLOW_KINDS)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shape", "name", "isa"), list_cases())
def test_equal_to_the_operators_one_by_one(shape: str, name: str, isa: str) -> None:
    kind, batch = KINDS[name], make_batch(*BATCHES[shape])
    if kind.groups:
        batch = add_group(batch, kind.other_window or 1)
    if kind.recurrent:
        batch = add_states(batch)
    tables = [
        build_table(544, DIM, 10000.0, interleaved=kind.interleaved),
        build_table(544, DIM // 2, 1e6, interleaved=kind.interleaved, temperature=QueryTemperature(0.1, 64)),
        build_table(544, 0, 10000.0, interleaved=kind.interleaved),
    ]
    stream = np.random.default_rng(9).standard_normal((batch.tokens, kind.hidden)).astype(np.float32)
    results, ledgers = [], []
    for threads, run in ((1, one_by_one), (1, native_layers), (3, native_layers)):
        ctx = Context("cpu", threads=threads, isa=isa)
        made = tuple(make_layers(ctx, kind))
        layers = Layers(made, run.prepare(ctx, made))
        keys, values = make_pools(ctx, batch, None)
        states = make_states(kind, batch)
        step = StepInput(batch, tables, keys, values, states)
        summed, delta = run.run_layers(ctx, stream.copy(), layers, step)
        assert (delta is None) == (kind.output_scale != 1.0 or kind.streams > 0)
        last = summed if delta is None else delta
        arrays = [summed, last, *keys, *values, *(pool for pool in states if pool is not None)]
        results.append([array.tobytes() for array in arrays])
        ledgers.append(count_apart(ctx))
        assert np.isfinite(last).all()
        assert last.std() > 0.01
    assert results[0] == results[1] == results[2]
    assert ledgers[0] == ledgers[1] == ledgers[2]


@pytest.mark.parametrize(("name", "gated"), [("q8_0", True), ("f16", False)])
def test_the_ledger_says_whether_gate_and_up_were_activated_in_their_panels(
    cpu: Context, name: str, gated: bool
) -> None:
    """F16 comes in units of 256 columns: where these are not full, products are made whole and activated afterwards."""
    layers = prepare_layers(cpu, make_layers(cpu, Kind(name)))
    batch = make_batch([75], [0])
    keys, values = make_pools(cpu, batch, None)
    table = build_table(96, DIM, 10000.0, interleaved=False)
    run_layers(cpu, np.ones((75, HIDDEN), np.float32), layers, StepInput(batch, [table], keys, values))
    products = {f"panels {name}": 4 * LAYERS}
    if gated:
        products = {f"panels {name}": 3 * LAYERS, f"gated panels {name}": LAYERS}
    assert list_ran(cpu, "linear") == products
    assert list_ran(cpu, "activate") == {"fused silu": LAYERS}
    assert list_ran(cpu, "rms_norm") == {"fused f32": 1, "fused f32+residual": 2 * LAYERS - 1}


def test_an_activation_that_no_product_reads_is_computed(cpu: Context) -> None:
    """Clamped values go to the rotation, so no product makes its rows in passing."""
    batch, table = make_batch([75], [0]), build_table(96, DIM, 10000.0, interleaved=False)
    stream = np.random.default_rng(9).standard_normal((75, HIDDEN)).astype(np.float32)
    found = []
    for clamp in (0.6, 1e5):
        made = make_layers(cpu, Kind("q8_0", clamp=clamp))
        keys, values = make_pools(cpu, batch, "f32")
        run_layers(cpu, stream.copy(), prepare_layers(cpu, made), StepInput(batch, [table], keys, values))
        found.append(max(float(np.abs(pool).max()) for pool in values))
    assert found[0] == np.float32(0.6) < found[1]
    assert list_ran(cpu, "activate") == {"clamp+ungated": 2 * LAYERS, "fused silu": 2 * LAYERS}


def test_what_does_not_fit_is_refused(cpu: Context) -> None:
    layers = prepare_layers(cpu, make_layers(cpu, Kind()))
    batch = make_batch([1], [40])
    keys, values = make_pools(cpu, batch, None)
    table = build_table(64, DIM, 10000.0, interleaved=False)
    stream = np.ones((1, HIDDEN), np.float32)
    with pytest.raises(ValueError, match="number of k_pools is 2, expected 3"):
        run_layers(cpu, stream, layers, StepInput(batch, [table], keys[:2], values))
    with pytest.raises(ValueError, match="columns of stream is 64, expected 128"):
        run_layers(cpu, stream[:, :64].copy(), layers, StepInput(batch, [table], keys, values))
    with pytest.raises(ValueError, match=r"rope: positions\[0\] is 40, expected 0 to 31"):
        run_layers(
            cpu, stream, layers, StepInput(batch, [build_table(32, DIM, 10000.0, interleaved=False)], keys, values)
        )
    other = [keys[0], keys[1].astype(np.float32), keys[2]]
    with pytest.raises(ValueError, match="of another type"):
        run_layers(cpu, stream, layers, StepInput(batch, [table], other, values))
    longer = [keys[0], *(np.concatenate([pool, pool]) for pool in keys[1:])]
    with pytest.raises(ValueError, match="pools is of different shapes or types, expected all alike"):
        run_layers(cpu, stream, layers, StepInput(batch, [table], longer, longer))
    grouped = prepare_layers(cpu, make_layers(cpu, Kind(groups=True, other_window=9)))
    with pytest.raises(ValueError, match="layers: group is 1, expected below 1"):
        run_layers(cpu, stream, grouped, StepInput(batch, [table], keys, values))
    foreign = batch.with_groups([(batch.slots, np.full_like(batch.page_table, 7))])
    with pytest.raises(ValueError, match=r"page_table\[0, 1\] is 7, expected 0 to 1"):
        run_layers(cpu, stream, grouped, StepInput(foreign, [table], keys, values))
    fed = prepare_layers(cpu, make_layers(cpu, Kind(inputs=True)))
    batch.token_ids[:] = 7
    with pytest.raises(ValueError, match=r"layers: token_ids\[0\] is 7, expected 0 to 6"):
        run_layers(cpu, stream, fed, StepInput(batch, [table], keys, values))
    batch.slots[:] = 0
    batch.page_table[:] = 2
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is 2, expected 0 to 1"):
        run_layers(cpu, stream, layers, StepInput(batch, [table], keys, values))


@pytest.mark.parametrize("name", KINDS)
def test_every_tensor_must_fit_its_layer(cpu: Context, name: str) -> None:
    layer = describe_layers(replace(KINDS[name], forward=64))[0]
    right = make_zeros(layer, HIDDEN)
    for changed, tensor in right.items():
        shape = (*tensor.shape[:-1], tensor.shape[-1] + 32)
        wrong = right | {changed: encode("f32", shape, bytes(4 * prod(shape)))}
        said = re.escape(f"tensor {changed} has shape {shape}, expected {tensor.shape}")
        with pytest.raises(ModelError, match=said):
            layer.load(Weights(cpu, wrong), 0, HIDDEN)
        without = {part: source for part, source in right.items() if part != changed}
        with pytest.raises(ModelError, match=f"tensor {changed} is missing"):
            layer.load(Weights(cpu, without), 0, HIDDEN)


def test_inputs_must_be_there(cpu: Context) -> None:
    first = make_layers(cpu, Kind(inputs=True))[0]
    square = prepare(cpu, [make_tensor(np.random.default_rng(1), Kind(), "w.weight", (HIDDEN, HIDDEN))])
    wide = MatMul(square, "stream", "x"), Activate("silu", HIDDEN, is_gated=False, first=0)
    misplaced = replace(first, operators=(*first.operators[:-4], *wide, MatMul(square, "x", "delta")))
    with pytest.raises(ValueError, match="layers: first of the inputs is 0, expected so that 128 of 96 columns follow"):
        prepare_layers(cpu, [misplaced])


def test_what_no_layer_can_be_is_refused(cpu: Context) -> None:
    with pytest.raises(ModelError, match="activation 'clamped_swiglu' without a gate"):
        FeedForward(64, "clamped_swiglu", gated=False)
    block = describe_layers(KINDS["experts"])[0].feed_forward
    assert isinstance(block, Experts)
    with pytest.raises(ModelError, match="share another one, expected none"):
        DenseAndExperts(FeedForward(64, "silu"), block)
    with pytest.raises(ModelError, match="model has 4 heads, which its kv_heads 3 do not divide"):
        Attention(4, 3, DIM, 1.0, NO_ROPE)
    layer = make_layers(cpu, Kind())[0]
    operators = tuple(
        replace(one, heads=replace(one.heads, heads=4, kv_heads=3)) if isinstance(one, RopeAndWriteKV) else one
        for one in layer.operators
    )
    with pytest.raises(ValueError, match="layers: heads is 4, expected a multiple of the 3 key heads"):
        prepare_layers(cpu, [replace(layer, operators=operators)])
