"""Families of models: of each one function from its configuration to its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxr.models.specs import Attention, FeedForward, LayerSpec, Norms, Rope

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig


def build_llama(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layers that are normed before each block: Llama, Mistral, Qwen2, Qwen3."""
    return _build_layers(config, Norms(config.rms_eps))


def build_gemma(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layers that are normed before and after each block: Gemma 2 and 3."""
    return _build_layers(config, Norms(config.rms_eps, places="both"))


def _build_layers(config: ModelConfig, norms: Norms) -> tuple[LayerSpec, ...]:
    """Layers that differ in their windows, and with these in their rotation, only."""
    feed_forward = FeedForward(config.ffn, config.activation, bias=config.ffn_bias)
    has_window = config.window_layers or (True,) * config.layers
    return tuple(LayerSpec(_make_attention(config, windowed), feed_forward, norms) for windowed in has_window)


def _make_attention(config: ModelConfig, windowed: bool) -> Attention:
    return Attention(
        config.heads,
        config.kv_heads,
        config.head_dim,
        scale=config.attention_scale or float(config.head_dim**-0.5),
        rope=_make_rope(config, windowed),
        window=config.sliding_window if windowed else None,
        softcap=config.attention_softcap,
        head_norms="each" if config.qk_norm else None,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
    )


def _make_rope(config: ModelConfig, windowed: bool) -> Rope:
    """The rotation of a layer: that of windows is not stretched, as they see no longer context."""
    if windowed and config.window_rope_theta is not None:
        return Rope(config.window_rope_theta, config.rope_dim, config.rope_interleaved, has_factors=False)
    return Rope(config.rope_theta, config.rope_dim, config.rope_interleaved, config.rope_scaling)
