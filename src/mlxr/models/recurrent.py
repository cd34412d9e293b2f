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
        case _:
            raise ModelError(f"recurrent layers of kind {kind} are not supported")


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
        case _:
            raise ModelError(f"recurrent layers of kind {name_kind(mixer)} cannot be stated in a GGUF file")
