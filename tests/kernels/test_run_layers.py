"""Layers in one native call: the same bits and the same ledger as the operators one by one, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import amounts
import numpy as np
import pytest
from numpy.typing import NDArray
from ran import count_apart, list_ran

from mlxr.formats import TensorSource, encode_tensor
from mlxr.kernels.activate import Activation
from mlxr.kernels.attend import KVType, allocate_pools
from mlxr.kernels.context import Context, load_native
from mlxr.kernels.gated_delta import DeltaRule
from mlxr.kernels.layers import (
    AttentionBlock,
    BesideBlock,
    BothBlock,
    FeedForwardBlock,
    InputBlock,
    InputsBlock,
    Layer,
    Layers,
    MixerNorm,
    MixtureBlock,
    NormWeight,
    RecurrentBlock,
    StepInput,
    make_attention,
    make_beside,
    make_both,
    make_feed_forward,
    make_input,
    make_inputs,
    make_mixture,
    make_recurrent,
    prepare_layers,
    run_layers,
)
from mlxr.kernels.layers import cpu as native_layers
from mlxr.kernels.layers import reference as one_by_one
from mlxr.kernels.layers.block import NormKind
from mlxr.kernels.linear import LinearWeight, prepare
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.moe import RoutingRule, make_experts, make_router
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import QueryTemperature, build_table
from mlxr.kernels.short_conv import Convolution
from mlxr.kernels.split_heads import HeadNormKind, HeadNorms, Projected

HIDDEN, HEADS, KV_HEADS, DIM, PAGE, INPUTS = 128, 4, 2, 64, 32, 32
LAYERS = 3
Floats = NDArray[np.float32]


@dataclass
class Kind:
    """What layers may differ in."""

    weight_type: str = "q8_0"
    down_type: str | None = None  # else as the others
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
    norms: str = "before"  # both, after
    norm_kind: NormKind = "rms"
    head_norms: HeadNormKind = "each"
    values: bool = False  # are normed, too
    projected: Projected = "qkv"
    parallel: bool = False
    residual_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None
    sinks: bool = False
    ropes: tuple[int, ...] = (0,)  # numbers of the layers' tables, in turn
    inputs: bool = False  # what layers get of each token besides the stream
    experts: int = 0  # beside one block that all tokens have
    recurrent: str = ""  # conv, delta, mamba: the mixer of the first layer and the last
    beside: bool = False  # attention in all layers, then


@cache
def encode(type_name: str, shape: tuple[int, ...], values: bytes) -> TensorSource:
    """All cases have the same few weights, which some types take longer to encode than to multiply with."""
    array = np.frombuffer(values, np.float32).reshape(shape)
    return TensorSource("w", type_name, shape, encode_tensor(type_name, array))


def make_weight(
    ctx: Context, rng: np.random.Generator, kind: Kind, columns: int, *rows: int, weight_type: str | None = None
) -> LinearWeight:
    name = weight_type or kind.weight_type

    def source(count: int) -> TensorSource:
        values = (rng.standard_normal((count, columns)) / np.sqrt(columns)).astype(np.float32)
        return encode(name, values.shape, values.tobytes())

    biases = [rng.standard_normal(count).astype(np.float32) if kind.bias else None for count in rows]
    return prepare(ctx, [source(count) for count in rows], biases)


def make_layers(ctx: Context, kind: Kind, seed: int = 5) -> list[Layer]:
    rng = np.random.default_rng(seed)
    hidden, forward = kind.hidden, kind.forward

    def norm(length: int) -> Floats:
        return rng.uniform(0.5, 1.5, length).astype(np.float32)

    def norm_at(place: str) -> NormWeight | None:
        if kind.norms not in (place, "both"):
            return None
        bias = norm(hidden) if kind.norm_kind == "layer" else None
        return NormWeight(norm(hidden), 1e-5, kind.norm_kind, bias)

    def norm_heads() -> HeadNorms | None:
        if not kind.norms_heads:
            return None
        q, k = (DIM, DIM) if kind.head_norms == "each" else (HEADS * DIM, KV_HEADS * DIM)
        return HeadNorms(norm(q), norm(k), 1e-5, kind.values, kind.head_norms)

    def read_inputs() -> InputsBlock:
        columns = LAYERS * INPUTS
        values = rng.standard_normal((7, columns)).astype(np.float32)
        table = TensorSource("t", "q8_0", values.shape, encode_tensor("q8_0", values))
        projection = make_weight(ctx, rng, kind, hidden, columns)
        return make_inputs(table, projection, NormWeight(norm(INPUTS), 1e-3), table_scale=0.6, scale=0.7)

    def read_input(index: int) -> InputBlock:
        gate, projection = make_weight(ctx, rng, kind, hidden, INPUTS), make_weight(ctx, rng, kind, INPUTS, hidden)
        return make_input(gate, projection, kind.activation, index * INPUTS, norm_at("after"))

    def set_beside(dense: FeedForwardBlock, gate_up: LinearWeight, down: LinearWeight) -> BothBlock:
        """A block and experts, all with norms of their own."""
        mixture = mix_experts(norm_at("before"), gate_up, down)
        norms = [NormWeight(norm(hidden), 1e-5) for _ in range(3)]
        return make_both(dense, replace(mixture, shared=None, shared_gate=None), norms[0], norms[1], norms[2])

    def mix_experts(before: NormWeight | None, gate_up: LinearWeight, down: LinearWeight) -> MixtureBlock:
        """Experts beside one that all tokens have, with a gate."""
        ups = [make_weight(ctx, rng, kind, hidden, forward, forward) for _ in range(kind.experts)]
        downs = [make_weight(ctx, rng, kind, forward, hidden, weight_type=kind.down_type) for _ in ups]
        router = make_router(kind.experts, RoutingRule(2, "sigmoid", renormalises=True), norm(kind.experts))
        return make_mixture(
            before,
            make_weight(ctx, rng, kind, hidden, kind.experts, weight_type="f32"),
            router,
            make_experts(ctx, ups, downs, kind.activation),
            make_feed_forward(None, gate_up, down, kind.activation),
            make_weight(ctx, rng, kind, hidden, 1, weight_type="f32"),
        )

    def make_mixer(before: NormWeight | None) -> RecurrentBlock:
        """Inputs come in the order in which a block has them: with a gate of Mamba-2 before all others."""
        gain, taps = rng.uniform(0.5, 1.5, 32).astype(np.float32), rng.standard_normal((3, 192)).astype(np.float32)
        rates, bias, skip = (rng.uniform(0.1, 2, 4).astype(np.float32) for _ in range(3))
        match kind.recurrent:
            case "conv":
                conv, rule, gated, counts = Convolution(taps, None, "gated"), None, None, [3 * 192]
            case "delta":
                conv = Convolution(np.ascontiguousarray(taps[:, :128]), None, "silu")
                rule = DeltaRule(1, 4, 32, 16, -rates, bias)
                gated, counts = MixerNorm(gain[:16], 1e-5, 64, 16, gate_first=False), [128, 64, 4, 4]
            case _:
                conv = Convolution(taps, norm(192), "silu")
                rule = StateSpace(4, 32, 2, 16, -rates, bias, skip)
                gated, counts = MixerNorm(np.tile(gain, 4), 1e-5, 128, 64, gate_first=True), [128, 192, 4]
        made = conv.channels if rule is None else rule.results
        first, last = make_weight(ctx, rng, kind, hidden, *counts), make_weight(ctx, rng, kind, made, hidden)
        return make_recurrent(before, first, last, conv, rule, gated, norm_at("after"))

    layers = []
    for index in range(LAYERS):
        attention = make_attention(
            norm_at("before"),
            make_weight(ctx, rng, kind, hidden, *[HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM][: len(kind.projected)]),
            make_weight(ctx, rng, kind, HEADS * DIM, hidden),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            head_norms=norm_heads(),
            post_norm=norm_at("after"),
            projected=kind.projected,
            softcap=kind.softcap,
            sinks=norm(HEADS) if kind.sinks else None,
            rope=kind.ropes[index % len(kind.ropes)],
            sliding_window=kind.other_window if kind.groups and index % 2 else kind.window,
            group=index % 2 if kind.groups else 0,
        )
        gate_up = make_weight(ctx, rng, kind, hidden, *[forward, forward][: 2 if kind.gated else 1])
        down = make_weight(ctx, rng, kind, forward, hidden, weight_type=kind.down_type)
        before = None if kind.parallel else norm_at("before")
        feed_forward: FeedForwardBlock | MixtureBlock | BothBlock
        if kind.experts and kind.norms == "both":
            dense = make_feed_forward(before, gate_up, down, kind.activation, norm_at("after"))
            feed_forward = set_beside(dense, gate_up, down)
        elif kind.experts:
            feed_forward = mix_experts(before, gate_up, down)
        else:
            feed_forward = make_feed_forward(before, gate_up, down, kind.activation, norm_at("after"))
        mixer: AttentionBlock | RecurrentBlock | BesideBlock = attention
        if kind.recurrent and kind.beside:
            mixer = make_beside(attention, make_mixer(None))
        elif kind.recurrent and index != 1:
            mixer = make_mixer(norm_at("before"))
        own = read_input(index) if kind.inputs else None
        inputs = read_inputs() if kind.inputs and not index else None
        scales = kind.residual_scale, kind.output_scale
        layers.append(Layer(mixer, feed_forward, kind.parallel, *scales, own, inputs))
    return layers


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
    """A second group of layers, with pages of its own, of which those that nobody sees are gone."""
    count = batch.page_table.size
    pages = np.random.default_rng(4).permutation(count).reshape(batch.page_table.shape).astype(np.int32)
    owners = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
    slots = (pages[owners, batch.positions // PAGE] * PAGE + batch.positions % PAGE).astype(np.int32)
    for row, start in zip(pages, batch.positions[batch.query_starts[:-1]], strict=True):
        row[: max(0, start - window + 1) // PAGE] = -1
    return batch.with_groups([(slots, pages)])


def add_states(batch: RaggedBatch) -> RaggedBatch:
    """Slots in disorder for the states of all sequences; that of one begins with zeros."""
    slots = np.random.default_rng(6).permutation(2 * batch.sequences).astype(np.int32).reshape(2, -1)
    reads, writes = slots.copy()
    reads[batch.sequences // 2] = -1
    return batch.with_states(reads, writes)


def make_states(layers: Sequence[Layer], batch: RaggedBatch) -> list[Floats | None]:
    """The pools of recurrent layers."""
    rng, states = np.random.default_rng(8), []
    for layer in layers:
        mixer = layer.mixer.recurrent if isinstance(layer.mixer, BesideBlock) else layer.mixer
        shape = (2 * batch.sequences, mixer.state_floats) if isinstance(mixer, RecurrentBlock) else None
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
    "q4_k_m": Kind("q4_k", "q6_k", hidden=256, forward=768),
    "two groups of layers": Kind(groups=True, other_window=40),
    "gemma2": Kind("q8_0", norms="both", activation="gelu_tanh", softcap=5.0, groups=True, other_window=40),
    "gemma3": Kind("f16", norms="both", norms_heads=True, window=40, ropes=(0, 1)),
    "olmo2": Kind("q4_0", norms="after", norms_heads=True, head_norms="joint"),
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
    "experts": Kind("q8_0", experts=4),
    "experts beside a block": Kind("q8_0", norms="both", activation="gelu_tanh", output_scale=0.7, experts=4),
    "experts of two types": Kind("q4_k", "q6_k", hidden=256, forward=256, experts=5, residual_scale=0.22),
    "inputs and scales": Kind("f16", residual_scale=0.22, inputs=True),
    "keys as values": Kind("q8_0", norms_heads=True, values=True, projected="qk", sinks=True),
    "raw keys as values": Kind("f16", projected="qk"),
    "queries alone": Kind("q8_0", norms_heads=True, projected="q"),
    "lfm2": Kind("q8_0", recurrent="conv", norms_heads=True),
    "qwen3.5": Kind("q4_0", "q8_0", recurrent="delta", norms_heads=True),
    "granite 4 h": Kind("f16", recurrent="mamba", residual_scale=0.22, experts=4),
    "falcon-h1": Kind("q8_0", recurrent="mamba", beside=True),
    "spans and groups": Kind("q2_k", "q8_0", hidden=256, forward=544),
}


SLOW_KINDS = ("llama", "q4_k_m", "gemma2")  # that a long prompt goes through without vector instructions, at least


def list_cases() -> list[tuple[str, str, str]]:
    slow = "a long prompt", "portable"
    cases = amounts.choose_pairs(list(KINDS), list(BATCHES), load_native().available_isas())
    wanted = [(shape, kind, isa) for kind, shape, isa in cases if amounts.is_thorough or (shape, isa) != slow]
    return wanted if amounts.is_thorough else [*wanted, *(("a long prompt", kind, "portable") for kind in SLOW_KINDS)]


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
        states = make_states(made, batch)
        step = StepInput(batch, tables, keys, values, states)
        summed, delta = run.run_layers(ctx, stream.copy(), layers, step)
        assert (delta is None) == (kind.output_scale != 1.0)
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


def test_blocks_must_fit_together(cpu: Context) -> None:
    rng = np.random.default_rng(1)
    qkv = make_weight(cpu, rng, Kind(), HIDDEN, HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    output = make_weight(cpu, rng, Kind(), HEADS * DIM, HIDDEN)
    norm, short = NormWeight(np.ones(HIDDEN, np.float32), 1e-5), NormWeight(np.ones(64, np.float32), 1e-5)
    with pytest.raises(ValueError, match="columns of qkv is 512, expected 768"):
        make_attention(norm, qkv, output, heads=8, kv_heads=2, head_dim=DIM)
    with pytest.raises(ValueError, match="length of norm is 64, expected 128"):
        make_attention(short, qkv, output, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    with pytest.raises(ValueError, match="columns of gate and up is 512, expected 256"):
        make_feed_forward(norm, qkv, make_weight(cpu, rng, Kind(), HIDDEN, HIDDEN), "silu")
    square = make_weight(cpu, rng, Kind(), HIDDEN, HIDDEN)
    table = TensorSource("t", "f32", (2, 96), np.zeros(768, np.uint8))
    with pytest.raises(ValueError, match="layer_inputs: columns of table t is 96, expected 128"):
        make_inputs(table, square, short, table_scale=1.0, scale=1.0)
    table, odd = TensorSource("t", "f32", (2, 128), np.zeros(1024, np.uint8)), NormWeight(np.ones(96, np.float32), 1e-5)
    with pytest.raises(ValueError, match="layer_inputs: length of norm is 96, expected a divisor of the 128 columns"):
        make_inputs(table, square, odd, table_scale=1.0, scale=1.0)
    with pytest.raises(ValueError, match="layer_input: columns of gate is 512, expected 128"):
        make_input(qkv, square, "silu", 0)
    misplaced = replace(make_layers(cpu, Kind(inputs=True))[0], input=make_input(square, square, "silu", 0))
    with pytest.raises(ValueError, match="layers: first of the inputs is 0, expected so that 128 of 96 columns follow"):
        prepare_layers(cpu, [misplaced])
    with pytest.raises(ValueError, match="activation is 'clamped_swiglu', expected a kind without a gate"):
        make_feed_forward(norm, square, square, "clamped_swiglu")


def test_experts_beside_a_block_have_norms_and_nothing_shared(cpu: Context) -> None:
    both = make_layers(cpu, KINDS["experts beside a block"])[0].feed_forward
    assert isinstance(both, BothBlock)
    assert both.mixture.router_norm is not None
    norms = (both.mixture.router_norm, both.post_norm, both.post_norm)
    short = NormWeight(np.ones(64, np.float32), 1e-5)
    for at in range(3):
        given = [short if index == at else norm for index, norm in enumerate(norms)]
        with pytest.raises(ValueError, match="both: length of norm is 64, expected 128"):
            make_both(both.dense, both.mixture, *given)
    for dense, mixture in (
        (replace(both.dense, norm=None), both.mixture),
        (replace(both.dense, post_norm=None), both.mixture),
        (both.dense, replace(both.mixture, norm=None)),
    ):
        with pytest.raises(ValueError, match="both: norms is None, expected one before and after each block"):
            make_both(dense, mixture, *norms)
    with pytest.raises(ValueError, match="both: shared is a block, expected none"):
        make_both(both.dense, replace(both.mixture, shared=both.dense), *norms)
