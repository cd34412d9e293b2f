"""The weights of layers, ready to run, and what a layer's blocks do with them; `operators` says in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlxr.kernels.activate import Activation
from mlxr.kernels.gated_delta import DeltaRule
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.moe import Experts, Router
from mlxr.kernels.short_conv import Convolution
from mlxr.kernels.split_heads import HeadNorms, Projected
from mlxr.kernels.tensor import FloatArray, TensorSource

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True, eq=False)
class NormWeight:
    """A norm of rows: `weight` (columns,), for `layer` norms perhaps a `bias` (columns,), and `eps`."""

    weight: FloatArray
    eps: float
    kind: NormKind = "rms"
    bias: FloatArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """One layer's self-attention.

    `norm` stands before it, `post_norm` norms what it adds to the stream; either may be None. `qkv` is what `projected`
    names in one weight. `head_norms` norm queries and keys. Scores are multiplied by `scale`, capped by `softcap`
    and joined by `sinks` (heads,). `rope` is the number of the step's rotation table, `group` that of the batch's slots
    and page table. `gate` makes of the block's input a gate for each number, or each head, that attention gives.
    """

    norm: NormWeight | None
    qkv: LinearWeight
    output: LinearWeight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    head_norms: HeadNorms | None = None
    post_norm: NormWeight | None = None
    projected: Projected = "qkv"
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: FloatArray | None = None
    rope: int = 0
    group: int = 0
    gate: LinearWeight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MixerNorm:
    """The norm of what a recurrence gives, with a gate: see `gated_norm`. Without a weight it is the gate alone."""

    weight: FloatArray | None
    eps: float
    columns: int
    width: int
    gate_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentBlock:
    """One layer's recurrent mixer: a convolution, and perhaps a recurrence after it, whose result is normed and gated.

    `input` makes all that they read, in this order: for the delta rule queries, keys and values, the gate, betas and
    steps; for a state space the gate, its columns, and steps. `norm` and `post_norm` stand as those of attention.
    """

    norm: NormWeight | None
    input: LinearWeight
    output: LinearWeight
    conv: Convolution
    rule: DeltaRule | StateSpace | None = None
    gated_norm: MixerNorm | None = None
    post_norm: NormWeight | None = None

    @property
    def state_floats(self) -> int:
        """Numbers of a sequence's state: the convolution's, then the recurrence's."""
        return self.conv.state_floats + (0 if self.rule is None else self.rule.state_floats)


@dataclass(frozen=True, slots=True, eq=False)
class BesideBlock:
    """Attention and a recurrent mixer beside it, of one input. The norm of that is the attention's."""

    attention: AttentionBlock
    recurrent: RecurrentBlock

    @property
    def norm(self) -> NormWeight | None:
        """The norm that it begins with."""
        return self.attention.norm


MixerBlock = AttentionBlock | RecurrentBlock | BesideBlock


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardBlock:
    """One layer's feed-forward block: `up` is gate and up in one weight, or up alone, which makes as many columns as
    `down` reads; its norms stand as those of attention."""

    norm: NormWeight | None
    up: LinearWeight
    down: LinearWeight
    activation: Activation
    post_norm: NormWeight | None = None

    @property
    def is_gated(self) -> bool:
        """Whether what is activated is a gate."""
        return self.up.out_features != self.down.in_features


@dataclass(frozen=True, slots=True, eq=False)
class MixtureBlock:
    """One layer's mixture of experts. `router_weight` makes a logit for each expert.

    `shared` is a block that all tokens go through beside the experts, without norms of its own; what it makes is
    multiplied by the sigmoid of the one number that `shared_gate` makes of a token. With a `router_norm` the router
    has an input of its own, the stream normed by it.
    """

    norm: NormWeight | None
    router_weight: LinearWeight
    router: Router
    experts: Experts
    shared: FeedForwardBlock | None = None
    shared_gate: LinearWeight | None = None
    router_norm: NormWeight | None = None
    post_norm: NormWeight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BothBlock:
    """A feed-forward block and experts beside it, each with norms before and after it; `post_norm` is of their sum."""

    dense: FeedForwardBlock
    mixture: MixtureBlock
    post_norm: NormWeight

    @property
    def norm(self) -> NormWeight | None:
        """The norm that it begins with."""
        return self.dense.norm


@dataclass(frozen=True, slots=True, eq=False)
class InputsBlock:
    """What makes the inputs of all `layers`, beside the stream: an embedding of its own for each of them.

    Rows of the `table` (vocabulary, layers * features) are multiplied by `table_scale`. To these is added what
    `projection` makes of the stream, after `norm` (features,) has normed the part of each layer; the sum is multiplied
    by `scale`.
    """

    table: TensorSource
    projection: LinearWeight
    norm: NormWeight
    layers: int
    table_scale: float
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class InputBlock:
    """How a layer adds its own input to the stream, in the end.

    The stream goes through `gate` and the activation, is multiplied by the input, which are the columns of all inputs
    from `first` on, goes through `projection`, and is normed by `post_norm`, if there is one.
    """

    gate: LinearWeight
    projection: LinearWeight
    activation: Activation
    first: int
    post_norm: NormWeight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The two blocks of a layer, one after the other, or side by side (`is_parallel`) after the norm of the first.
    Either may be missing.

    What each block adds to the stream is multiplied by `residual_scale`, and the stream after both by `output_scale`.
    Before that the layer may add its own `input`; before the first layer, `inputs` makes those of all.
    """

    mixer: MixerBlock | None
    feed_forward: FeedForwardBlock | MixtureBlock | BothBlock | None
    is_parallel: bool = False
    residual_scale: float = 1.0
    output_scale: float = 1.0
    input: InputBlock | None = None
    inputs: InputsBlock | None = None

    @property
    def attention(self) -> AttentionBlock | None:
        """The attention of the layer, alone or beside a recurrent mixer."""
        mixer = self.mixer.attention if isinstance(self.mixer, BesideBlock) else self.mixer
        return mixer if isinstance(mixer, AttentionBlock) else None

    @property
    def columns(self) -> int:
        """Columns of the stream."""
        match self.mixer, self.feed_forward:
            case BesideBlock(attention), _:
                return attention.output.out_features
            case (AttentionBlock() | RecurrentBlock()) as mixer, _:
                return mixer.output.out_features
            case _, MixtureBlock(router_weight=weight) | BothBlock(mixture=MixtureBlock(router_weight=weight)):
                return weight.in_features
            case _, FeedForwardBlock(up=weight):
                return weight.in_features
            case _:
                raise ValueError("layer: has neither a mixer nor a feed-forward block, expected one of them")


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Layers that run one after another. What `payload` is only the implementation knows that made it."""

    layers: tuple[Layer, ...]
    payload: Any
