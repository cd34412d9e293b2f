"""Self-attention: rotated heads over the cache's pages; `LatentAttention` has one short key for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace

from mlxr.cache.shapes import CacheShape
from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.attend.scores import spread_buckets, spread_slopes
from mlxr.kernels.latent import Parts, make_parts
from mlxr.kernels.layers.operators import (
    Activate,
    Attend,
    GateHeads,
    Heads,
    MatMul,
    Norm,
    Operator,
    ProjectParts,
    RopeAndWriteKV,
    RopeAndWriteLatent,
    Scale,
)
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.rope import QueryTemperature, RopeScaling
from mlxr.kernels.rope_and_write_kv import HeadNormKind, HeadNorms, Projected
from mlxr.kernels.sources import Columns, PaddedRows, Stack, make_choice, make_vector, stack_vectors, take_halves
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers, read_vector
from mlxr.models import limits
from mlxr.models.components.weights import Flow, LayerWeights, Shape, Tensors, check_range, list_product

SINKS, RELATIVE, INNER_NORM = "attn_sinks.weight", "attn_rel_b.weight", "attn_sub_norm"
QKV = "attn_qkv"  # the joined weights of a product in some files: the rows of one part after those of another
QKV_OF_HEADS = "attn_qkv of heads"  # the same, but each head of keys has its queries, its key and its value together
GATE = "attn_q.gate"  # the rows of a gate among those of the queries
OWN_GATE = "attn_gate"  # a gate with a weight of its own
PROJECTIONS = {"qkv": ("attn_q", "attn_k", "attn_v"), "qk": ("attn_q", "attn_k"), "q": ("attn_q",)}


@frozen
class Rope:
    """A rotation of pairs of a head's numbers."""

    theta: float  # its base
    dim: int  # numbers of a head that turn, 0 for none
    interleaved: bool  # neighbours are pairs, else halves
    scaling: RopeScaling | None = None
    temperature: QueryTemperature | None = None  # by which queries grow with their position
    has_factors: bool = True  # the model's tensor of factors divides the frequencies
    # The number of pairs that turn by each of three axes, time, row and column, if pictures have places on them. Axes
    # alternate from pair to pair if `shuffles`, else one follows the other. For a text all axes agree
    sections: tuple[int, int, int] | None = field(default=None, repr=False)
    shuffles: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 < self.theta <= limits.MAX_THETA:
            raise ModelError(f"model has rope_theta {self.theta}, expected above 1 and at most 1e15")
        if self.dim % 2:
            raise ModelError(f"model has rope_dim {self.dim}, expected even")
        if self.sections is not None and (min(self.sections) < 0 or sum(self.sections) != self.dim // 2):
            raise ModelError(f"model has rope sections {self.sections}, expected three that add up to {self.dim // 2}")
        factors = () if self.scaling is None else self.scaling.long_factors
        if len(factors) not in (0, self.dim // 2):
            raise ModelError(
                f"model has rope_dim {self.dim} with {len(factors)} longrope factors, expected {self.dim // 2}"
            )

    @property
    def pair_axes(self) -> list[int]:
        """The axis of each pair: 0 is time, 1 the row, 2 the column."""
        if self.sections is None:
            return [0] * (self.dim // 2)
        if not self.shuffles:
            return [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]
        axes = [0] * (self.dim // 2)
        for axis in (1, 2):
            taken = axes[axis : 3 * self.sections[axis] : 3]
            axes[axis : 3 * self.sections[axis] : 3] = [axis] * len(taken)
        return axes


NO_ROPE = Rope(10000.0, 0, interleaved=False, has_factors=False)  # no rotation (NoPE)


@frozen
class Slopes:
    """Biases that lower scores with the distance of a key, by a slope of each head (ALiBi, arXiv:2108.12409)."""

    longest: int  # tokens of a text
    largest: float = 8.0  # a head's slope is at least 2**-largest

    def __post_init__(self) -> None:
        check_range("context_length with slopes", self.longest, 1, 1 << 17)
        if not 0 < self.largest <= limits.MAX_SCALE:
            raise ModelError(f"model has slopes of {self.largest}, expected above 0 and at most {limits.MAX_SCALE:g}")


@frozen
class Buckets:
    """Biases of scores from a table, by the bucket of a key's distance (T5, arXiv:1910.10683)."""

    count: int
    farthest: int  # distance; all from there on share the last bucket
    owner: int  # the layer that has the table

    def __post_init__(self) -> None:
        check_range("buckets of distances", self.count, 4, 1024)
        check_range("distances with buckets", self.farthest, self.count // 4 + 1, 1 << 15)
        if self.count % 4:
            raise ModelError(f"model has {self.count} buckets of distances, expected a multiple of 4")


@frozen
class Attention:
    """Self-attention with grouped queries."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of scores
    rope: Rope
    window: int | None = None  # position p sees p - window + 1 to p
    is_causal: bool = True  # else position p also sees those after it, up to p + window - 1
    softcap: float | None = None  # of scores
    head_norms: HeadNormKind | None = None  # of queries and keys
    projected: Projected = "qkv"  # "qk": values are the keys before their norm and rotation; "q": see `reads`
    qkv_bias: bool = False
    output_bias: bool = False
    norms_values: bool = False  # value heads are normed, too, without a weight
    reads: int | None = None  # the layer before this one whose keys and values it reads; it projects queries alone
    sinks: bool = False  # each head has one more score, which has no value
    gated: bool = False  # each number of the result is multiplied by the sigmoid of one that the input makes
    own_gate: bool = False  # the gate has a weight of its own; else its rows are among those of queries
    inner_norm: bool = False  # the result is normed before the last product
    gates_heads: bool = False  # the gate's weight makes one gate for each head
    whole_pictures: bool = field(default=False, repr=False)  # tokens of a picture also see those of it behind them
    biases: Slopes | Buckets | None = None  # of scores, by the distance of a key
    owns_biases: bool = False  # the layer has the table of the buckets
    indexed: bool = False  # files have an indexer, as for `LatentAttention`
    chunked: bool = False  # position p sees its chunk of `window` positions, up to itself
    clamp: float | None = None  # queries, keys and values are kept from minus this number to it
    bare_norms: bool = False  # those of heads have no weights
    softplus: bool = False  # of a gate, in place of its sigmoid
    value_dim: int = 0  # numbers of a value, if fewer than those of a key; in pages zeros follow them
    value_scale: float = 1.0  # of attention's result

    def __post_init__(self) -> None:
        check_range("heads", self.heads, 1, limits.MAX_HEADS)
        check_range("kv_heads", self.kv_heads, 1, limits.MAX_HEADS)
        check_range("head_dim", self.head_dim, 1, limits.MAX_HEAD_DIM)
        if self.heads % self.kv_heads:
            raise ModelError(f"model has {self.heads} heads, which its kv_heads {self.kv_heads} do not divide")
        if self.rope.dim > self.head_dim:
            raise ModelError(f"model has rope_dim {self.rope.dim}, expected at most head_dim {self.head_dim}")
        if self.head_norms == "turned" and self.rope.temperature is not None:
            raise ModelError("model norms its queries after a temperature, which norms would undo")
        if not 0 <= self.value_dim <= self.head_dim:
            raise ModelError(f"model has values of {self.value_dim} numbers, expected at most head_dim {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ModelError(f"model has sliding_window {self.window}, expected at least 1")
        for name, value in (("scale", self.scale), ("softcap", self.softcap), ("clamp", self.clamp)):
            if value is not None and not 0 < value <= limits.MAX_SCALE:
                raise ModelError(
                    f"model has attention_{name} {value}, expected above 0 and at most {limits.MAX_SCALE:g}"
                )

    @property
    def queries(self) -> int:
        """Columns of all queries."""
        return self.heads * self.head_dim

    @property
    def values(self) -> int:
        """Columns of attention's result."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.kv_heads * self.head_dim

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the weights of the product that makes queries, keys and values."""
        return PROJECTIONS[self.projected]

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        for name in self.parts:
            rows = self.keys if name != "attn_q" else 2 * self.queries if self.gated else self.queries
            rows = self.kv_heads * self.value_dim if name == "attn_v" and self.value_dim else rows
            yield from list_product(name, rows, hidden, bias=self.qkv_bias)
        if self.own_gate:
            yield from list_product(OWN_GATE, self.heads if self.gates_heads else self.values, hidden)
        yield from list_product("attn_output", hidden, self.values, bias=self.output_bias)
        if self.inner_norm:
            yield f"{INNER_NORM}.weight", (self.values,)
        if self.sinks:
            yield SINKS, (self.heads,)
        if isinstance(self.biases, Buckets) and self.owns_biases:
            yield RELATIVE, (self.biases.count, self.heads)
        if self.head_norms is not None and not self.bare_norms:
            yield "attn_q_norm.weight", self._shape_norm(self.heads)
            if self.projected != "q":
                yield "attn_k_norm.weight", self._shape_norm(self.kv_heads)

    def _shape_norm(self, heads: int) -> Shape:
        dim = self.head_dim
        return {"joint": (heads * dim,), "layer": (heads, dim)}.get(self.head_norms or "each", (dim,))

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        source = yield from w.turn(flow.source, *self.parts)
        if self.gated:
            gate, qkv = self._take_gate(w)
            yield MatMul(gate, source, "kept")
        else:
            qkv = self._join_padded(w) if self.value_dim else w.product(*self.parts)
            if self.own_gate:
                yield MatMul(w.product(OWN_GATE), flow.source, "kept")
        yield MatMul(qkv, source, "x")
        if self.clamp is not None:
            yield Activate("clamp", qkv.out_features, is_gated=False, parameters=(self.clamp,))
        heads = self._read_heads(w)
        yield RopeAndWriteKV(heads)
        yield Attend(heads)
        if self.value_dim:
            yield ProjectParts(self._leave_zeros(w))
        if self.value_scale != 1.0:
            yield Scale(self.value_scale, "x")
        if self.gated or self.own_gate:
            yield GateHeads(self.softplus)
        if self.inner_norm:
            yield Norm(w.norm(INNER_NORM), "x", "x")
        yield from w.turn("x", "attn_output")
        yield from flow.finish(w.product("attn_output"))

    def _take_gate(self, w: LayerWeights) -> tuple[LinearWeight, LinearWeight]:
        """Return the weights of the gate, and of the rest: in files a head's rows are its query's, then its gate's."""
        names = [f"{name}.weight" for name in self.parts]
        first, *others = (w.model.take_turned(w.prefix + name) for name in names)
        query, gate = take_halves(first, self.heads)
        qkv = w.prepare([query, *others], *names)
        return replace(w.prepare([gate], GATE), rotation=qkv.rotation), qkv

    def _join_padded(self, w: LayerWeights) -> LinearWeight:
        """Return the weights of queries, keys and values; rows of zeros make values as long as keys in each head."""
        query, key, value = (w.take(f"{name}.weight") for name in self.parts)
        return w.prepare([query, key, PaddedRows(value, self.value_dim, self.head_dim)], *self.parts)

    def _leave_zeros(self, w: LayerWeights) -> Parts:
        """Return the product that takes the numbers of each value, and drops the zeros behind them."""
        choice, count = make_choice("values", self.value_dim, self.head_dim), 1 if w.ctx.gpu is None else self.heads
        made = [w.prepare([choice]) for _ in range(count)]  # one for all, but a GPU stacks them
        return make_parts(w.ctx, made * (self.heads // count))

    def _read_heads(self, w: LayerWeights) -> Heads:
        return Heads(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.scale,
            norms=self._read_norms(w),
            projected=self.projected,
            window=self.window,
            symmetric=not self.is_causal,
            whole_pictures=self.whole_pictures,
            softcap=self.softcap,
            sinks=w.vector(SINKS) if self.sinks else None,
            rope=w.rope,
            group=w.group,
            biases=self._read_biases(w),
            chunked=self.chunked,
        )

    def _read_biases(self, w: LayerWeights) -> FloatArray | None:
        if isinstance(self.biases, Buckets):
            table = read_numbers(w.model.tensors[f"blk.{self.biases.owner}.{RELATIVE}"])
            return spread_buckets(table, self.biases.farthest)
        return None if self.biases is None else spread_slopes(self.heads, self.biases.longest, self.biases.largest)

    def _read_norms(self, w: LayerWeights) -> HeadNorms | None:
        if self.head_norms is None:
            return None
        if self.bare_norms:
            ones = read_vector(make_vector("norm of heads", [1.0] * self.head_dim))
            return HeadNorms(ones, ones, w.norms.eps, self.norms_values, self.head_norms)
        q = w.numbers("attn_q_norm.weight").reshape(-1)
        k = q if self.projected == "q" else w.numbers("attn_k_norm.weight").reshape(-1)
        return HeadNorms(q, k, w.norms.eps, self.norms_values, self.head_norms)

    def order_joined(self) -> list[int]:
        """Return the places of the rows of all queries, keys and values in a tensor QKV_OF_HEADS."""
        group = self.heads // self.kv_heads
        return [
            (head * (group + 2) + place) * self.head_dim + row
            for places in (range(group), (group,), (group + 1,))
            for head in range(self.kv_heads)
            for place in places
            for row in range(self.head_dim)
        ]

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Make one tensor of the norms of all heads, if a file has one for each. ModelError if one is missing."""
        if self.indexed:
            _leave_out_indexer(tensors, prefix)
        if self.head_norms == "layer":
            for name, heads in (("attn_q_norm", self.heads), ("attn_k_norm", self.kv_heads)):
                _stack_norms(tensors, prefix + name, heads)


def _stack_norms(tensors: dict[str, TensorSource], name: str, heads: int) -> None:
    if f"{name}.0.weight" not in tensors:
        return
    parts = [tensors.pop(f"{name}.{head}.weight", None) for head in range(heads)]
    if None in parts:
        raise ModelError(f"tensor {name}.{parts.index(None)}.weight is missing, the norm of one of {heads} heads")
    tensors[f"{name}.weight"] = stack_vectors(f"{name}.weight", [part for part in parts if part is not None])


def _leave_out_indexer(tensors: dict[str, TensorSource], prefix: str) -> None:
    for name in [name for name in tensors if name.startswith((f"{prefix}indexer.", f"{prefix}indexer_"))]:
        del tensors[name]


JOINED, KEYS, VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


@frozen
class LatentAttention:
    """Attention whose heads share one key: `rope.dim` numbers that rotate, `unturned_dim` that do not, and a latent
    vector of `rank`, which is the value, too (DeepSeek-AI 2024, arXiv:2405.04434).

    The cache keeps these numbers of a token. Prompts and answers are computed alike, with the matrices of keys and
    values multiplied into queries and results. The other form, in which prompts would be cheaper, gives other bits, so
    the same token would differ between a prompt and an answer. Queries of a head have `plain_dim` numbers besides those
    that rotate, and results `value_dim`. With a `query_rank` queries are made from a normed vector of that length.
    """

    heads: int
    rank: int
    plain_dim: int
    value_dim: int
    scale: float  # of scores
    rope: Rope
    query_rank: int | None = None
    indexed: bool = False  # files have an indexer, which chooses positions in longer texts than are served
    unturned_dim: int = 0  # numbers of the key beside the latent vector that stay as they are, as in Kimi Linear

    def __post_init__(self) -> None:
        check_range("heads", self.heads, 1, limits.MAX_HEADS)
        for name in ("rank", "plain_dim", "value_dim"):
            check_range(name, getattr(self, name), 1, limits.MAX_HEAD_DIM)
        check_range("head_dim", self.head_dim, 1, limits.MAX_HEAD_DIM)
        if not 0 < self.scale <= limits.MAX_SCALE:
            raise ModelError(f"model has attention_scale {self.scale}, expected above 0 and at most 1e6")

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.short_dim + self.rank

    @property
    def short_dim(self) -> int:
        """Numbers of a key beside the latent vector."""
        return self.rope.dim + self.unturned_dim

    @property
    def cache(self) -> CacheShape:
        """The shape of what the cache keeps of a token."""
        return CacheShape(1, self.head_dim, value_dim=self.rank)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        queries = self.heads * (self.plain_dim + self.short_dim)
        if self.query_rank is None:
            yield from list_product("attn_q", queries, hidden)
        else:
            yield from list_product("attn_q_a", self.query_rank, hidden)
            yield "attn_q_a_norm.weight", (self.query_rank,)
            yield from list_product("attn_q_b", queries, self.query_rank)
        yield from list_product("attn_kv_a_mqa", self.head_dim, hidden)
        yield "attn_kv_a_norm.weight", (self.rank,)
        yield KEYS, (self.heads, self.rank, self.plain_dim)
        yield VALUES, (self.heads, self.value_dim, self.rank)
        yield from list_product("attn_output", hidden, self.heads * self.value_dim)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        if self.query_rank is None:
            yield MatMul(w.product("attn_q"), flow.source, "x")
        else:
            yield MatMul(w.product("attn_q_a"), flow.source, "x")
            yield Norm(w.norm("attn_q_a_norm"), "x", "x")
            yield MatMul(w.product("attn_q_b"), "x", "x")
        yield MatMul(w.product("attn_kv_a_mqa"), flow.source, "kept")
        yield ProjectParts(self._read_parts(w, KEYS), self.short_dim)
        heads = Heads(self.heads, 1, self.head_dim, self.scale, rope=w.rope, group=w.group, value_dim=self.rank)
        yield RopeAndWriteLatent(heads, w.norm("attn_kv_a_norm"))
        yield Attend(heads)
        yield ProjectParts(self._read_parts(w, VALUES))
        yield from flow.finish(w.product("attn_output"))

    def _read_parts(self, w: LayerWeights, name: str) -> Parts:
        """Return the matrices of all heads. Adapters do not know them: in other programs one product has them."""
        stack = w.take(name)
        return make_parts(w.ctx, [w.prepare([stack.take_matrix(head)]) for head in range(self.heads)])

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Make the matrices of keys and of values, if a file has both of a head in one tensor, as folders do.

        Those of keys have rows and columns exchanged there; if the tensor is quantised, they become bf16. Tensors of an
        indexer are left out.
        """
        if self.indexed:
            _leave_out_indexer(tensors, prefix)
        joined = tensors.get(prefix + JOINED)
        rows = self.plain_dim + self.value_dim
        if joined is None or joined.shape != (self.heads * rows, self.rank):
            return
        del tensors[prefix + JOINED]
        heads = [joined.take_rows(head * rows, (head + 1) * rows) for head in range(self.heads)]
        keys = [Columns(head.take_rows(0, self.plain_dim), range(self.rank)) for head in heads]
        tensors[prefix + KEYS] = Stack(prefix + KEYS, keys)
        tensors[prefix + VALUES] = Stack(prefix + VALUES, [head.take_rows(self.plain_dim, rows) for head in heads])
