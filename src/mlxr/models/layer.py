"""One transformer layer: its weights, prepared for the operators, and its forward step.

Knows operators, not arrays' makers: it hands on what they return.
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
from mlxr.kernels.rope import RopeTable
from mlxr.kernels.split_heads import HeadNorms, split_heads
from mlxr.kernels.tensor import FloatArray, PoolArray, TensorSource, read_vector
from mlxr.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one layer; q, k and v are one weight, gate and up another."""

    config: ModelConfig
    attn_norm: FloatArray
    qkv: LinearWeight
    head_norms: HeadNorms | None
    attn_output: LinearWeight
    ffn_norm: FloatArray
    gate_up: LinearWeight
    down: LinearWeight

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one forward step reads."""
        norms = [self.attn_norm, self.ffn_norm]
        if self.head_norms is not None:
            norms += [self.head_norms.q, self.head_norms.k]
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
        qkv = linear(ctx, normed, self.qkv)
        q = split_heads(ctx, qkv, config.heads, batch, table, k_pool, v_pool, self.head_norms)
        scale = config.head_dim**-0.5
        attended = attend(ctx, q, k_pool, v_pool, batch, scale=scale, sliding_window=config.sliding_window)
        return linear(ctx, attended, self.attn_output)


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
        head_norms=HeadNorms(
            read_vector(tensor("attn_q_norm.weight")), read_vector(tensor("attn_k_norm.weight")), config.rms_eps
        )
        if config.qk_norm
        else None,
        attn_output=group("attn_output"),
        ffn_norm=read_vector(tensor("ffn_norm.weight")),
        gate_up=group("ffn_gate", "ffn_up"),
        down=group("ffn_down"),
    )
