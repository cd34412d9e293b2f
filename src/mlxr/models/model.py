"""A model as its family builds it: its layers, made of components, and the parts before and after them.

It describes a model; `Decoder` is one that runs. All that others need of a model follows from it: the tensors that a
file must have, the contents of the cache, and the share of one of several GPUs.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cached_property

from mlxr.cache.shapes import LayerCache, SharedWith
from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.models import limits
from mlxr.models.components import Attention, Dense, Embeddings, LatentAttention, Layer
from mlxr.models.components.weights import RotatedWeights, Tensors

RANK_POOLINGS = ("mean", "cls", "last")


@frozen(slots=False)
class Model:
    """A decoder: a table of embeddings, layers over the residual stream, a norm and an output.

    Or an encoder, which has no output, and whose attention sees a whole text, which therefore goes through it in one
    step.

    Raises ModelError, naming the field, for values that contradict each other.
    """

    architecture: str  # its name in GGUF
    layers: tuple[Layer, ...]
    hidden: int  # columns of the residual stream
    vocab_size: int
    context_length: int  # the longest sequence that the model is meant for
    is_tied: bool = False  # the output is the table of embeddings
    has_output_bias: bool = False
    output_norm: str | None = "output_norm"  # name of the norm before the output, None without one
    has_output: bool = True  # it gives logits of the next token
    embeddings: Embeddings | None = None  # added to embeddings before the first layer
    dense: tuple[Dense, ...] = ()  # products of the vector of a text
    classifier: tuple[Dense, ...] = ()  # products of the state that ranks a text, up to logits of labels
    labels: tuple[str, ...] = ()  # of the classifier, where files name them
    rank_pooling: str = "last"  # the states that the classifier reads, one of RANK_POOLINGS
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None  # of logits
    joins: tuple[str, ...] = ()  # tensors that files keep as one: attn_qkv, and gate and up as ffn_up
    picture_layers: int = field(default=0, repr=False)  # the first layers, behind each of which pictures add rows
    rotated: RotatedWeights | None = field(default=None, repr=False)  # weights that the file has rotated
    loops: int = 1  # times that all layers run, each time with their own keys and values
    norms_loops: bool = False  # the output's norm also runs between these times
    interleaved_dim: int = 0  # numbers of each head of queries and keys that rotate in neighbouring pairs

    def __post_init__(self) -> None:
        for name, value, high in (
            ("layers", len(self.layers), limits.MAX_LAYERS),
            ("hidden", self.hidden, limits.MAX_WIDTH),
            ("vocab_size", self.vocab_size, limits.MAX_VOCABULARY),
            ("context_length", self.context_length, limits.MAX_CONTEXT),
        ):
            if not 1 <= value <= high:
                raise ModelError(f"model has {name} {value}, expected from 1 to {high}")
        if self.embeddings is not None and 0 < self.embeddings.positions < self.context_length:
            raise ModelError(
                f"model has {self.embeddings.positions} learned positions for a context of {self.context_length}"
            )
        if not self.is_causal and any(layer.attention is None or layer.recurrence is not None for layer in self.layers):
            raise ModelError("model has layers that do not attend beside those that see whole texts")
        for name in ("embedding_scale", "logit_scale", "final_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= limits.MAX_SCALE:
                raise ModelError(f"model has {name} {value}, expected above 0 and at most {limits.MAX_SCALE:g}")

    @cached_property
    def attention(self) -> Attention | None:
        """The attention of the first layer that sees all positions, else of the first that attends, if one does."""
        attending = [layer.attention for layer in self.layers if layer.attention is not None]
        return next((one for one in attending if one.window is None), attending[0] if attending else None)

    @property
    def has_rows(self) -> bool:
        """True if rows for positions or for types of tokens are added to embeddings."""
        return self.embeddings is not None and bool(self.embeddings.positions or self.embeddings.types)

    @property
    def has_biases(self) -> bool:
        """True if scores of attention get a bias by the distance of a key."""
        return any(layer.attention is not None and layer.attention.biases is not None for layer in self.layers)

    @property
    def turns_pictures(self) -> bool:
        """True if tokens of pictures stand on three axes."""
        return self.attention is not None and self.attention.rope.sections is not None

    @property
    def sees_whole_pictures(self) -> bool:
        """True if in some layers tokens of a picture also see those of it behind them."""
        return any(layer.attention is not None and layer.attention.whole_pictures for layer in self.layers)

    @property
    def heads(self) -> int:
        """Heads of queries; 1 in a model that does not attend, or whose heads all share latent vectors."""
        return 1 if self.attention is None else self.attention.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys; 1 in a model that does not attend."""
        return 1 if self.attention is None else self.attention.kv_heads

    @property
    def draft_layer(self) -> Layer | None:
        """A layer at the end that drafts tokens, as the family would have it: one that attends, with experts if some
        layers have them; None for a family whose layers are single blocks."""
        whole = [layer for layer in self.layers if layer.mixer is not None and layer.feed_forward is not None]
        attending = [layer for layer in whole if isinstance(layer.mixer, Attention | LatentAttention)]
        layers = [layer for layer in attending if layer.experts is not None] or attending
        if not layers or len(whole) < len(self.layers) or self.layers[0].streams is not None:
            return None
        mixer = layers[-1].mixer
        return replace(layers[-1], mixer=replace(mixer, window=None)) if isinstance(mixer, Attention) else layers[-1]

    @cached_property
    def cache_layers(self) -> tuple[LayerCache, ...]:
        """The shape of what each layer keeps in the cache, for each time that it runs.

        The layers of an encoder use the pages of the first one in turn: no step reads what another has written.
        """
        return (
            tuple(
                layer.cache if self.is_causal or not number else SharedWith(0)
                for number, layer in enumerate(self.layers)
            )
            * self.loops
        )

    @property
    def vector_size(self) -> int:
        """The length of the vector that a text becomes."""
        return self.dense[-1].features if self.dense else self.hidden

    @property
    def is_causal(self) -> bool:
        """True if no token sees later ones, so that a text may go through the model in parts."""
        return all(layer.attention is None or layer.attention.is_causal for layer in self.layers)

    def end_tensors(self) -> Tensors:
        """List the tensors outside the layers."""
        table, norms = (self.vocab_size, self.hidden), self.layers[-1].norms
        yield "token_embd.weight", table
        if self.output_norm is not None and norms.has_weights:
            yield f"{self.output_norm}.weight", (self.hidden,)
            if norms.bias:
                yield f"{self.output_norm}.bias", (self.hidden,)
        if self.has_output and not self.is_tied:
            yield "output.weight", table
        if self.has_output_bias:
            yield "output.bias", (self.vocab_size,)
        if self.embeddings is not None:
            yield from self.embeddings.tensors(self.hidden, bias=norms.bias)
        for dense in (*self.dense, *self.classifier):
            yield from dense.tensors()

    def limit_context(self, context_tokens: int | None) -> Model:
        """Return the model for contexts of up to `context_tokens` (None: as long as the model can).

        Longrope's short factors are for contexts up to its original one. A model served within that has this length,
        and other keys in its cache than one that is served beyond it.
        """
        scalings = [layer.rope.scaling for layer in self.layers if layer.rope.scaling is not None]
        scaling = next((one for one in scalings if one.kind == "longrope"), None)
        if context_tokens is None or scaling is None:
            return self
        original = scaling.original_context or self.context_length
        return replace(self, context_length=min(self.context_length, original)) if context_tokens <= original else self
