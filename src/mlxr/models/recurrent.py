"""Recurrent mixers of layers: which tensors they have, their weights out of these, and their order in GGUF files.

How files state the mixers is the matter of `recurrence_config`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Literal, Protocol

from mlxr.kernels.gated_delta import DeltaRule
from mlxr.kernels.layers import MixerNorm, NormWeight, RecurrentBlock, make_recurrent
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.short_conv import Convolution, ConvolutionKind, make_convolution
from mlxr.kernels.sources import Decoded, part_groups, pick_parts
from mlxr.kernels.tensor import FloatArray, TensorSource
from mlxr.models.specs import GatedDelta, Mamba2, Norms, Recurrence, ShortConv

RecurrenceKind = Literal["short_conv", "gated_delta", "mamba2"]
Shape = tuple[int, ...]

# What Qwen3-Next keeps as one tensor: in folders, and in old files of GGUF; and in all of them
_ALL, BETAS_AND_ALPHAS = "ssm_in.weight", "ssm_ba.weight"
PARTED_BETAS = ("ssm_beta.weight", "ssm_alpha.weight")
_CONV = re.compile(r".*\.(shortconv\.conv|ssm_conv1d)\.weight")
# Names of the products that read a mixer's input, in the order in which its block has their rows, and of the output.
_PRODUCTS = {
    "short_conv": (("shortconv.in_proj",), "shortconv.out_proj"),
    "gated_delta": (("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"), "ssm_out"),
    "mamba2": (("ssm_in",), "ssm_out"),
}


def is_convolution(name: str) -> bool:
    """Whether a tensor of that name is a matrix that nothing is multiplied by as a whole."""
    return _CONV.fullmatch(name) is not None


def name_kind(mixer: Recurrence) -> RecurrenceKind:
    """The kind of a mixer."""
    match mixer:
        case ShortConv():
            return "short_conv"
        case GatedDelta():
            return "gated_delta"
        case Mamba2():
            return "mamba2"


def list_recurrent(mixer: Recurrence, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Name, without the layer's prefix, and shape of each tensor of a mixer."""
    inputs, output = _PRODUCTS[name_kind(mixer)]
    rows: tuple[int, ...]
    match mixer:
        case ShortConv(channels, taps):
            rows, results = (3 * channels,), channels
            yield "shortconv.conv.weight", (channels, taps)
        case GatedDelta(value_heads=heads):
            rows, results = (mixer.channels, mixer.results, heads, heads), mixer.results
            yield "ssm_conv1d.weight", (mixer.channels, mixer.taps)
            yield "ssm_dt.bias", (heads,)
            yield "ssm_a", (heads,)
            yield "ssm_norm.weight", (mixer.value_dim,)
        case Mamba2(heads=heads, groups=groups):
            rows, results = (mixer.channels + mixer.results + heads,), mixer.results
            yield "ssm_conv1d.weight", (mixer.channels, mixer.taps)
            yield "ssm_conv1d.bias", (mixer.channels,)
            yield "ssm_dt.bias", (heads,)
            yield "ssm_a", (heads, 1)
            yield "ssm_d", (heads, 1)
            if mixer.normed:
                yield "ssm_norm.weight", (groups, mixer.results // groups)
    for name, count in zip(inputs, rows, strict=True):
        yield f"{name}.weight", (count, hidden)
    yield f"{output}.weight", (hidden, results)


def fold_tensors(tensors: dict[str, TensorSource], prefix: str, mixer: Recurrence, hidden: int) -> None:
    """Give the small tensors of a mixer the shapes that they have in GGUF, decoded where they have others.

    Folders keep the channels of convolutions by themselves, and norms of groups as one row; so do files whose writers
    drop axes of one.
    """
    inputs, output = _PRODUCTS[name_kind(mixer)]
    joined = tensors.get(f"{prefix}{_ALL}")
    if isinstance(mixer, GatedDelta) and joined is not None:
        _part_inputs(tensors, prefix, mixer, joined)
    products = {f"{name}.weight" for name in (*inputs, output)}
    for part, shape in list_recurrent(mixer, hidden):
        tensor = tensors.get(prefix + part)
        if tensor is None or part in products or tensor.shape == shape:
            continue
        if _drop_ones(tensor.shape) in (_drop_ones(shape), (prod(shape),)):
            tensors[prefix + part] = Decoded(tensor.name, tensor.to_float32().reshape(shape))


def _part_inputs(tensors: dict[str, TensorSource], prefix: str, mixer: GatedDelta, joined: TensorSource) -> None:
    """Qwen3-Next: queries, keys, values and gates of the heads of each key head follow one another in one tensor."""
    if joined.shape[:1] != (mixer.channels + mixer.results,):
        return  # which is found when all tensors are checked
    values = mixer.results // mixer.key_heads
    *qkv, gates = part_groups(mixer.key_heads, (mixer.key_dim, mixer.key_dim, values, values))
    del tensors[prefix + _ALL]
    tensors[f"{prefix}attn_qkv.weight"] = pick_parts(joined, qkv)
    tensors[f"{prefix}attn_gate.weight"] = pick_parts(joined, [gates])


def part_betas(joined: TensorSource, mixer: GatedDelta) -> tuple[TensorSource, TensorSource]:
    """Betas and alphas of a tensor that has those of each key head after one another."""
    each = mixer.value_heads // mixer.key_heads
    betas, alphas = part_groups(mixer.key_heads, (each, each))
    return pick_parts(joined, [betas]), pick_parts(joined, [alphas])


def _drop_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


class Prepares(Protocol):
    """Prepares the weights of these names, whose rows follow one another."""

    def __call__(self, prefix: str, *names: str) -> LinearWeight:
        """Return all of them in one."""
        ...


def read_recurrent(
    prepare: Prepares,
    read: Callable[[str], FloatArray],
    prefix: str,
    mixer: Recurrence,
    norms: Norms,
    norm: NormWeight | None,
    post_norm: NormWeight | None,
) -> RecurrentBlock:
    """The block of a mixer; `read` gives a small tensor as numbers."""
    inputs, output = _PRODUCTS[name_kind(mixer)]
    first, last = prepare(prefix, *inputs), prepare(prefix, output)

    def vector(name: str) -> FloatArray:
        return read(prefix + name).reshape(-1)

    def convolve(name: str, kind: ConvolutionKind, bias: FloatArray | None = None) -> Convolution:
        return make_convolution(read(f"{prefix}{name}.weight"), bias, kind)

    match mixer:
        case ShortConv():
            return make_recurrent(norm, first, last, convolve("shortconv.conv", "gated"), post_norm=post_norm)
        case GatedDelta(key_heads, value_heads, key_dim, value_dim, _, tiled):
            rates, bias = vector("ssm_a"), vector("ssm_dt.bias")
            rule = DeltaRule(key_heads, value_heads, key_dim, value_dim, rates, bias, tiled)
            gated = MixerNorm(vector("ssm_norm.weight"), norms.eps, mixer.results, value_dim, gate_first=False)
            return make_recurrent(norm, first, last, convolve("ssm_conv1d", "silu"), rule, gated, post_norm)
        case Mamba2(heads, head_dim, groups, state_dim, _, normed):
            numbers = vector("ssm_a"), vector("ssm_dt.bias"), vector("ssm_d")
            space = StateSpace(heads, head_dim, groups, state_dim, *numbers)
            gain = vector("ssm_norm.weight") if normed else None
            gated = MixerNorm(gain, norms.eps, mixer.results, mixer.results // groups, gate_first=True)
            conv = convolve("ssm_conv1d", "silu", vector("ssm_conv1d.bias"))
            return make_recurrent(norm, first, last, conv, space, gated, post_norm)


def order_values(mixer: GatedDelta) -> list[int]:
    """Which value head of a Hugging Face folder becomes head i in GGUF: the first of each key head, then the second."""
    each = mixer.value_heads // mixer.key_heads
    return [key * each + index for index in range(each) for key in range(mixer.key_heads)]


def order_value_columns(mixer: GatedDelta) -> list[int]:
    """The same of single columns of values."""
    return [head * mixer.value_dim + column for head in order_values(mixer) for column in range(mixer.value_dim)]


def order_value_rows(mixer: GatedDelta, part: str) -> list[int] | None:
    """The same of the rows of a tensor, whose name has no layer; None where they stay."""
    if mixer.key_heads in (1, mixer.value_heads):
        return None
    keys = 2 * mixer.key_heads * mixer.key_dim
    match part:
        case "attn_qkv.weight" | "ssm_conv1d.weight":
            return [*range(keys), *(keys + column for column in order_value_columns(mixer))]
        case "attn_gate.weight":
            return order_value_columns(mixer)
        case "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_a" | "ssm_dt.bias":
            return order_values(mixer)
        case _:
            return None


def order_output_columns(mixer: GatedDelta) -> list[int] | None:
    """The same of the columns of the output's weight."""
    return None if mixer.key_heads in (1, mixer.value_heads) else order_value_columns(mixer)
