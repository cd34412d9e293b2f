"""Families of models: of each one function from its configuration to its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxr.models.specs import Attention, FeedForward, LayerSpec, Norms, Rope

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig


def build_llama(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Layers that are all alike, normed before each block: Llama, Mistral, Qwen2, Qwen3."""
    attention = Attention(
        config.heads,
        config.kv_heads,
        config.head_dim,
        scale=float(config.head_dim**-0.5),
        rope=make_rope(config),
        window=config.sliding_window,
        head_norms="each" if config.qk_norm else None,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
    )
    feed_forward = FeedForward(config.ffn, config.activation, bias=config.ffn_bias)
    return (LayerSpec(attention, feed_forward, Norms(config.rms_eps)),) * config.layers


def make_rope(config: ModelConfig) -> Rope:
    """The rotation that a configuration states for all layers."""
    return Rope(config.rope_theta, config.rope_dim, config.rope_interleaved, config.rope_scaling)
