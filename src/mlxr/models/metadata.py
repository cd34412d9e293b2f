"""Typed access to the metadata of a model file, in GGUF's words: reads the parts that families have in common.

A family's `build` asks for what its models have. Every error names the key as the file spells it. A key that changes
answers and that nobody asked for is refused when all is built, so no list has to agree with the families.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cached_property
from typing import cast, get_args

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import ACTIVATIONS, Activation
from mlxr.kernels.moe import RoutingRule, Scoring
from mlxr.kernels.rope import QueryTemperature, RopeScaling, yarn_attention_factor
from mlxr.kernels.rope_and_write_kv import HeadNormKind
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.components import (
    NO_ROPE,
    Attention,
    Dense,
    Embeddings,
    FeedForward,
    LatentAttention,
    Layer,
    Mamba,
    Mamba2,
    Rope,
)
from mlxr.models.components.attention import Buckets, Slopes
from mlxr.models.components.encoder import (
    CLASSIFIER,
    CLASSIFIER_NORM,
    CLASSIFIER_OUTPUT,
    DENSE,
    TYPES,
    DenseActivation,
)
from mlxr.models.fields import BARE, MAX_LABELS, NEEDED, NO_ORIGINS, Fields, Origin, open_own_keys, says_nothing
from mlxr.models.model import RANK_POOLINGS, Model
from mlxr.models.rotations import LONG_FACTORS, PRISM, SHORT_FACTORS, read_rope_factors, read_rotated_weights

Flags = tuple[bool, ...]  # of each layer

SECTIONS = "rope.dimension_sections"
MAX_ALIBI, CLAMP = "attention.max_alibi_bias", "attention.clamp_kqv"
WINDOW_PATTERN, WINDOW_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
SCORING_NUMBERS: dict[Scoring, int] = {"softmax": 1, "sigmoid": 2, "softmax_chosen": 3}
_SCORINGS: dict[int, Scoring] = {number: scoring for scoring, number in SCORING_NUMBERS.items()}
_PARALLEL = "use_parallel_residual"

# Keys that are refused if the family did not ask for them, with the values that have no effect, and the reason.
_REFUSED: tuple[tuple[tuple[str, ...], tuple[object, ...], str], ...] = (
    (("attn_logit_softcapping", "final_logit_softcapping"), (0,), "logit soft-capping is not supported"),
    (("embedding_scale", "residual_scale", "attention.scale", "logit_scale"), (0, 1), "not supported"),
    ((CLAMP, MAX_ALIBI), (0,), "not supported"),
    (("attention.causal",), (True,), "only causal attention is supported"),
    ((_PARALLEL,), (False,), "parallel residual is not supported"),
    (("rope.scaling.alpha",), (0, 1), "not supported; convert the model with its frequency base scaled"),
    (("rope.scaling.yarn_ext_factor",), (1,), "only full yarn extrapolation (1) is supported"),
    ((SECTIONS, WINDOW_THETA), (), "not supported"),
    ((WINDOW_PATTERN,), (), "windows that differ by layer are not supported"),
    (("expert_count", "expert_used_count"), (0,), "mixture of experts is not supported there"),
    (("moe_latent_size",), (0,), "experts that read fewer columns than the stream has are not supported"),
    (("tensor_data_layout",), ("Meta AI original pth",), "not a known layout"),
)
# Keys that do not change answers, or only together with others, whose readers ask for them.
_HARMLESS = frozenset(
    (
        *("vocab_size", "pooling_type", "nextn_predict_layers", "leading_dense_block_count", "n_deepstack_layers"),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.relative_buckets_count"),
        *("rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast"),
        *("rope.scaling.yarn_beta_slow", "rope.scale_linear", "attention.temperature_length", "rope.freq_base"),
        *("rope.dimension_count", "feed_forward_length", "expert_feed_forward_length", "expert_shared_count"),
        *("expert_shared_feed_forward_length", "full_attention_interval", "classifier.output_labels"),
    )
)
# Keys of other families that would change answers, with the values that do not.
_CHANGING: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step", "expert_group_scale"), (1,)),
    **dict.fromkeys(("expert_chunk_feed_forward_length", "experts_per_group", "router_logit_softcapping"), ()),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "activation_sparsity_scale"), ()),
    **dict.fromkeys(("altup.num_inputs", "embedding_length_per_layer_input", "swin_norm", "token_shift_count"), ()),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla"), ()),
    **dict.fromkeys(("attention.value_length_mla", "attention.shared_kv_layers", "attention.group_norm_groups"), ()),
    **dict.fromkeys(("attention.chunk_size", "attention.sinks", "kda.head_dim", "wkv.head_size"), ()),
    **dict.fromkeys((f"{BARE}{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")), ()),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (1,)),
}
_CHANGES = "it changes answers, and mlxr does not know it in this family; take another file of the model"
# Files whose weights are in another basis say so in a key with one of these words, if they say it at all.
_ROTATED = re.compile(r"(^|[._])(hadamard|rotations?|rotated|quarot|spinquant|flatquant|ostquant)([._]|$)")
_OTHER_COMPUTATIONS = ("diffusion.shift_logits",)
_EXTENSIONS = ("prism.",)  # beginnings of keys that are reported if unknown


class Metadata:
    """The metadata of one model; keys are asked for without the architecture's prefix.

    `tensors` are those of the file: their names tell more than metadata do, and some hold factors of rotations.
    `origins` are the sources of entries that no file has under their key.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        tensors: Mapping[str, TensorSource],
        origins: Mapping[str, Origin] = NO_ORIGINS,
    ) -> None:
        self.architecture = Fields(values).text("general.architecture")
        prefix, bare = f"{self.architecture}.", {name: value for name, value in values.items() if name.startswith(BARE)}
        self.fields = Fields(
            {**values, **{prefix + name: value for name, value in bare.items()}},
            prefix,
            {**origins, **{prefix + name: Origin(name, value) for name, value in bare.items()}},
        )
        self.own = open_own_keys(values, origins)  # keys that GGUF does not have
        self.tensors = tensors
        self._interleaved_dim = 0
        self._found: dict[str, bool] = {}  # tensors that were asked for: any layer has them
        self._values = values
        _refuse_other_bases(values)

    # Single values.

    def integer(self, name: str, low: int = 1, high: int = limits.MAX_WIDTH, default: int | None = None) -> int:
        """Return a whole number in [low, high]."""
        return self.fields.integer(name, low, high, default)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Return a whole number for each layer; files may also state it for layers that only draft tokens."""
        return self.fields.integers(name, self._blocks, low, high)[: self.layers]

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number in [low, high]."""
        return self.fields.number(name, low, high, default)

    def numbers(self, name: str, low: float, high: float) -> tuple[float, ...]:
        """Return a number in [low, high] for each layer."""
        return self.fields.numbers(name, low, high, self._blocks)[: self.layers]

    def scale(self, name: str) -> float | None:
        """Return a factor or a cap; None if the file says 0 or nothing."""
        return self.fields.number(name, 0.0, limits.MAX_SCALE, default=0.0) or None

    def has_tensor(self, part: str) -> bool:
        """Return True if any layer has a tensor of that name."""
        if part not in self._found:
            self._found[part] = any(f"blk.{index}.{part}" in self.tensors for index in range(self.layers))
        return self._found[part]

    # Sizes.

    @cached_property
    def _blocks(self) -> int:
        return self.integer("block_count", 1, limits.MAX_LAYERS)

    @cached_property
    def layers(self) -> int:
        """The number of layers, without those at the end that only draft tokens."""
        return self._blocks - self.integer("nextn_predict_layers", 0, self._blocks - 1, default=0)

    @cached_property
    def hidden(self) -> int:
        """Columns of the residual stream."""
        return self.integer("embedding_length")

    @cached_property
    def heads(self) -> int:
        """The number of heads of queries, the same in all layers that attend."""
        counts = {*self.head_counts} - {0}
        if len(counts) != 1:
            self.fields.refuse("attention.head_count", "one number above 0 for all layers that attend")
        return counts.pop()

    @cached_property
    def head_counts(self) -> tuple[int, ...]:
        """Heads of queries of each layer, 0 for layers that do not attend."""
        return self.integers("attention.head_count", 0, limits.MAX_HEADS)

    @cached_property
    def key_dim(self) -> int:
        """Numbers of a head of queries or keys."""
        usual = None
        if self.fields.get("attention.key_length") is None:
            usual, rest = divmod(self.hidden, self.heads)
            if rest:
                self.fields.refuse("attention.head_count", f"a divisor of the embedding length {self.hidden}")
        return self.integer("attention.key_length", 2, limits.MAX_HEAD_DIM, default=usual)

    @cached_property
    def value_dim(self) -> int:
        """Numbers of a value, in families in which they may be fewer than those of a key."""
        return self.integer("attention.value_length", 1, limits.MAX_HEAD_DIM, default=self.key_dim)

    @cached_property
    def head_dim(self) -> int:
        """Numbers of a head, of whatever kind."""
        if self.value_dim != self.key_dim:
            self.fields.refuse("attention.value_length", f"the key length {self.key_dim}")
        return self.key_dim

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys, as many in all layers."""
        kv_heads = self.integer("attention.head_count_kv", 1, limits.MAX_HEADS, default=self.heads)
        self._check_kv_heads(kv_heads)
        return kv_heads

    def _check_kv_heads(self, kv_heads: int) -> None:
        if self.heads % kv_heads:
            self.fields.refuse("attention.head_count_kv", f"a divisor of the {self.heads} heads")

    @cached_property
    def kv_counts(self) -> tuple[int, ...]:
        """Heads of keys of each layer: 0 for layers that do not attend, the same number for all others."""
        counts = self.integers("attention.head_count_kv", 0, limits.MAX_HEADS)
        if len({*counts} - {0}) != 1:
            self.fields.refuse(
                "attention.head_count_kv", "one number for all layers that attend, of which there must be one"
            )
        self._check_kv_heads(max(counts))
        return counts

    @cached_property
    def ffn(self) -> int:
        """Features of a feed-forward block."""
        return self.integer("feed_forward_length")

    @cached_property
    def context(self) -> int:
        """The longest sequence that the model is meant for."""
        return self.integer("context_length", 1, limits.MAX_CONTEXT)

    @cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary: stated, or the number of its tokens; they must agree when both are there."""
        tokens = self._values.get("tokenizer.ggml.tokens")
        count = len(tokens) if isinstance(tokens, Sized) and not isinstance(tokens, str) and len(tokens) else None
        stated = self.integer("vocab_size", 1, limits.MAX_VOCABULARY, default=count)
        if count is not None and stated != count:
            self.fields.refuse("vocab_size", f"the {count} tokens of tokenizer.ggml.tokens")
        return stated

    @cached_property
    def rms_eps(self) -> float:
        """The number that RMS norms add to the variance."""
        return self.number("attention.layer_norm_rms_epsilon", 1e-30, 0.5)

    @cached_property
    def layer_eps(self) -> float:
        """The number that layer norms add to the variance."""
        return self.number("attention.layer_norm_epsilon", 1e-30, 0.5)

    # Rotations.

    def rope(
        self, *, interleaved: bool = False, truncates_yarn: bool = True, shuffles_sections: bool | None = None
    ) -> Rope:
        """Return the rotation of all layers, or of those without a window.

        `shuffles_sections`: files state how many pairs turn by each of three axes; True if the axes take turns, False
        if one follows the other.
        """
        dim = self.integer("rope.dimension_count", 2, limits.MAX_HEAD_DIM, default=self.key_dim)
        if dim % 2 or dim > self.key_dim:
            self.fields.refuse("rope.dimension_count", f"an even number up to the head size {self.key_dim}")
        self._interleaved_dim = dim if interleaved else 0
        sections = None if shuffles_sections is None else self._read_sections(dim // 2)
        return Rope(
            self.theta,
            dim,
            interleaved,
            self._read_scaling(truncates_yarn),
            self._read_temperature(),
            sections=sections,
            shuffles=bool(shuffles_sections),
        )

    def _read_sections(self, pairs: int) -> tuple[int, int, int] | None:
        """Return the pairs of each axis, None if the file says nothing; a fourth number counts pairs of no axis."""
        if self.fields.get(SECTIONS) is None:
            return None
        time, rows, columns, others = self.fields.integers(SECTIONS, 4, 0, pairs)
        if time + rows + columns + others != pairs or others:
            self.fields.refuse(SECTIONS, f"three numbers that add up to {pairs}, and a 0")
        return time, rows, columns

    @cached_property
    def theta(self) -> float:
        """The base of the rotation."""
        return self.number("rope.freq_base", 1.0001, limits.MAX_THETA, default=10000.0)

    def window_theta(self, default: float) -> float:
        """Return the base of the rotation of layers with windows."""
        return self.number(WINDOW_THETA, 1.0001, limits.MAX_THETA, default=default)

    def rotates(self, usual: Sequence[bool]) -> Flags:
        """Return for each layer True if it rotates queries and keys."""
        return self.own.flags("rope.layers", self.layers) or tuple(usual)

    def _read_scaling(self, truncates_yarn: bool) -> RopeScaling | None:
        """Return the scaling of the rotation, None if there is none."""
        factor_key = (
            "rope.scaling.factor" if self.fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
        )
        factor = self.number(factor_key, 0.0, 1e6, default=0.0)  # 0 is how writers say "none"
        kind = self.fields.text("rope.scaling.type", default="linear")
        is_plain = kind == "none" or (kind == "linear" and factor in (0.0, 1.0))
        if kind == "longrope" or (is_plain and LONG_FACTORS in self.tensors):
            if factor not in (0.0, 1.0):
                self.fields.refuse(factor_key, "none, as longrope has a factor for each pair")
            return RopeScaling(
                "longrope",
                1.0,
                original_context=self._original_context,
                attention_factor=self.number("rope.scaling.attn_factor", 1e-6, 1e6, default=1.0),
                short_factors=tuple(read_rope_factors(self.tensors, SHORT_FACTORS)),
                long_factors=tuple(read_rope_factors(self.tensors, LONG_FACTORS)),
            )
        if is_plain:
            return None
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind != "yarn":
            self.fields.refuse("rope.scaling.type", "none, linear, longrope or yarn")
        if factor <= 0:
            self.fields.refuse(factor_key, "a factor above 0")
        return self._read_yarn(factor, truncates_yarn)

    def _read_yarn(self, factor: float, truncates: bool) -> RopeScaling:
        stated = "rope.scaling.yarn_attn_factor"
        if self.fields.get(stated) is None:
            stated = "rope.scaling.attn_factor"
        log_multiplier = self.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, default=0.0)
        # files state a factor on the recommended one
        attention_factor = self.number(stated, 1e-6, 1e6, default=1.0)
        return RopeScaling(
            "yarn",
            factor,
            original_context=self._original_context,
            attention_factor=attention_factor * yarn_attention_factor(factor, 1.0, log_multiplier),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, default=32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, default=1.0),
            truncate=self.own.flag("rope.scaling.yarn_truncate", truncates),
        )

    @property
    def _original_context(self) -> int:
        return self.integer("rope.scaling.original_context_length", 1, limits.MAX_CONTEXT, default=self.context)

    def _read_temperature(self) -> QueryTemperature | None:
        beta = self.number("attention.temperature_scale", 0.0, limits.MAX_SCALE, default=0.0)
        return QueryTemperature(beta, self._original_context) if beta else None

    # Windows.

    @cached_property
    def stated_window(self) -> int | None:
        """The window of layers that have one, as the file states it."""
        return self.integer("attention.sliding_window", 0, limits.MAX_CONTEXT, default=0) or None

    @cached_property
    def window(self) -> int | None:
        """The window of layers that have one; None if it covers the longest context."""
        return None if self.stated_window is None or self.stated_window >= self.context else self.stated_window

    @property
    def symmetric_window(self) -> int | None:
        """The window of layers that see as far behind a position as before it: half of the stated one each way."""
        window = None if self.stated_window is None else self.stated_window // 2 + 1
        return None if window is None or window >= self.context else window

    def windowed(self, full_every: int | None = None) -> Flags:
        """Return for each layer True if it has the window. If a file does not say so, the last of every `full_every`
        layers has none, or all have it."""
        stated = self.own.flags("attention.sliding_window_layers", self.layers)
        if stated is not None or self.stated_window is None:
            return stated or (False,) * self.layers
        if full_every is None:
            return (True,) * self.layers
        pattern = self.fields.get(WINDOW_PATTERN)
        if isinstance(pattern, Iterable) and not isinstance(pattern, str):
            count = self.layers if len(list(pattern)) == self.layers else self._blocks  # with those that draft
            return (self.fields.flags(WINDOW_PATTERN, count) or ())[: self.layers]
        return self.all_but_last_of(self.integer(WINDOW_PATTERN, 1, limits.MAX_LAYERS, default=full_every))

    def all_but_last_of(self, every: int) -> Flags:
        """Return flags that are false for the last of each `every` layers."""
        return tuple((index + 1) % every != 0 for index in range(self.layers))

    def windows(self, full_every: int | None = None) -> tuple[int | None, ...]:
        """Return the window of each layer, None for those that see every position."""
        return tuple(self.window if flag else None for flag in self.windowed(full_every))

    def slopes(self, default: float = 8.0) -> Slopes | None:
        """Return the slopes by which scores fall with the distance of a key; None if the file says there are none."""
        largest = self.number(MAX_ALIBI, 0.0, limits.MAX_SCALE, default=default)
        return Slopes(self.context, largest) if largest else None

    def clamp(self) -> float | None:
        """Return the number c such that queries, keys and values are clamped to [-c, c]; None if they are not."""
        return self.scale(CLAMP)

    # Components that most families have.

    def activation(self, usual: Activation = "silu") -> Activation:
        """Return the activation of feed-forward blocks."""
        name = self.own.text("activation", default=usual)
        if name not in ACTIVATIONS:
            self.own.refuse("activation", f"one of {', '.join(ACTIVATIONS)}")
        return cast(Activation, name)

    def attention(
        self,
        rope: Rope,
        *,
        heads: int = 0,
        kv_heads: int = 0,
        head_dim: int = 0,
        value_dim: int = 0,
        window: int | None = None,
        head_norms: HeadNormKind | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        qkv_bias: bool = False,
        sinks: bool = False,
        gated: bool = False,
        is_causal: bool = True,
        whole_pictures: bool = False,
        biases: Slopes | Buckets | None = None,
        owns_biases: bool = False,
        clamp: float | None = None,
    ) -> Attention:
        """Return attention with the heads of the file, with the biases that its tensors have.

        `heads`, `kv_heads` and `head_dim` are given if not all layers have the same, and `value_dim` if values may have
        fewer numbers. Scores are multiplied by `scale`, or by 1 / sqrt(head_dim).
        """
        usual = self.key_dim if value_dim else self.head_dim
        head_dim = head_dim or usual
        return Attention(
            heads or self.heads,
            kv_heads or self.kv_heads,
            head_dim,
            scale=_round(self._own_scale or scale or float(head_dim**-0.5)),
            rope=rope,
            window=window,
            softcap=softcap,
            head_norms=head_norms,
            qkv_bias=self.own.flag(
                "attention.qkv_bias", qkv_bias or self.has_tensor("attn_q.bias") or self.has_tensor("attn_qkv.bias")
            ),
            output_bias=self.own.flag("attention.output_bias", self.has_tensor("attn_output.bias")),
            sinks=sinks,
            gated=gated,
            is_causal=is_causal,
            whole_pictures=whole_pictures,
            biases=biases,
            owns_biases=owns_biases,
            clamp=clamp,
            value_dim=0 if value_dim == head_dim else value_dim,
        )

    def latent_attention(self, *, interleaved: bool = True, rotates: bool = True) -> LatentAttention:
        """Return latent attention with the sizes of the file, whose key may have a part that `rotates`.

        In newer files the usual keys have the sizes of what is kept of a token, and other keys the sizes of heads. A
        file whose yarn has a `yarn_log_multiplier` m means that scores are multiplied by (1 + m ln(factor))² and the
        rotation by nothing (llama.cpp's src/models/deepseek2.cpp).
        """
        end = "" if self.fields.get("attention.key_length_mla") is None else "_mla"
        self.fields.note(("attention.key_length", "attention.value_length", "attention.head_count_kv"))
        key_dim = self.integer(f"attention.key_length{end}", 2, limits.MAX_HEAD_DIM)
        dim = self.integer("rope.dimension_count", 2 if rotates else 0, limits.MAX_HEAD_DIM)
        if dim % 2 or dim >= key_dim:
            self.fields.refuse("rope.dimension_count", f"an even number below the key length {key_dim}")
        scaling, grown = self._read_scaling(truncates_yarn=True), 1.0
        multiplier = self.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, default=0.0)
        if scaling is not None and scaling.kind == "yarn" and multiplier:
            stated = self.number("rope.scaling.attn_factor", 1e-6, 1e6, default=1.0)
            scaling = replace(scaling, attention_factor=stated)
            grown = (1.0 + multiplier * math.log(max(scaling.factor, 1.0))) ** 2
        return LatentAttention(
            self.heads,
            self.integer("attention.kv_lora_rank", 1, limits.MAX_HEAD_DIM),
            key_dim - dim,
            self.integer(f"attention.value_length{end}", 1, limits.MAX_HEAD_DIM),
            scale=_round(self._own_scale or grown * float(key_dim**-0.5)),
            rope=Rope(self.theta, dim, interleaved, scaling, self._read_temperature()) if rotates else NO_ROPE,
            query_rank=self.integer("attention.q_lora_rank", 0, default=0) or None,
            unturned_dim=0 if rotates else dim,
        )

    @cached_property
    def _own_scale(self) -> float | None:
        """The factor of scores, for which GGUF has no key."""
        return self.own.number("attention.scale", 0.0, limits.MAX_SCALE, default=0.0) or None

    def has_head_norms(self) -> bool:
        """Return True if queries and keys are normed, in families in which this differs."""
        return self.own.flag("attention.head_norms", "blk.0.attn_q_norm.weight" in self.tensors)

    def feed_forward(
        self,
        activation: Activation = "silu",
        *,
        gated: bool = True,
        features: int = 0,
        parameters: tuple[float, ...] = (),
    ) -> FeedForward:
        """Return a feed-forward block, with biases if its tensors have some; `parameters` are the activation's."""
        bias = self.own.flag("feed_forward_bias", self.has_tensor("ffn_down.bias"))
        kind = self.activation(activation)
        return FeedForward(features or self.ffn, kind, bias=bias, gated=gated, parameters=parameters)

    def is_parallel(self) -> bool:
        """Return True if the two blocks of a layer stand side by side, in families in which this differs.

        Converters did so for models whose configuration says nothing; if blocks follow one another, each has a norm.
        """
        self.fields.note((_PARALLEL,))
        return self.own.flag("parallel_blocks", "blk.0.ffn_norm.weight" not in self.tensors)

    # Experts.

    @cached_property
    def experts(self) -> int:
        """The number of experts, 0 for a model without."""
        return self.integer("expert_count", 0, limits.MAX_STATED, default=0)

    @cached_property
    def expert_features(self) -> int:
        """Features of one expert."""
        has_width = self.fields.get("expert_feed_forward_length") is not None
        return self.integer("expert_feed_forward_length" if has_width else "feed_forward_length")

    @cached_property
    def has_experts(self) -> Flags:
        """True for each layer that has experts: one with a router, unless a key of our own says otherwise."""
        routers = tuple(f"blk.{index}.ffn_gate_inp.weight" in self.tensors for index in range(self.layers))
        return self.own.flags("expert_layers", self.layers) or routers

    def routing(
        self, scoring: Scoring = "softmax", *, renormalises: bool = False, floor: float = 0.0, jitter: float = 0.0
    ) -> RoutingRule:
        """Return the rule by which the experts of a token are chosen and weighted; `scoring` and `renormalises` are
        used if the file does not say."""
        number = self.integer("expert_gating_func", 0, 1 << 16, default=0)  # 0: not stated
        if number and number not in _SCORINGS:
            self.fields.refuse("expert_gating_func", "1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)")
        groups = self._find("expert_group_count").integer("expert_group_count", 0, limits.MAX_STATED, default=1) or 1
        name = "expert_group_used_count"
        scale = self._find("expert_weights_scale").number("expert_weights_scale", 0.0, limits.MAX_SCALE, default=1.0)
        return RoutingRule(
            self.integer("expert_used_count", 1, limits.MAX_STATED),
            scoring if scoring == "sparsemixer" else _SCORINGS.get(number, scoring),
            renormalises=self._find("expert_weights_norm").flag("expert_weights_norm", renormalises),
            floor=floor,
            scale=scale or 1.0,
            groups=groups,
            groups_used=self._find(name).integer(name, 0, limits.MAX_STATED, default=groups) or groups,
            jitter=jitter,
        )

    def _find(self, name: str) -> Fields:
        """Return the fields that state the key of that name: our own, or GGUF's."""
        return self.fields if self.own.get(name) is None else self.own

    def shared_features(self, old_key: str | None = None) -> int:
        """Return the features of the block that all tokens go through beside the experts, 0 without one; very old files
        have another key for it."""
        key = "expert_shared_feed_forward_length"
        if old_key is not None and self.fields.get(key) is None:
            key = old_key
        return self.integer(key, 0, default=0)

    # Recurrent mixers.

    def ssm_heads(self, what: str) -> tuple[int, int]:
        """Return the heads of a recurrence, and the columns of each."""
        heads = self.integer("ssm.time_step_rank", 1, limits.MAX_HEADS)
        inner = self.integer("ssm.inner_size", 1, limits.MAX_STATED)
        if inner % heads:
            self.fields.refuse("ssm.inner_size", f"a multiple of the {heads} {what}")
        return heads, inner // heads

    def ssm_groups(self, heads: int, what: str, default: int | None = None) -> int:
        """Return the groups of heads of a recurrence."""
        groups = self.integer("ssm.group_count", 1, limits.MAX_HEADS, default=default)
        if heads % groups:
            self.fields.refuse("ssm.group_count", f"a divisor of the {heads} {what}")
        return groups

    def mamba(self, *, is_normed: bool = False) -> Mamba:
        """Return the Mamba of the file; B, C and steps are normed with weights, or without if the file says so."""
        is_bare = not is_normed and self.fields.flag("ssm.dt_b_c_rms", False)
        return Mamba(
            self.integer("ssm.inner_size"),
            self.integer("ssm.state_size", 1, limits.MAX_HEAD_DIM),
            self.integer("ssm.time_step_rank", 1, limits.MAX_HEAD_DIM),
            taps=self.integer("ssm.conv_kernel", 2, limits.MAX_TAPS),
            norms="weighted" if is_normed else "bare" if is_bare else None,
            norm_eps=self.own.number("ssm.norm_eps", 1e-30, 0.5, default=self.rms_eps),
        )

    def mamba2(self) -> Mamba2:
        """Return the Mamba-2 of the file."""
        heads, head_dim = self.ssm_heads("heads")
        return Mamba2(
            heads,
            head_dim,
            groups=self.ssm_groups(heads, "heads", default=1),
            state_dim=self.integer("ssm.state_size", 1, limits.MAX_STATED),
            taps=self.integer("ssm.conv_kernel", 2, limits.MAX_TAPS),
            normed=self.own.flag("ssm.norm", self.has_tensor("ssm_norm.weight")),
        )

    # Encoders, and products of the vector of a text.

    def is_causal(self, default: bool) -> bool:
        """Return True if no token sees later ones, in families in which this differs."""
        return self.fields.flag("attention.causal", default)

    def embeddings(self, *, positions: int = 0, normed: bool = True) -> Embeddings:
        """Return the additions to embeddings before the first layer; `positions` is the number of learned rows."""
        rows, key = self._count_rows(TYPES), "tokenizer.ggml.token_type_count"
        types = self.own.integer("token_types", 0, 16, default=rows or 0)
        if key in self._values and rows is not None and Fields(self._values).integer(key, 0, 16) != types:
            raise ModelError(f"{key} is {self._values[key]!r:.80}, expected {types}, the rows of {TYPES}")
        return Embeddings(positions, types, normed)

    def _count_rows(self, name: str) -> int | None:
        return self.tensors[name].shape[0] if name in self.tensors else None

    def dense(self) -> tuple[Dense, ...]:
        """Return the products of a pooled vector, in their order."""
        found: list[Dense] = []
        inputs = self.hidden
        for name in DENSE:
            stated = self.fields.get(f"{name}_feat_out") is not None
            rows = self._count_rows(f"{name}.weight")
            if not stated and rows is None:
                continue
            features = self.integer(f"{name}_feat_out", default=rows)
            if self.integer(f"{name}_feat_in", default=inputs) != inputs:
                self.fields.refuse(f"{name}_feat_in", f"{inputs}, as many numbers as there are")
            bias = self.own.flag(f"{name}.bias", f"{name}.bias" in self.tensors)
            activation = self.own.text(f"{name}.activation", default="none")
            if activation not in get_args(DenseActivation):
                self.own.refuse(f"{name}.activation", f"one of {', '.join(get_args(DenseActivation))}")
            found.append(Dense(name, features, inputs, bias, cast(DenseActivation, activation)))
            inputs = features
        return tuple(found)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's labels."""
        value = self.fields.get("classifier.output_labels")
        if value is None:
            return ()
        items = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [None]
        if not all(isinstance(item, str) for item in items) or not 0 < len(items) <= MAX_LABELS:
            self.fields.refuse("classifier.output_labels", f"up to {MAX_LABELS} strings")
        return tuple(str(item) for item in items)

    def classifier(self) -> tuple[Dense, ...]:
        """Return the products that make logits of labels from the state that ranks: one with tanh, another, or both.

        ModernBERT has GELU and a norm in place of tanh.
        """
        kinds = {"both": (CLASSIFIER, CLASSIFIER_OUTPUT), "output": (CLASSIFIER_OUTPUT,), "first": (CLASSIFIER,)}
        names = tuple(name for name in kinds["both"] if f"{name}.weight" in self.tensors)
        kind = self.own.text("classifier", default=next((one for one, own in kinds.items() if own == names), "none"))
        if kind == "none":
            return ()
        if kind not in kinds:
            self.own.refuse("classifier", f"none, {', '.join(kinds)}")
        normed = self.own.flag("classifier.norm", f"{CLASSIFIER_NORM}.weight" in self.tensors)
        keys = {CLASSIFIER: "classifier.bias", CLASSIFIER_OUTPUT: "classifier.output_bias"}
        has_bias = {name: self.own.flag(keys[name], f"{name}.bias" in self.tensors) for name in kinds[kind]}
        labels = len(self.labels) or self._count_rows(f"{kinds[kind][-1]}.weight") or 1
        last = kinds[kind][-1]
        first: DenseActivation = "gelu_erf" if normed else "tanh"
        return tuple(
            Dense(
                name,
                labels if name == last else self.hidden,
                self.hidden,
                has_bias[name],
                first if name == CLASSIFIER else "none",
                normed and name == CLASSIFIER,
            )
            for name in kinds[kind]
        )

    def _read_rank_pooling(self, usual: str) -> str:
        pooling = self.own.text("classifier.pooling", default=usual)
        if pooling not in RANK_POOLINGS:
            self.own.refuse("classifier.pooling", f"one of {', '.join(RANK_POOLINGS)}")
        return pooling

    # The model.

    def model(
        self,
        layers: Iterable[Layer],
        *,
        output_norm: str | None = "output_norm",
        has_output: bool = True,
        embeddings: Embeddings | None = None,
        rank_pooling: str = "last",
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        final_softcap: float | None = None,
        joins: tuple[str, ...] = (),
        picture_layers: int = 0,
    ) -> Model:
        """Return the model of these layers, with the ends that the file states."""
        is_tied = has_output and self.own.flag("tied_embeddings", "output.weight" not in self.tensors)
        return Model(
            self.architecture,
            tuple(layers),
            hidden=self.hidden,
            vocab_size=self.vocabulary,
            context_length=self.context,
            is_tied=is_tied,
            has_output_bias=has_output and self.own.flag("output_bias", "output.bias" in self.tensors),
            output_norm=output_norm,
            has_output=has_output,
            embeddings=embeddings,
            dense=self.dense(),
            classifier=self.classifier(),
            labels=self.labels,
            rank_pooling=self._read_rank_pooling(rank_pooling),
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
            final_softcap=final_softcap,
            joins=joins,
            picture_layers=picture_layers,
            rotated=read_rotated_weights(self._values, is_tied=is_tied),
            interleaved_dim=self._interleaved_dim,
        )

    def refuse_unread(self) -> None:
        """Raise ModelError for a key that changes answers and that nobody asked for."""
        if "blk.0.ffn_norm.weight" in self.tensors:
            self.fields.note((_PARALLEL,))
        for names, harmless, why in _REFUSED:
            for name in names:
                if not self.fields.was_asked(name):
                    self.fields.refuse_unless((name,), harmless, why)
        self.fields.refuse_unread(_CHANGING, _CHANGES)
        for name in sorted(NEEDED):
            if not self.own.was_asked(name) and self.own.get(name) is not None:
                self.own.refuse(name, "none, as this family does not read it")

    def list_unknown(self) -> list[str]:
        """Return the keys that describe the model and that nothing here reads."""
        unread = [self.fields.key(name) for name in self.fields.list_unread() if name not in _HARMLESS]
        own = [name for name in self._values if name.startswith(_EXTENSIONS) and not name.startswith(PRISM)]
        return unread + own


def _round(number: float) -> float:
    """Round a number to 32 bits, as files keep it and kernels take it."""
    rounded: tuple[float] = struct.unpack("f", struct.pack("f", number))
    return rounded[0]


def _refuse_other_bases(values: Mapping[str, object]) -> None:
    """Refuse files whose weights, or whose whole computation, differ from the family's."""
    for key, value in values.items():
        if key.startswith(("general.", "tokenizer.", PRISM)) or says_nothing(value):
            continue
        if _ROTATED.search(key.lower()):
            raise ModelError(f"{key} is there: the weights are rotated, which mlxr does not undo; take another file")
        if key.startswith(_OTHER_COMPUTATIONS):
            raise ModelError(f"{key} is there: it changes answers, and mlxr does not know it")
