"""Encoders that transformers does not have, in plain torch after what their authors published: Jina's BERT 2, NeoBERT
and Nomic's mixture. Their tensors have the names of their folders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, silu, softmax


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Every position sees all; each is (tokens, heads, numbers of a head)."""
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    weights = softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias, dim=-1)
    return (weights @ v).transpose(0, 1).reshape(q.shape[1], -1)


def turn(x: torch.Tensor, theta: float, *, neighbours: bool) -> torch.Tensor:
    """Rotate pairs of (tokens, heads, numbers of a head): neighbours, or the two halves."""
    dim = x.shape[-1]
    angles = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    pair = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.stack(pair, dim=-1).flatten(-2) if neighbours else torch.cat(pair, dim=-1)


class Encoder(nn.Module):
    """Named parameters of given shapes, and `compute` over them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.shapes = dict(self.list_shapes(config))
        self.holder = {name: nn.Parameter(torch.zeros(shape)) for name, shape in self.shapes.items()}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """The parameters by the names of the folder, dots and all."""
        return dict(self.holder)

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        """Take the parameters."""
        self.holder = dict(state)
        return [], []

    def forward(self, input_ids: torch.Tensor) -> Any:
        """The states of the tokens."""
        return SimpleNamespace(last_hidden_state=self.compute(input_ids[0])[None])

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A product, with its bias if there is one."""
        return nn.functional.linear(x, self.holder[f"{name}.weight"], self.holder.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        """A layer norm, or without a bias an RMS norm."""
        weight, bias = self.holder[f"{name}.weight"], self.holder.get(f"{name}.bias")
        if bias is None:
            return nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def list_shapes(self, config: dict[str, Any]) -> Any:
        """Names and shapes of the parameters."""
        raise NotImplementedError

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) of token ids."""
        raise NotImplementedError


def _list(prefix: str, rows: int, columns: int, *, bias: bool = True) -> Any:
    yield f"{prefix}.weight", (rows, columns)
    if bias:
        yield f"{prefix}.bias", (rows,)


def _list_norm(prefix: str, size: int, *, bias: bool = True) -> Any:
    yield f"{prefix}.weight", (size,)
    if bias:
        yield f"{prefix}.bias", (size,)


class JinaBert2(Encoder):
    """huggingface.co/jinaai/jina-bert-implementation."""

    def list_shapes(self, config: dict[str, Any]) -> Any:
        """Names and shapes of the parameters."""
        size, inner = config["hidden_size"], config["intermediate_size"]
        yield "embeddings.word_embeddings.weight", (config["vocab_size"], size)
        yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], size)
        yield from _list_norm("embeddings.LayerNorm", size)
        for index in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}"
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                yield from _list(f"{layer}.attention.{part}", size, size)
            yield from _list_norm(f"{layer}.attention.output.LayerNorm", size)
            yield from _list(f"{layer}.mlp.gated_layers", 2 * inner, size, bias=False)
            yield from _list(f"{layer}.mlp.wo", size, inner)
            yield from _list_norm(f"{layer}.mlp.layernorm", size)

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) of token ids."""
        heads, eps = self.config["num_attention_heads"], self.config["layer_norm_eps"]
        near = 2 ** (heads.bit_length() - 1)
        slopes = [2.0 ** (-8 * (head + 1) / near) for head in range(near)]
        slopes += [2.0 ** (-4 * (2 * head + 1) / near) for head in range(heads - near)]
        places = torch.arange(len(tokens))
        bias = -torch.tensor(slopes)[:, None, None] * (places[:, None] - places[None]).abs()
        x = self.holder["embeddings.word_embeddings.weight"][tokens]
        x = self.norm(x + self.holder["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm", eps)
        for index in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}"
            parts = [self.product(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")]
            made = attend(*(part.reshape(len(tokens), heads, -1) for part in parts), bias)
            x = x + self.product(made, f"{layer}.attention.output.dense")
            x = self.norm(x, f"{layer}.attention.output.LayerNorm", eps)
            gate, up = self.product(x, f"{layer}.mlp.gated_layers").chunk(2, dim=-1)
            x = self.norm(x + self.product(gelu(gate) * up, f"{layer}.mlp.wo"), f"{layer}.mlp.layernorm", eps)
        return x


class NeoBert(Encoder):
    """huggingface.co/chandar-lab/NeoBERT: each head has its query, key and value together; neighbours rotate."""

    def list_shapes(self, config: dict[str, Any]) -> Any:
        """Names and shapes of the parameters."""
        size, inner = config["hidden_size"], -(-int(2 * config["intermediate_size"] / 3) // 8) * 8
        yield "model.encoder.weight", (config["vocab_size"], size)
        yield from _list_norm("model.layer_norm", size, bias=False)
        for index in range(config["num_hidden_layers"]):
            layer = f"model.transformer_encoder.{index}"
            yield from _list(f"{layer}.qkv", 3 * size, size, bias=False)
            yield from _list(f"{layer}.wo", size, size, bias=False)
            yield from _list(f"{layer}.ffn.w12", 2 * inner, size, bias=False)
            yield from _list(f"{layer}.ffn.w3", size, inner, bias=False)
            yield from _list_norm(f"{layer}.attention_norm", size, bias=False)
            yield from _list_norm(f"{layer}.ffn_norm", size, bias=False)

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) of token ids."""
        heads, eps = self.config["num_attention_heads"], self.config["norm_eps"]
        x = self.holder["model.encoder.weight"][tokens]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.transformer_encoder.{index}"
            normed = self.norm(x, f"{layer}.attention_norm", eps)
            q, k, v = self.product(normed, f"{layer}.qkv").reshape(len(tokens), heads, -1).chunk(3, dim=-1)
            q, k = turn(q, 10000.0, neighbours=True), turn(k, 10000.0, neighbours=True)
            x = x + self.product(attend(q, k, v), f"{layer}.wo")
            gate, up = self.product(self.norm(x, f"{layer}.ffn_norm", eps), f"{layer}.ffn.w12").chunk(2, dim=-1)
            x = x + self.product(silu(gate) * up, f"{layer}.ffn.w3")
        return self.norm(x, "model.layer_norm", eps)


class NomicMixture(Encoder):
    """huggingface.co/nomic-ai/nomic-bert-2048 with experts: their shares are not divided by their sum, and their joint
    output has a bias."""

    def list_shapes(self, config: dict[str, Any]) -> Any:
        """Names and shapes of the parameters."""
        size, inner, experts = config["n_embd"], config["n_inner"], config["num_experts"]
        yield "embeddings.word_embeddings.weight", (config["vocab_size"], size)
        yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], size)
        yield from _list_norm("emb_ln", size)
        for index in range(config["n_layer"]):
            layer = f"encoder.layers.{index}"
            yield from _list(f"{layer}.attn.Wqkv", 3 * size, size)
            yield from _list(f"{layer}.attn.out_proj", size, size)
            yield from (*_list_norm(f"{layer}.norm1", size), *_list_norm(f"{layer}.norm2", size))
            if index % config["moe_every_n_layers"] == 1:
                yield f"{layer}.mlp.router.layer.weight", (experts, size)
                yield f"{layer}.mlp.experts.mlp.w1", (experts * inner, size)
                yield f"{layer}.mlp.experts.mlp.w2", (experts * inner, size)
                yield f"{layer}.mlp.experts.bias", (size,)
            else:
                yield from (*_list(f"{layer}.mlp.fc1", inner, size), *_list(f"{layer}.mlp.fc2", size, inner))

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) of token ids."""
        heads, eps = self.config["n_head"], self.config["layer_norm_epsilon"]
        x = self.holder["embeddings.word_embeddings.weight"][tokens]
        x = self.norm(x + self.holder["embeddings.token_type_embeddings.weight"][0], "emb_ln", eps)
        for index in range(self.config["n_layer"]):
            layer = f"encoder.layers.{index}"
            parts = self.product(x, f"{layer}.attn.Wqkv").chunk(3, dim=-1)
            q, k, v = (part.reshape(len(tokens), heads, -1) for part in parts)
            q, k = turn(q, 10000.0, neighbours=False), turn(k, 10000.0, neighbours=False)
            x = self.norm(x + self.product(attend(q, k, v), f"{layer}.attn.out_proj"), f"{layer}.norm1", eps)
            if index % self.config["moe_every_n_layers"] == 1:
                made = self.mix(x, f"{layer}.mlp")
            else:
                made = self.product(gelu(self.product(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2")
            x = self.norm(x + made, f"{layer}.norm2", eps)
        return x

    def mix(self, x: torch.Tensor, block: str) -> torch.Tensor:
        """The output of each token's experts."""
        shares, chosen = softmax(self.product(x, f"{block}.router.layer"), dim=-1).topk(self.config["moe_top_k"])
        shape = (self.config["num_experts"], self.config["n_inner"], self.config["n_embd"])
        up, down = (self.holder[f"{block}.experts.mlp.{name}"].reshape(shape) for name in ("w1", "w2"))
        rows = [
            sum(share * (gelu(up[expert] @ row) @ down[expert]) for share, expert in zip(some, own, strict=True))
            for row, some, own in zip(x, shares, chosen, strict=True)
        ]
        return torch.stack(rows) + self.holder[f"{block}.experts.bias"]


OWN = {"jina-v2": JinaBert2, "neo": NeoBert, "nomic-mixture": NomicMixture}
