"""One transformer layer: which tensors it has, and its weights out of these, prepared for the operators.

Knows names and shapes; how a layer runs is the matter of `mlxr.kernels.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.kernels.layers import Layer, NormWeight, make_attention, make_feed_forward
from mlxr.kernels.linear import LinearWeight, prepare
from mlxr.kernels.split_heads import HeadNorms
from mlxr.kernels.tensor import FloatArray, TensorSource, read_vector
from mlxr.models.specs import Attention, LayerSpec, Norms

Shape = tuple[int, ...]

# Names of the norms of a block: of its input, and of what it adds to the stream.
_ATTENTION_NORMS = "attn_norm", "post_attention_norm"
_FEED_FORWARD_NORMS = "ffn_norm", "post_ffw_norm"
_OUTPUT_SCALE = "layer_output_scale.weight"
_PROJECTIONS = {"qkv": ("attn_q", "attn_k", "attn_v"), "qk": ("attn_q", "attn_k"), "q": ("attn_q",)}


def list_tensors(spec: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name, without the layer's prefix, and shape of each tensor of a layer."""
    attention, ffn, bias = spec.attention, spec.feed_forward.features, spec.feed_forward.bias
    for name in (*_name_norms(spec, _ATTENTION_NORMS), *_name_norms(spec, _FEED_FORWARD_NORMS)):
        if name is not None:
            yield f"{name}.weight", (hidden,)
            if spec.norms.bias:
                yield f"{name}.bias", (hidden,)
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    for name in _PROJECTIONS[attention.projected]:
        yield from _list_product(name, queries if name == "attn_q" else keys, hidden, attention.qkv_bias)
    yield from _list_product("attn_output", hidden, queries, attention.output_bias)
    for name in spec.feed_forward.projections:
        yield from _list_product(name, ffn, hidden, bias)
    yield from _list_product("ffn_down", hidden, ffn, bias)
    if spec.scales_output:
        yield _OUTPUT_SCALE, (1,)
    if attention.head_norms is not None:
        for name, length in (("attn_q_norm", queries), ("attn_k_norm", keys)):
            if name == "attn_q_norm" or attention.projected != "q":
                yield f"{name}.weight", (length if attention.head_norms == "joint" else attention.head_dim,)


def _list_product(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _name_norms(spec: LayerSpec, names: tuple[str, str]) -> tuple[str | None, str | None]:
    """The norms that a block has of `names`; of blocks side by side the first one's norm is that of both."""
    before, after = names
    has_before = spec.norms.places != "after" and not (spec.is_parallel and names == _FEED_FORWARD_NORMS)
    return before if has_before else None, None if spec.norms.places == "before" else after


class LayerReader:
    """Reads the weights of the layers of one model, one after another."""

    def __init__(self, ctx: Context, tensors: Mapping[str, TensorSource]) -> None:
        self._ctx, self._tensors = ctx, tensors

    def read(self, spec: LayerSpec, index: int, *, rope: int, group: int) -> Layer:
        """Prepare the weights of layer `index`; the sources are released one after another.

        `rope` and `group` are the numbers of its rotation table and of its group in the cache.
        """
        prefix, attention, feed_forward = f"blk.{index}.", spec.attention, spec.feed_forward
        norm, post_norm = self._read_norms(prefix, spec, _ATTENTION_NORMS)
        block = make_attention(
            norm,
            self._prepare(prefix, *_PROJECTIONS[attention.projected]),
            self._prepare(prefix, "attn_output"),
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            head_norms=self._read_head_norms(prefix, attention, spec.norms),
            post_norm=post_norm,
            projected=attention.projected,
            sliding_window=attention.window,
            softcap=attention.softcap,
            rope=rope,
            group=group,
        )
        norm, post_norm = self._read_norms(prefix, spec, _FEED_FORWARD_NORMS)
        up, down = self._prepare(prefix, *feed_forward.projections), self._prepare(prefix, "ffn_down")
        other = make_feed_forward(norm, up, down, feed_forward.activation, post_norm)
        scale = self._read_scale(prefix + _OUTPUT_SCALE) if spec.scales_output else 1.0
        return Layer(block, other, spec.is_parallel, spec.residual_scale, scale)

    def read_norm(self, name: str, norms: Norms) -> NormWeight:
        """The norm of that name."""
        bias = self._vector(f"{name}.bias") if norms.bias else None
        return NormWeight(self._vector(f"{name}.weight"), norms.eps, norms.kind, bias)

    def _read_norms(
        self, prefix: str, spec: LayerSpec, names: tuple[str, str]
    ) -> tuple[NormWeight | None, NormWeight | None]:
        before, after = (
            None if name is None else self.read_norm(prefix + name, spec.norms) for name in _name_norms(spec, names)
        )
        return before, after

    def _read_head_norms(self, prefix: str, attention: Attention, norms: Norms) -> HeadNorms | None:
        if attention.head_norms is None:
            return None
        q = self._vector(f"{prefix}attn_q_norm.weight")
        k = q if attention.projected == "q" else self._vector(f"{prefix}attn_k_norm.weight")
        return HeadNorms(q, k, norms.eps, attention.norms_values)

    def _read_scale(self, name: str) -> float:
        scale = float(self._vector(name)[0])
        if not math.isfinite(scale):
            raise ModelError(f"tensor {name} holds {scale}, expected a finite number")
        return scale

    def _prepare(self, prefix: str, *names: str) -> LinearWeight:
        biases = [self._tensors.get(f"{prefix}{name}.bias") for name in names]
        return prepare(
            self._ctx,
            [self._tensors[f"{prefix}{name}.weight"] for name in names],
            [None if bias is None else read_vector(bias) for bias in biases],
        )

    def _vector(self, name: str) -> FloatArray:
        return read_vector(self._tensors[name])
