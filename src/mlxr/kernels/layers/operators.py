"""A layer as the list of its operators: data, which NumPy, C++ and a GPU execute, and others count or measure.

Operators read and write registers. `stream` (T, hidden) is the residual stream and `delta` what is still to be added to
it, which the next norm of the stream does in passing. `normed` is what blocks begin with, `x` what they pass on from
operator to operator, `kept` what it keeps for later ones, `turned` what it begins with in the basis of weights that are
rotated, and `other` what a block beside another one adds to the stream; `steps` are those by which states of channels
forget. `chosen` and `shares` (T, used) are the experts of each token and their shares. `inputs` (T, layers * features)
is what each layer gets of each token besides the stream, where a model has such embeddings (Gemma 4 E2B and E4B).

Of a model with several residual streams side by side `streams` (T, count * hidden) has them from layer to layer, and
`gains` (T, count) by how much each takes what a block gives; `stream` is then what enters the first layer, and what
leaves the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True, eq=False)
class NormWeight:
    """A norm of rows."""

    weight: FloatArray  # (columns,)
    eps: float  # added to the variance
    kind: NormKind = "rms"
    bias: FloatArray | None = None  # (columns,), of layer norms

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class MixerNorm:
    """The norm of what a recurrence gives, with a gate: see `gated_norm`. Without a weight it is the gate alone."""

    weight: FloatArray | None
    eps: float
    columns: int
    width: int
    gate_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The heads of a layer's attention, and how they attend."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of scores
    norms: HeadNorms | None = None  # of queries and keys
    projected: Projected = "qkv"  # what the product before holds
    window: int | None = None  # position p sees p - window + 1 to p
    symmetric: bool = False  # and as far behind itself
    whole_pictures: bool = False  # tokens see as far as the batch's `ends` say
    softcap: float | None = None  # of scores
    sinks: FloatArray | None = None  # (heads,): a score more of each head, which has no value
    rope: int = 0  # number of the step's rotation table
    group: int = 0  # number of the batch's slots and page table
    value_dim: int | None = None  # values are the last so many numbers of the keys
    biases: FloatArray | None = None  # (heads, 2n + 1): of scores, see `attend`
    chunked: bool = False  # position p sees those up to itself of its chunk of `window`

    @property
    def value_columns(self) -> int:
        """Columns of what attention gives."""
        return self.heads * (self.value_dim or self.head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Norm `source` into `target`, each of so many `parts` of a row alone, with one weight for all or each its own; to
    the stream its delta is added first."""

    weight: NormWeight
    source: Register
    target: Register
    parts: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class AddResidual:
    """Add the delta to the stream, where no norm does it, and multiply the sum by `factor`."""

    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class MatMul:
    """Multiply `source` by a weight, into `target`."""

    weight: LinearWeight
    source: Register
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Rotate `source` into `target`, where the weights that read it are rotated."""

    rotation: Hadamard
    source: Register
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """Add up what all ranks have in `target`, each of which multiplied by its share of a weight's inputs."""

    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class RopeAndWriteKV:
    """Make queries of what `x` projected, and write keys and values into their pages."""

    heads: Heads


@dataclass(frozen=True, slots=True, eq=False)
class RopeAndWriteLatent:
    """Make keys of what was kept and write them into their pages; rotate the queries in `x`."""

    heads: Heads
    norm: NormWeight


@dataclass(frozen=True, slots=True, eq=False)
class ProjectParts:
    """Multiply each part of `source` by a weight of its own; the last `passed` numbers of a part stand before its
    result."""

    parts: Parts
    passed: int = 0
    source: Register = "x"
    target: Register = "x"


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """Let the queries in `x` attend."""

    heads: Heads


@dataclass(frozen=True, slots=True, eq=False)
class Activate:
    """Apply the activation to `x`: to the gate before `features` others, or to these themselves.

    With `first` they are then multiplied by the columns of `inputs` from that one on. `parameters` are the numbers that
    some activations have in each layer.
    """

    kind: Activation
    features: int
    is_gated: bool
    first: int | None = None
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Multiply `target` by a number; with a softcap c, what that makes is capped by tanh, as by `scale`."""

    factor: float
    target: Register
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """Add `source` to `target`, and multiply the sum by `factor`."""

    target: Register = "delta"
    factor: float = 1.0
    source: Register = "other"


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Choose of `experts` those of each token by the logits in `x`, into `chosen` and `shares`."""

    router: Router
    experts: Experts


@dataclass(frozen=True, slots=True, eq=False)
class MixExperts:
    """Send `source` through the `used` experts chosen for each token, and their sum into `target`."""

    experts: Experts
    used: int
    source: Register
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class TakeShares:
    """Multiply each token of `source` by the share of its one expert into `target`; the share is 1 then."""

    source: Register
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class GateRows:
    """Multiply each token of `target` by the sigmoid of the one number in `x`."""

    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class GetRows:
    """Look up the rows of a table that the ids of the tokens name, into `target`."""

    table: TensorSource
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class MixStreams:
    """Make of `count` streams, which were kept, their mean, each number by its gate in `x`, into `target`."""

    count: int
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class SpreadStreams:
    """Spread `source` over the `count` streams of `target`, `factor` times, and by their gains if it `has_gains`; it
    `adds` this to what they are. Of a delta nothing is left to add."""

    count: int
    source: Register
    target: Register
    factor: float = 1.0
    gate_scale: float = 1.0
    has_gains: bool = True
    adds: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class MatchStreams:
    """Make the gains of `count` streams of how alike `x` and what was kept are, times `scale`."""

    count: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class BalanceStreams:
    """Make of `x` the gains of `count` streams, as `balance_streams` says."""

    count: int
    scale: FloatArray
    base: FloatArray
    turns: int
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class BlendStreams:
    """Make of `count` streams their sum by their gains in `target`, or their mean unless it `has_gains`; or where it
    `adds` the streams that follow, with `source`. Of a delta nothing is left to add."""

    count: int
    target: Register = "streams"
    has_gains: bool = True
    adds: bool = False
    source: Register = "delta"


@dataclass(frozen=True, slots=True, eq=False)
class LevelStreams:
    """Make of the `count` parts of `x` the streams that follow, each as long as the stream, which is the first."""

    count: int


@dataclass(frozen=True, slots=True, eq=False)
class CutGates:
    """Take of the first `features` columns of `x` their mean and `factor` times their deviation, and leave 0 where
    nothing is left."""

    features: int
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class GetNgrams:
    """Look up the rows of a table that tokens name by themselves and those before them, into `target`; the last tokens
    are a state, which begins at `at` of the layer's."""

    table: TensorSource
    ngrams: Ngrams
    at: int
    target: Register


@dataclass(frozen=True, slots=True, eq=False)
class GateHeads:
    """Multiply `x` by the sigmoid of what was kept, or by its softplus."""

    softplus: bool = False


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
class Scan:
    """Scan `x` by the steps, with B and C in `other`; its state begins at `at` of the layer's."""

    rule: SelectiveScan
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """Norm `x`, gated by what was kept from column `first` on."""

    norm: MixerNorm
    first: int


Operator = (
    Norm | AddResidual | MatMul | AllReduce | RopeAndWriteKV | Attend | Activate | Scale | Add | GetRows | Route
    | MixExperts | GateRows | GateHeads | Convolve | Recur | GatedNorm | RopeAndWriteLatent | ProjectParts | Turn
    | MixStreams | SpreadStreams | MatchStreams | BalanceStreams | BlendStreams | GetNgrams | TakeShares | Scan
    | LevelStreams | CutGates
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer of a model, as it runs."""

    columns: int  # of the residual stream
    operators: tuple[Operator, ...]
    before: tuple[Operator, ...] = ()  # run before the first layer: they make the inputs of all layers

    @property
    def program(self) -> tuple[Operator, ...]:
        """All operators, in their order."""
        return self.before + self.operators


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Layers that run one after another. What `payload` is only the implementation knows that made it."""

    layers: tuple[Layer, ...]
    payload: Any


def count_weight_bytes(operator: Operator) -> int:
    """Bytes that the weights of an operator take in memory."""
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
    """Bytes of the weights that an operator reads in any step; of tables and experts it is the tokens that say."""
    return 0 if isinstance(operator, GetRows | GetNgrams | MixExperts) else count_weight_bytes(operator)


def count_token_macs(operator: Operator) -> int:
    """Multiply-adds of an operator's products for each token."""
    macs = sum(weight.in_features * weight.out_features for weight in list_weights(operator))
    return macs * operator.used // len(operator.experts.up) if isinstance(operator, MixExperts) else macs


def list_weights(operator: Operator) -> tuple[LinearWeight, ...]:
    """The weights that an operator multiplies by."""
    match operator:
        case MatMul(weight):
            return (weight,)
        case ProjectParts(parts):
            return parts.weights
        case MixExperts(experts):
            return (*experts.up, *experts.down)
        case _:
            return ()


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """A batch, the rotation tables that layers name by their number, and for each layer its part of the cache.

    That is one K and one V pool, None for a layer without them, and the pool of a recurrent layer's `states`, (slots,
    floats) in f32, of which the batch's `state_reads` and `state_writes` name the slots; None for other layers.

    `adapters` update the products of some rows, in their order.
    """

    batch: RaggedBatch
    ropes: Sequence[RopeTable]
    k_pools: Sequence[PoolArray]
    v_pools: Sequence[PoolArray]
    states: Sequence[PoolArray | None] = ()
    adapters: Sequence[AdapterRows] = ()

    @property
    def output_adapters(self) -> Sequence[AdapterRows]:
        """The adapters of the batch's output rows, by the places that these have among themselves."""
        return choose_rows(self.adapters, self.batch.output_rows) if self.adapters else ()

    def cut(self, start: int, stop: int) -> StepInput:
        """What the layers from number `start` to before `stop` get."""
        pools = self.k_pools[start:stop], self.v_pools[start:stop]
        return StepInput(self.batch, self.ropes, *pools, self.states[start:stop], self.adapters)
