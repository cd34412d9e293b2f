"""What a model is, as numbers: the shape that decides which tensors it has and what the decoder does with them.

Made by `gguf_config` out of files that may lie; a `ModelConfig` checks itself, so everything after it
may rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mlxr.cache.shapes import LayerCache
from mlxr.core.errors import ModelError
from mlxr.kernels.activate import ACTIVATIONS, Activation
from mlxr.kernels.rope import QueryTemperature, RopeScaling
from mlxr.models import limits
from mlxr.models.architectures import build_layers
from mlxr.models.components import Experts, Layer, Recurrence


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm, rotary positions, grouped-query attention, feed-forward.

    Sizes are counts; `head_dim` need not be hidden / heads. `rope_dim` elements of each head are rotated;
    `rope_interleaved` pairs neighbours (GGUF's order for llama), otherwise halves. `sliding_window` w: position p
    sees p - w + 1 to p, in the layers for which `window_layers` is true, or in all. These rotate with the base
    `window_rope_theta`, if there is one. Queries grow by `query_temperature`. Scores are multiplied by
    `attention_scale`, or 1 / sqrt(head_dim), and capped by `attention_softcap`; embeddings, what blocks add to the
    stream, and logits by their scales, and logits capped by `final_softcap`. Where `rope_layers` is false a layer
    rotates nothing. `parallel_blocks` stand side by side, where a family has both kinds.
    Layers with windows have `window_kv_heads` heads of `window_head_dim`, if these are stated; in the
    others values may be `keys_as_values`. The last `shared_layers` layers read the keys and values of the last layer of
    their kind before them, and their feed-forward blocks may have `shared_ffn` features. Each layer may get
    `input_features` of each token by an embedding of its own. In the layers for which
    `mixture_layers` is true, or in all, the feed-forward block is a `mixture` of experts, if there is one. Those for
    which `recurrent_layers` is true, or all, have a `recurrence` instead of attention, if there is one. With
    `mixer_layers` each layer is one block, of these the mixer and of others the feed-forward block. What attention
    gives is gated with `gated_attention`. `rms_eps` is that of all norms. `context_length` is the longest sequence the
    model is meant for.
    Raises ModelError, naming the field, for values that contradict each other.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_dim: int
    rope_interleaved: bool
    rope_scaling: RopeScaling | None = None
    query_temperature: QueryTemperature | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    logit_bias: bool = False
    qk_norm: bool = False
    parallel_blocks: bool = False
    tied_embeddings: bool = False
    activation: Activation = "silu"
    window_layers: tuple[bool, ...] | None = None
    window_rope_theta: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    rope_layers: tuple[bool, ...] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None
    window_head_dim: int | None = None
    window_kv_heads: int | None = None
    keys_as_values: bool = False
    shared_layers: int = 0
    shared_ffn: int | None = None
    input_features: int | None = None
    mixture: Experts | None = None
    mixture_layers: tuple[bool, ...] | None = None
    recurrence: Recurrence | None = None
    recurrent_layers: tuple[bool, ...] | None = None
    mixer_layers: tuple[bool, ...] | None = None
    gated_attention: bool = False

    def __post_init__(self) -> None:
        for name, high in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise ModelError(f"model has {name} {value}, expected from 1 to {high}")
        if self.heads % self.kv_heads:
            raise ModelError(f"model has {self.heads} heads, which its kv_heads {self.kv_heads} do not divide")
        for name, high in _OPTIONAL_LIMITS.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= high:
                raise ModelError(f"model has {name} {value}, expected from 1 to {high}")
        if self.window_kv_heads is not None and self.heads % self.window_kv_heads:
            raise ModelError(
                f"model has {self.heads} heads, which its window_kv_heads {self.window_kv_heads} do not divide"
            )
        own = self.layers - self.shared_layers
        if self.shared_layers < 0 or not set(self.windowed) <= set(self.windowed[: max(own, 0)]):
            raise ModelError(
                f"model has shared_layers {self.shared_layers} of {self.layers}, expected so many that each kind of "
                "layer stands before them"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ModelError(f"model has rope_dim {self.rope_dim}, expected even and at most head_dim {self.head_dim}")
        if self.rope_scaling is not None and len(self.rope_scaling.long_factors) not in (0, self.rope_dim // 2):
            raise ModelError(
                f"model has rope_dim {self.rope_dim} with {len(self.rope_scaling.long_factors)} longrope factors, "
                f"expected {self.rope_dim // 2}"
            )
        if not 0 < self.rms_eps < 1:
            raise ModelError(f"model has rms_eps {self.rms_eps}, expected between 0 and 1")
        for name in ("rope_theta", "window_rope_theta"):
            theta = getattr(self, name)
            if theta is not None and not 1 < theta <= limits.MAX_THETA:
                raise ModelError(f"model has {name} {theta}, expected above 1 and at most 1e15")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"model has sliding_window {self.sliding_window}, expected at least 1")
        for flags, what in (
            (self.window_layers, "have windows"),
            (self.rope_layers, "rotate"),
            (self.mixture_layers, "have experts"),
            (self.recurrent_layers, "are recurrent"),
            (self.mixer_layers, "are mixers"),
        ):
            if flags is not None and len(flags) != self.layers:
                raise ModelError(f"model says of {len(flags)} of its {self.layers} layers which {what}")
        for name in _SCALES:
            value = getattr(self, name)
            if value is not None and not 0 < value <= limits.MAX_SCALE:
                raise ModelError(f"model has {name} {value}, expected above 0 and at most {limits.MAX_SCALE:g}")
        if self.mixture is not None:
            _check_mixture(self.mixture)
        if self.recurrence is not None:
            _check_recurrence(self.recurrence)
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"model has activation {self.activation!r}, expected one of {', '.join(ACTIVATIONS)}")

    def limit_context(self, context_tokens: int | None) -> ModelConfig:
        """The configuration for contexts of up to `context_tokens` (None: as long as the model can).

        Longrope's short factors are for contexts up to its original one. Served within that, the model is one of that
        length, with other keys in its cache than the model that is served beyond it.
        """
        scaling = self.rope_scaling
        if context_tokens is None or scaling is None or scaling.kind != "longrope":
            return self
        original = scaling.original_context or self.context_length
        return replace(self, context_length=min(self.context_length, original)) if context_tokens <= original else self

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Which layers have the window."""
        return self.window_layers or (self.sliding_window is not None,) * self.layers

    @property
    def layer_specs(self) -> tuple[Layer, ...]:
        """The layers, as the model's family builds them."""
        return build_layers(self)

    @property
    def cache_layers(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of the tokens."""
        return tuple(layer.cache for layer in self.layer_specs)


def _check_recurrence(mixer: Recurrence) -> None:
    for field in fields(mixer):
        value = getattr(mixer, field.name)
        high = {"taps": limits.MAX_TAPS, "channels": limits.MAX_WIDTH}.get(field.name, limits.MAX_HEAD_DIM)
        if not isinstance(value, bool) and not (2 if field.name == "taps" else 1) <= value <= high:
            raise ModelError(f"model has {field.name} {value} in its recurrent layers, expected up to {high}")
    for many, few in (("value_heads", "key_heads"), ("heads", "groups")):
        count, parts = getattr(mixer, many, 0), getattr(mixer, few, 1)
        if count % parts:
            raise ModelError(f"model has {count} {many}, which its {few} {parts} do not divide")


def _check_mixture(mixture: Experts) -> None:
    rule = mixture.rule
    for name, value, high in (
        ("experts", mixture.count, limits.MAX_EXPERTS),
        ("used experts", rule.used, min(mixture.count, limits.MAX_USED_EXPERTS)),
        ("features of an expert", mixture.features, limits.MAX_WIDTH),
        ("groups of experts", rule.groups, mixture.count),
        ("used groups of experts", rule.groups_used, rule.groups),
    ):
        if not 1 <= value <= high:
            raise ModelError(f"model has {value} {name}, expected from 1 to {high}")
    if not 0 <= mixture.shared_features <= limits.MAX_WIDTH:
        raise ModelError(
            f"model has {mixture.shared_features} features of its shared expert, expected up to {limits.MAX_WIDTH}"
        )
    size, rest = divmod(mixture.count, rule.groups)
    if rest or (rule.groups > 1 and size < 2) or rule.groups_used * size < rule.used:
        raise ModelError(
            f"model uses {rule.used} of {mixture.count} experts out of {rule.groups_used} of {rule.groups} groups, "
            "expected groups of one size, two experts or more, and enough of them"
        )
    if not 0 < rule.scale <= limits.MAX_SCALE:
        raise ModelError(
            f"model multiplies shares of experts by {rule.scale}, expected above 0 and at most {limits.MAX_SCALE:g}"
        )


_SCALES = (
    "attention_scale",
    "attention_softcap",
    "final_softcap",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
_LIMITS = {
    "layers": limits.MAX_LAYERS,
    "hidden": limits.MAX_WIDTH,
    "heads": limits.MAX_HEADS,
    "kv_heads": limits.MAX_HEADS,
    "head_dim": limits.MAX_HEAD_DIM,
    "ffn": limits.MAX_WIDTH,
    "vocab_size": limits.MAX_VOCABULARY,
    "context_length": limits.MAX_CONTEXT,
    "rope_dim": limits.MAX_HEAD_DIM,
}
_OPTIONAL_LIMITS = {
    "window_head_dim": limits.MAX_HEAD_DIM,
    "window_kv_heads": limits.MAX_HEADS,
    "shared_ffn": limits.MAX_WIDTH,
    "input_features": limits.MAX_WIDTH,
}
