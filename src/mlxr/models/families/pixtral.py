"""The tower of Pixtral, Mistral Small 3.1 and later, and Ministral 3: no positions but rotations, and a row of rows.

A picture keeps its shape and is only made smaller. Behind each line of its rows but the last a token breaks the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.kernels.activate import Activation
from mlxr.kernels.sources import pick_rows, round_float
from mlxr.kernels.tensor import TensorSource, read_numbers
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.tower import (
    CHANNELS,
    GGUF_BLOCK,
    MAX_MERGE,
    MAX_PATCH,
    MAX_SIDE,
    Join,
    Multiply,
    NormRows,
    Step,
    TowerFamily,
    TowerNames,
    TowerSpec,
    V,
    Words,
    join_slices,
    read_colours,
    read_gguf_sizes,
)

_EPS, _THETA = round_float(1e-5), 10000.0
_WORDS = Words(open="", place="[IMG]", close="[IMG_END]", row_break="[IMG_BREAK]")
_ACTIVATIONS: dict[object, Activation] = {None: "gelu_erf", "gelu": "gelu_erf", "silu": "silu"}
_BLOCK = {
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
_NAMES = TowerNames(
    ("model.vision_tower.", "vision_tower."),
    "transformer.layers.",
    _BLOCK,
    {"patch_conv": "patch_embd", "ln_pre": "first_norm"},
)
_PROJECTOR = TowerNames(
    ("model.multi_modal_projector.", "multi_modal_projector."),
    "-",
    {},
    {
        "norm": "merge.norm",
        "patch_merger.merging_layer": "merge.join",
        "linear_1": "merge.fc1",
        "linear_2": "merge.fc2",
    },
)
_GGUF_NAMES = TowerNames(
    ("",),
    "v.blk.",
    GGUF_BLOCK,
    {
        "v.patch_embd": "patch_embd",
        "v.pre_ln": "first_norm",
        "mm.input_norm": "merge.norm",
        "mm.patch_merger": "merge.join",
        "mm.1": "merge.fc1",
        "mm.2": "merge.fc2",
    },
)


def _make_spec(
    sizes: dict[str, Any],
    merge: int | None,
    activation: Activation,
    eps: tuple[float, float],  # of the tower and of the merger
    theta: float,
    longest: int,
    stated: Fields,
    prefix: str,
    *,
    bias: bool,
) -> TowerSpec:
    hidden, columns = sizes["hidden"], sizes["columns"]
    merging: tuple[Step, ...] = ()
    if merge is not None:
        joined = Multiply("merge.join", hidden, hidden * merge**2, bias=False)
        merging = NormRows("merge.norm", hidden, eps[1], "rms"), Join(merge**2, by_columns=True), joined
    return TowerSpec(
        **sizes,
        merge=merge or 1,
        words=_WORDS,
        begin=(NormRows("first_norm", hidden, eps[0], "rms"),),
        end=(
            *merging,
            Multiply("merge.fc1", columns, hidden, bias=bias, activation="gelu_erf"),
            Multiply("merge.fc2", columns, columns, bias=bias),
        ),
        eps=eps[0],
        positions="none",
        theta=theta,
        lies_between=True,
        patch_bias=False,
        norm="rms",
        bias=False,
        activation=activation,
        gated=True,
        longest=longest,
        mean=read_colours(stated, prefix + "image_mean"),
        deviation=read_colours(stated, prefix + "image_std", 1e-3),
    )


def _read_gguf(fields: Fields, _: Mapping[str, TensorSource]) -> TowerSpec:
    sizes, has_merger = read_gguf_sizes(fields), fields.get(V + "spatial_merge_size") is not None
    merge = fields.integer(V + "spatial_merge_size", 1, MAX_MERGE) if has_merger else None
    activation: Activation = "silu" if fields.flag("clip.use_silu", False) else "gelu_erf"
    eps = round_float(fields.number(V + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS))
    theta = fields.number(V + "rope.freq_base", 1.0001, 1e15, default=_THETA)
    longest = sizes["side"] * sizes["patch"]
    return _make_spec(sizes, merge, activation, (eps, eps), theta, longest, fields, V, bias=not has_merger)


def _read_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
    tower.refuse_unless(("num_channels",), (CHANNELS,), "only pictures of three colours are supported")
    whole.refuse_unless(("vision_feature_layer",), (-1,), "only what leaves the last layer is supported")
    whole.refuse_unless(("projector_hidden_act",), ("gelu",), "only gelu is supported")
    if tower.get("hidden_act") not in _ACTIVATIONS:
        tower.refuse("hidden_act", "gelu or silu")
    text = whole.mapping("text_config") or Fields({})
    patch = tower.integer("patch_size", 1, MAX_PATCH, default=16)
    size = tower.integer("image_size", patch, MAX_SIDE * MAX_PATCH, default=1024)
    sizes = {
        "hidden": tower.integer("hidden_size", 4, MAX_WIDTH, default=1024),
        "layers": tower.integer("num_hidden_layers", 1, MAX_LAYERS, default=24),
        "heads": tower.integer("num_attention_heads", 1, MAX_HEADS, default=16),
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH, default=4096),
        "patch": patch,
        "side": size // patch,
        "columns": text.integer("hidden_size", 1, MAX_WIDTH),
    }
    has_merger = whole.get("spatial_merge_size") is not None
    rope = tower.mapping("rope_parameters") or Fields({})
    theta = rope.number("rope_theta", 1.0001, 1e15, tower.number("rope_theta", 1.0001, 1e15, _THETA))
    return _make_spec(
        sizes,
        whole.integer("spatial_merge_size", 1, MAX_MERGE) if has_merger else None,
        _ACTIVATIONS[tower.get("hidden_act")],
        (_EPS, round_float(text.number("rms_norm_eps", 1e-12, 1e-2, default=1e-5))),
        theta,
        (prepares.mapping("size") or Fields({})).integer("longest_edge", patch, MAX_SIDE * MAX_PATCH, default=size),
        prepares,
        "",
        bias=whole.flag("multimodal_projector_bias", not has_merger),
    )


def _name_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _NAMES.rename(tensors) | _PROJECTOR.rename(tensors)
    if "patch_embd.weight" in named:
        named |= join_slices(spec, [read_numbers(named["patch_embd.weight"])])
    return named


def _name_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with the rows of queries and keys as folders have them: files have pairs as neighbours."""
    named, dim = _GGUF_NAMES.rename(tensors), spec.hidden // spec.heads
    rows = [head * dim + 2 * pair + half for head in range(spec.heads) for half in (0, 1) for pair in range(dim // 2)]
    for name in [f"blk.{index}.attn_{part}.weight" for index in range(spec.layers) for part in "qk"]:
        if name in named and named[name].shape == (spec.hidden, spec.hidden):
            named[name] = pick_rows(named[name], rows)
    if "patch_embd.weight" in named:
        named |= join_slices(spec, [read_numbers(named["patch_embd.weight"])])
    return named


PIXTRAL = TowerFamily("pixtral", ("pixtral",), _read_gguf, _read_folder, _name_gguf, _name_folder)
