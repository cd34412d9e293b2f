"""One transformer layer: its weights, prepared for the operators, and its forward step.

Knows operators, not arrays' makers: it hands on what the operators return and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxr.kernels.context import Context
from mlxr.kernels.feed_forward import FeedForwardBlock, feed_forward, prepare_feed_forward
from mlxr.kernels.linear import LinearWeight, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.self_attention import AttentionBlock, prepare_attention, self_attention
from mlxr.kernels.tensor import FloatArray, PoolArray, TensorSource, read_vector
from mlxr.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The two blocks of one layer."""

    attention: AttentionBlock
    feed_forward: FeedForwardBlock

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one forward step reads."""
        return self.attention.nbytes + self.feed_forward.nbytes

    def forward(
        self,
        ctx: Context,
        stream: FloatArray,
        delta: FloatArray | None,
        batch: RaggedBatch,
        table: RopeTable,
        k_pool: PoolArray,
        v_pool: PoolArray,
    ) -> tuple[FloatArray, FloatArray]:
        """One layer over the residual stream (T, hidden).

        What a block adds to the stream is handed to the next block's norm, which adds it (`delta`, None at the first
        layer). Returns the stream and this layer's last delta.
        """
        stream, delta = self_attention(ctx, stream, delta, self.attention, batch, table, k_pool, v_pool)
        return feed_forward(ctx, stream, delta, self.feed_forward)


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
    attention = prepare_attention(
        ctx,
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
    return Layer(attention, prepare_feed_forward(ctx, norm, config.rms_eps, gate_up, down, config.activation))
