"""A model as its family builds it: its layers, out of components, and what stands before and after them.

It says what a model is; `Decoder` is one that runs. All that others need of a model follows from it: which tensors a
file must have, what the cache keeps, and what a GPU of several has of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from mlxr.cache.shapes import LayerCache
from mlxr.core.errors import ModelError
from mlxr.models import limits
from mlxr.models.components import Attention, Layer


@dataclass(frozen=True)
class Model:
    """A decoder: a table of embeddings, layers over the residual stream, a norm and an output.

    Raises ModelError, naming the field, for values that contradict each other.
    """

    architecture: str  # GGUF's name of it
    layers: tuple[Layer, ...]
    hidden: int  # columns of the residual stream
    vocab_size: int
    context_length: int  # the longest sequence that the model is meant for
    is_tied: bool = False  # the output is the table of embeddings
    has_output_bias: bool = False
    output_norm: str = "output_norm"  # what tensors call the norm before the output
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None  # of logits
    joins: tuple[str, ...] = ()  # what files keep as one tensor: attn_qkv, and gate and up as ffn_up
    interleaved_dim: int = 0  # so many numbers of each head of queries and keys are neighbouring pairs that rotate

    def __post_init__(self) -> None:
        for name, value, high in (
            ("layers", len(self.layers), limits.MAX_LAYERS),
            ("hidden", self.hidden, limits.MAX_WIDTH),
            ("vocab_size", self.vocab_size, limits.MAX_VOCABULARY),
            ("context_length", self.context_length, limits.MAX_CONTEXT),
        ):
            if not 1 <= value <= high:
                raise ModelError(f"model has {name} {value}, expected from 1 to {high}")
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
    def heads(self) -> int:
        """Heads of queries, 1 of a model that does not attend."""
        return 1 if self.attention is None else self.attention.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys, 1 of a model that does not attend."""
        return 1 if self.attention is None else self.attention.kv_heads

    @property
    def draft_layer(self) -> Layer | None:
        """A layer at the end that drafts tokens, as the family would have it: one that attends, with experts if some
        layers have them; None of a family whose layers are single blocks."""
        whole = [layer for layer in self.layers if layer.mixer is not None and layer.feed_forward is not None]
        attending = [layer for layer in whole if isinstance(layer.mixer, Attention)]
        layers = [layer for layer in attending if layer.experts is not None] or attending
        if not layers or len(whole) < len(self.layers):
            return None
        mixer = layers[-1].mixer
        assert isinstance(mixer, Attention)
        return replace(layers[-1], mixer=replace(mixer, window=None))

    @cached_property
    def cache_layers(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of the tokens."""
        return tuple(layer.cache for layer in self.layers)

    def limit_context(self, context_tokens: int | None) -> Model:
        """Return the model for contexts of up to `context_tokens` (None: as long as the model can).

        Longrope's short factors are for contexts up to its original one. Served within that, the model is one of that
        length, with other keys in its cache than the model that is served beyond it.
        """
        scaling = None if self.attention is None else self.attention.rope.scaling
        if context_tokens is None or scaling is None or scaling.kind != "longrope":
            return self
        original = scaling.original_context or self.context_length
        return replace(self, context_length=min(self.context_length, original)) if context_tokens <= original else self
