"""A layer: two blocks around the residual stream, its norms, and what some models add to it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from mlxr.cache.shapes import CacheShape, LayerCache, PagesAndState, SharedWith, StateShape
from mlxr.core.errors import ModelError
from mlxr.kernels.activate import Activation
from mlxr.kernels.layers import operators as ops
from mlxr.kernels.layers.operators import (
    Activate,
    Add,
    AddResidual,
    MatMul,
    Norm,
    NormWeight,
    Operator,
    Register,
    Scale,
)
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.components.attention import NO_ROPE, Attention, LatentAttention, Rope
from mlxr.models.components.experts import DenseAndExperts, Experts
from mlxr.models.components.feed_forward import FeedForward
from mlxr.models.components.recurrent import Recurrence
from mlxr.models.components.weights import Flow, LayerWeights, Norms, Tensors, Weights

# Names of the norms of what blocks add to the stream; those of their inputs the layer's `Norms` name.
MIXER_POST_NORM, FEED_FORWARD_POST_NORM = "post_attention_norm", "post_ffw_norm"
MIXER_SUM_NORM, FEED_FORWARD_SUM_NORM = "attn_output_norm", "layer_output_norm"  # of the stream behind a block
OUTPUT_SCALE, BESIDE_NORM = "layer_output_scale.weight", "ffn_norm_exps"
INPUT_GATE, INPUT_PROJECTION, INPUT_NORM = "inp_gate", "proj", "post_norm"  # of the input of a layer
# Of what makes the inputs of all layers.
TABLE, INPUTS_OF_STREAM, INPUTS_NORM = "per_layer_token_embd.weight", "per_layer_model_proj", "per_layer_proj_norm"


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """Attention and a recurrent mixer beside it, of one input, which both add to the stream (Falcon-H1)."""

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


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What every layer gets of each token besides the stream, and adds in the end (Gemma 4 E2B and E4B).

    These inputs are the sum of the token's row in a table, times `table_scale`, and of a product of its embedding,
    normed for each layer by itself; the sum is multiplied by `scale`. A layer multiplies them by what the activation
    makes of a product of the stream.
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
        """List what makes the inputs of all layers, with the model's weights. The table stays in its file."""
        yield ops.GetRows(w.take(TABLE), "other")
        yield Scale(self.table_scale, "other")
        projection = w.product(INPUTS_OF_STREAM)
        yield MatMul(projection, "stream", "x")
        norm = NormWeight(w.vector(f"{INPUTS_NORM}.weight"), self.eps)
        yield Norm(norm, "x", "inputs", projection.out_features // self.features)
        yield Add("inputs", self.scale)

    def operators(self, w: LayerWeights) -> Iterator[Operator]:
        """List how a layer adds its inputs to the stream."""
        yield AddResidual()
        yield MatMul(w.product(INPUT_GATE), "stream", "x")
        yield Activate(self.activation, self.features, is_gated=False, first=w.index * self.features)
        yield from Flow("x", norm=w.norm(INPUT_NORM)).finish(w.product(INPUT_PROJECTION))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its two blocks after one another, or side by side after one norm; or one block alone."""

    mixer: Mixer | None
    feed_forward: SecondBlock | None
    norms: Norms
    is_parallel: bool = False  # the blocks stand side by side after the norm of the first one
    has_own_norms: bool = False  # blocks that stand side by side have a norm each
    residual_scale: float = 1.0  # of what each block adds to the stream
    scales_output: bool = False  # multiplies the stream by a number of its own in the end
    inputs: LayerInputs | None = None  # the same in all layers
    beside: Experts | None = None  # read the stream before the first block by a norm of their own, and add to it last

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
        """The rotation of the layer's queries and keys; one that turns nothing where it does not attend."""
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
        """What the layer keeps of the tokens."""
        attention, recurrence = self.attention, self.recurrence
        pages: CacheShape | SharedWith | None = None if self.latent is None else self.latent.cache
        if attention is not None:
            own = CacheShape(attention.kv_heads, attention.head_dim, attention.window if attention.is_causal else None)
            pages = own if attention.reads is None else SharedWith(attention.reads)
        state = None if recurrence is None else StateShape(recurrence.state_floats)
        return PagesAndState(pages, state) if pages is not None and state is not None else pages or state

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors of the layer, for a stream of `hidden` columns."""
        for name in self._name_norms() if self.norms.has_weights else ():
            yield f"{name}.weight", (hidden,)
            if self.norms.bias:
                yield f"{name}.bias", (hidden,)
        if self.beside is not None:
            yield f"{BESIDE_NORM}.weight", (hidden,)
        for block in (self.mixer, self.feed_forward, self.inputs, self.beside):
            if block is not None:
                yield from block.tensors(hidden)
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
        return ops.Layer(hidden, tuple(self._list_operators(own)), before)

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
        """List the operators of the second block. Experts that the stream before the first one chooses are chosen while
        what that block adds is still apart."""
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
        """List how a block begins; returns where its input is then."""
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
