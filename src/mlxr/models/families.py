"""Families of models: of each one function from its configuration to its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlxr.models.components import (
    NO_ROPE,
    Attention,
    DenseAndExperts,
    Experts,
    FeedForward,
    Layer,
    LayerInputs,
    Norms,
    ParallelMixers,
    Rope,
)

if TYPE_CHECKING:
    from mlxr.kernels.split_heads import HeadNormKind
    from mlxr.models.config import ModelConfig


def build_llama(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers that are normed before each block: Llama, Mistral, Ministral 3, Phi-3, Qwen2, Qwen3, Granite, SmolLM3."""
    return _build_layers(config, Norms(config.rms_eps))


def build_qwen35(config: ModelConfig) -> tuple[Layer, ...]:
    """Llama's layers, whose second norm has another name: Qwen3.5."""
    return _build_layers(config, Norms(config.rms_eps, feed_forward="post_attention_norm"))


def build_nemotron(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of one block each, normed before it, whose feed-forward blocks have no gate: Nemotron-H and Nemotron 3."""
    layers = _build_layers(config, Norms(config.rms_eps, feed_forward="attn_norm"), gated=False)
    return tuple(
        replace(layer, feed_forward=None) if is_mixer else replace(layer, mixer=None)
        for layer, is_mixer in zip(layers, config.mixer_layers or (True,) * config.layers, strict=True)
    )


def build_falcon(config: ModelConfig) -> tuple[Layer, ...]:
    """Llama's layers, whose attention has a recurrent mixer beside it: Falcon-H1."""
    assert config.recurrence is not None
    attending = replace(config, recurrence=None, recurrent_layers=None)
    return tuple(
        replace(layer, mixer=ParallelMixers(layer.attention, config.recurrence))
        for layer in _build_layers(attending, Norms(config.rms_eps))
        if layer.attention is not None
    )


def build_gemma(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers that are normed before and after each block: Gemma 2 and 3."""
    return _build_layers(config, Norms(config.rms_eps, places="both"))


def build_gemma4(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers normed as Gemma 3's, whose outputs are scaled; heads with windows have a size of their own: Gemma 4.

    Those of the small models get embeddings of their own, those of another one have experts beside their blocks.
    """
    inputs = _make_inputs(config, config.input_features) if config.input_features else None
    layers: list[Layer] = []
    for layer, windowed in zip(build_gemma(config), config.windowed, strict=True):
        assert isinstance(layer.mixer, Attention)
        attention, features = replace(layer.mixer, norms_values=True), config.ffn
        if windowed:
            head_dim = config.window_head_dim or config.head_dim
            attention = replace(
                attention,
                head_dim=head_dim,
                kv_heads=config.window_kv_heads or config.kv_heads,
                rope=replace(attention.rope, dim=head_dim),
            )
        elif config.keys_as_values:
            attention = replace(attention, projected="qk")
        if len(layers) >= config.layers - config.shared_layers:
            own = config.windowed[: config.layers - config.shared_layers]
            reads = max(index for index, flag in enumerate(own) if flag == windowed)
            attention = replace(attention, projected="q", reads=reads)
            features = config.shared_ffn or config.ffn
        feed_forward: FeedForward | DenseAndExperts = FeedForward(features, config.activation)
        if isinstance(layer.feed_forward, Experts):
            feed_forward = DenseAndExperts(FeedForward(features, config.activation), layer.feed_forward)
        made = replace(layer, mixer=attention, feed_forward=feed_forward, scales_output=True, inputs=inputs)
        layers.append(made)
    return tuple(layers)


def _make_inputs(config: ModelConfig, features: int) -> LayerInputs:
    # a product is divided by the root of the hidden size before its norm, which takes that back, but for eps
    eps = config.rms_eps * config.hidden
    return LayerInputs(features, config.activation, table_scale=features**0.5, scale=0.5**0.5, eps=eps)


def build_olmo(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of which each block's result is normed, and queries and keys as wide as they are: OLMo 2 and 3."""
    return _build_layers(config, Norms(config.rms_eps, places="after"), head_norms="joint")


def build_olmoe(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers that are normed before each block, and queries and keys as wide as they are: OLMoE."""
    return _build_layers(config, Norms(config.rms_eps), head_norms="joint")


def build_gpt_oss(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers as Llama's, whose heads have a sink: gpt-oss."""
    layers = _build_layers(config, Norms(config.rms_eps))
    return tuple(
        replace(layer, mixer=replace(layer.mixer, sinks=True)) for layer in layers if isinstance(layer.mixer, Attention)
    )


def build_cohere(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers of two blocks side by side after one layer norm: Command R, Command R+ and Cohere 2."""
    layers = _build_layers(config, Norms(config.rms_eps, kind="layer"), head_norms="layer")
    return tuple(replace(layer, is_parallel=True) for layer in layers)


def build_stablelm(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers with a layer norm and its bias before each block, or before both of them side by side: StableLM."""
    layers = _build_layers(config, Norms(config.rms_eps, kind="layer", bias=True), head_norms="layer")
    return tuple(replace(layer, is_parallel=config.parallel_blocks) for layer in layers)


def build_phi_moe(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers with a layer norm and its bias before each block: Phi-3.5-MoE."""
    return _build_layers(config, Norms(config.rms_eps, kind="layer", bias=True))


def build_starcoder(config: ModelConfig) -> tuple[Layer, ...]:
    """Layers with a layer norm and its bias before each block, of which the second has no gate: StarCoder 2."""
    return _build_layers(config, Norms(config.rms_eps, kind="layer", bias=True), gated=False)


def _build_layers(
    config: ModelConfig, norms: Norms, head_norms: HeadNormKind = "each", *, gated: bool = True
) -> tuple[Layer, ...]:
    """Layers that differ in their windows and rotations, and in whether they attend and have experts.

    `head_norms` is how queries and keys are normed, if they are.
    """
    feed_forward = FeedForward(config.ffn, config.activation, bias=config.ffn_bias, gated=gated)
    window = config.sliding_window
    if window is not None and window >= config.context_length:
        window = None  # every position is seen, as in the Phi models with 128k
    has_rope = config.rope_layers or (True,) * config.layers
    mixed = config.mixture_layers or (True,) * config.layers
    recurs = config.recurrent_layers or (config.recurrence is not None,) * config.layers
    return tuple(
        Layer(
            config.recurrence
            if is_recurrent and config.recurrence is not None
            else Attention(
                config.heads,
                config.kv_heads,
                config.head_dim,
                scale=config.attention_scale or float(config.head_dim**-0.5),
                rope=_make_rope(config, windowed) if rotates else NO_ROPE,
                window=window if windowed else None,
                softcap=config.attention_softcap,
                head_norms=head_norms if config.qk_norm else None,
                qkv_bias=config.qkv_bias,
                output_bias=config.output_bias,
                gated=config.gated_attention,
            ),
            config.mixture if has_experts and config.mixture is not None else feed_forward,
            norms,
            residual_scale=config.residual_scale,
        )
        for windowed, rotates, has_experts, is_recurrent in zip(config.windowed, has_rope, mixed, recurs, strict=True)
    )


def _make_rope(config: ModelConfig, windowed: bool) -> Rope:
    """The rotation of a layer: that of windows may not be stretched, as they see no longer context."""
    if windowed and config.window_rope_theta is not None:
        return Rope(config.window_rope_theta, config.rope_dim, config.rope_interleaved, has_factors=False)
    return Rope(
        config.rope_theta, config.rope_dim, config.rope_interleaved, config.rope_scaling, config.query_temperature
    )
