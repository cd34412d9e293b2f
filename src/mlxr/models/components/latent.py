"""Latent attention (DeepSeek-AI 2024, arXiv:2405.04434): one short key of each token, which is its value, too.

The cache keeps of a token the numbers that rotate and the latent vector. Prompts and answers are computed alike, with
the matrices of keys and values multiplied into queries and results: the other form, in which prompts would be cheaper,
has other bits, and so the same token would have other ones in a prompt than in an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxr.cache.shapes import CacheShape
from mlxr.core.errors import ModelError
from mlxr.kernels.latent import Parts, make_parts
from mlxr.kernels.layers.operators import Attend, Heads, MatMul, Norm, Operator, ProjectParts, RopeAndWriteLatent
from mlxr.kernels.sources import Columns, Stack
from mlxr.kernels.tensor import TensorSource
from mlxr.models import limits
from mlxr.models.components.attention import Rope
from mlxr.models.components.weights import Flow, LayerWeights, Tensors, check_range, list_product

JOINED, KEYS, VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose heads share a key of `rope.dim` numbers that rotate and a latent vector of `rank`.

    Queries of a head have `plain_dim` numbers besides those that rotate, and results `value_dim`. With a `query_rank`
    queries are made of a vector so long, which is normed.
    """

    heads: int
    rank: int
    plain_dim: int
    value_dim: int
    scale: float  # of scores
    rope: Rope
    query_rank: int | None = None
    indexed: bool = False  # files have an indexer, which chooses what is attended to in longer texts than are served

    def __post_init__(self) -> None:
        check_range("heads", self.heads, 1, limits.MAX_HEADS)
        for name in ("rank", "plain_dim", "value_dim"):
            check_range(name, getattr(self, name), 1, limits.MAX_HEAD_DIM)
        check_range("head_dim", self.head_dim, 1, limits.MAX_HEAD_DIM)
        if not 0 < self.scale <= limits.MAX_SCALE:
            raise ModelError(f"model has attention_scale {self.scale}, expected above 0 and at most 1e6")

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.rope.dim + self.rank

    @property
    def cache(self) -> CacheShape:
        """What is kept of a token."""
        return CacheShape(1, self.head_dim, value_dim=self.rank)

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        queries = self.heads * (self.plain_dim + self.rope.dim)
        if self.query_rank is None:
            yield from list_product("attn_q", queries, hidden)
        else:
            yield from list_product("attn_q_a", self.query_rank, hidden)
            yield "attn_q_a_norm.weight", (self.query_rank,)
            yield from list_product("attn_q_b", queries, self.query_rank)
        yield from list_product("attn_kv_a_mqa", self.head_dim, hidden)
        yield "attn_kv_a_norm.weight", (self.rank,)
        yield KEYS, (self.heads, self.rank, self.plain_dim)
        yield VALUES, (self.heads, self.value_dim, self.rank)
        yield from list_product("attn_output", hidden, self.heads * self.value_dim)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        if self.query_rank is None:
            yield MatMul(w.product("attn_q"), flow.source, "x")
        else:
            yield MatMul(w.product("attn_q_a"), flow.source, "x")
            yield Norm(w.norm("attn_q_a_norm"), "x", "x")
            yield MatMul(w.product("attn_q_b"), "x", "x")
        yield MatMul(w.product("attn_kv_a_mqa"), flow.source, "kept")
        yield ProjectParts(self._read_parts(w, KEYS), self.rope.dim)
        heads = Heads(self.heads, 1, self.head_dim, self.scale, rope=w.rope, group=w.group, value_dim=self.rank)
        yield RopeAndWriteLatent(heads, w.norm("attn_kv_a_norm"))
        yield Attend(heads)
        yield ProjectParts(self._read_parts(w, VALUES))
        yield from flow.finish(w.product("attn_output"))

    def _read_parts(self, w: LayerWeights, name: str) -> Parts:
        """The matrices of all heads, which adapters do not know, as they belong to one product in other programs."""
        stack = w.take(name)
        return make_parts(w.ctx, [w.prepare([stack.take_matrix(head)]) for head in range(self.heads)])

    def arrange(self, tensors: dict[str, TensorSource], prefix: str) -> None:
        """Make the matrices of keys and of values, where a file has both of a head in one tensor, as folders have.

        Those of keys stand there with rows and columns exchanged; of a quantised tensor they become bf16. What an
        indexer has is left out.
        """
        if self.indexed:
            for name in [name for name in tensors if name.startswith(f"{prefix}indexer.")]:
                del tensors[name]
        joined = tensors.get(prefix + JOINED)
        rows = self.plain_dim + self.value_dim
        if joined is None or joined.shape != (self.heads * rows, self.rank):
            return
        del tensors[prefix + JOINED]
        heads = [joined.take_rows(head * rows, (head + 1) * rows) for head in range(self.heads)]
        keys = [Columns(head.take_rows(0, self.plain_dim), range(self.rank)) for head in heads]
        tensors[prefix + KEYS] = Stack(prefix + KEYS, keys)
        tensors[prefix + VALUES] = Stack(prefix + VALUES, [head.take_rows(self.plain_dim, rows) for head in heads])
