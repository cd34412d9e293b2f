"""A layer as the list of its operators: data that NumPy, C++ and GPU implementations execute, and others count.

Operators read and write registers:
- `stream` (T, hidden): the residual stream, and `delta`: what is still to be added to it, by its next norm.
- `normed`: the input of a block; `turned`: the same, rotated, for weights that are rotated.
- `x`: the result that operators of a block pass on; `kept`: a result that later ones need.
- `other`: what a parallel block adds to the stream.
- `steps`: step sizes of the selective scan, by which its states forget.
- `chosen` and `shares` (T, used): the experts of each token and their shares.
- `inputs` (T, layers * features): embeddings of each token for each layer, in models that have them (Gemma 4 E2B, E4B).
- `streams` (T, count * hidden) and `gains`: in a model with several parallel residual streams, these streams, and the
  factors by which each takes what a block makes. `stream` is then the input of the first layer and the output of the
  last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from mlxr.core.frozen import frozen
from mlxr.kernels.activate import Activation
from mlxr.kernels.elementwise import Hadamard
from mlxr.kernels.embed import Ngrams
from mlxr.kernels.latent import Parts
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.lora import AdapterRows, choose_rows
from mlxr.kernels.moe import Experts, Router
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.recurrent import Convolution, DeltaRule, SelectiveScan, StateSpace
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.rope_and_write_kv import HeadNorms, Projected
from mlxr.kernels.tensor import FloatArray, PoolArray, TensorSource

Register = Literal["stream", "normed", "x", "delta", "other", "inputs", "kept", "turned", "streams", "gains", "steps"]
Routes = Literal["chosen", "shares"]
NormKind = Literal["rms", "layer"]


@frozen(eq=False)
class NormWeight:
    """The weight of a norm of rows."""

    weight: FloatArray  # (columns,)
    eps: float  # added to the variance
    kind: NormKind = "rms"
    bias: FloatArray | None = None  # (columns,), for layer norms

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@frozen(eq=False)
class MixerNorm:
    """The gated norm of a recurrence's results, see `gated_norm`. Without a weight it is only the gate."""

    weight: FloatArray | None
    eps: float
    columns: int
    width: int
    gate_first: bool


@frozen(eq=False)
class Heads:
    """The heads of a layer's attention, and how they attend."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of scores
    norms: HeadNorms | None = None  # norms of queries and keys
    projected: Projected = "qkv"  # the parts that the product before makes
    window: int | None = None  # position p sees p - window + 1 to p
    symmetric: bool = False  # positions also see later ones, as far as earlier ones
    whole_pictures: bool = False  # tokens see as far as the batch's `ends` say
    softcap: float | None = None  # cap of scores
    sinks: FloatArray | None = None  # (heads,): an additional score of each head, without a value
    rope: int = 0  # number of the step's rotation table
    group: int = 0  # number of the batch's slots and page table
    value_dim: int | None = None  # values are the last `value_dim` numbers of the keys
    biases: FloatArray | None = None  # (heads, 2n + 1): added to scores, see `attend`
    chunked: bool = False  # position p sees positions up to itself in its chunk of `window`

    @property
    def value_columns(self) -> int:
        """The number of columns of attention's result."""
        return self.heads * (self.value_dim or self.head_dim)


@frozen(eq=False)
class Norm:
    """Norm `source` into `target`, each of the `parts` of a row by itself; they share a weight or have one each.

    If the source is the stream, its delta is added first.
    """

    weight: NormWeight
    source: Register
    target: Register
    parts: int = 1


@frozen(eq=False)
class AddResidual:
    """Add the delta to the stream, if no norm does, and multiply the sum by `factor`."""

    factor: float = 1.0


@frozen(eq=False)
class MatMul:
    """Multiply `source` by a weight, into `target`."""

    weight: LinearWeight
    source: Register
    target: Register


@frozen(eq=False)
class Turn:
    """Rotate `source` into `target`, for weights that are rotated."""

    rotation: Hadamard
    source: Register
    target: Register


@frozen(eq=False)
class AllReduce:
    """Add up `target` over all ranks, each of which multiplied by its share of a weight's inputs."""

    target: Register


@frozen(eq=False)
class RopeAndWriteKV:
    """Make queries of the projection in `x`, and write its keys and values into their pages."""

    heads: Heads


@frozen(eq=False)
class RopeAndWriteLatent:
    """Make keys of `kept` and write them into their pages; rotate the queries in `x`."""

    heads: Heads
    norm: NormWeight


@frozen(eq=False)
class ProjectParts:
    """Multiply each part of `source` by its own weight; a part's last `passed` numbers are put before its result."""

    parts: Parts
    passed: int = 0
    source: Register = "x"
    target: Register = "x"


@frozen(eq=False)
class Attend:
    """Let the queries in `x` attend."""

    heads: Heads


@frozen(eq=False)
class Activate:
    """Apply the activation to `x`: to the gates, which come before the `features` that they gate, or to all of it.

    With `first`, it is then multiplied by the columns of `inputs` from that one on. `parameters` are numbers of the
    layer that some activations need.
    """

    kind: Activation
    features: int
    is_gated: bool
    first: int | None = None
    parameters: tuple[float, ...] = ()


@frozen(eq=False)
class Scale:
    """Multiply `target` by a number; with a softcap, cap the result by tanh, as `scale` does."""

    factor: float
    target: Register
    softcap: float | None = None


@frozen(eq=False)
class Add:
    """Add `source` to `target`, and multiply the sum by `factor`."""

    target: Register = "delta"
    factor: float = 1.0
    source: Register = "other"


@frozen(eq=False)
class Route:
    """Choose the experts of each token by the logits in `x`, into `chosen` and `shares`."""

    router: Router
    experts: Experts


@frozen(eq=False)
class MixExperts:
    """Apply the `used` experts chosen for each token to `source`, and put their sum into `target`."""

    experts: Experts
    used: int
    source: Register
    target: Register


@frozen(eq=False)
class TakeShares:
    """Multiply each token of `source` by the share of its one expert, into `target`, and set the share to 1."""

    source: Register
    target: Register


@frozen(eq=False)
class GateRows:
    """Multiply each token of `target` by the sigmoid of the one number in `x`."""

    target: Register


@frozen(eq=False)
class GetRows:
    """Look up the rows of a table by token ids, into `target`."""

    table: TensorSource
    target: Register


@frozen(eq=False)
class MixStreams:
    """Put the mean of the `count` streams in `kept` into `target`, each number multiplied by the sigmoid of its gate in
    `x`."""

    count: int
    target: Register


@frozen(eq=False)
class SpreadStreams:
    """Put `source` times `factor` into each of the `count` streams of `target`, by their gains if it `has_gains`.

    If it `adds`, that is added to the streams. If the source is the delta, nothing of it is left to add.
    """

    count: int
    source: Register
    target: Register
    factor: float = 1.0
    gate_scale: float = 1.0
    has_gains: bool = True
    adds: bool = True


@frozen(eq=False)
class MatchStreams:
    """Compute the gains of `count` streams from the products of `x` and `kept`, times `scale` (see `match_streams`)."""

    count: int
    scale: float


@frozen(eq=False)
class BalanceStreams:
    """Compute the gains of `count` streams from `x` by `balance_streams`."""

    count: int
    scale: FloatArray
    base: FloatArray
    turns: int
    eps: float


@frozen(eq=False)
class BlendStreams:
    """Put the sum of `count` streams by their gains, or unless it `has_gains` their mean, into `target`.

    If it `adds`, make the next streams instead, with `source`; of a delta nothing is left to add. See `blend_streams`.
    """

    count: int
    target: Register = "streams"
    has_gains: bool = True
    adds: bool = False
    source: Register = "delta"


@frozen(eq=False)
class LevelStreams:
    """Make the next streams of the `count` parts of `x`: the first is `stream`, the others are scaled to its rms."""

    count: int


@frozen(eq=False)
class CutGates:
    """Subtract from the first `features` columns of `x` their mean and `factor` times their deviation; set negative
    results to 0."""

    features: int
    factor: float


@frozen(eq=False)
class GetNgrams:
    """Look up the rows of a table by n-grams (tokens with those before them), into `target`; the last tokens are a
    state, at `at` in the layer's."""

    table: TensorSource
    ngrams: Ngrams
    at: int
    target: Register


@frozen(eq=False)
class GateHeads:
    """Multiply `x` by the sigmoid, or the softplus, of `kept`."""

    softplus: bool = False


@frozen(eq=False)
class Convolve:
    """Convolve the columns of `kept` from `first` on, into `x`; its state begins at `at` in the layer's."""

    conv: Convolution
    first: int = 0
    at: int = 0


@frozen(eq=False)
class Recur:
    """Run the recurrence over `x`; the columns of `kept` from `first` on say how much it forgets and takes in."""

    rule: DeltaRule | StateSpace
    first: int
    at: int


@frozen(eq=False)
class Scan:
    """Scan `x` with `steps`, and with B and C in `other`; its state begins at `at` in the layer's."""

    rule: SelectiveScan
    at: int


@frozen(eq=False)
class GatedNorm:
    """Norm `x`, gated by the columns of `kept` from `first` on."""

    norm: MixerNorm
    first: int


Operator = (
    Norm | AddResidual | MatMul | AllReduce | RopeAndWriteKV | Attend | Activate | Scale | Add | GetRows | Route
    | MixExperts | GateRows | GateHeads | Convolve | Recur | GatedNorm | RopeAndWriteLatent | ProjectParts | Turn
    | MixStreams | SpreadStreams | MatchStreams | BalanceStreams | BlendStreams | GetNgrams | TakeShares | Scan
    | LevelStreams | CutGates
)  # fmt: skip


@frozen(eq=False)
class Layer:
    """One layer of a model, as it runs."""

    columns: int  # columns of the residual stream
    operators: tuple[Operator, ...]
    before: tuple[Operator, ...] = ()  # operators that run before the first layer and make the inputs of all layers

    @property
    def program(self) -> tuple[Operator, ...]:
        """All operators, in their order."""
        return self.before + self.operators


@frozen(eq=False)
class Layers:
    """Layers that run one after another. Only the implementation that made `payload` knows what it is."""

    layers: tuple[Layer, ...]
    payload: Any


def count_weight_bytes(operator: Operator) -> int:
    """Return the bytes that an operator's weights take in memory."""
    match operator:
        case Norm(weight) | MatMul(weight):
            return weight.nbytes
        case RopeAndWriteLatent(norm=norm):
            return norm.nbytes
        case BalanceStreams(_, scale, base):
            return scale.nbytes + base.nbytes
        case ProjectParts(parts):
            return parts.nbytes
        case RopeAndWriteKV(Heads(norms=HeadNorms(q, k))):
            return q.nbytes + k.nbytes
        case MixExperts(experts):
            return experts.held_bytes
        case GetRows(table) | GetNgrams(table):
            return table.nbytes
        case Convolve(conv):
            return conv.nbytes
        case Recur(rule) | Scan(rule):
            return rule.nbytes
        case GatedNorm(mixer_norm):
            return 0 if mixer_norm.weight is None else mixer_norm.weight.nbytes
        case _:
            return 0


def count_step_bytes(operator: Operator) -> int:
    """Return the bytes of weights that an operator reads in every step; 0 for tables and experts, read by token."""
    return 0 if isinstance(operator, GetRows | GetNgrams | MixExperts) else count_weight_bytes(operator)


def count_token_macs(operator: Operator) -> int:
    """Return the multiply-adds of an operator's products for each token."""
    macs = sum(weight.in_features * weight.out_features for weight in list_weights(operator))
    return macs * operator.used // len(operator.experts.up) if isinstance(operator, MixExperts) else macs


def list_weights(operator: Operator) -> tuple[LinearWeight, ...]:
    """Return the weights of an operator's products."""
    match operator:
        case MatMul(weight):
            return (weight,)
        case ProjectParts(parts):
            return parts.weights
        case MixExperts(experts):
            return (*experts.up, *experts.down)
        case _:
            return ()


@frozen(eq=False)
class StepInput:
    """A batch, the rotation tables, which layers name by number, and the pools of each layer.

    These are a K and a V pool, None for a layer without keys and values, and the pool of a recurrent layer's `states`,
    (slots, floats) in f32, None for other layers; the batch's `state_reads` and `state_writes` are its slots.

    `adapters` update the products of some rows, one adapter after another.
    """

    batch: RaggedBatch
    ropes: Sequence[RopeTable]
    k_pools: Sequence[PoolArray]
    v_pools: Sequence[PoolArray]
    states: Sequence[PoolArray | None] = ()
    adapters: Sequence[AdapterRows] = ()

    @property
    def output_adapters(self) -> Sequence[AdapterRows]:
        """The adapters of the batch's output rows, with rows counted among these."""
        return choose_rows(self.adapters, self.batch.output_rows) if self.adapters else ()

    def cut(self, start: int, stop: int) -> StepInput:
        """Return the input of layers `start` to `stop` - 1."""
        pools = self.k_pools[start:stop], self.v_pools[start:stop]
        return StepInput(self.batch, self.ropes, *pools, self.states[start:stop], self.adapters)
