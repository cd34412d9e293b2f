"""Recurrent mixers of layers: which tensors they have, their weights out of these, and how files state them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from mlxr.core.errors import ModelError
from mlxr.kernels.gated_delta import DeltaRule
from mlxr.kernels.layers import MixerNorm, NormWeight, RecurrentBlock, make_recurrent
from mlxr.kernels.linear import LinearWeight
from mlxr.kernels.mamba2 import StateSpace
from mlxr.kernels.short_conv import Convolution, ConvolutionKind, make_convolution
from mlxr.kernels.tensor import FloatArray
from mlxr.models.fields import Fields
from mlxr.models.specs import GatedDelta, Mamba2, Norms, Recurrence, ShortConv

RecurrenceKind = Literal["short_conv", "gated_delta", "mamba2"]
Shape = tuple[int, ...]

MAX_HEADS = 1024
MAX_SIZE = 1 << 16
MAX_TAPS = 16
FULL_EVERY = 4  # of so many layers of Qwen3.5 the last attends
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
            yield "ssm_norm.weight", (groups, mixer.results // groups)
    for name, count in zip(inputs, rows, strict=True):
        yield f"{name}.weight", (count, hidden)
    yield f"{output}.weight", (hidden, results)


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
        case Mamba2(heads, head_dim, groups, state_dim):
            numbers = vector("ssm_a"), vector("ssm_dt.bias"), vector("ssm_d")
            space = StateSpace(heads, head_dim, groups, state_dim, *numbers)
            width = mixer.results // groups
            gated = MixerNorm(vector("ssm_norm.weight"), norms.eps, mixer.results, width, gate_first=True)
            conv = convolve("ssm_conv1d", "silu", vector("ssm_conv1d.bias"))
            return make_recurrent(norm, first, last, conv, space, gated, post_norm)


def read_gguf_recurrence(
    fields: Fields, kind: RecurrenceKind | None, layers: int, hidden: int
) -> tuple[Recurrence | None, tuple[bool, ...] | None]:
    """The recurrent mixer of a GGUF file, and which layers have it."""
    match kind:
        case None:
            return None, None
        case "short_conv":
            kv_heads = fields.integers("attention.head_count_kv", layers, 0, MAX_HEADS)
            taps = fields.integer("shortconv.l_cache", 2, MAX_TAPS)
            return ShortConv(hidden, taps), tuple(count == 0 for count in kv_heads)
        case "gated_delta":
            heads = fields.integer("ssm.time_step_rank", 1, MAX_HEADS)
            key_dim = fields.integer("ssm.state_size", 1, MAX_SIZE)
            inner = fields.integer("ssm.inner_size", 1, MAX_SIZE)
            if inner % heads:
                fields.refuse("ssm.inner_size", f"a multiple of the {heads} value heads")
            key_heads = _read_key_heads(fields, "ssm.group_count", heads)
            taps = fields.integer("ssm.conv_kernel", 2, MAX_TAPS)
            delta = GatedDelta(key_heads, heads, key_dim, inner // heads, taps, tiled=key_heads < heads)
            return delta, _read_gguf_layers(fields, layers)
        case _:
            raise ModelError(f"recurrent layers of kind {kind} are not supported")


def _read_key_heads(fields: Fields, name: str, value_heads: int) -> int:
    key_heads = fields.integer(name, 1, MAX_HEADS)
    if value_heads % key_heads:
        fields.refuse(name, f"a divisor of the {value_heads} value heads")
    return key_heads


def _read_gguf_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers are recurrent: a flag for each, or all but one in so many."""
    if fields.get("attention.recurrent_layers") is not None:
        return tuple(map(bool, fields.integers("attention.recurrent_layers", layers, 0, 1)))
    every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
    return make_flags(layers, every)


def make_flags(layers: int, every: int) -> tuple[bool, ...]:
    """Flags that are false for the last of each `every` layers."""
    return tuple((index + 1) % every != 0 for index in range(layers))


def read_hf_recurrence(
    fields: Fields, kind: RecurrenceKind | None, layers: int, hidden: int
) -> tuple[Recurrence | None, tuple[bool, ...] | None]:
    """The recurrent mixer of a model folder, and which layers have it."""
    match kind:
        case None:
            return None, None
        case "short_conv":
            fields.refuse_unless(("conv_bias",), (False,), "biases of convolutions are not supported")
            taps = fields.integer("conv_L_cache", 2, MAX_TAPS, default=3)
            return ShortConv(hidden, taps), _read_layer_types(fields, layers, "conv")
        case "gated_delta":
            heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS, default=32)
            key_dim, value_dim = (
                fields.integer(f"linear_{part}_head_dim", 1, MAX_SIZE, default=128) for part in ("key", "value")
            )
            taps = fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, default=4)
            delta = GatedDelta(_read_key_heads(fields, "linear_num_key_heads", heads), heads, key_dim, value_dim, taps)
            if fields.get("layer_types") is None:
                every = fields.integer("full_attention_interval", 1, layers, default=min(layers, FULL_EVERY))
                return delta, make_flags(layers, every)
            return delta, _read_layer_types(fields, layers, "linear_attention")
        case _:
            raise ModelError(f"recurrent layers of kind {kind} are not supported")


def _read_layer_types(fields: Fields, layers: int, recurrent: str) -> tuple[bool, ...]:
    """Which layers are recurrent, by their types or by the numbers of those that attend."""
    types = fields.get("layer_types")
    if types is None:
        attend = fields.get("full_attn_idxs")
        if not isinstance(attend, list) or any(not isinstance(index, int) for index in attend):
            fields.refuse("layer_types", f"a list of {layers} types, or full_attn_idxs")
        return tuple(index not in attend for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {recurrent, "full_attention"}:
        fields.refuse("layer_types", f"a list of {layers}, each one {recurrent} or full_attention")
    return tuple(kind == recurrent for kind in types)


def gguf_recurrence(mixer: Recurrence, recurrent: tuple[bool, ...], kv_heads: int) -> dict[str, object]:
    """What a GGUF file says of the recurrent layers."""
    match mixer:
        case ShortConv(_, taps):
            counts = [0 if flag else kv_heads for flag in recurrent]
            return {"shortconv.l_cache": taps, "attention.head_count_kv": counts}
        case GatedDelta(key_heads, value_heads, key_dim, value_dim, taps):
            if key_dim != value_dim:
                raise ModelError(f"heads of {key_dim} and {value_dim} columns cannot be stated in a GGUF file")
            numbers: dict[str, object] = {
                "ssm.conv_kernel": taps,
                "ssm.state_size": key_dim,
                "ssm.group_count": key_heads,
                "ssm.time_step_rank": value_heads,
                "ssm.inner_size": mixer.results,
            }
            layers = len(recurrent)
            every = [count for count in range(1, layers + 1) if make_flags(layers, count) == recurrent]
            if every:
                return numbers | {"full_attention_interval": every[0]}
            return numbers | {"attention.recurrent_layers": list(recurrent)}
        case _:
            raise ModelError(f"recurrent layers of kind {name_kind(mixer)} cannot be stated in a GGUF file")


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


def gguf_column_order(name: str, mixer: Recurrence | None) -> list[int] | None:
    """Which column of the Hugging Face tensor becomes column i in GGUF; None when they stay as they are."""
    if not isinstance(mixer, GatedDelta) or not name.endswith(".ssm_out.weight"):
        return None
    return None if mixer.key_heads in (1, mixer.value_heads) else order_value_columns(mixer)
