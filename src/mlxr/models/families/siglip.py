"""Towers with the encoder of SigLIP (arXiv:2303.15343): pictures of one size, a learned position for each patch.

Models differ in how they make rows of its patches. Gemma 3 takes the mean of each square, norms and projects it;
Idefics3 and SmolVLM project all patches of a square together, and see a picture in tiles besides. LFM2-VL's is SigLIP 2
(arXiv:2502.14786), with pictures of any shape; large ones are cut into tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mlxr.kernels.sources import add_one, round_float, turn_matrix
from mlxr.kernels.tensor import TensorSource, read_numbers
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.tower import (
    CHANNELS,
    GGUF_BLOCK,
    MAX_MERGE,
    MAX_PATCH,
    MAX_SIDE,
    Average,
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

_EPS = round_float(1e-6)
_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "layer_norm1": "attn_norm",
    "layer_norm2": "ffn_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_ENDS = {
    "embeddings.patch_embedding": "patch_embd",
    "embeddings.position_embedding": "position_embd",
    "post_layernorm": "post_norm",
}
_GGUF_ENDS = {"v.patch_embd": "patch_embd", "v.position_embd": "position_embd", "v.post_ln": "post_norm"}
_PREFIXES = tuple(f"{start}vision_tower.{middle}" for start in ("model.", "") for middle in ("vision_model.", ""))


_IDEFICS3 = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}  # configurations may leave them out


def _read_folder_sizes(tower: Fields, columns: int) -> dict[str, Any]:
    tower.refuse_unless(("hidden_act",), ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported in a tower")
    tower.refuse_unless(("num_channels",), (CHANNELS,), "only pictures of three colours are supported")
    patch = tower.integer("patch_size", 1, MAX_PATCH, default=16)
    return {
        "hidden": tower.integer("hidden_size", 4, MAX_WIDTH, default=768),
        "layers": tower.integer("num_hidden_layers", 1, MAX_LAYERS, default=12),
        "heads": tower.integer("num_attention_heads", 1, MAX_HEADS, default=12),
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH, default=3072),
        "patch": patch,
        "side": tower.integer("image_size", patch, MAX_SIDE * MAX_PATCH, default=224) // patch,
        "columns": columns,
    }


def _read_eps(fields: Fields, name: str) -> float:
    return round_float(fields.number(name, 1e-12, 1e-2, default=_EPS))


def _read_width(whole: Fields, default: int | None = None) -> int:
    return (whole.mapping("text_config") or Fields({})).integer("hidden_size", 1, MAX_WIDTH, default)


def _join_patches(spec: TowerSpec, named: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with the matrix of patches, which files have as that of a convolution."""
    if "patch_embd.weight" in named:
        named |= join_slices(spec, [read_numbers(named["patch_embd.weight"])])
    return named


def make_gemma3_tower(name: str) -> TowerFamily:
    """Return the tower of Gemma 3; `name` is its type, of the projector and in folders."""
    words = Words("\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n")

    def make(sizes: dict[str, Any], merge: int, eps: float, stated: Fields, prefix: str) -> TowerSpec:
        hidden = sizes["hidden"]
        return TowerSpec(
            **sizes,
            merge=merge,
            words=words,
            end=(
                NormRows("post_norm", hidden, eps),
                Average(merge**2),
                NormRows("soft_norm", hidden, eps, "rms"),
                Multiply("project", sizes["columns"], hidden, bias=False),
            ),
            eps=eps,
            resample=2,
            mean=read_colours(stated, prefix + "image_mean"),
            deviation=read_colours(stated, prefix + "image_std", 1e-3),
            is_whole=True,
        )

    def read_gguf(fields: Fields, _: Mapping[str, TensorSource]) -> TowerSpec:
        merge = fields.integer(V + "projector.scale_factor", 1, 8, default=4)
        return make(read_gguf_sizes(fields), merge, _read_eps(fields, V + "attention.layer_norm_epsilon"), fields, V)

    def read_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
        prepares.refuse_unless(("do_pan_and_scan",), (None, False), "only whole pictures are supported")
        sizes = _read_folder_sizes(tower, _read_width(whole, 2304))
        side = math.isqrt(whole.integer("mm_tokens_per_image", 1, MAX_SIDE**2, default=256))
        return make(sizes, max(1, sizes["side"] // side), _read_eps(tower, "layer_norm_eps"), prepares, "")

    def finish(adds_one: bool) -> Callable[[TowerSpec, dict[str, TensorSource]], dict[str, TensorSource]]:
        def run(spec: TowerSpec, named: dict[str, TensorSource]) -> dict[str, TensorSource]:
            if adds_one and "soft_norm.weight" in named:
                named["soft_norm.weight"] = add_one(named["soft_norm.weight"])
            if "project.weight" in named:  # files have its rows as columns
                named["project.weight"] = turn_matrix(named["project.weight"])
            return _join_patches(spec, named)

        return run

    ends = {"mm.soft_emb_norm": "soft_norm", "mm.input_projection": "project"}
    gguf = TowerNames(("",), "v.blk.", GGUF_BLOCK, _GGUF_ENDS | ends)
    own = TowerNames(_PREFIXES, "encoder.layers.", _BLOCK, _ENDS)
    projector = TowerNames(
        ("model.multi_modal_projector.", "multi_modal_projector."),
        "-",
        {},
        {"mm_soft_emb_norm": "soft_norm", "mm_input_projection_weight": "project.weight"},
    )

    def name_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        return finish(adds_one=False)(spec, gguf.rename(tensors))

    def name_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        return finish(adds_one=True)(spec, own.rename(tensors) | projector.rename(tensors))

    return TowerFamily(name, (name,), read_gguf, read_folder, name_gguf, name_folder)


def _make_idefics3(
    sizes: dict[str, Any], merge: int, eps: float, stated: Fields, prefix: str, longest: int
) -> TowerSpec:
    joined, around = sizes["hidden"] * merge**2, "<fake_token_around_image>"
    return TowerSpec(
        **sizes,
        merge=merge,
        words=Words(
            open="",
            place="<image>",
            close=around,
            alone=f"{around}<global-img>",
            tile=around + "<row_{row}_col_{column}>",
            line="\n",
            whole=f"\n{around}<global-img>",
        ),
        end=(
            NormRows("post_norm", sizes["hidden"], eps),
            Join(merge**2),
            Multiply("project", sizes["columns"], joined, bias=False),
        ),
        eps=eps,
        longest=longest,
        mean=read_colours(stated, prefix + "image_mean"),
        deviation=read_colours(stated, prefix + "image_std", 1e-3),
    )


def _read_idefics3_gguf(fields: Fields, _: Mapping[str, TensorSource]) -> TowerSpec:
    sizes = read_gguf_sizes(fields)
    merge = fields.integer(V + "projector.scale_factor", 1, MAX_MERGE, default=2)
    longest = fields.integer(V + "preproc_image_size", 1, _MAX_LONGEST, default=sizes["side"] * sizes["patch"])
    return _make_idefics3(sizes, merge, _read_eps(fields, V + "attention.layer_norm_epsilon"), fields, V, longest)


def _read_idefics3_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
    sizes = _read_folder_sizes(tower.fill(_IDEFICS3), _read_width(whole))
    merge, tile = whole.integer("scale_factor", 1, MAX_MERGE, default=2), sizes["side"] * sizes["patch"]
    size = prepares.mapping("size") or Fields({})
    is_cut = prepares.flag("do_image_splitting", True)
    longest = size.integer("longest_edge", 1, _MAX_LONGEST, default=4 * tile) if is_cut else tile
    return _make_idefics3(sizes, merge, _read_eps(tower, "layer_norm_eps"), prepares, "", longest)


_MAX_LONGEST = 4096  # pixels, as transformers has it
_IDEFICS3_NAMES = TowerNames(
    ("model.vision_model.", "model."),
    "encoder.layers.",
    _BLOCK,
    _ENDS | {"connector.modality_projection.proj": "project"},
)
_IDEFICS3_GGUF = TowerNames(("",), "v.blk.", GGUF_BLOCK, _GGUF_ENDS | {"mm.model.fc": "project"})
IDEFICS3 = TowerFamily(
    "idefics3",
    ("idefics3", "smolvlm"),
    _read_idefics3_gguf,
    _read_idefics3_folder,
    lambda spec, tensors: _join_patches(spec, _IDEFICS3_GGUF.rename(tensors)),
    lambda spec, tensors: _join_patches(spec, _IDEFICS3_NAMES.rename(tensors)),
)


_SIGLIP2_ENDS = {"layer_norm": "merge.norm", "linear_1": "merge.fc1", "linear_2": "merge.fc2"}


def make_lfm2_tower(name: str) -> TowerFamily:
    """Return the tower of LFM2-VL; `name` is the type of its projector."""
    words = Words(
        open="<|image_start|>",
        place="<image>",
        close="<|image_end|>",
        tile="<|img_row_{row}_col_{column}|>",
        whole="<|img_thumbnail|>",
    )
    own = TowerNames(_PREFIXES, "encoder.layers.", _BLOCK, _ENDS)
    projector = TowerNames(("model.multi_modal_projector.", "multi_modal_projector."), "-", {}, _SIGLIP2_ENDS)
    ends = {"mm.input_norm": "merge.norm", "mm.1": "merge.fc1", "mm.2": "merge.fc2"}
    gguf = TowerNames(("",), "v.blk.", GGUF_BLOCK, _GGUF_ENDS | ends)

    def make(
        sizes: dict[str, Any], merge: int, features: int, eps: float, stated: Fields, prefix: str, *, norms: bool
    ) -> TowerSpec:
        joined, factor = sizes["hidden"] * merge**2, sizes["patch"] * merge
        norm = (NormRows("merge.norm", joined, _EPS_JOINED),) if norms else ()
        made = Multiply("merge.fc1", features, joined, activation="gelu_erf")
        keys = Fields({}) if prefix else stated  # of a preprocessor, which GGUF files do not state
        is_cut = keys.flag("do_image_splitting", True)
        return TowerSpec(
            **sizes,
            merge=merge,
            words=words,
            end=(
                NormRows("post_norm", sizes["hidden"], eps),
                Join(merge**2),
                *norm,
                made,
                Multiply("merge.fc2", sizes["columns"], features),
            ),
            eps=eps,
            positions="resized",
            least_pixels=keys.integer("min_image_tokens", 1, 1 << 16, default=64) * factor**2,
            most_pixels=keys.integer("max_image_tokens", 1, 1 << 16, default=256) * factor**2,
            tile=keys.integer("tile_size", factor, MAX_SIDE * MAX_PATCH, default=512),
            most_tiles=keys.integer("max_tiles", 1, 64, default=10) if is_cut else 0,
            mean=read_colours(stated, prefix + "image_mean"),
            deviation=read_colours(stated, prefix + "image_std", 1e-3),
        )

    def read_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> TowerSpec:
        merge, first = fields.integer(V + "projector.scale_factor", 1, MAX_MERGE, default=2), tensors.get("mm.1.weight")
        features = 2560 if first is None else first.shape[0]
        eps = _read_eps(fields, V + "attention.layer_norm_epsilon")
        has_norm = "mm.input_norm.weight" in tensors
        return make(read_gguf_sizes(fields), merge, features, eps, fields, V, norms=has_norm)

    def read_folder(whole: Fields, tower: Fields, prepares: Fields) -> TowerSpec:
        whole.refuse_unless(("projector_hidden_act",), ("gelu",), "only gelu is supported")
        whole.refuse_unless(("projector_bias",), (True,), "only a projector with biases is supported")
        whole.refuse_unless(("vision_feature_layer",), (-1,), "only what leaves the last layer is supported")
        sizes = _read_folder_sizes(tower, _read_width(whole))
        sizes["side"] = math.isqrt(tower.integer("num_patches", 1, MAX_SIDE**2, default=256))
        features = whole.integer("projector_hidden_size", 1, MAX_WIDTH, default=2560)
        merge, norms = whole.integer("downsample_factor", 1, MAX_MERGE, default=2), whole.flag(*_USES_NORM)
        return make(sizes, merge, features, _read_eps(tower, "layer_norm_eps"), prepares, "", norms=norms)

    def name_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        named = own.rename(tensors) | projector.rename(tensors)
        whole = named.get("patch_embd.weight")
        if whole is not None and whole.shape == (spec.hidden, CHANNELS * spec.patch**2):  # colours stand last
            parts = read_numbers(whole).reshape(spec.hidden, spec.patch, spec.patch, CHANNELS)
            named |= join_slices(spec, [parts.transpose(0, 3, 1, 2)])
        return named

    def name_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        return _join_patches(spec, gguf.rename(tensors))

    return TowerFamily(name, (f"{name}_vl", f"{name}-vl"), read_gguf, read_folder, name_gguf, name_folder)


_EPS_JOINED = round_float(1e-5)
_USES_NORM = "projector_use_layernorm", True
