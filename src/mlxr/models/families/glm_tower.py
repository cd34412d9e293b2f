"""The towers of GLM-4.1V and GLM-4.6V Flash, and of GLM-OCR: pictures of any size; squares of patches become rows.

Patches turn by their row and column. Those of GLM-4.1V also have positions, which are sampled from a square; heads of
GLM-OCR's are normed. (arXiv:2507.01006; transformers, models/glm4v and glm_ocr; llama.cpp, tools/mtmd/models/glm4v.cpp)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.kernels.sources import Decoded, round_float
from mlxr.kernels.tensor import TensorSource, read_numbers
from mlxr.models.families.qwen_tower import CLIP_COLOURS, join_times, read_merge
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.tower import (
    CHANNELS,
    GGUF_BLOCK,
    MAX_PATCH,
    MAX_PIXELS,
    MAX_SIDE,
    ActivateRows,
    GateRows,
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

_EPS, _THETA = round_float(1e-5), 10000.0
_LEAST, _MOST = 112 * 112, 28 * 28 * 15000  # pixels of two frames, as a picture counts
_WORDS = Words("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
_BLOCK = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_NAMES = TowerNames(
    ("model.visual.", "visual."),
    "blocks.",
    _BLOCK,
    {
        "patch_embed.proj": "patch_embd",
        "post_conv_layernorm": "first_norm",
        "embeddings.position_embedding": "position_embd",
        "post_layernorm": "post_norm",
        "downsample": "merge.join",
        "merger.proj": "merge.fc",
        "merger.post_projection_norm": "merge.norm",
        **{f"merger.{part}_proj": f"merge.{part}" for part in ("gate", "up", "down")},
    },
)
_GGUF_NAMES = TowerNames(
    ("",),
    "v.blk.",
    GGUF_BLOCK,
    {
        "v.patch_embd": "patch_embd",
        "v.norm_embd": "first_norm",
        "v.position_embd": "position_embd",
        "v.post_ln": "post_norm",
        "mm.patch_merger": "merge.join",
        "mm.model.fc": "merge.fc",
        "mm.post_norm": "merge.norm",
        **{f"mm.{part}": f"merge.{part}" for part in ("gate", "up", "down")},
    },
)


def _make_spec(
    sizes: dict[str, Any],
    merge: int,
    eps: float,
    features: int,
    pixels: tuple[int, int],
    stated: Fields,
    prefix: str,
    *,
    is_ocr: bool,
) -> TowerSpec:
    hidden, columns = sizes["hidden"], sizes["columns"]
    return TowerSpec(
        **sizes,
        merge=merge,
        words=_WORDS,
        begin=() if is_ocr else (NormRows("first_norm", hidden, eps, "rms"),),
        end=(
            NormRows("post_norm", hidden, eps, "rms"),
            Join(merge**2, by_columns=True),
            Multiply("merge.join", columns, hidden * merge**2),
            Multiply("merge.fc", columns, columns, bias=False),
            NormRows("merge.norm", columns, _EPS),
            ActivateRows("gelu_erf"),
            GateRows("merge", columns, features, "silu"),
        ),
        eps=eps,
        positions="none" if is_ocr else "sampled",
        theta=_THETA,
        turns=True,
        norm="rms",
        bias=is_ocr,
        activation="silu",
        gated=True,
        norms_heads=is_ocr,
        least_pixels=pixels[0] // 2,
        most_pixels=pixels[1] // 2,
        grows=True,
        mean=read_colours(stated, prefix + "image_mean", default=CLIP_COLOURS[0]),
        deviation=read_colours(stated, prefix + "image_std", 1e-3, default=CLIP_COLOURS[1]),
    )


def _read_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> TowerSpec:
    if not fields.flag("clip.use_silu", False):
        fields.refuse("clip.use_silu", "true")
    gate, is_ocr = tensors.get("mm.gate.weight"), "v.position_embd.weight" not in tensors
    sizes = read_gguf_sizes(fields)
    features = sizes["features"] if gate is None else gate.shape[0]
    up = tensors.get("v.blk.0.ffn_up.weight")  # as the stated number may be the merger's
    sizes["features"] = sizes["features"] if up is None else up.shape[0]
    eps = round_float(fields.number(V + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS))
    merge = read_merge(fields, V)
    return _make_spec(sizes, merge, eps, features, (_LEAST, _MOST), fields, V, is_ocr=is_ocr)


def _read_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
    is_ocr = "ocr" in whole.text("model_type", default=tower.text("model_type", default=""))
    tower.refuse_unless(("hidden_act",), ("silu",), "only silu is supported in a tower")
    tower.refuse_unless(("in_channels",), (CHANNELS,), "only pictures of three colours are supported")
    tower.refuse_unless(("attention_bias",), (is_ocr,), f"only {str(is_ocr).lower()} is supported in a tower")
    patch = tower.integer("patch_size", 1, MAX_PATCH, default=14)
    sizes = {
        "hidden": tower.integer("hidden_size", 4, MAX_WIDTH, default=1024 if is_ocr else 1536),
        "layers": tower.integer("depth", 1, MAX_LAYERS, default=24),
        "heads": tower.integer("num_heads", 1, MAX_HEADS, default=16 if is_ocr else 12),
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH, default=4096 if is_ocr else 13696),
        "patch": patch,
        "side": tower.integer("image_size", patch, MAX_SIDE * MAX_PATCH, default=336) // patch,
        "columns": tower.integer("out_hidden_size", 1, MAX_WIDTH, default=1536 if is_ocr else 4096),
    }
    features = sizes["columns"] * CHANNELS
    if not is_ocr:  # its layers have as many features as rows columns
        features, sizes["features"] = sizes["features"], sizes["columns"]
    eps = round_float(tower.number("rms_norm_eps", 1e-12, 1e-2, default=1e-5))
    size = prepares.mapping("size") or Fields({})
    pixels = (
        size.integer("shortest_edge", 2, MAX_PIXELS, default=_LEAST),
        size.integer("longest_edge", 2, MAX_PIXELS, default=_MOST),
    )
    return _make_spec(sizes, read_merge(tower), eps, features, pixels, prepares, "", is_ocr=is_ocr)


def _finish(named: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with a matrix of squares, which files have as that of a convolution."""
    name = "merge.join.weight"
    if name in named and len(named[name].shape) == 4:
        weight = read_numbers(named[name])
        named[name] = Decoded(name, weight.reshape(len(weight), -1))
    return named


def _name_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    return _finish(join_times(spec, _NAMES.rename(tensors)))


def _name_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _GGUF_NAMES.rename(tensors)
    slices = [tensors[name] for name in ("v.patch_embd.weight", "v.patch_embd.weight.1") if name in tensors]
    return _finish(named | join_slices(spec, [read_numbers(part) for part in slices]))


GLM = TowerFamily("glm4v", ("glm4v", "glm_ocr"), _read_gguf, _read_folder, _name_gguf, _name_folder)
