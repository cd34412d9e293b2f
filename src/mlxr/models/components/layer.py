"""A layer: two blocks around the residual stream, its norms, and additions of some models."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from mlxr.cache.shapes import CacheShape, LayerCache, PagesAndState, SharedWith, StateShape
from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.activate import Activation
from mlxr.kernels.elementwise import MOST_STREAMS, correct_gains, predict_gains
from mlxr.kernels.embed import Ngrams
from mlxr.kernels.latent import make_parts
from mlxr.kernels.layers import operators as ops
from mlxr.kernels.layers.operators import (
    Activate,
    Add,
    AddResidual,
    MatMul,
    MixStreams,
    Norm,
    NormWeight,
    Operator,
    Register,
    Scale,
    SpreadStreams,
)
from mlxr.kernels.recurrent import make_convolution
from mlxr.kernels.sources import Joined, PaddedRows, Stack
from mlxr.kernels.tensor import FloatArray, TensorSource
from mlxr.models import limits
from mlxr.models.components.attention import NO_ROPE, Attention, LatentAttention, Rope
from mlxr.models.components.feed_forward import DenseAndExperts, Experts, FeedForward
from mlxr.models.components.recurrent import Recurrence, fold
from mlxr.models.components.weights import Flow, LayerWeights, Norms, Tensors, Weights, check_range

# Names of the norms of what blocks add to the stream; the layer's `Norms` name those of their inputs.
MIXER_POST_NORM, FEED_FORWARD_POST_NORM = "post_attention_norm", "post_ffw_norm"
MIXER_SUM_NORM, FEED_FORWARD_SUM_NORM = "attn_output_norm", "layer_output_norm"  # of the stream behind a block
OUTPUT_SCALE, BESIDE_NORM = "layer_output_scale.weight", "ffn_norm_exps"
INPUT_GATE, INPUT_PROJECTION, INPUT_NORM = "inp_gate", "proj", "post_norm"  # of the input of a layer
STREAM_BLOCKS, LAST_STREAMS = ("hc_attn", "hc_ffn"), "output_hc"  # of residual streams side by side
ALTUP_PRODUCTS, ALTUP_SCALE = ("altup_proj.weight", "altup_unembd_proj.weight"), "altup_correct_scale.weight"
TABLE_PARTS = "ple_table."  # parts, in folders, of a table whose rows n-grams name
# Tensors that make the inputs of all layers.
TABLE, INPUTS_OF_STREAM, INPUTS_NORM = "per_layer_token_embd.weight", "per_layer_model_proj", "per_layer_proj_norm"


@frozen
class ParallelMixers:
    """Attention and a recurrent mixer beside it, with one input; both add to the stream (Falcon-H1)."""

    attention: Attention
    recurrence: Recurrence

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield from self.attention.tensors(hidden)
        yield from self.recurrence.tensors(hidden)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        assert flow.norm is None, "no family norms what two mixers add"
        yield from self.recurrence.operators(w, flow)
        yield from self.attention.operators(w, Flow(flow.source, "other", flow.factor))
        yield Add(flow.target)


Mixer = Attention | LatentAttention | Recurrence | ParallelMixers
SecondBlock = FeedForward | Experts | DenseAndExperts


@frozen
class LayerInputs:
    """Inputs that every layer gets for each token besides the stream, and adds in the end (Gemma 4 E2B and E4B).

    These inputs are the sum of the token's row in a table, times `table_scale`, and of a product of its embedding,
    normed for each layer by itself; the sum is multiplied by `scale`. A layer multiplies them by the activation of a
    product of the stream.
    """

    features: int  # of each layer
    activation: Activation
    table_scale: float
    scale: float
    eps: float  # of the norm

    def model_tensors(self, layers: int, hidden: int, vocabulary: int) -> Tensors:
        """List the tensors that make the inputs of all layers."""
        yield TABLE, (vocabulary, layers * self.features)
        yield f"{INPUTS_OF_STREAM}.weight", (layers * self.features, hidden)
        yield f"{INPUTS_NORM}.weight", (self.features,)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors of each layer."""
        yield f"{INPUT_GATE}.weight", (self.features, hidden)
        yield f"{INPUT_PROJECTION}.weight", (hidden, self.features)
        yield f"{INPUT_NORM}.weight", (hidden,)

    def make(self, w: LayerWeights) -> Iterator[Operator]:
        """List the operators that make the inputs of all layers, with the model's weights; the table stays in its
        file."""
        yield ops.GetRows(w.take(TABLE), "other")
        yield Scale(self.table_scale, "other")
        projection = w.product(INPUTS_OF_STREAM)
        yield MatMul(projection, "stream", "x")
        norm = NormWeight(w.vector(f"{INPUTS_NORM}.weight"), self.eps)
        yield Norm(norm, "x", "inputs", projection.out_features // self.features)
        yield Add("inputs", self.scale)

    def operators(self, w: LayerWeights, scales: FloatArray | None = None) -> Iterator[Operator]:
        """List the operators that add a layer's inputs to the stream; the gate reads each column of it times its
        scale."""
        gate = w.product(INPUT_GATE) if scales is None else w.scaled_product(INPUT_GATE, scales)
        yield AddResidual()
        yield MatMul(gate, "stream", "x")
        yield Activate(self.activation, self.features, is_gated=False, first=w.index * self.features)
        yield from Flow("x", norm=w.norm(INPUT_NORM)).finish(w.product(INPUT_PROJECTION))


@frozen
class Streams:
    """Residual streams side by side instead of one (hyper-connections of low rank, as Qwen3.8-Flash-Next has them).

    A block reads the mean of the streams, each of them normed and each number times a gate, which products of low rank
    make from all of them. Its result goes to each stream through another gate. All streams begin as the embedding; in
    the end such a mean takes the place of a norm.
    """

    count: int
    rank: int

    def __post_init__(self) -> None:
        check_range("residual streams", self.count, 2, 64)
        check_range("the rank of residual streams", self.rank, 1, limits.MAX_WIDTH)

    def _list(self, name: str, hidden: int) -> Tensors:
        yield f"{name}_norm.weight", (self.count * hidden,)
        yield f"{name}_down.weight", (self.rank, self.count * hidden)
        yield f"{name}_up.weight", (self.count * hidden, self.rank)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors of each layer."""
        for name in STREAM_BLOCKS:
            yield from self._list(name, hidden)
            yield f"{name}_inject.weight", (self.count, self.count * hidden)

    def model_tensors(self, hidden: int) -> Tensors:
        """List the tensors behind all layers."""
        yield from self._list(LAST_STREAMS, hidden)

    def mix(self, w: LayerWeights, name: str, target: Register) -> Iterator[Operator]:
        """List the operators that make one row of the streams, and the gains of each if a block follows."""
        norm = NormWeight(w.vector(f"{name}_norm.weight"), w.norms.eps)
        yield Norm(norm, "streams", "kept", self.count)
        yield MatMul(w.product(f"{name}_down"), "kept", "x")
        yield Scale(1 / self.count, "x")
        yield Activate("silu", self.rank, is_gated=False)
        yield MatMul(w.product(f"{name}_up"), "x", "x")
        if name != LAST_STREAMS:
            yield MatMul(w.product(f"{name}_inject"), "kept", "gains")
        yield MixStreams(self.count, target)

    def add(self) -> Operator:
        """Return the operator that adds a block's result: a gain of 0 counts as 1."""
        return SpreadStreams(self.count, "delta", "streams", 2.0, 1 / self.count)


@frozen
class BalancedStreams:
    """Residual streams side by side whose mixing is doubly stochastic (manifold-constrained hyper-connections,
    arXiv:2512.24880), as GLM-5.3-Flash has them.

    A product of all streams, normed together, makes the gains of a block: how much of each stream it reads, how much of
    its result each stream takes, and how much of each stream goes on in each; `turns` of Sinkhorn's algorithm make the
    last ones. In the end comes the mean of the streams, which is normed as in other models.
    """

    count: int
    turns: int
    eps: float

    def __post_init__(self) -> None:
        check_range("residual streams", self.count, 2, MOST_STREAMS)
        check_range("turns of balancing", self.turns, 1, 1024)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors of each layer."""
        gains = (2 + self.count) * self.count
        for name, norm in zip(STREAM_BLOCKS, ("attn_norm", "ffn_norm"), strict=True):
            yield f"{norm}.weight", (hidden,)
            yield f"{name}_fn.weight", (gains, self.count * hidden)
            yield f"{name}_base.weight", (gains,)
            yield f"{name}_scale.weight", (3,)

    def model_tensors(self, hidden: int) -> Tensors:  # noqa: ARG002 -- as `Streams` have it
        """List the tensors behind all layers: none."""
        yield from ()

    def mix(self, w: LayerWeights, name: str, target: Register) -> Iterator[Operator]:
        """List the operators that make one normed row of the streams, and the gains of each."""
        if name == LAST_STREAMS:
            yield ops.BlendStreams(self.count, target, has_gains=False)
            return
        product = w.exact_product(f"{name}_fn")
        yield Norm(NormWeight(w.make_ones(product.in_features), w.norms.eps), "streams", "kept")
        yield MatMul(product, "kept", "x")
        scale, base = w.vector(f"{name}_scale.weight"), w.vector(f"{name}_base.weight")
        yield ops.BalanceStreams(self.count, scale, base, self.turns, self.eps)
        yield ops.BlendStreams(self.count, "x")
        yield Norm(w.norm("attn_norm" if name == STREAM_BLOCKS[0] else "ffn_norm"), "x", target)

    def add(self) -> Operator:
        """Return the operator that adds a block's result."""
        return ops.BlendStreams(self.count, adds=True)


@frozen
class AltUp:
    """Residual streams side by side, of which blocks compute the first (alternating updates, arXiv:2301.13310), and
    beside attention a product of low `rank` of the same input (Gemma 3n).

    Each layer predicts all streams by gains that the first makes, runs its blocks on the predicted first stream, and
    corrects all streams by what the blocks changed. Its inputs are added to all streams but the first. These begin as
    products of the embedding, scaled to its length; behind the last layer products of them are scaled to the length of
    the first stream, and the mean of all goes on.
    """

    count: int
    rank: int

    def __post_init__(self) -> None:
        check_range("residual streams", self.count, 2, MOST_STREAMS)
        check_range("the rank beside attention", self.rank, 1, limits.MAX_WIDTH)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors of each layer."""
        yield "altup_router.weight", (self.count, hidden)
        yield "altup_router_norm.weight", (hidden,)
        yield "altup_predict_coef.weight", (self.count**2, self.count)
        yield "altup_correct_coef.weight", (self.count, self.count)
        yield ALTUP_SCALE, (hidden,)
        yield "laurel_l.weight", (self.rank, hidden)
        yield "laurel_r.weight", (hidden, self.rank)
        yield "laurel_post_norm.weight", (hidden,)

    def model_tensors(self, hidden: int) -> Tensors:
        """List the tensors before and behind all layers."""
        for name in ALTUP_PRODUCTS:
            yield name, (self.count - 1, hidden, hidden)

    def begin(self, w: LayerWeights) -> Iterator[Operator]:
        """List the operators that make the streams from the embedding, with the model's weights."""
        yield SpreadStreams(self.count, "stream", "streams", has_gains=False, adds=False)
        yield from self._project(w, ALTUP_PRODUCTS[0])

    def end(self, w: LayerWeights) -> Iterator[Operator]:
        """List the operators that make one stream of all, with the model's weights."""
        yield from self._project(w, ALTUP_PRODUCTS[1])
        yield ops.BlendStreams(self.count, "stream", has_gains=False)

    def _project(self, w: LayerWeights, name: str) -> Iterator[Operator]:
        stack = w.take(name)
        made = [w.prepare([stack.take_matrix(part)]) for part in range(self.count - 1)]
        yield ops.ProjectParts(make_parts(w.ctx, [made[0], *made]), source="streams")  # the first is not read
        yield ops.LevelStreams(self.count)

    def predict(self, w: LayerWeights) -> Iterator[Operator]:
        """List the operators that predict the streams. The first of them is in `stream`, before and afterwards."""
        yield from self._blend(w, predict_gains(w.numbers("altup_predict_coef.weight"), self.count))

    def correct(self, w: LayerWeights) -> Iterator[Operator]:
        """List the operators that correct the streams by the blocks' results for the first, which is in `stream`."""
        yield from self._blend(w, correct_gains(w.numbers("altup_correct_coef.weight")))

    def _blend(self, w: LayerWeights, gains: tuple[FloatArray, FloatArray]) -> Iterator[Operator]:
        """List the operators that make the gains of the streams from the tokens' states, and then the streams that
        follow."""
        norm = w.norm("altup_router_norm")
        yield Norm(NormWeight(norm.weight * (1 / len(norm.weight)), norm.eps), "stream", "x")
        yield MatMul(w.exact_product("altup_router"), "x", "x")
        yield Scale(1.0, "x", 1.0)
        yield MatMul(w.made_product(*gains), "x", "gains")
        yield ops.BlendStreams(self.count, adds=True, source="stream")
        yield ops.BlendStreams(self.count, "stream")

    def join_low_rank(self, w: LayerWeights) -> Iterator[Operator]:
        """List the operators that add the product of low rank and the input of attention to attention's result."""
        yield MatMul(w.product("laurel_l"), "normed", "other")
        yield MatMul(w.product("laurel_r"), "other", "other")
        yield Norm(w.norm("laurel_post_norm"), "other", "other")
        yield Add()
        yield Add(source="normed")
        yield AddResidual(0.5**0.5)

    def arrange(self, tensors: dict[str, TensorSource]) -> None:
        """Make stacks of products that folders have one by one, and pad the table of inputs to the vocabulary."""
        for name in ALTUP_PRODUCTS:
            parts = [f"{name.removesuffix('.weight')}.{part}.weight" for part in range(self.count - 1)]
            if all(part in tensors for part in parts):
                tensors[name] = Stack(name, [tensors.pop(part) for part in parts])
        table, words = tensors.get(TABLE), tensors.get("token_embd.weight")
        if table is not None and words is not None and table.shape[0] < words.shape[0]:
            tensors[TABLE] = PaddedRows(table, table.shape[0], words.shape[0])


@frozen
class NgramInputs:
    """Inputs that a layer adds to its streams from a table; n-grams, a token and those before it, name its rows.

    A product of these rows makes a key for each stream, which says how much the stream takes of their value, another
    product. A convolution adds values of earlier tokens, as far apart as the n-grams are long.
    """

    ngrams: Ngrams
    rows: int  # of the table
    features: int  # of a row
    streams: int
    hidden: int
    taps: int

    @property
    def _channels(self) -> int:
        return self.streams * self.hidden

    @property
    def _reach(self) -> int:
        return (self.taps - 1) * len(self.ngrams.multipliers)

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps for a sequence: ids, and inputs of the convolution."""
        return self.ngrams.state_floats + self._reach * self._channels

    def model_tensors(self) -> Tensors:
        """List the table, which stands outside the layers."""
        yield TABLE, (self.rows, self.features)

    def tensors(self) -> Tensors:
        """List the tensors of the layer."""
        columns = len(self.ngrams.sizes) * self.features
        yield "ple_key.weight", (self._channels, columns)
        yield "ple_value.weight", (self.hidden, columns)
        for name in ("key", "query", "conv"):
            yield f"ple_norm_{name}.weight", (self._channels,)
        yield "ple_conv1d.weight", (self._channels, self.taps)

    def operators(self, w: LayerWeights, at: int) -> Iterator[Operator]:
        """List the operators that add it to the streams; its state begins at `at`. The table stays in its file."""
        norms = {
            name: NormWeight(w.vector(f"ple_norm_{name}.weight"), w.norms.eps) for name in ("key", "query", "conv")
        }
        yield ops.GetNgrams(w.model.tensors[TABLE], self.ngrams, at, "other")
        yield MatMul(w.product("ple_key"), "other", "x")
        yield Norm(norms["key"], "x", "x", self.streams)
        yield Norm(norms["query"], "streams", "kept", self.streams)
        yield ops.MatchStreams(self.streams, self.hidden**-0.5)
        yield MatMul(w.product("ple_value"), "other", "x")
        yield SpreadStreams(self.streams, "x", "other", adds=False)
        yield Norm(norms["conv"], "other", "kept", self.streams)
        yield Add("streams")
        conv = make_convolution(w.numbers("ple_conv1d.weight"), None, "silu", len(self.ngrams.multipliers))
        yield ops.Convolve(conv, at=at + self.ngrams.state_floats)
        yield Add("streams", source="x")

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Join the parts of the table, which folders have, and give the convolution the shape that it has in GGUF."""
        fold(tensors, prefix, self.tensors())
        names = sorted((name for name in tensors if name.startswith(prefix + TABLE_PARTS)), key=_number_part)
        if names:
            tensors[TABLE] = Joined(TABLE, [tensors.pop(name) for name in names])


def _number_part(name: str) -> int:
    return int(name.split(".")[-2])


@frozen
class Layer:
    """One layer: its two blocks after one another, or side by side after one norm; or one block alone."""

    mixer: Mixer | None
    feed_forward: SecondBlock | None
    norms: Norms
    is_parallel: bool = False  # the blocks stand side by side after the norm of the first one
    has_own_norms: bool = False  # blocks that stand side by side have a norm each
    residual_scale: float = 1.0  # of what each block adds to the stream
    scales_output: bool = False  # it multiplies the stream by a number of its own in the end
    inputs: LayerInputs | None = None  # the same in all layers
    beside: Experts | None = None  # read the stream before the first block by their own norm, and are added last
    streams: Streams | BalancedStreams | AltUp | None = None  # the same, too; the first two with the layer's norms
    ngrams: NgramInputs | None = None
    is_last: bool = False  # of layers with streams, which become one behind it

    def __post_init__(self) -> None:
        if not 0 < self.residual_scale <= limits.MAX_SCALE:
            raise ModelError(
                f"model has residual_scale {self.residual_scale}, expected above 0 and at most {limits.MAX_SCALE:g}"
            )

    @property
    def attention(self) -> Attention | None:
        """The layer's attention, alone or beside a recurrent mixer."""
        mixer = self.mixer.attention if isinstance(self.mixer, ParallelMixers) else self.mixer
        return mixer if isinstance(mixer, Attention) else None

    @property
    def latent(self) -> LatentAttention | None:
        """The layer's latent attention, if it has some."""
        return self.mixer if isinstance(self.mixer, LatentAttention) else None

    @property
    def rope(self) -> Rope:
        """The rotation of the layer's queries and keys; one that rotates nothing if it does not attend."""
        attends = self.attention or self.latent
        return NO_ROPE if attends is None else attends.rope

    @property
    def recurrence(self) -> Recurrence | None:
        """The layer's recurrent mixer, alone or beside attention."""
        mixer = self.mixer.recurrence if isinstance(self.mixer, ParallelMixers) else self.mixer
        return None if isinstance(mixer, Attention | LatentAttention) else mixer

    @property
    def experts(self) -> Experts | None:
        """The layer's experts, if it has some."""
        block = self.beside or self.feed_forward
        block = block.experts if isinstance(block, DenseAndExperts) else block
        return block if isinstance(block, Experts) else None

    @property
    def cache(self) -> LayerCache:
        """The shape of what the layer keeps in the cache, None if nothing."""
        attention, recurrence = self.attention, self.recurrence
        pages: CacheShape | SharedWith | None = None if self.latent is None else self.latent.cache
        if attention is not None:
            own = CacheShape(attention.kv_heads, attention.head_dim, attention.window if attention.is_causal else None)
            pages = own if attention.reads is None else SharedWith(attention.reads)
        more = 0 if self.ngrams is None else self.ngrams.state_floats
        state = None if recurrence is None else StateShape(recurrence.state_floats + more)
        return PagesAndState(pages, state) if pages is not None and state is not None else pages or state

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors of the layer, for a stream of `hidden` columns."""
        is_own = self.streams is None or isinstance(self.streams, AltUp)
        for name in self._name_norms() if self.norms.has_weights and is_own else ():
            yield f"{name}.weight", (hidden,)
            if self.norms.bias:
                yield f"{name}.bias", (hidden,)
        if self.beside is not None:
            yield f"{BESIDE_NORM}.weight", (hidden,)
        for block in (self.mixer, self.feed_forward, self.inputs, self.streams, self.beside):
            if block is not None:
                yield from block.tensors(hidden)
        if self.ngrams is not None:
            yield from self.ngrams.tensors()
        if self.scales_output:
            yield OUTPUT_SCALE, (1,)

    def _name_norms(self) -> Iterator[str]:
        norms = self.norms
        if self.mixer is not None:
            yield from [norms.mixer] * self._norms_before if norms.mixer is not None else []
            yield from [MIXER_POST_NORM] * self._norms_after + [MIXER_SUM_NORM] * self._norms_sum
        if self.feed_forward is not None:
            yield from [norms.feed_forward] * (self._norms_before and (self.has_own_norms or not self.is_parallel))
            yield from [FEED_FORWARD_POST_NORM] * self._norms_after + [FEED_FORWARD_SUM_NORM] * self._norms_sum

    @property
    def _norms_before(self) -> bool:
        return self.norms.places in ("before", "both")

    @property
    def _norms_after(self) -> bool:
        return self.norms.places in ("after", "both")

    @property
    def _norms_sum(self) -> bool:
        return self.norms.places == "stream"

    def load(self, weights: Weights, index: int, hidden: int, *, rope: int = 0, group: int = 0) -> ops.Layer:
        """Prepare the weights of the layer, whose number is `index`, and list its operators.

        `rope` and `group` are the numbers of its rotation table and of its group in the cache. Raises ModelError,
        naming the tensor, for one of another shape.
        """
        own = LayerWeights(weights, f"blk.{index}.", self.norms, index, rope, group)
        weights.check(own.prefix, self.tensors(hidden))
        before = () if self.inputs is None or index else tuple(self.inputs.make(weights.of_model(self.norms)))
        if isinstance(self.streams, AltUp):
            before += () if index else tuple(self.streams.begin(weights.of_model(self.norms)))
            return ops.Layer(hidden, tuple(self._list_alternating(own, self.streams)), before)
        if self.streams is not None:
            start = SpreadStreams(self.streams.count, "stream", "streams", has_gains=False, adds=False)
            return ops.Layer(hidden, tuple(self._list_in_streams(own, self.streams)), () if index else (start,))
        return ops.Layer(hidden, tuple(self._list_operators(own)), before)

    def _list_in_streams(self, w: LayerWeights, streams: Streams | BalancedStreams) -> Iterator[Operator]:
        if self.ngrams is not None and self.recurrence is not None:
            yield from self.ngrams.operators(w, self.recurrence.state_floats)
        for name, block in zip(STREAM_BLOCKS, (self.mixer, self.feed_forward), strict=True):
            if block is not None:
                yield from streams.mix(w, name, "normed")
                yield from block.operators(w, Flow("normed"))
                yield streams.add()
        if self.is_last:
            yield from streams.mix(w.model.of_model(w.norms), LAST_STREAMS, "stream")

    def _list_alternating(self, w: LayerWeights, streams: AltUp) -> Iterator[Operator]:
        if self.mixer is None or self.inputs is None:
            raise ModelError("a layer with alternating updates lacks a mixer or inputs, expected both")
        yield from streams.predict(w)
        source = yield from self._begin(w, self.norms.mixer)
        yield from self.mixer.operators(w, self._flow(w, source, MIXER_POST_NORM))
        yield from streams.join_low_rank(w)
        yield from self._list_second(w, "stream", "delta")
        yield AddResidual()
        yield from streams.correct(w)
        yield from self.inputs.operators(w, w.vector(ALTUP_SCALE))
        yield SpreadStreams(streams.count, "delta", "streams", has_gains=False)
        if self.is_last:
            yield from streams.end(w.model.of_model(w.norms))

    def _list_operators(self, w: LayerWeights) -> Iterator[Operator]:
        if self.beside is not None and self.mixer is not None:
            yield from self._list_with_experts(w, self.mixer, self.beside)
            return
        source: Register = "stream"
        is_mixture = self.is_parallel and isinstance(self.feed_forward, Experts)  # which uses `other` itself
        if self.has_own_norms:  # before anything is added to the stream that both read
            yield from self._list_second(w, source, "other")
        if self.mixer is not None:
            source = yield from self._begin(w, self.norms.mixer)
            if is_mixture:
                yield from self._list_second(w, source, "delta")
            target: Register = "other" if is_mixture else "delta"
            yield from self.mixer.operators(w, self._flow(w, source, MIXER_POST_NORM, target))
            yield from self._end(w, MIXER_SUM_NORM)
        if not self.has_own_norms and not is_mixture:
            yield from self._list_second(w, source, "other" if self.is_parallel else "delta")
        if self.is_parallel:
            yield Add()
        if self.inputs is not None:
            yield from self.inputs.operators(w)
        scale = w.scalar(OUTPUT_SCALE) if self.scales_output else 1.0
        if scale != 1.0:
            yield AddResidual(scale)

    def _list_with_experts(self, w: LayerWeights, mixer: Mixer, experts: Experts) -> Iterator[Operator]:
        """List the operators of a layer with experts beside both blocks, whose input stays while the stream changes."""
        yield Norm(w.norm(BESIDE_NORM), "stream", "kept")
        source = yield from self._begin(w, self.norms.mixer)
        yield from mixer.operators(w, Flow(source, "other", self.residual_scale))
        yield Add("stream")
        yield from self._list_second(w, "stream", "delta")
        yield from experts.operators(w, Flow("kept", "other", self.residual_scale))
        yield Add()

    def _list_second(self, w: LayerWeights, source: Register, target: Register) -> Iterator[Operator]:
        """List the operators of the second block. If experts are chosen by the stream before the first block, they are
        chosen before that block's result is added."""
        block, made = self.feed_forward, None
        if block is None:
            return
        if isinstance(block, Experts) and block.looks_back:
            made = yield from block.route(w, "stream")
        if self.has_own_norms or not self.is_parallel:
            source = yield from self._begin(w, self.norms.feed_forward)
        flow = self._flow(w, source, FEED_FORWARD_POST_NORM, target)
        yield from block.operators(w, flow, made) if isinstance(block, Experts) else block.operators(w, flow)
        yield from self._end(w, FEED_FORWARD_SUM_NORM)

    def _begin(self, w: LayerWeights, name: str | None) -> Generator[Operator, None, Register]:
        """List how a block begins; return the register of its input."""
        if self._norms_sum:
            return "stream"
        if not self._norms_before or name is None:
            yield AddResidual()
            return "stream"
        yield Norm(w.norm(name), "stream", "normed")
        return "normed"

    def _end(self, w: LayerWeights, name: str) -> Iterator[Operator]:
        """List how a block ends whose sum with the stream is normed."""
        if self._norms_sum:
            yield Norm(w.norm(name), "stream", "stream")

    def _flow(self, w: LayerWeights, source: Register, name: str, target: Register = "delta") -> Flow:
        norm = w.norm(name, eps=self.norms.after_eps) if self._norms_after else None
        return Flow(source, target, self.residual_scale, norm)

    def arrange(self, tensors: dict[str, TensorSource], prefix: str, hidden: int) -> None:
        """Lay the layer's tensors out as `tensors` lists them, where a file has them otherwise; nothing is copied but
        small ones. Raises ModelError for a part that is missing, or of another shape than the other ones."""
        if self.attention is not None:
            self.attention.arrange(tensors, prefix)
        if self.latent is not None:
            self.latent.arrange(tensors, prefix)
        if self.feed_forward is not None:
            self.feed_forward.arrange(tensors, prefix)
        if self.beside is not None:
            self.beside.arrange(tensors, prefix)
        if self.recurrence is not None:
            self.recurrence.arrange(tensors, prefix, hidden)
        if isinstance(self.streams, AltUp):
            self.streams.arrange(tensors)
        if self.ngrams is not None:
            self.ngrams.arrange(tensors, prefix)
