"""The tower of InternVL 3 and 3.5: tiles of one size, a token beside their patches, and scaled sums.

Squares of patches become rows. A large picture is cut into a grid of tiles of nearly its shape, and also seen as a
whole. (arXiv:2504.10479; transformers, models/internvl; llama.cpp, conversion/internvl.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.kernels.sources import Decoded, round_float
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
    TowerFamily,
    TowerNames,
    TowerSpec,
    V,
    Words,
    join_slices,
    read_colours,
    read_gguf_sizes,
)

_EPS, _EPS_JOINED, _MAX_TILES = round_float(1e-6), round_float(1e-5), 64
_WORDS = Words("<img>", "<IMG_CONTEXT>", "</img>\n")
_NAMES = TowerNames(
    ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector."),
    "encoder.layer.",
    {
        **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
        "attention.projection_layer": "attn_output",
        "layernorm_before": "attn_norm",
        "layernorm_after": "ffn_norm",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    {
        "embeddings.cls_token": "class.weight",
        "embeddings.position_embeddings": "position_embd.weight",
        "embeddings.patch_embeddings.projection": "patch_embd",
        "layer_norm": "merge.norm",
        "linear_1": "merge.fc1",
        "linear_2": "merge.fc2",
    },
)
_GGUF_NAMES = TowerNames(
    ("",),
    "v.blk.",
    GGUF_BLOCK,
    {
        "v.class_embd": "class.weight",
        "v.position_embd": "position_embd",
        "v.patch_embd": "patch_embd",
        **{f"mm.model.mlp.{number}": f"merge.{part}" for number, part in ((0, "norm"), (1, "fc1"), (3, "fc2"))},
    },
)


def _make_spec(sizes: dict[str, Any], merge: int, eps: float, tiles: int, stated: Fields, prefix: str) -> TowerSpec:
    joined, columns = sizes["hidden"] * merge**2, sizes["columns"]
    return TowerSpec(
        **sizes,
        merge=merge,
        words=_WORDS,
        end=(
            Join(merge**2),
            NormRows("merge.norm", joined, _EPS_JOINED),
            Multiply("merge.fc1", columns, joined, activation="gelu_erf"),
            Multiply("merge.fc2", columns, columns),
        ),
        eps=eps,
        activation="gelu_erf",
        has_class=True,
        most_tiles=tiles,
        mean=read_colours(stated, prefix + "image_mean"),
        deviation=read_colours(stated, prefix + "image_std", 1e-3),
    )


def _read_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> TowerSpec:
    if not fields.flag("clip.use_gelu", False) or "v.blk.0.attn_q_norm.weight" in tensors:
        fields.refuse("clip.use_gelu", "true, and a tower of 300M, without norms of queries and keys")
    merge = fields.integer(V + "projector.scale_factor", 1, MAX_MERGE, default=2)
    tiles = fields.integer(V + "preproc_max_tiles", 1, _MAX_TILES, default=12)
    eps = round_float(fields.number(V + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS))
    return _make_spec(read_gguf_sizes(fields), merge, eps, tiles, fields, V)


def _read_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
    tower.refuse_unless(("hidden_act",), ("gelu",), "only gelu is supported in a tower")
    tower.refuse_unless(("use_qk_norm",), (False,), "norms of queries and keys are not supported in a tower")
    tower.refuse_unless(("norm_type",), ("layer_norm",), "only layer_norm is supported in a tower")
    tower.refuse_unless(("use_absolute_position_embeddings", "use_mean_pooling"), (True,), "not supported")
    tower.refuse_unless(("num_channels",), (CHANNELS,), "only pictures of three colours are supported")
    if not tower.flag("attention_bias", False):
        tower.refuse("attention_bias", "true, a tower whose products all have biases")
    whole.refuse_unless(("vision_feature_layer",), (-1,), "only what leaves the last layer is supported")
    whole.refuse_unless(("projector_hidden_act",), ("gelu",), "only gelu is supported")
    patch, side = _read_side(tower, "patch_size", MAX_PATCH, 14), _read_side(tower, "image_size", MAX_SIDE * 14, 448)
    sizes = {
        "hidden": tower.integer("hidden_size", 4, MAX_WIDTH, default=1024),
        "layers": tower.integer("num_hidden_layers", 1, MAX_LAYERS, default=24),
        "heads": tower.integer("num_attention_heads", 1, MAX_HEADS, default=16),
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH, default=4096),
        "patch": patch,
        "side": side // patch,
        "columns": (whole.mapping("text_config") or Fields({})).integer("hidden_size", 1, MAX_WIDTH),
    }
    merge = round(1 / whole.number("downsample_ratio", 1 / MAX_MERGE, 1.0, default=0.5))
    eps = round_float(tower.number("layer_norm_eps", 1e-12, 1e-2, default=1e-6))
    tiles = prepares.integer("max_patches", 1, _MAX_TILES, default=12)
    return _make_spec(sizes, merge, eps, tiles, prepares, "")


def _read_side(tower: Fields, name: str, high: int, default: int) -> int:
    """Return the side of a square, which files state once or twice."""
    sides = {default} if tower.get(name) is None else {*tower.integers(name, 2, 1, high)}
    if len(sides) > 1:
        tower.refuse(name, "a square")
    return sides.pop()


def _finish(spec: TowerSpec, named: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with positions of patches apart from the other token's, and scales named by their products."""
    if "patch_embd.weight" in named:
        named |= join_slices(spec, [read_numbers(named["patch_embd.weight"])])
    if "class.weight" in named and "position_embd.weight" in named:
        first, places = (read_numbers(named[f"{name}.weight"]) for name in ("class", "position_embd"))
        if first.size == spec.hidden and places.size == (spec.side**2 + 1) * spec.hidden:
            places = places.reshape(-1, spec.hidden)
            named["class.weight"] = Decoded("class.weight", first.reshape(-1) + places[0])
            named["position_embd.weight"] = Decoded("position_embd.weight", places[1:])
    for index in range(spec.layers):
        for number, product in ((1, "attn_output"), (2, "ffn_down")):
            for old in (f"blk.{index}.ls{number}.weight", f"blk.{index}..lambda_{number}"):
                if old in named:
                    named[f"blk.{index}.{product}.scale"] = named.pop(old)
    return named


INTERNVL = TowerFamily(
    "internvl",
    ("internvl",),
    _read_gguf,
    _read_folder,
    lambda spec, tensors: _finish(spec, _GGUF_NAMES.rename(tensors)),
    lambda spec, tensors: _finish(spec, _NAMES.rename(tensors)),
)
