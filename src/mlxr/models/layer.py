"""One transformer layer: its weights out of a model's tensors, prepared for the operators.

Knows names and shapes; how a layer runs is the matter of `mlxr.kernels.layers`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.kernels.context import Context
from mlxr.kernels.layers import Layer, make_attention, make_feed_forward
from mlxr.kernels.linear import LinearWeight, prepare
from mlxr.kernels.tensor import TensorSource, read_vector
from mlxr.models.config import ModelConfig


def load_layer(ctx: Context, config: ModelConfig, tensors: Mapping[str, TensorSource], layer: int) -> Layer:
    """Prepare the weights of one layer; the sources are released one after another."""

    def tensor(part: str) -> TensorSource:
        return tensors[f"blk.{layer}.{part}"]

    def group(*parts: str) -> LinearWeight:
        biases = [tensors.get(f"blk.{layer}.{part}.bias") for part in parts]
        return prepare(
            ctx,
            [tensor(f"{part}.weight") for part in parts],
            [None if bias is None else read_vector(bias) for bias in biases],
        )

    head_norms = None
    if config.qk_norm:
        head_norms = read_vector(tensor("attn_q_norm.weight")), read_vector(tensor("attn_k_norm.weight"))
    attention = make_attention(
        read_vector(tensor("attn_norm.weight")),
        config.rms_eps,
        group("attn_q", "attn_k", "attn_v"),
        group("attn_output"),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        head_norms=head_norms,
        sliding_window=config.sliding_window,
    )
    norm = read_vector(tensor("ffn_norm.weight"))
    gate_up, down = group("ffn_gate", "ffn_up"), group("ffn_down")
    return Layer(attention, make_feed_forward(norm, config.rms_eps, gate_up, down, config.activation))
