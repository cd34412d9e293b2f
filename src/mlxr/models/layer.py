"""One transformer layer: its weights, prepared for the operators, and its forward step.

Knows operators, not arrays' makers: it slices and reshapes what the operators return and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxr.kernels.activate import activate
from mlxr.kernels.attend import attend
from mlxr.kernels.context import Context
from mlxr.kernels.linear import LinearWeight, linear, prepare
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rms_norm import rms_norm
from mlxr.kernels.rope import RopeTable, rope
from mlxr.kernels.tensor import FloatArray, PoolArray, TensorSource, read_vector
from mlxr.kernels.write_pages import write_pages
from mlxr.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one layer; q, k and v are one weight, gate and up another."""

    config: ModelConfig
    attn_norm: FloatArray
    qkv: LinearWeight
    q_norm: FloatArray | None
    k_norm: FloatArray | None
    attn_output: LinearWeight
    ffn_norm: FloatArray
    gate_up: LinearWeight
    down: LinearWeight

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one forward step reads."""
        norms = [norm for norm in (self.attn_norm, self.q_norm, self.k_norm, self.ffn_norm) if norm is not None]
        weights = (self.qkv, self.attn_output, self.gate_up, self.down)
        return sum(weight.nbytes for weight in weights) + sum(norm.nbytes for norm in norms)

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

        What a block adds to the stream is handed to the next norm, which adds it (`delta`, None at the first layer).
        Returns the stream and this layer's last delta.
        """
        eps = self.config.rms_eps
        normed, stream = rms_norm(ctx, stream, self.attn_norm, eps, delta)
        delta = self._attend(ctx, normed, batch, table, k_pool, v_pool)
        normed, stream = rms_norm(ctx, stream, self.ffn_norm, eps, delta)
        gate_up = linear(ctx, normed, self.gate_up)
        return stream, linear(ctx, activate(ctx, gate_up, self.config.activation), self.down)

    def _attend(
        self,
        ctx: Context,
        normed: FloatArray,
        batch: RaggedBatch,
        table: RopeTable,
        k_pool: PoolArray,
        v_pool: PoolArray,
    ) -> FloatArray:
        config = self.config
        q_end, k_end = config.q_features, config.q_features + config.kv_features
        qkv = linear(ctx, normed, self.qkv)
        # views: the operators take a free token stride
        q = qkv[:, :q_end].reshape(-1, config.heads, config.head_dim)
        k = qkv[:, q_end:k_end].reshape(-1, config.kv_heads, config.head_dim)
        v = qkv[:, k_end:].reshape(-1, config.kv_heads, config.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = self._norm_heads(ctx, q, self.q_norm)
            k = self._norm_heads(ctx, k, self.k_norm)
        rope(ctx, q, batch.positions, table)
        rope(ctx, k, batch.positions, table)
        write_pages(ctx, k, v, k_pool, v_pool, batch.slots)
        scale = config.head_dim**-0.5
        attended = attend(ctx, q, k_pool, v_pool, batch, scale=scale, sliding_window=config.sliding_window)
        return linear(ctx, attended, self.attn_output)

    def _norm_heads(self, ctx: Context, x: FloatArray, weight: FloatArray) -> FloatArray:
        normed, _ = rms_norm(ctx, x.reshape(-1, self.config.head_dim), weight, self.config.rms_eps)
        return normed.reshape(x.shape)


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

    return Layer(
        config=config,
        attn_norm=read_vector(tensor("attn_norm.weight")),
        qkv=group("attn_q", "attn_k", "attn_v"),
        q_norm=read_vector(tensor("attn_q_norm.weight")) if config.qk_norm else None,
        k_norm=read_vector(tensor("attn_k_norm.weight")) if config.qk_norm else None,
        attn_output=group("attn_output"),
        ffn_norm=read_vector(tensor("ffn_norm.weight")),
        gate_up=group("ffn_gate", "ffn_up"),
        down=group("ffn_down"),
    )
