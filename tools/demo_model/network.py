"""The Llama architecture in PyTorch, as `transformers` defines it, small enough to read.

RMSNorm, rotary positions on half-split heads, grouped-query attention, SwiGLU, tied embeddings. Parameter names are
those of `LlamaForCausalLM`, so that a state dict is a checkpoint. It knows nothing of text or of training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as functions


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; `ffn` is a multiple of 256 so that rows suit 256-element quantised blocks."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 64
    vocabulary: int = 8192
    context: int = 2048
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5


SHAPES = {
    "main": Shape(hidden=512, layers=6, heads=8, kv_heads=2, ffn=1280),
    "draft": Shape(hidden=256, layers=3, heads=4, kv_heads=1, ffn=768),
    "tiny": Shape(hidden=256, layers=1, heads=4, kv_heads=1, ffn=256),  # for a run on a CPU that proves the plumbing
}


class Attention(nn.Module):
    """Causal attention of query heads in groups over fewer key and value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, hidden) to (B, T, hidden)."""
        rows, length, _ = x.shape
        s = self.shape
        q = self.q_proj(x).view(rows, length, s.heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, s.kv_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k = k.repeat_interleave(s.heads // s.kv_heads, dim=1)
        v = v.repeat_interleave(s.heads // s.kv_heads, dim=1)
        out = functions.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, s.heads * s.head_dim))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    """The feed-forward part of a layer: SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) to (B, T, hidden)."""
        return self.down_proj(functions.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """RMSNorm, in float32 whatever comes in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.rms_eps
        self.weight = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) to (B, T, hidden)."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Layer(nn.Module):
    """Attention and feed-forward, each on a normed copy and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, hidden) to (B, T, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Holds the parameters under the names of a checkpoint; `Llama` runs them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """`forward(ids (B, T))` gives logits (B, T, vocabulary); `mask` (B, 1, T, T), true where a row may look, replaces
    causality."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if deep else 1.0))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary) of ids (B, T)."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos = self.cos[: ids.shape[1]].to(x.dtype)
        sin = self.sin[: ids.shape[1]].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return functions.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats over targets that are not -100; ids and targets are (B, T)."""
        logits = self(ids, mask)
        return functions.cross_entropy(
            logits.float().view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100
        )
