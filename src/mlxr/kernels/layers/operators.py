"""The operators of a layer, in their order: said here once, for whoever runs, counts or measures them.

Operators read and write registers. `stream` (T, hidden) is the residual stream and `delta` what is still to be added to
it, which the next norm of the stream does in passing. `normed` is what blocks begin with, `x` what they pass on from
operator to operator, `kept` what it keeps for later ones, and `other` what a block beside another one adds to the
stream. `chosen` and `shares` (T, used) are the experts of each token and their shares. `inputs` (T, layers * features)
is what each layer gets of each token besides the stream, where a model has such embeddings (Gemma 4 E2B and E4B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mlxr.kernels.activate import Activation
from mlxr.kernels.gated_delta import DeltaRule
from mlxr.kernels.layers.block import (
    AttentionBlock,
    BesideBlock,
    BothBlock,
    FeedForwardBlock,
    InputBlock,
    InputsBlock,
    Layer,
    MixerBlock,
    MixerNorm,
    MixtureBlock,
    NormWeight,
    RecurrentBlock,
)
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.moe import Experts, Router
from mlxr.kernels.short_conv import Convolution
from mlxr.kernels.tensor import TensorSource

Register = Literal["stream", "normed", "x", "delta", "other", "inputs", "kept"]
Routes = Literal["chosen", "shares"]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Norm `source` into `target`, each of so many `parts` of a row alone; to the stream its delta is added first."""

    weight: NormWeight
    source: Register
    target: Register
    parts: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """Add the delta to the stream, where no norm does it, and multiply the sum by `factor`."""

    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Multiply `source` by a weight, into `target`."""

    weight: LinearWeight
    source: Register
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class SumRanks:
    """Add up what all ranks have in `target`, each of which multiplied by its share of a weight's inputs."""

    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class SplitHeads:
    """Make queries of what `x` projected, and write keys and values into their pages."""

    block: AttentionBlock


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """Let the queries in `x` attend."""

    block: AttentionBlock


@dataclass(frozen=True, slots=True, eq=False)
class Activate:
    """Apply the activation to `x`: to the gate before `features` others, or to these themselves.

    With `first` they are then multiplied by the columns of `inputs` from that one on.
    """

    kind: Activation
    features: int
    is_gated: bool
    first: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Multiply `target` by a number."""

    factor: float
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Add `other` to `target`, and multiply the sum by `factor`."""

    target: Register = "delta"
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Choose of `experts` those of each token by the logits in `x`, into `chosen` and `shares`."""

    router: Router
    experts: Experts


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Send `source` through the `used` experts chosen for each token, and their sum into `target`."""

    experts: Experts
    used: int
    source: Register
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class GateRows:
    """Multiply each token of `target` by the sigmoid of the one number in `x`."""

    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Look up the rows of a table that the ids of the tokens name, into `target`."""

    table: TensorSource
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class GateHeads:
    """Multiply `x` by the sigmoid of what was kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Convolve:
    """Convolve what was kept, from column `first` on, into `x`; its state begins at `at` of the layer's."""

    conv: Convolution
    first: int = 0
    at: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Recur:
    """Run the recurrence over `x`; what was kept has, from column `first` on, what it forgets and takes in by."""

    rule: DeltaRule | StateSpace
    first: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """Norm `x`, gated by what was kept from column `first` on."""

    norm: MixerNorm
    first: int


Operator = (
    Norm | Sum | Product | SumRanks | SplitHeads | Attend | Activate | Scale | Join | Rows | Route | Mix | GateRows
    | GateHeads | Convolve | Recur | GatedNorm
)  # fmt: skip


def list_operators(layer: Layer) -> tuple[Operator, ...]:
    """All operators of a layer."""
    factor, total = layer.residual_scale, layer.output_scale
    before = () if layer.inputs is None else tuple(make_inputs(layer.inputs))
    last = () if total == 1.0 else (Sum(total),)
    if layer.input is not None:
        last = (*_take_input(layer.input), *last)
    if layer.is_parallel:
        mixer, feed_forward = layer.mixer, layer.feed_forward
        assert mixer is not None
        assert feed_forward is not None
        first, source = _begin(mixer.norm)
        return (
            *before,
            *first,
            *_mix_tokens(mixer, source, "delta", factor),
            *_feed_forward(feed_forward, source, "other", factor),
            Join(),
            *last,
        )
    return (*before, *_one_after_the_other(layer.mixer, layer.feed_forward, factor), *last)


def _one_after_the_other(
    mixer: MixerBlock | None, feed_forward: FeedForwardBlock | MixtureBlock | BothBlock | None, factor: float
) -> Iterator[Operator]:
    if mixer is not None:
        first, source = _begin(mixer.norm)
        yield from first
        yield from _mix_tokens(mixer, source, "delta", factor)
    if feed_forward is not None:
        first, source = _begin(feed_forward.norm)
        yield from first
        yield from _feed_forward(feed_forward, source, "delta", factor)


def make_inputs(block: InputsBlock) -> Iterator[Operator]:
    """List what makes the inputs of all layers, before the first one."""
    yield Rows(block.table, "other")
    yield Scale(block.table_scale, "other")
    yield Product(block.projection, "stream", "x")
    yield Norm(block.norm, "x", "inputs", block.layers)
    yield Join("inputs", block.scale)


def _take_input(block: InputBlock) -> Iterator[Operator]:
    """What a layer adds to the stream of its own input."""
    yield Sum()
    yield Product(block.gate, "stream", "x")
    yield Activate(block.activation, block.gate.out_features, is_gated=False, first=block.first)
    yield from _end(block.projection, block.post_norm, "delta", 1.0)


def _begin(norm: NormWeight | None) -> tuple[tuple[Operator, ...], Register]:
    """How a block begins, and where its input is then."""
    if norm is None:
        return (Sum(),), "stream"
    return (Norm(norm, "stream", "normed"),), "normed"


def _mix_tokens(block: MixerBlock, source: Register, target: Register, factor: float) -> Iterator[Operator]:
    if isinstance(block, BesideBlock):
        yield from _mix_tokens(block.recurrent, source, target, factor)
        yield from _mix_tokens(block.attention, source, "other", factor)
        yield Join(target)
        return
    if isinstance(block, RecurrentBlock):
        yield Product(block.input, source, "kept")
        yield from _recur(block)
    else:
        if block.gate is not None:
            yield Product(block.gate, source, "kept")
        yield Product(block.qkv, source, "x")
        yield SplitHeads(block)
        yield Attend(block)
        if block.gate is not None:
            yield GateHeads()
    yield from _end(block.output, block.post_norm, target, factor)


def _recur(block: RecurrentBlock) -> Iterator[Operator]:
    conv, rule, norm = block.conv, block.rule, block.gated_norm
    gate_first = norm is not None and norm.gate_first
    gates = 0 if norm is None else norm.columns
    yield Convolve(conv, gates if gate_first else 0)
    if rule is not None:
        yield Recur(rule, conv.inputs + gates, conv.state_floats)
    if norm is not None:
        yield GatedNorm(norm, 0 if gate_first else conv.inputs)


def _feed_forward(
    block: FeedForwardBlock | MixtureBlock | BothBlock, source: Register, target: Register, factor: float
) -> Iterator[Operator]:
    if isinstance(block, BothBlock):
        yield from _both(block, source, target, factor)
        return
    if isinstance(block, MixtureBlock):
        yield from _mixture(block, source, target, factor)
        return
    yield Product(block.up, source, "x")
    yield Activate(block.activation, block.down.in_features, block.is_gated)
    yield from _end(block.down, block.post_norm, target, factor)


def _both(block: BothBlock, source: Register, target: Register, factor: float) -> Iterator[Operator]:
    """The block of all tokens, then the experts. Nothing is left to add to the stream when it is normed again."""
    mixture = block.mixture
    assert mixture.router_norm is not None
    assert mixture.norm is not None
    assert mixture.post_norm is not None
    yield from _feed_forward(block.dense, source, "other", 1.0)
    yield Norm(mixture.router_norm, "stream", "normed")
    yield Product(mixture.router_weight, "normed", "x")
    yield Route(mixture.router, mixture.experts)
    yield Norm(mixture.norm, "stream", "normed")
    yield Mix(mixture.experts, mixture.router.rule.used, "normed", "x")
    yield Norm(mixture.post_norm, "x", "x")
    yield Join("x")
    yield Norm(block.post_norm, "x", target)
    if factor != 1.0:
        yield Scale(factor, target)


def _mixture(block: MixtureBlock, source: Register, target: Register, factor: float) -> Iterator[Operator]:
    """The chosen experts, and after them the one that all tokens have, whose result is added last."""
    yield Product(block.router_weight, source, "x")
    yield Route(block.router, block.experts)
    yield Mix(block.experts, block.router.rule.used, source, target)
    if block.shared is not None:
        yield from _feed_forward(block.shared, source, "other", 1.0)
        if block.shared_gate is not None:
            yield Product(block.shared_gate, source, "x")
            yield GateRows("other")
        yield Join()
    if factor != 1.0:
        yield Scale(factor, target)


def _end(weight: LinearWeight, norm: NormWeight | None, target: Register, factor: float) -> Iterator[Operator]:
    """How a block ends: in what it adds to the stream."""
    made: Register = target if norm is None else "x"
    yield Product(weight, "x", made)
    if weight.is_share:
        yield SumRanks(made)
    if norm is not None:
        yield Norm(norm, "x", target)
    if factor != 1.0:
        yield Scale(factor, target)


def count_weight_bytes(operator: Operator) -> int:
    """Bytes that the weights of an operator take in memory."""
    match operator:
        case Norm(weight) | Product(weight):
            return weight.nbytes
        case SplitHeads(block) if block.head_norms is not None:
            return block.head_norms.q.nbytes + block.head_norms.k.nbytes
        case Mix(experts):
            return experts.held_bytes
        case Rows(table):
            return table.nbytes
        case Convolve(conv):
            return conv.nbytes
        case Recur(rule):
            return rule.nbytes
        case GatedNorm(norm):
            return 0 if norm.weight is None else norm.weight.nbytes
        case _:
            return 0


def count_step_bytes(operator: Operator) -> int:
    """Bytes of the weights that an operator reads in any step; of tables and experts it is the tokens that say."""
    return 0 if isinstance(operator, Rows | Mix) else count_weight_bytes(operator)


def count_token_macs(operator: Operator) -> int:
    """Multiply-adds of an operator's products for each token."""
    macs = sum(weight.in_features * weight.out_features for weight in list_weights(operator))
    return macs * operator.used // len(operator.experts.up) if isinstance(operator, Mix) else macs


def list_weights(operator: Operator) -> tuple[LinearWeight, ...]:
    """The weights that an operator multiplies by."""
    match operator:
        case Product(weight):
            return (weight,)
        case Mix(experts):
            return (*experts.up, *experts.down)
        case _:
            return ()
