"""The tower of Qwen3-VL and of Qwen3.5: pictures of any size, positions blended out of a square, squares made to rows.

What leaves some layers of Qwen3-VL's is added behind the first layers of its text ("deepstack").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlxr.kernels.sources import round_float
from mlxr.kernels.tensor import TensorSource, read_numbers
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.tower import (
    CHANNELS,
    GGUF_BLOCK,
    MAX_MERGE,
    MAX_PATCH,
    MAX_PIXELS,
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

_THETA, _EPS = 10000.0, round_float(1e-6)
_WORDS = Words("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_MERGERS = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_BLOCK = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_output",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_ENDS = {"pos_embed": "position_embd", "patch_embed.proj": "patch_embd"}
_ENDS |= {f"merger.{part}": f"merge.{name}" for part, name in _MERGERS.items()}
_GGUF_ENDS = {
    "v.post_ln": "merge.norm",
    "mm.0": "merge.fc1",
    "mm.2": "merge.fc2",
    "v.position_embd": "position_embd",
    "v.patch_embd": "patch_embd",
}


def _make_spec(sizes: dict[str, Any], merge: int, taps: tuple[int, ...], eps: float, stated: Fields) -> TowerSpec:
    hidden, columns, joined = sizes["hidden"], sizes["columns"], sizes["hidden"] * merge**2

    def merge_rows(name: str, *, norms_each: bool) -> tuple[Step, ...]:
        norm = NormRows(f"{name}.norm", hidden if norms_each else joined, eps)
        first = (norm, Join(merge**2)) if norms_each else (Join(merge**2), norm)
        made = Multiply(f"{name}.fc1", joined, joined, activation="gelu_erf")
        return *first, made, Multiply(f"{name}.fc2", columns, joined)

    is_gguf = stated.get(V + "embedding_length") is not None
    names = (V + "image_min_pixels", V + "image_max_pixels") if is_gguf else ("shortest_edge", "longest_edge")
    bounds = stated if is_gguf else stated.mapping("size") or Fields({})
    prefix, factor = V if is_gguf else "", sizes["patch"] * merge
    return TowerSpec(
        **sizes,
        merge=merge,
        words=_WORDS,
        end=merge_rows("merge", norms_each=True),
        eps=eps,
        positions="blended",
        theta=_THETA,
        taps=taps,
        tap_ends=tuple(merge_rows(f"deep.{number}", norms_each=False) for number in range(len(taps))),
        least_pixels=bounds.integer(names[0], 1, MAX_PIXELS, default=64 * factor**2),
        most_pixels=bounds.integer(names[1], 1, MAX_PIXELS, default=16384 * factor**2),
        mean=read_colours(stated, prefix + "image_mean"),
        deviation=read_colours(stated, prefix + "image_std", 1e-3),
    )


def _read_gguf(fields: Fields, _: Mapping[str, TensorSource]) -> TowerSpec:
    if not fields.flag("clip.use_gelu", False):
        fields.refuse("clip.use_gelu", "true, a tower with gelu")
    sizes = read_gguf_sizes(fields)
    flags = fields.flags(V + "is_deepstack_layers", sizes["layers"]) or ()
    taps = tuple(index for index, is_tap in enumerate(flags) if is_tap)
    merge = fields.integer(V + "spatial_merge_size", 1, MAX_MERGE, default=2)
    eps = round_float(fields.number(V + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS))
    return _make_spec(sizes, merge, taps, eps, fields)


def _read_folder(_: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
    tower.refuse_unless(("hidden_act",), ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported in a tower")
    tower.refuse_unless(("in_channels",), (CHANNELS,), "only pictures of three colours are supported")
    taps, layers = tower.get("deepstack_visual_indexes"), tower.integer("depth", 1, MAX_LAYERS)
    sizes = {
        "hidden": tower.integer("hidden_size", 4, MAX_WIDTH),
        "layers": layers,
        "heads": tower.integer("num_heads", 1, MAX_HEADS),
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH),
        "patch": tower.integer("patch_size", 1, MAX_PATCH, default=16),
        "side": math.isqrt(tower.integer("num_position_embeddings", 1, MAX_SIDE**2, default=2304)),
        "columns": tower.integer("out_hidden_size", 1, MAX_WIDTH),
    }
    merge = tower.integer("spatial_merge_size", 1, MAX_MERGE, default=2)
    indexes = (
        tower.integers("deepstack_visual_indexes", len(taps), 0, layers - 1) if isinstance(taps, list) and taps else ()
    )
    return _make_spec(sizes, merge, indexes, _EPS, prepares)


def _name_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    deep = {f"v.deepstack.{tap}.{part}": f"deep.{at}.{part}" for at, tap in enumerate(spec.taps) for part in _PARTS}
    named = TowerNames(("",), "v.blk.", GGUF_BLOCK, _GGUF_ENDS | deep).rename(tensors)
    slices = [tensors[name] for name in ("v.patch_embd.weight", "v.patch_embd.weight.1") if name in tensors]
    return named | join_slices(spec, [read_numbers(part) for part in slices])


_PARTS = ("norm", "fc1", "fc2")


def _name_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    deep = {
        f"deepstack_merger_list.{at}.{part}": f"deep.{at}.{name}"
        for at in range(len(spec.taps))
        for part, name in _MERGERS.items()
    }
    named = TowerNames(("model.visual.", "visual."), "blocks.", _BLOCK, _ENDS | deep).rename(tensors)
    if "patch_embd.weight" in named:
        whole = read_numbers(named["patch_embd.weight"])
        named |= join_slices(spec, [whole[:, :, at] for at in range(whole.shape[2])] if whole.ndim == 5 else [])
    return named


TOWER = TowerFamily("qwen3vl_merger", _TYPES, _read_gguf, _read_folder, _name_gguf, _name_folder)
