"""The tower of Gemma 4 (E2B, E4B, 26B-A4B, 31B): pictures that fill a budget of tokens, in their own shape.

Patches have a position for their row and one for their column, by which heads turn, too. Heads of queries, keys and
values are normed, and so are the blocks' results. In small models products clamp their inputs and results to ranges in
the file; large ones shift and scale rows in the end. (llama.cpp, conversion/gemma.py; transformers, models/gemma4)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.kernels.sources import Decoded, pick_numbers, pick_rows, round_float
from mlxr.kernels.tensor import TensorSource, read_numbers
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.tower import (
    CHANNELS,
    GGUF_BLOCK,
    MAX_MERGE,
    MAX_PATCH,
    Average,
    Multiply,
    NormRows,
    Shift,
    Step,
    TowerFamily,
    TowerNames,
    TowerSpec,
    V,
    Words,
    join_slices,
    read_gguf_sizes,
)

_EPS, _THETA, _BUDGETS = round_float(1e-6), 100.0, (70, 140, 280, 560, 1120)
_PLAIN_EPS = round_float(1e-5)
_WORDS = Words("<|image>", "<|image|>", "<image|>")
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_BLOCK |= {
    f"{module}_proj{end}": name
    for module, name in (
        *((f"self_attn.{part}", f"attn_{part}") for part in "qkv"),
        ("self_attn.o", "attn_output"),
        *((f"mlp.{part}", f"ffn_{part}") for part in ("gate", "up", "down")),
    )
    for end in ("", ".linear")  # the weight is that of a module below that of the ranges
}
_NAMES = TowerNames(
    ("model.vision_tower.", "vision_tower.", "model.embed_vision.", "embed_vision."),
    "encoder.layers.",
    _BLOCK,
    {
        "patch_embedder.input_proj": "patch_embd",
        "patch_embedder.position_embedding_table": "position_embd.weight",
        "std_bias": "shift.bias",
        "std_scale": "shift.weight",
        "embedding_projection": "project",
    },
)
_GGUF_NAMES = TowerNames(
    ("",),
    "v.blk.",
    GGUF_BLOCK | {"attn_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"},
    {
        "v.patch_embd": "patch_embd",
        "v.position_embd": "position_embd",
        "v.std_bias": "shift.bias",
        "v.std_scale": "shift.weight",
        "mm.input_projection": "project",
    },
)


def _make_spec(sizes: dict[str, Any], merge: int, eps: float, *, shifts: bool) -> TowerSpec:
    hidden = sizes["hidden"]
    shift: tuple[Step, ...] = (Shift("shift", hidden),) if shifts else ()
    return TowerSpec(
        **sizes,
        merge=merge,
        words=_WORDS,
        end=(
            Average(merge**2, factor=hidden**0.5),
            *shift,
            NormRows("", hidden, eps, "rms"),
            Multiply("project", sizes["columns"], hidden, bias=False),
        ),
        eps=eps,
        positions="axes",
        theta=_THETA,
        patch_bias=False,
        norm="rms",
        bias=False,
        gated=True,
        norms_all=True,
        budgets=_BUDGETS,
    )


def _read_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> TowerSpec:
    sizes, merge = read_gguf_sizes(fields), fields.integer(V + "projector.scale_factor", 1, MAX_MERGE, default=3)
    positions = tensors.get("v.position_embd.weight")
    rows = 0 if positions is None or len(positions.shape) != 3 else positions.shape[1]
    sizes["side"] = _count_places(rows, merge)
    eps = round_float(fields.number(V + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS))
    return _make_spec(sizes, merge, eps, shifts="v.std_bias" in tensors)


def _count_places(rows: int, merge: int) -> int:
    """Return the positions of an axis that are used; a file may have more than any picture has patches."""
    return min(rows, _BUDGETS[-1] * merge)


def _read_folder(whole: Fields, tower: Fields, _: Fields) -> TowerSpec:
    tower.refuse_unless(
        ("hidden_activation",), ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported in a tower"
    )
    tower.refuse_unless(("attention_bias",), (False,), "biases are not supported in a tower")
    hidden, heads = (
        tower.integer("hidden_size", 4, MAX_WIDTH, default=768),
        tower.integer("num_attention_heads", 1, MAX_HEADS, default=12),
    )
    tower.refuse_unless(("num_key_value_heads",), (heads,), "only as many heads of keys as of queries are supported")
    tower.refuse_unless(("head_dim",), (hidden // heads,), "only heads that share the columns are supported")
    theta = (tower.mapping("rope_parameters") or Fields({})).number("rope_theta", 1.0001, 1e15, default=_THETA)
    tower.refuse_unless(("rope_theta",), (_THETA,), "only rotations by a base of 100 are supported")
    if theta != _THETA:
        tower.refuse("rope_parameters", "a rotation by a base of 100")
    merge = tower.integer("pooling_kernel_size", 1, MAX_MERGE, default=3)
    sizes = {
        "hidden": hidden,
        "layers": tower.integer("num_hidden_layers", 1, MAX_LAYERS, default=16),
        "heads": heads,
        "features": tower.integer("intermediate_size", 1, MAX_WIDTH, default=3072),
        "patch": tower.integer("patch_size", 1, MAX_PATCH, default=16),
        "side": _count_places(tower.integer("position_embedding_size", 1, 1 << 20, default=10240), merge),
        "columns": (whole.mapping("text_config") or Fields({})).integer("hidden_size", 1, MAX_WIDTH),
    }
    eps = round_float(tower.number("rms_norm_eps", 1e-12, 1e-2, default=1e-6))
    return _make_spec(sizes, merge, eps, shifts=tower.flag("standardize", False))


def _name_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _NAMES.rename(tensors)
    whole = named.get("patch_embd.weight")
    if whole is not None and whole.shape == (spec.hidden, CHANNELS * spec.patch**2):  # colours stand last
        parts = read_numbers(whole).reshape(spec.hidden, spec.patch, spec.patch, CHANNELS)
        named |= join_slices(spec, [parts.transpose(0, 3, 1, 2)])
    return _finish(spec, named)


def _name_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _GGUF_NAMES.rename(tensors)
    if "patch_embd.weight" in named:
        named |= join_slices(spec, [read_numbers(named["patch_embd.weight"])])
    return _finish(spec, named)


def _finish(spec: TowerSpec, named: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with the positions of both axes in one matrix, and heads in the order in which they turn here.

    In files, the pairs of columns come before those of rows, and the halves of each lie side by side. Here the first
    half of all pairs is for rows, and a pair has one number in each half of the head.
    """
    positions = named.get("position_embd.weight")
    if positions is not None and positions.shape[::2] == (2, spec.hidden) and positions.shape[1] >= spec.side:
        table = read_numbers(positions)[:, : spec.side].reshape(2 * spec.side, spec.hidden)
        named["position_embd.weight"] = Decoded("position_embd.weight", table)
    dim = spec.hidden // spec.heads
    quarters = [number * (dim // 4) + place for number in (2, 0, 3, 1) for place in range(dim // 4)]
    rows = [head * dim + place for head in range(spec.heads) for place in quarters]
    for index in range(spec.layers):
        for part in "qk":
            name, norm = f"blk.{index}.attn_{part}.weight", f"blk.{index}.attn_{part}_norm.weight"
            if name in named and named[name].shape == (spec.hidden, spec.hidden):
                named[name] = pick_rows(named[name], rows)
            if norm in named and named[norm].shape == (dim,):
                named[norm] = Decoded(norm, read_numbers(named[norm])[quarters])
    return named


def make_tower(name: str) -> TowerFamily:
    """Return the tower of Gemma 4; `name` is its type in folders."""
    return TowerFamily(f"{name}v", (name,), _read_gguf, _read_folder, _name_gguf, _name_folder)


def _make_plain(hidden: int, patch: int, side: int, columns: int, eps: float) -> TowerSpec:
    """Return the tower of 12B, whose patches are as large as one row."""
    return TowerSpec(
        hidden=hidden,
        layers=0,
        heads=1,
        features=1,
        patch=patch,
        merge=1,
        side=min(side, _BUDGETS[-1]),
        columns=columns,
        words=_WORDS,
        first=(NormRows("patch_norm", CHANNELS * patch**2, _PLAIN_EPS),),
        begin=(NormRows("hidden_norm", hidden, _PLAIN_EPS),),
        end=(
            NormRows("place_norm", hidden, _PLAIN_EPS),
            NormRows("", hidden, eps, "rms"),
            Multiply("project", columns, hidden, bias=False),
        ),
        eps=eps,
        positions="axes",
        mean=(0.0,) * CHANNELS,
        deviation=(1.0,) * CHANNELS,
        budgets=_BUDGETS,
    )


def _read_plain_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> TowerSpec:
    patch, merge = fields.integer(V + "patch_size", 1, MAX_PATCH), fields.integer(V + "projector.scale_factor", 1, 4, 3)
    if patch * merge > MAX_PATCH:
        fields.refuse(V + "patch_size", f"at most {MAX_PATCH // merge}")
    positions = tensors.get("v.position_embd.weight")
    side = 0 if positions is None or len(positions.shape) != 3 else positions.shape[1]
    columns = fields.integer(V + "projection_dim", 1, MAX_WIDTH)
    hidden = fields.integer(V + "embedding_length", 4, MAX_WIDTH)
    return _make_plain(hidden, patch * merge, side, columns, _EPS)


def _read_plain_folder(whole: Fields, tower: Fields, _: Fields) -> TowerSpec:
    merge = tower.integer("pooling_kernel_size", 1, 4, default=3)
    patch = tower.integer("patch_size", 1, MAX_PATCH // merge, default=16) * merge
    side = tower.integer("mm_posemb_size", 1, 1 << 20, default=_BUDGETS[-1])
    hidden = tower.integer("mm_embed_dim", 4, MAX_WIDTH, default=3840)
    columns = (whole.mapping("text_config") or Fields({})).integer("hidden_size", 1, MAX_WIDTH)
    return _make_plain(hidden, patch, side, columns, round_float(tower.number("rms_norm_eps", 1e-12, 1e-2, 1e-6)))


_PLAIN_ENDS = {
    "patch_dense": "patch_embd",
    "patch_ln1": "patch_norm",
    "patch_ln2": "hidden_norm",
    "pos_norm": "place_norm",
    "pos_embedding": "position_embd.weight",
    "multimodal_embedder.embedding_projection": "project",
    "embedding_projection": "project",
}
_PLAIN_NAMES = TowerNames(
    ("model.embed_vision.", "embed_vision.", "model.vision_embedder.", "vision_embedder."), "layers.", {}, _PLAIN_ENDS
)
_PLAIN_GGUF_NAMES = TowerNames(
    ("",),
    "v.blk.",
    {},
    {
        "v.patch_embd": "patch_embd",
        "v.position_embd": "position_embd",
        "v.patch_norm.1": "patch_norm",
        "v.patch_norm.2": "hidden_norm",
        "v.patch_norm.3": "place_norm",
        "mm.input_projection": "project",
    },
)


def _name_plain_folder(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors, with colours before the pixels of each, and positions of columns before those of rows."""
    named, numbers = _PLAIN_NAMES.rename(tensors), CHANNELS * spec.patch**2
    order = [CHANNELS * pixel + colour for colour in range(CHANNELS) for pixel in range(spec.patch**2)]
    for name in ("patch_embd.weight", "patch_norm.weight", "patch_norm.bias"):
        tensor = named.get(name)
        if tensor is not None and tensor.shape[-1] == numbers:
            named[name] = pick_numbers(tensor, order)
    positions = named.get("position_embd.weight")
    if positions is not None and len(positions.shape) == 3:
        table = read_numbers(positions).transpose(1, 0, 2)
        named["position_embd.weight"] = Decoded("position_embd.weight", table)
    return _finish(spec, named)


def _name_plain_gguf(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _PLAIN_GGUF_NAMES.rename(tensors)
    whole = named.get("patch_embd.weight")
    if whole is not None and len(whole.shape) > 2:
        named["patch_embd.weight"] = Decoded("patch_embd.weight", read_numbers(whole).reshape(whole.shape[0], -1))
    return _finish(spec, named)


def make_plain_tower(name: str) -> TowerFamily:
    """Return the tower of Gemma 4 12B; `name` is the type of the other towers in folders."""
    named = f"{name}uv", (f"{name}_unified",)
    return TowerFamily(*named, _read_plain_gguf, _read_plain_folder, _name_plain_gguf, _name_plain_folder)
