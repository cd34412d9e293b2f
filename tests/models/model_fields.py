"""The parts of a model, each under one word, whichever layers have it: to look at, and to change for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlxr.models import Model
from mlxr.models.components import (
    NO_ROPE,
    Attention,
    DenseAndExperts,
    Experts,
    FeedForward,
    Layer,
    ParallelMixers,
    Rope,
)

OF_MODEL = ("architecture", "hidden", "heads", "kv_heads", "vocab_size", "context_length", "embedding_scale")
OF_MODEL += ("logit_scale", "final_softcap", "is_tied", "has_output_bias")
OF_ATTENTION = ("head_dim", "qkv_bias", "output_bias")
OF_ROPE = {
    "rope_theta": "theta",
    "rope_dim": "dim",
    "rope_interleaved": "interleaved",
    "rope_scaling": "scaling",
    "rope_sections": "sections",
}
OF_ROPE |= {"query_temperature": "temperature"}


def find_block(model: Model) -> FeedForward | None:
    """The first feed-forward block."""
    blocks = [layer.feed_forward for layer in model.layers]
    dense = [block.dense if isinstance(block, DenseAndExperts) else block for block in blocks]
    return next((block for block in dense if isinstance(block, FeedForward)), None)


def find_experts(model: Model) -> Experts | None:
    return next((layer.experts for layer in model.layers if layer.experts is not None), None)


def list_windows(model: Model) -> tuple[int | None, ...]:
    """The window of each layer."""
    return tuple(None if layer.attention is None else layer.attention.window for layer in model.layers)


def look(model: Model, name: str) -> Any:
    """Return a named part of the model, or of the first of its layers that has such a part."""
    if name in OF_MODEL:
        return getattr(model, name)
    attention, block = model.attention, find_block(model)
    latent = next((layer.latent for layer in model.layers if layer.latent is not None), None)
    attends = attention or latent
    if name in OF_ROPE:
        return None if attends is None else getattr(attends.rope, OF_ROPE[name])
    if name in OF_ATTENTION:
        return getattr(attends, name, False)
    match name:
        case "ffn":
            return None if block is None else block.features
        case "ffn_bias":
            return block is not None and block.bias
        case "activation":
            return None if block is None else block.activation
        case "attention_softcap":
            return None if attention is None else attention.softcap
        case "rms_eps":
            return model.layers[0].norms.eps
        case "sliding_window":
            return next((window for window in list_windows(model) if window is not None), None)
        case "residual_scale":
            return model.layers[0].residual_scale
        case "experts":
            return find_experts(model)
        case "recurrence":
            return next((layer.recurrence for layer in model.layers if layer.recurrence is not None), None)
        case _:
            raise KeyError(name)


def change(model: Model, changes: dict[str, Any]) -> Model:
    """Return the model with other parts in all of the layers that have them."""
    for name, value in changes.items():
        if name in OF_MODEL:
            model = replace(model, **{name: value})
        else:
            model = replace(
                model, layers=tuple(_change_layer(model, at, name, value) for at in range(len(model.layers)))
            )
    return model


def with_attention(layer: Layer, made: Callable[[Attention], Attention]) -> Layer:
    if isinstance(layer.mixer, ParallelMixers):
        return replace(layer, mixer=replace(layer.mixer, attention=made(layer.mixer.attention)))
    return replace(layer, mixer=made(layer.mixer)) if isinstance(layer.mixer, Attention) else layer


def with_experts(layer: Layer, experts: Experts) -> Layer:
    block = layer.feed_forward
    if isinstance(block, DenseAndExperts):
        return replace(layer, feed_forward=replace(block, experts=experts))
    return replace(layer, feed_forward=experts) if isinstance(block, Experts) else layer


def _find_rope(model: Model, windowed: bool) -> Rope | None:
    """The rotation of layers with a window, or of those without."""
    attending = [layer.attention for layer in model.layers if layer.attention is not None]
    return next((one.rope for one in attending if (one.window is not None) == windowed and one.rope.dim), None)


def _change_layer(model: Model, at: int, name: str, value: Any) -> Layer:
    layer = model.layers[at]

    def turn(attention: Attention) -> Attention:
        """If layers with windows have rotations of their own, only those change."""
        rope = attention.rope
        is_own = attention.window is not None and not rope.has_factors
        if name == "window_rope_theta":
            full = _find_rope(model, windowed=False)
            assert full is not None
            other = full if value is None else replace(rope, theta=value)
            return replace(attention, rope=other) if is_own else attention
        if not rope.dim or (is_own and name in ("rope_theta", "rope_scaling")):
            return attention
        return replace(attention, rope=replace(rope, **{OF_ROPE[name]: value}))

    def let_turn(attention: Attention) -> Attention:
        if value is not None and not value[at]:
            return replace(attention, rope=NO_ROPE)
        usual = _find_rope(model, windowed=True) or _find_rope(model, windowed=False)
        usual = usual or Rope(10000.0, attention.head_dim, interleaved=model.interleaved_dim > 0)
        return attention if attention.rope.dim else replace(attention, rope=usual)

    def see(attention: Attention) -> Attention:
        flag = value is None or value[at]
        rope = _find_rope(model, windowed=flag) or attention.rope
        window = look(model, "sliding_window") if flag else None
        return replace(attention, window=window, rope=rope if attention.rope.dim else attention.rope)

    if name in OF_ROPE or name == "window_rope_theta":
        return with_attention(layer, turn)
    match name:
        case "rope_layers":
            return with_attention(layer, let_turn)
        case "window_layers":
            return with_attention(layer, see)
        case "sliding_window":
            return with_attention(layer, lambda one: one if one.window is None else replace(one, window=value))
        case "attention_scale":
            return with_attention(layer, lambda one: replace(one, scale=value or one.head_dim**-0.5))
        case "biases" | "clamp":
            return with_attention(layer, lambda one: replace(one, **{name: value}))
        case "head_norms":
            return with_attention(layer, lambda one: replace(one, head_norms=value))
        case "attention_softcap":
            return with_attention(layer, lambda one: replace(one, softcap=value))
        case "residual_scale":
            return replace(layer, residual_scale=value)
        case "rms_eps":
            inputs = None if layer.inputs is None else replace(layer.inputs, eps=value * model.hidden)
            return replace(layer, norms=replace(layer.norms, eps=value), inputs=inputs)
        case "activation":
            inputs = None if layer.inputs is None else replace(layer.inputs, activation=value)
            block = layer.feed_forward
            if isinstance(block, DenseAndExperts):
                block = replace(block, dense=replace(block.dense, activation=value))
            elif isinstance(block, FeedForward):
                block = replace(block, activation=value)
            return replace(layer, feed_forward=block, inputs=inputs)
        case "experts":
            return with_experts(layer, value)
        case "recurrence":
            mixer = layer.mixer
            return (
                layer if layer.recurrence is None or isinstance(mixer, ParallelMixers) else replace(layer, mixer=value)
            )
        case _:
            raise KeyError(name)
