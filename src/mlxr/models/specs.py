"""What the layers of a model are, as numbers: of each the blocks, their norms and where these stand.

A family is one function from a `ModelConfig` to such layers (`families`). Which tensors a model has (`layer`), what it
keeps of each token and which operators run all follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxr.kernels.activate import Activation
from mlxr.kernels.layers.block import NormKind
from mlxr.kernels.moe import RoutingRule
from mlxr.kernels.rope import QueryTemperature, RopeScaling
from mlxr.kernels.split_heads import HeadNormKind, Projected

NormPlaces = Literal["before", "after", "both"]  # of a block: its input is normed, what it adds to the stream, or both


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation: its base, the `dim` elements of a head that it turns (0 for none), which pairs, how it is stretched.

    `has_factors`: the model's tensor of factors divides the frequencies.
    """

    theta: float
    dim: int
    interleaved: bool
    scaling: RopeScaling | None = None
    temperature: QueryTemperature | None = None
    has_factors: bool = True


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a layer: their kind, `eps`, whether they have a bias, and where they stand.

    `feed_forward` is what tensors call the one of the second block's input.
    """

    eps: float
    kind: NormKind = "rms"
    bias: bool = False
    places: NormPlaces = "before"
    feed_forward: str = "ffn_norm"


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention. With a `window` w, position p sees p - w + 1 to p; `scale` and `softcap` are those of scores.

    `norms_values`: value heads are normed, too, without a weight. A layer that `reads` another one's keys and values,
    which stands before it, projects queries alone. With `sinks` each head has a score more, which has no value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    softcap: float | None = None
    head_norms: HeadNormKind | None = None
    projected: Projected = "qkv"
    qkv_bias: bool = False
    output_bias: bool = False
    norms_values: bool = False
    reads: int | None = None
    sinks: bool = False
    gated: bool = False  # each number that it gives, by the sigmoid of one that the input makes


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A convolution of `channels` channels over the last `taps` inputs, with gates before and after it (LFM2)."""

    channels: int
    taps: int

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps of a sequence."""
        return (self.taps - 1) * self.channels


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net: a convolution of queries, keys and values, then the delta rule, whose heads are normed.

    With `tiled` value head h reads key head h % key_heads, else h // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.results

    @property
    def results(self) -> int:
        """Columns of what the delta rule gives, and of its gate."""
        return self.value_heads * self.value_dim

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps of a sequence."""
        return (self.taps - 1) * self.channels + self.results * self.key_dim + self.value_heads


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2: a convolution with a bias of its columns, B and C, then its recurrence, which is gated, and then normed
    in `groups` groups, if it is `normed`."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    normed: bool = True

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.results + 2 * self.groups * self.state_dim

    @property
    def results(self) -> int:
        """Columns of what the recurrence gives, and of its gate."""
        return self.heads * self.head_dim

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps of a sequence."""
        return (self.taps - 1) * self.channels + self.results * self.state_dim + self.heads


Recurrence = ShortConv | GatedDelta | Mamba2


@dataclass(frozen=True, slots=True)
class Beside:
    """Attention and a recurrent mixer beside it, of one input, which both add to the stream (Falcon-H1)."""

    attention: Attention
    recurrence: Recurrence


Mixer = Attention | Recurrence | Beside


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward block of `features` features, with a gate or without."""

    features: int
    activation: Activation
    bias: bool = False
    gated: bool = True

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the products that read its input."""
        return ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of `experts` feed-forward blocks of `features` features, of which the rule chooses for each token.

    `router_bias` is added to the router's logits, `choice_bias` to scores for the choice alone, and shares are
    multiplied by `expert_scales`. All tokens go through a block of `shared_features`, too, if these are not 0, and
    with `shared_gate` a number of each token says how much of it counts. `bias`: that of the experts' products.
    """

    experts: int
    features: int
    activation: Activation
    rule: RoutingRule
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    choice_bias: bool = False
    expert_scales: bool = False
    shared_features: int = 0
    shared_gate: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the products that read an expert's input."""
        return ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)


@dataclass(frozen=True, slots=True)
class Both:
    """A feed-forward block and a mixture of experts beside it, both of the stream: each is normed before and after it
    alone, as is their sum, and the router's input (Gemma 4)."""

    dense: FeedForward
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What results of products are multiplied by in folders of Falcon-H1, where other files have it in the weights.

    `attention_in` and `recurrent_in` multiply what the mixers read, and `keys` those of attention besides; `parts` are
    those of Mamba-2's gate, its columns, B, C and steps; `gate` and `down` are of the feed-forward block.
    """

    embedding: float = 1.0
    logits: float = 1.0
    attention_in: float = 1.0
    keys: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0
    parts: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What every layer gets of each token besides the stream: `features` of its own, which it adds in the end.

    They are the sum, times `scale`, of the token's row in a table, times `table_scale`, and of a product of its
    embedding, after a norm with `eps`. By them the layer multiplies what the activation makes of a product of the
    stream.
    """

    features: int
    activation: Activation
    table_scale: float
    scale: float
    eps: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its two blocks after one another, or side by side after one norm; or one block alone."""

    mixer: Mixer | None
    feed_forward: FeedForward | Mixture | Both | None
    norms: Norms
    is_parallel: bool = False
    residual_scale: float = 1.0
    scales_output: bool = False  # by a number of its own
    inputs: LayerInputs | None = None  # the same in all layers

    @property
    def attention(self) -> Attention | None:
        """The layer's attention, alone or beside a recurrent mixer."""
        mixer = self.mixer.attention if isinstance(self.mixer, Beside) else self.mixer
        return mixer if isinstance(mixer, Attention) else None

    @property
    def recurrence(self) -> Recurrence | None:
        """The layer's recurrent mixer, alone or beside attention."""
        mixer = self.mixer.recurrence if isinstance(self.mixer, Beside) else self.mixer
        return None if isinstance(mixer, Attention) else mixer

    @property
    def mixture(self) -> Mixture | None:
        """The layer's experts, if it has some."""
        block = self.feed_forward.mixture if isinstance(self.feed_forward, Both) else self.feed_forward
        return block if isinstance(block, Mixture) else None
