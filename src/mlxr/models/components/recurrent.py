"""Recurrent mixers: a short convolution, alone or before a gated delta net, Mamba or Mamba-2, with a state of one size.

Files of GGUF and folders lay small tensors out differently; their order in GGUF is also defined here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import Literal

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.latent import make_parts
from mlxr.kernels.layers.operators import (
    Convolve,
    GatedNorm,
    GateHeads,
    MatMul,
    MixerNorm,
    Norm,
    NormWeight,
    Operator,
    ProjectParts,
    Recur,
    Scan,
)
from mlxr.kernels.recurrent import (
    Convolution,
    ConvolutionKind,
    DeltaRule,
    StateSpace,
    make_convolution,
    make_scan,
)
from mlxr.kernels.sources import Decoded, part_groups, pick_parts, stack_vectors
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers
from mlxr.models import limits
from mlxr.models.components.weights import Flow, LayerWeights, Shape, Tensors

# Joined tensors of Qwen3-Next: the first in folders and in old files of GGUF, the second in all of them
_ALL, BETAS_AND_ALPHAS = "ssm_in.weight", "ssm_ba.weight"
PARTED_BETAS = ("ssm_beta.weight", "ssm_alpha.weight")
_CONV = re.compile(r".*\.(shortconv\.conv|ssm_conv1d(_[qkv])?|ple_conv1d)\.weight")


def is_convolution(name: str) -> bool:
    """Return True for the name of a convolution, a matrix that nothing is multiplied by as a whole."""
    return _CONV.fullmatch(name) is not None


@frozen
class ShortConv:
    """A convolution of `channels` channels over the last `taps` inputs, with gates before and after it (LFM2)."""

    channels: int
    taps: int

    def __post_init__(self) -> None:
        _check_sizes(self, channels=limits.MAX_WIDTH)

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps for a sequence."""
        return (self.taps - 1) * self.channels

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield "shortconv.conv.weight", (self.channels, self.taps)
        yield "shortconv.in_proj.weight", (3 * self.channels, hidden)
        yield "shortconv.out_proj.weight", (hidden, self.channels)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        yield MatMul(w.product("shortconv.in_proj"), flow.source, "kept")
        yield Convolve(_read_convolution(w, "shortconv.conv", "gated"))
        yield from flow.finish(w.product("shortconv.out_proj"))

    def arrange(self, tensors: dict[str, TensorSource], prefix: str, hidden: int) -> None:
        """Give small tensors the shapes that they have in GGUF."""
        fold(tensors, prefix, self.tensors(hidden))


@frozen
class GatedDelta:
    """A gated delta net: a convolution of queries, keys and values, then the delta rule, whose heads are normed.

    The product before it makes queries, keys and values, the gate of the norm, betas and alphas.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False  # value head h reads key head h % key_heads, else h // (value_heads / key_heads)
    by_sigmoid: bool = False  # the gate behind the norm is a sigmoid, else silu

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_divisor("value_heads", self.value_heads, "key_heads", self.key_heads)

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.results

    @property
    def results(self) -> int:
        """Columns of the delta rule's result, and of its gate."""
        return self.value_heads * self.value_dim

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps for a sequence."""
        return (self.taps - 1) * self.channels + self.results * self.key_dim + self.value_heads

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield "ssm_conv1d.weight", (self.channels, self.taps)
        yield "ssm_dt.bias", (self.value_heads,)
        yield "ssm_a", (self.value_heads,)
        yield "ssm_norm.weight", (self.value_dim,)
        yield "attn_qkv.weight", (self.channels, hidden)
        yield "attn_gate.weight", (self.results, hidden)
        yield "ssm_beta.weight", (self.value_heads, hidden)
        yield "ssm_alpha.weight", (self.value_heads, hidden)
        yield "ssm_out.weight", (hidden, self.results)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        gates = () if self.by_sigmoid else ("attn_gate",)
        names = "attn_qkv", *gates, "ssm_beta", "ssm_alpha"
        source = yield from w.turn(flow.source, *names)
        yield MatMul(w.product(*names), source, "kept")
        conv = _read_convolution(w, "ssm_conv1d", "silu")
        yield Convolve(conv)
        heads = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        rule = DeltaRule(*heads, _read_flat(w, "ssm_a"), _read_flat(w, "ssm_dt.bias"), self.tiled)
        rule.check("gated_delta")
        yield Recur(rule, conv.inputs + (self.results if gates else 0), conv.state_floats)
        if gates:
            gain = _read_flat(w, "ssm_norm.weight")
            norm = MixerNorm(gain, w.norms.eps, self.results, self.value_dim, gate_first=False)
            yield GatedNorm(norm, conv.inputs)
        else:
            yield Norm(w.norm("ssm_norm"), "x", "x", self.value_heads)
            yield MatMul(w.product("attn_gate"), source, "kept")
            yield GateHeads()
        is_grouped = w.model.rotated is not None and w.model.rotated.groups_heads and self.tiled
        yield from w.turn("x", "ssm_out", order=self._group_results() if is_grouped else ())
        yield from flow.finish(w.product("ssm_out"))

    def arrange(self, tensors: dict[str, TensorSource], prefix: str, hidden: int) -> None:
        """Give small tensors the shapes that they have in GGUF, and cut apart the joined tensor of Qwen3-Next."""
        joined = tensors.get(prefix + _ALL)
        if joined is not None and joined.shape[:1] == (self.channels + self.results,):  # else the check finds it
            # queries, keys, values and gates of the heads of each key head follow one another
            values = self.results // self.key_heads
            *qkv, gates = part_groups(self.key_heads, (self.key_dim, self.key_dim, values, values))
            del tensors[prefix + _ALL]
            tensors[f"{prefix}attn_qkv.weight"] = pick_parts(joined, qkv)
            tensors[f"{prefix}attn_gate.weight"] = pick_parts(joined, [gates])
        fold(tensors, prefix, self.tensors(hidden))

    def part_betas(self, joined: TensorSource) -> tuple[TensorSource, TensorSource]:
        """Cut apart a tensor that has the betas and alphas of each key head after one another."""
        each = self.value_heads // self.key_heads
        betas, alphas = part_groups(self.key_heads, (each, each))
        return pick_parts(joined, [betas]), pick_parts(joined, [alphas])

    def order_rows(self, part: str) -> list[int] | None:
        """Return which row of a folder's tensor becomes row i in GGUF, by its name without a layer; None if rows stay.
        In GGUF the first value heads of all key heads come first, then the second ones."""
        if self.key_heads in (1, self.value_heads):
            return None
        keys = 2 * self.key_heads * self.key_dim
        match part:
            case "attn_qkv.weight" | "ssm_conv1d.weight":
                return [*range(keys), *(keys + column for column in self._order_columns())]
            case "attn_gate.weight":
                return self._order_columns()
            case "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_a" | "ssm_dt.bias":
                return self._order_heads()
            case _:
                return None

    def order_output(self) -> list[int] | None:
        """Return which column of a folder's weight of the output becomes column i in GGUF; None if columns stay."""
        return None if self.key_heads in (1, self.value_heads) else self._order_columns()

    def _group_results(self) -> list[int]:
        """Return for each column that a folder's output reads the place of this number in the result."""
        columns = self.order_output() or []
        return sorted(range(len(columns)), key=columns.__getitem__)

    def _order_heads(self) -> list[int]:
        each = self.value_heads // self.key_heads
        return [key * each + index for index in range(each) for key in range(self.key_heads)]

    def _order_columns(self) -> list[int]:
        return [head * self.value_dim + column for head in self._order_heads() for column in range(self.value_dim)]


@frozen
class Mamba2:
    """Mamba-2: a convolution with a bias of its columns, B and C, then its recurrence, gated and then normed.

    The product before it makes the gate, the columns, B, C, and steps.
    """

    heads: int
    head_dim: int
    groups: int  # of heads that share B and C, and that are normed together
    state_dim: int
    taps: int
    normed: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_divisor("heads", self.heads, "groups", self.groups)

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.results + 2 * self.groups * self.state_dim

    @property
    def results(self) -> int:
        """Columns of the recurrence's result, and of its gate."""
        return self.heads * self.head_dim

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps for a sequence."""
        return (self.taps - 1) * self.channels + self.results * self.state_dim + self.heads

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield "ssm_conv1d.weight", (self.channels, self.taps)
        yield "ssm_conv1d.bias", (self.channels,)
        yield "ssm_dt.bias", (self.heads,)
        yield "ssm_a", (self.heads, 1)
        yield "ssm_d", (self.heads, 1)
        if self.normed:
            yield "ssm_norm.weight", (self.groups, self.results // self.groups)
        yield "ssm_in.weight", (self.channels + self.results + self.heads, hidden)
        yield "ssm_out.weight", (hidden, self.results)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        yield MatMul(w.product("ssm_in"), flow.source, "kept")
        conv = _read_convolution(w, "ssm_conv1d", "silu", _read_flat(w, "ssm_conv1d.bias"))
        yield Convolve(conv, self.results)
        numbers = (_read_flat(w, name) for name in ("ssm_a", "ssm_dt.bias", "ssm_d"))
        space = StateSpace(self.heads, self.head_dim, self.groups, self.state_dim, *numbers)
        space.check("mamba2")
        yield Recur(space, conv.inputs + self.results, conv.state_floats)
        gain = _read_flat(w, "ssm_norm.weight") if self.normed else None
        width = self.results // self.groups
        yield GatedNorm(MixerNorm(gain, w.norms.eps, self.results, width, gate_first=True), 0)
        yield from flow.finish(w.product("ssm_out"))

    def arrange(self, tensors: dict[str, TensorSource], prefix: str, hidden: int) -> None:
        """Give small tensors the shapes that they have in GGUF."""
        fold(tensors, prefix, self.tensors(hidden))


@frozen
class Mamba:
    """Mamba: a convolution with a bias, then a scan of the state of each of its channels, and a gate.

    The product before it makes the input of the convolution, and the gate. A second product makes B and C from the
    convolution's result, and `rank` numbers, from which a third makes the steps. B, C and steps may be normed: by norms
    with weights, or without (`bare`), which add `norm_eps` to the variance.
    """

    channels: int
    state_dim: int
    rank: int
    taps: int
    norms: Literal["weighted", "bare"] | None = None
    norm_eps: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(self, channels=limits.MAX_WIDTH)
        if self.norms is not None and not 0 < self.norm_eps < 1:
            raise ModelError(f"model has norms with eps {self.norm_eps} in its recurrent layers, expected 0 to 1")

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps for a sequence."""
        return (self.taps - 1 + self.state_dim) * self.channels

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        yield "ssm_conv1d.weight", (self.channels, self.taps)
        yield "ssm_conv1d.bias", (self.channels,)
        yield "ssm_a", (self.channels, self.state_dim)
        yield "ssm_d", (self.channels,)
        if self.norms == "weighted":
            for part, count in (("dt", self.rank), ("b", self.state_dim), ("c", self.state_dim)):
                yield f"ssm_{part}_norm.weight", (count,)
        yield "ssm_in.weight", (2 * self.channels, hidden)
        yield "ssm_x.weight", (self.rank + 2 * self.state_dim, self.channels)
        yield "ssm_dt.weight", (self.channels, self.rank)
        yield "ssm_dt.bias", (self.channels,)
        yield "ssm_out.weight", (hidden, self.channels)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        yield MatMul(w.product("ssm_in"), flow.source, "kept")
        conv = _read_convolution(w, "ssm_conv1d", "silu", _read_flat(w, "ssm_conv1d.bias"))
        yield Convolve(conv)
        made = w.take("ssm_x.weight")
        yield MatMul(w.prepare([made.take_rows(0, self.rank)]), "x", "steps")
        yield MatMul(w.prepare([made.take_rows(self.rank, made.shape[0])]), "x", "other")
        if self.norms is not None:
            yield Norm(self._read_norm(w, self.rank, "dt"), "steps", "steps")
            yield Norm(self._read_norm(w, self.state_dim, "b", "c"), "other", "other", 2)
        yield MatMul(w.product("ssm_dt"), "steps", "steps")
        rule = make_scan(w.numbers("ssm_a"), _read_flat(w, "ssm_d"))
        rule.check("scan")
        yield Scan(rule, conv.state_floats)
        gate = MixerNorm(None, w.norms.eps, self.channels, self.channels, gate_first=True)
        yield GatedNorm(gate, self.channels)
        yield from flow.finish(w.product("ssm_out"))

    def _read_norm(self, w: LayerWeights, count: int, *parts: str) -> NormWeight:
        if self.norms == "bare":
            return NormWeight(w.make_ones(len(parts) * count), self.norm_eps)
        weights = [w.take(f"ssm_{part}_norm.weight") for part in parts]
        return NormWeight(read_numbers(stack_vectors(w.prefix, weights)).reshape(-1), self.norm_eps)

    def arrange(self, tensors: dict[str, TensorSource], prefix: str, hidden: int) -> None:
        """Give small tensors the shapes that they have in GGUF."""
        fold(tensors, prefix, self.tensors(hidden))


@frozen
class ChannelDelta:
    """A delta rule in which each channel of a key forgets by itself (Kimi Delta Attention, arXiv:2510.26692).

    Queries, keys and values have convolutions of their own. Products of low rank make the steps by which it forgets,
    and the gates of its result, which is normed first. With a `bound` below 0 a step keeps at least e**bound of a
    state.
    """

    heads: int
    head_dim: int
    taps: int
    bound: float = 0.0
    has_flat_rates: bool = False  # files have the rates of heads as one row, else each as a row of its own

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def results(self) -> int:
        """Columns of queries, of keys, of values, and of the rule's result."""
        return self.heads * self.head_dim

    @property
    def state_floats(self) -> int:
        """Numbers that it keeps for a sequence."""
        return (self.taps - 1) * 3 * self.results + self.results * self.head_dim

    def tensors(self, hidden: int) -> Tensors:
        """List the tensors, for a stream of `hidden` columns."""
        for part in "qkv":
            yield f"ssm_conv1d_{part}.weight", (self.results, 1, self.taps)
            yield f"attn_{part}.weight", (self.results, hidden)
        yield "ssm_a", (self.heads,) if self.has_flat_rates else (self.heads, 1)
        yield "ssm_dt.bias", (self.results,)
        yield "ssm_norm.weight", (self.head_dim,)
        yield "ssm_beta.weight", (self.heads, hidden)
        for part in "fg":
            yield f"ssm_{part}_a.weight", (self.head_dim, hidden)
            yield f"ssm_{part}_b.weight", (self.results, self.head_dim)
        yield "attn_output.weight", (hidden, self.results)

    def operators(self, w: LayerWeights, flow: Flow) -> Iterator[Operator]:
        """List the operators with their weights."""
        yield MatMul(w.product("attn_q", "attn_k", "attn_v"), flow.source, "kept")
        taps = [w.numbers(f"ssm_conv1d_{part}.weight").reshape(self.results, self.taps) for part in "qkv"]
        conv = make_convolution(taps, None, "silu")
        conv.check("ssm_conv1d")
        yield Convolve(conv)
        yield MatMul(w.product("ssm_f_a", "ssm_beta"), flow.source, "other")
        steps = make_parts(w.ctx, [w.prepare([w.take("ssm_f_b.weight")])])
        yield ProjectParts(steps, self.heads, "other", "kept")  # the betas pass, and stand before the steps
        rates = _read_flat(w, "ssm_a").repeat(self.head_dim)
        sizes = self.heads, self.heads, self.head_dim, self.head_dim
        rule = DeltaRule(*sizes, rates, _read_flat(w, "ssm_dt.bias"), bound=self.bound)
        rule.check("gated_delta")
        yield Recur(rule, 0, conv.state_floats)
        yield Norm(w.norm("ssm_norm"), "x", "x", self.heads)
        yield MatMul(w.product("ssm_g_a"), flow.source, "other")
        yield MatMul(w.product("ssm_g_b"), "other", "kept")
        yield GateHeads()
        yield from flow.finish(w.product("attn_output"))

    def arrange(self, tensors: dict[str, TensorSource], prefix: str, hidden: int) -> None:
        """Give small tensors the shapes that they have in GGUF."""
        fold(tensors, prefix, self.tensors(hidden))


Recurrence = ShortConv | GatedDelta | Mamba | Mamba2 | ChannelDelta


def _check_sizes(mixer: Recurrence, channels: int = limits.MAX_HEAD_DIM) -> None:
    for field in fields(mixer):
        value = getattr(mixer, field.name)
        low, high = (2, limits.MAX_TAPS) if field.name == "taps" else (1, limits.MAX_HEAD_DIM)
        high = channels if field.name == "channels" else high
        if isinstance(value, int) and not isinstance(value, bool) and not low <= value <= high:
            raise ModelError(f"model has {field.name} {value} in its recurrent layers, expected up to {high}")


def _check_divisor(many: str, count: int, few: str, parts: int) -> None:
    if count % parts:
        raise ModelError(f"model has {count} {many}, which its {few} {parts} do not divide")


def _read_flat(w: LayerWeights, name: str) -> FloatArray:
    return w.numbers(name).reshape(-1)


def _read_convolution(w: LayerWeights, name: str, kind: ConvolutionKind, bias: FloatArray | None = None) -> Convolution:
    conv = make_convolution(w.numbers(f"{name}.weight"), bias, kind)
    conv.check(name)
    return conv


def fold(tensors: dict[str, TensorSource], prefix: str, own: Tensors) -> None:
    """Give tensors their shapes here, and decode those: folders keep the channels of convolutions apart and norms of
    groups as one row, and some writers of files drop axes of length 1."""
    for part, shape in own:
        tensor = tensors.get(prefix + part)
        if tensor is None or _is_product(part) or tensor.shape == shape:
            continue
        if _drop_ones(tensor.shape) in (_drop_ones(shape), (prod(shape),)):
            tensors[prefix + part] = Decoded(tensor.name, tensor.to_float32().reshape(shape))


def _is_product(part: str) -> bool:
    return part.endswith(".weight") and not part.endswith("norm.weight") and not is_convolution(f".{part}")


def _drop_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
