"""A `config.json` on its way to GGUF's metadata: states what folders of several families have in common.

A family's `state` calls the methods for what its folders have. Every value is read with its type and range, errors name
the key of `config.json`, and a key that changes answers and that nobody asked for is refused in the end. The result is
a `Statement`: metadata, the source of each entry, and what the tensors need on the way. Numbers are rounded as a GGUF
file keeps them, so that a model loaded from the folder equals the converted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.activate import Activation
from mlxr.kernels.sources import make_vector, round_float
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.components.weights import read_number
from mlxr.models.fields import BARE, MAX_LABELS, OWN, Fields, Origin

# Methods of quantisation that are supported.
_QUANTISED = ("mxfp4", "awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes", "torchao")


@frozen
class TensorLayout:
    """The layout of tensors in a family's folders, if it is unusual."""

    names: Mapping[str, str] = field(default_factory=dict, hash=False)  # with another meaning than elsewhere
    norms_from_one: bool = False  # norms are stored minus one
    exchanges: bool = False  # rows and columns of products in layers are exchanged
    alternates: bool = False  # rows of gate and up alternate, and experts' stacks have columns first, unless quantised
    columns_first: bool = False  # in stacks of experts whose gate does not alternate with up
    joins_heads: bool = False  # each head of keys has its queries, its key and its value together in attn_qkv
    turns_neighbours: bool = False  # neighbouring numbers of a head are rotated, as in GGUF files


@dataclass(slots=True)
class Statement:
    """The metadata of a folder, filled entry by entry.

    Entries are put in by their names without the architecture's prefix, which is known only at the end.
    """

    layout: TensorLayout  # of the folder's tensors
    architecture: str = ""  # its name in GGUF
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)  # of the values, by the same keys
    vectors: dict[str, Sequence[float]] = field(default_factory=dict)  # small f32 tensors that only GGUF has
    skipped_positions: int = 0  # rows of the table of positions that no text uses
    factors: dict[str, WeightFactors] = field(default_factory=dict)  # of weights, by their names without the layer

    def put(self, name: str, value: object, fields: Fields | None = None, key: str = "") -> None:
        """State an entry that comes from `key` of the folder."""
        self.values[name] = _round(value)
        if fields is not None:
            self.origins[name] = Origin(fields.key(key), fields.get(key))

    def put_own(self, name: str, value: object, fields: Fields | None = None, key: str = "") -> None:
        """State an entry that GGUF has no key for."""
        self.put(OWN + name, value, fields, key)

    def list_vectors(self) -> dict[str, TensorSource]:
        """Return the small tensors, by name."""
        return {name: make_vector(name, values) for name, values in self.vectors.items()}

    def integer(self, name: str) -> int:
        """Return a whole number that was stated."""
        value = self.values[name]
        assert isinstance(value, int)
        return value

    def finish(self) -> None:
        """Give all keys the prefix of the architecture, except for our own."""

        def spell(name: str) -> str:
            return name if name.startswith((OWN, BARE)) else f"{self.architecture}.{name}"

        values = {spell(name): value for name, value in self.values.items()}
        self.values = {"general.architecture": self.architecture} | values
        self.origins = {spell(name): origin for name, origin in self.origins.items()}


@frozen
class WeightFactors:
    """Factors for rows of a weight: the first for `counts[0]` rows, and so on; one factor for all without counts."""

    factors: tuple[float, ...]
    counts: tuple[int, ...] = ()


def _round(value: object) -> object:
    """Return a number, or a list of them, as 32 bits keep it."""
    if isinstance(value, float):
        return round_float(value)
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, str):
        return value
    return [_round(item) for item in value]


Flags = tuple[bool, ...]  # of each layer
Biases = Literal["block", "qkv", "use", None]

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # in GGUF, too
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "xielu": "xielu",
    "gelu": "gelu_erf",
}
_ACTIVATION_KEYS = ("hidden_activation", "mlp_hidden_act", "hidden_act")
_MULTIPLIERS = {  # by their names in GGUF
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
# Keys that are refused if the family did not ask for them, with the values that have no effect, and the reason.
_REFUSED: tuple[tuple[tuple[str, ...], tuple[object, ...], str], ...] = (
    (EXPERTS, (0,), "mixture of experts is not supported there"),
    (SOFTCAPS, (0,), "logit soft-capping is not supported"),
    (tuple(_MULTIPLIERS.values()), (1,), "not supported"),
    (("use_qk_norm",), (False,), "layer norms of queries and keys are not supported"),
    (("qk_layernorm",), (False,), "layer norms of queries and keys are not supported"),
    (("swiglu_limit",), (7,), "only activations that are clamped at 7 are supported"),
    (("swiglu_alpha",), (1.702,), "only activations with 1.702 are supported"),
    (("moe_latent_size",), (0,), "experts that read fewer columns than the stream has are not supported"),
    (("clip_qkv",), (), "queries, keys and values that are clipped are not supported"),
    (("use_parallel_residual",), (False,), "parallel residual is not supported"),
    (("is_encoder_decoder", "add_cross_attention"), (False,), "only decoder models are supported"),
    (("is_causal",), (True,), "only causal attention is supported"),
)
# Keys that would change answers if the family does not read them, with the values that do not.
_CHANGING: dict[str, tuple[object, ...]] = {
    "use_bidirectional_attention": ("vision",),
    **dict.fromkeys(("bidirectional", "use_alibi", "alibi", "scale_attn_by_inverse_layer_idx"), ()),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent"), (1,)),
    **dict.fromkeys(("attention_chunk_size", "attn_temperature_tuning", "use_attention_sinks", "attention_sinks"), ()),
    **dict.fromkeys(("no_rope_layer_interval", "router_logit_softcapping", "embedding_dense", "altup_num_inputs"), ()),
    **dict.fromkeys(("hadamard", "online_hadamard", "quarot", "spinquant", "rotation_config", "rotated_weights"), ()),
}
NO_TENSORS: Mapping[str, TensorSource] = {}
_CHANGES = "it changes answers, and mlxr does not know it in this family"


def state_clamp(c: FolderConfig, fields: Fields) -> None:
    """State the bound of queries, keys and values, which a group of a folder's keys has."""
    if fields.get("clip_qkv"):
        c.out.put("attention.clamp_kqv", fields.number("clip_qkv", 1e-6, limits.MAX_SCALE), fields, "clip_qkv")


def _read_number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 else MAX_LABELS


class FolderConfig:
    """The `config.json` of one folder, and the statement that is made of it.

    For a model that also sees images `fields` are those of `text_config`, the part that reads and writes text.
    `tensors` are the folder's, by its own names, or empty if only the sizes of a model matter.
    """

    def __init__(
        self, whole: Fields, fields: Fields, out: Statement, tensors: Mapping[str, TensorSource] = NO_TENSORS
    ) -> None:
        self.whole, self.fields, self.out, self._tensors = whole, fields, out, tensors

    def rename(self, names: Mapping[str, str], usual: Mapping[str, object] = NO_TENSORS) -> FolderConfig:
        """Return the same with newer names for keys of an older spelling, which errors name, and with `usual` values
        for missing keys."""
        values = {**usual} | {names.get(name, name): self.fields.get(name) for name in self.fields.names()}
        return FolderConfig(self.whole, Fields(values), self.out)

    # Sizes.

    @cached_property
    def layers(self) -> int:
        """The number of layers."""
        return self.fields.integer("num_hidden_layers", 1, limits.MAX_LAYERS)

    @cached_property
    def hidden(self) -> int:
        """Columns of the residual stream."""
        return self.fields.integer("hidden_size", 1, limits.MAX_WIDTH)

    @cached_property
    def heads(self) -> int:
        """The number of heads of queries."""
        return self.fields.integer("num_attention_heads", 1, limits.MAX_HEADS)

    @cached_property
    def head_key(self) -> str:
        """The key for the size of a head."""
        return (
            "attention_head_dim" if self.fields.get("head_dim") is None else "head_dim"
        )  # the former in old Nemotrons

    @cached_property
    def head_dim(self) -> int:
        """Numbers of a head."""
        if self.fields.get("head_dim") is None and self.hidden % self.heads:
            self.fields.refuse("num_attention_heads", f"a divisor of the hidden size {self.hidden}")
        return self.fields.integer(self.head_key, 2, limits.MAX_HEAD_DIM, default=self.hidden // self.heads)

    def read_kv_heads(self, default: int | None = None) -> int:
        """Return the number of heads of keys."""
        kv_heads = self.fields.integer("num_key_value_heads", 1, limits.MAX_HEADS, default=default)
        if self.heads % kv_heads:
            self.fields.refuse("num_key_value_heads", f"a divisor of the {self.heads} heads")
        return kv_heads

    def find_key(self, *names: str) -> str:
        """Return the first of some keys that is there, else the last one."""
        return next((name for name in names if self.fields.get(name) is not None), names[-1])

    def state_model(
        self,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        eps: Sequence[str] = (RMS_EPS,),
        eps_key: str = "rms_norm_eps",
        context_keys: Sequence[str] = ("max_position_embeddings",),
        activation: Activation = "silu",
        biases: Biases = None,
        qkv_key: str = "use_qkv_bias",
        tied: bool = False,
    ) -> None:
        """State what every model has but its rotation and the width of its feed-forward blocks.

        `kv_heads`, `activation` and `tied` are used if the folder does not say. Heads have `head_dim` numbers if that
        is not what the folder states. `eps` are GGUF's keys for the number that norms add to the variance. The first of
        `context_keys` that is there counts. For biases see `state_biases`.
        """
        out, fields = self.out, self.fields
        out.put("embedding_length", self.hidden, fields, "hidden_size")
        out.put("attention.head_count", self.heads, fields, "num_attention_heads")
        for name in ("attention.key_length", "attention.value_length"):
            out.put(name, head_dim or self.head_dim, fields, self.head_key)
        out.put("attention.head_count_kv", self.read_kv_heads(kv_heads), fields, "num_key_value_heads")
        key = self.find_key(*context_keys)
        out.put("context_length", fields.integer(key, 1, limits.MAX_CONTEXT), fields, key)
        out.put("block_count", self.layers, fields, "num_hidden_layers")
        out.put("vocab_size", fields.integer("vocab_size", 1, limits.MAX_VOCABULARY), fields, "vocab_size")
        for name in eps:
            out.put(name, fields.number(eps_key, 1e-30, 0.5), fields, eps_key)
        self.state_activation(activation)
        self.state_biases(biases, qkv_key)
        self.state_output(tied=tied)

    def state_width(self, key: str = "intermediate_size", default: int | None = None) -> None:
        """State the features of feed-forward blocks."""
        self.out.put("feed_forward_length", self.fields.integer(key, 1, limits.MAX_WIDTH, default), self.fields, key)

    def state_kv_layers(self, attends: Sequence[bool]) -> None:
        """State that only some layers have heads of keys."""
        kv_heads = self.out.integer("attention.head_count_kv")
        if not all(attends):
            counts = [kv_heads if flag else 0 for flag in attends]
            self.out.put("attention.head_count_kv", counts, self.fields, "num_key_value_heads")

    def state_encoder(self, *, padding: int = 0) -> None:
        """State that texts are seen as a whole, and the number of token types.

        The first `padding` rows of positions belong to no text, so the longest text is shorter by as many.
        """
        fields, out = self.fields, self.out
        out.put("attention.causal", False)
        types = fields.integer("type_vocab_size", 0, 16, default=0)
        out.put_own("token_types", types, fields, "type_vocab_size")
        if padding:
            out.skipped_positions = padding
            context = out.integer("context_length") - padding
            if context < 1:
                fields.refuse("max_position_embeddings", f"more than the {padding} rows that stand for padding")
            out.put("context_length", context, fields, "max_position_embeddings")

    def state_classifier(
        self, kind: str, *, bias: bool, output_bias: bool = True, normed: bool = False, pooling: str = "cls"
    ) -> None:
        """State the products that rank a text, or classify it: see `Metadata.classifier`."""
        named = self.fields.mapping("id2label")
        count = self.fields.integer("num_labels", 1, MAX_LABELS, default=2)
        names = [f"LABEL_{index}" for index in range(count)] if named is None else named.names()
        labels = names if named is None else [named.text(name) for name in sorted(names, key=_read_number)]
        self.out.put("classifier.output_labels", labels, self.fields, "id2label")
        self.out.put_own("classifier", kind)
        self.out.put_own("classifier.bias", bias)
        self.out.put_own("classifier.output_bias", output_bias)
        self.out.put_own("classifier.norm", normed)
        self.out.put_own("classifier.pooling", pooling, self.fields, "classifier_pooling")

    # Blocks.

    def state_activation(self, usual: Activation) -> None:
        """State the activation of feed-forward blocks, if it is not the usual one."""
        key = self.find_key(*_ACTIVATION_KEYS)
        if self.fields.get(key) is None:
            return
        name = self.fields.text(key)
        if name not in _ACTIVATIONS:
            self.fields.refuse(key, f"one of {', '.join(_ACTIVATIONS)}")
        if _ACTIVATIONS[name] != usual:
            self.out.put_own("activation", _ACTIVATIONS[name], self.fields, key)

    def state_biases(self, biases: Biases, qkv_key: str) -> None:
        """State which products have biases.

        Kinds: "block": `attention_bias` gives them to q, k, v and o, and `mlp_bias` to gate, up and down; "qkv": these
        three always have some; "use": `use_bias` gives them to all, unless it is false. `qkv_key` gives some to q, k
        and v.
        """
        fields, out = self.fields, self.out
        attention = feed_forward = biases == "use" and fields.flag("use_bias", True)
        if biases == "block":
            attention, feed_forward = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
        out.put_own("attention.qkv_bias", fields.flag(qkv_key, False) or biases == "qkv" or attention)
        out.put_own("attention.output_bias", attention)
        out.put_own("feed_forward_bias", feed_forward)
        out.put_own("output_bias", fields.flag("lm_head_bias", False))

    def state_output(self, *, tied: bool) -> None:
        """State whether the output is the table of embeddings; `tied` is used if the folder does not say."""
        stated = self.fields.flag("tie_word_embeddings", self.fields.flag("tie_embedding", tied))
        self.out.put_own("tied_embeddings", self.whole.flag("tie_word_embeddings", stated))

    def state_numbers(self, name: str, part: str, beginning: float) -> None:
        """State the number that each layer keeps in its tensor `part`; in a new model it is `beginning`."""
        names = [f"model.layers.{index}.{part}" for index in range(self.layers)]
        values = [beginning] * self.layers
        if self._tensors:
            missing = next((tensor for tensor in names if tensor not in self._tensors), None)
            if missing is not None:
                raise ModelError(f"tensor {missing} is missing, which states {name} of its layer")
            values = [read_number(self._tensors[tensor]) for tensor in names]
        self.out.put(name, values)

    def state_head_norms(self, key: str) -> None:
        """State whether queries and keys are normed, by `key`."""
        self.out.put_own("attention.head_norms", self.fields.flag(key, False))

    # Factors and caps.

    def state_multipliers(self) -> None:
        """State Granite's four multipliers."""
        for name, key in _MULTIPLIERS.items():
            self.out.put(name, self.fields.number(key, 1e-9, limits.MAX_SCALE, default=1.0), self.fields, key)

    def state_softcaps(self) -> None:
        """State the caps of scores and logits."""
        for name in SOFTCAPS:
            cap = self.fields.number(name, 0.0, limits.MAX_SCALE, default=0.0)
            if cap:
                self.out.put(name, cap, self.fields, name)

    def state_score_size(self, by_width_layers: int) -> None:
        """State the factor of scores, if it is not the usual one: by the head size, or in models of `by_width_layers`
        layers, which llama.cpp recognises by their number, by hidden / heads."""
        key = "query_pre_attn_scalar"
        size = self.fields.number(key, 1e-6, limits.MAX_SCALE, default=float(self.head_dim))
        usual = self.hidden / self.heads if self.layers == by_width_layers else self.head_dim
        if size != usual:
            self.out.put_own("attention.scale", size**-0.5, self.fields, key)

    # The end.

    def note(self, names: Iterable[str]) -> None:
        """Count keys as asked for: their contents are known otherwise."""
        self.fields.note(names)

    def refuse_others(self) -> None:
        """Raise ModelError for keys of the folder that neither all families have nor this one."""
        for names, harmless, why in _REFUSED:
            self.fields.refuse_unless([name for name in names if not self.fields.was_asked(name)], harmless, why)
        self._refuse_quantised()
        self.fields.refuse_unread(_CHANGING, _CHANGES)

    def _refuse_quantised(self) -> None:
        stated = self.whole.get("quantization_config")
        quantization = self.whole.mapping("quantization_config") if isinstance(stated, dict) else None
        method = None if quantization is None else quantization.get("quant_method")
        if self.whole.get("quantization") is None and method not in _QUANTISED:  # MLX states its own under both names
            why = "quantised like this is not supported; convert the original weights"
            self.whole.refuse_unless(("quantization_config",), (), why)
