"""Towers of Qwens: pictures of any size, in patches that turn by their row and column; squares of patches become rows.

Those of Qwen3-VL and Qwen3.5 have positions, too, which are blended from a square. The outputs of some layers of
Qwen3-VL's are added behind the first layers of its text ("deepstack"). Patches of Qwen2.5-VL see those of a window, and
all of a picture in some layers; those of Qwen2-VL see all. (arXiv:2409.12191, arXiv:2502.13923; llama.cpp,
conversion/qwenvl.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
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


def _make_spec(
    sizes: dict[str, Any],
    merge: int,
    taps: tuple[int, ...],
    eps: float,
    stated: Fields,
    *,
    least_rows: int = 64,
    colours: tuple[tuple[float, ...], tuple[float, ...]] = ((0.5,) * CHANNELS,) * 2,
    **others: Any,
) -> TowerSpec:
    """Return a tower whose pictures become `least_rows` to 16,384 rows by default, with `others` of its fields."""
    hidden, columns, joined = sizes["hidden"], sizes["columns"], sizes["hidden"] * merge**2

    def merge_rows(name: str, *, norms_each: bool) -> tuple[Step, ...]:
        norm = NormRows(f"{name}.norm", hidden if norms_each else joined, eps, others.get("norm", "layer"))
        first = (norm, Join(merge**2)) if norms_each else (Join(merge**2), norm)
        made = Multiply(f"{name}.fc1", joined, joined, activation="gelu_erf")
        return *first, made, Multiply(f"{name}.fc2", columns, joined)

    is_gguf = stated.get(V + "embedding_length") is not None
    names = (V + "image_min_pixels", V + "image_max_pixels") if is_gguf else ("shortest_edge", "longest_edge")
    if not is_gguf and stated.get("min_pixels") is not None:  # as older files have them
        names = "min_pixels", "max_pixels"
    bounds = stated if is_gguf or names[0] == "min_pixels" else stated.mapping("size") or Fields({})
    prefix, factor = V if is_gguf else "", sizes["patch"] * merge
    kept: dict[str, Any] = {"positions": "blended"} | others
    return TowerSpec(
        **sizes,
        **kept,
        merge=merge,
        words=_WORDS,
        end=merge_rows("merge", norms_each=True),
        eps=eps,
        theta=_THETA,
        turns=True,
        taps=taps,
        tap_ends=tuple(merge_rows(f"deep.{number}", norms_each=False) for number in range(len(taps))),
        least_pixels=bounds.integer(names[0], 1, MAX_PIXELS, default=least_rows * factor**2),
        most_pixels=bounds.integer(names[1], 1, MAX_PIXELS, default=16384 * factor**2),
        mean=read_colours(stated, prefix + "image_mean", default=colours[0]),
        deviation=read_colours(stated, prefix + "image_std", 1e-3, default=colours[1]),
    )


def _read_gguf(fields: Fields, _: Mapping[str, TensorSource]) -> TowerSpec:
    if not fields.flag("clip.use_gelu", False):
        fields.refuse("clip.use_gelu", "true, a tower with gelu")
    sizes = read_gguf_sizes(fields)
    flags = fields.flags(V + "is_deepstack_layers", sizes["layers"]) or ()
    taps = tuple(index for index, is_tap in enumerate(flags) if is_tap)
    return _make_spec(sizes, read_merge(fields, V), taps, _read_eps(fields), fields)


def read_merge(fields: Fields, prefix: str = "") -> int:
    """Return the side of the square of patches that becomes one row."""
    return fields.integer(f"{prefix}spatial_merge_size", 1, MAX_MERGE, default=2)


def _read_eps(fields: Fields) -> float:
    return round_float(fields.number(V + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS))


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
    indexes = (
        tower.integers("deepstack_visual_indexes", len(taps), 0, layers - 1) if isinstance(taps, list) and taps else ()
    )
    return _make_spec(sizes, read_merge(tower), indexes, _EPS, prepares)


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
    return join_times(spec, TowerNames(_PREFIXES, "blocks.", _BLOCK, _ENDS | deep).rename(tensors))


_PREFIXES = "model.visual.", "visual."


def join_times(spec: TowerSpec, named: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with the matrix of patches; folders have its weights for two successive pictures."""
    if "patch_embd.weight" in named:
        whole = read_numbers(named["patch_embd.weight"])
        named |= join_slices(spec, [whole[:, :, at] for at in range(whole.shape[2])] if whole.ndim == 5 else [])
    return named


def _make_older_spec(
    sizes: dict[str, Any], merge: int, eps: float, stated: Fields, window: int, whole_layers: tuple[int, ...]
) -> TowerSpec:
    """Return the tower of a Qwen2.5-VL, or of a Qwen2-VL if there is no window."""
    is_newer = bool(window)
    kind: dict[str, Any] = {"gated": True, "norm": "rms"} if is_newer else {"slope": 1.702}
    return _make_spec(
        sizes,
        merge,
        (),
        eps,
        stated,
        least_rows=4,
        colours=CLIP_COLOURS,
        positions="none",
        patch_bias=False,
        activation="silu",
        window=window,
        whole_layers=whole_layers,
        **kind,
    )


def _read_older_gguf(fields: Fields, _: Mapping[str, TensorSource]) -> TowerSpec:
    is_newer = fields.get(V + "n_wa_pattern") is not None
    if fields.flag("clip.use_silu", False) != is_newer or fields.flag("clip.use_gelu", False):
        fields.refuse("clip.use_silu", "true of Qwen2.5-VL, else a quick GELU")
    sizes, merge = read_gguf_sizes(fields), read_merge(fields, V)
    every = fields.integer(V + "n_wa_pattern", 1, MAX_LAYERS) if is_newer else 0
    whole = tuple(range(every - 1, sizes["layers"], every)) if every else ()
    window = _count_window(fields, V, sizes["patch"] * merge) if is_newer else 0
    return _make_older_spec(sizes, merge, _read_eps(fields), fields, window, whole)


def _count_window(fields: Fields, prefix: str, factor: int) -> int:
    """Return the side of a window in rows of the text."""
    return fields.integer(f"{prefix}window_size", factor, MAX_SIDE * MAX_PATCH, default=max(factor, 112)) // factor


def _read_older_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
    is_newer = "2_5" in whole.text("model_type", default=tower.text("model_type", default=""))
    acts = ("silu",) if is_newer else ("quick_gelu",)
    tower.refuse_unless(("hidden_act",), acts, f"only {acts[0]} is supported in a tower")
    tower.refuse_unless(("in_channels", "in_chans"), (CHANNELS,), "only pictures of three colours are supported")
    hidden = tower.integer("hidden_size" if is_newer else "embed_dim", 4, MAX_WIDTH, None if is_newer else 1280)
    layers = tower.integer("depth", 1, MAX_LAYERS, default=32)
    ratio = 1 if is_newer else tower.integer("mlp_ratio", 1, 64, default=4)
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": tower.integer("num_heads", 1, MAX_HEADS, default=16),
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH, default=3420) if is_newer else ratio * hidden,
        "patch": tower.integer("patch_size", 1, MAX_PATCH, default=14),
        "side": 1,
        "columns": tower.integer("out_hidden_size" if is_newer else "hidden_size", 1, MAX_WIDTH),
    }
    stated, merge = tower.get("fullatt_block_indexes"), read_merge(tower)
    count = len(stated) if isinstance(stated, list) else 0
    indexes = tower.integers("fullatt_block_indexes", count, 0, layers - 1) if count else ()
    if is_newer and stated is None:
        indexes = tuple(range(7, layers, 8))
    window = _count_window(tower, "", sizes["patch"] * merge) if is_newer else 0
    return _make_older_spec(sizes, merge, _EPS, prepares, window, indexes)


def _name_older_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    ends = {"patch_embed.proj": "patch_embd", "merger.ln_q": "merge.norm"}
    ends |= {"merger.mlp.0": "merge.fc1", "merger.mlp.2": "merge.fc2"}
    return join_times(spec, TowerNames(_PREFIXES, "blocks.", _OLDER_BLOCK, ends).rename(tensors))


_OLDER_BLOCK = _BLOCK | {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_OLDER_BLOCK |= {"mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
# What each colour's mean and deviation were where a tower was trained as CLIP is.
CLIP_COLOURS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN25 = TowerFamily(
    "qwen2.5vl_merger", ("qwen2_5_vl",), _read_older_gguf, _read_older_folder, _name_gguf, _name_older_folder
)
QWEN2 = replace(QWEN25, projector="qwen2vl_merger", model_types=("qwen2_vl",))
TOWER = TowerFamily("qwen3vl_merger", _TYPES, _read_gguf, _read_folder, _name_gguf, _name_folder)
