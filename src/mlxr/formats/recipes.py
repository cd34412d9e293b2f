"""Recipes: the type of each tensor of a converted model, given a name such as `q4_k_m`.

Knows tensor names as GGUF spells them, shapes and types; nothing of files. A recipe is a row: the type of most
matrices and the rules by which the sensitive ones (attn_v, ffn_down, attn_output, output) get more bits. The mixes and
the fallbacks for rows that do not fill blocks are llama.cpp's defaults without an importance matrix, so that a file
made here has the same types as one made there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.formats.ggml_types import by_name


@frozen
class TensorPlace:
    """The facts that a rule may use: the layer of the tensor, the number of layers, query heads per K/V head."""

    layer: int
    layers: int
    query_groups: int

    @property
    def is_sensitive(self) -> bool:
        """True for the first and last eighth of the layers, and every third between."""
        eighth = self.layers // 8
        return self.layer < eighth or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2


Rule = Callable[[TensorPlace], str]


@frozen
class Recipe:
    """A row: name, the number GGUF files give it (`general.file_type`), the usual type, rules by kind of tensor.

    output: the type of the matrix that makes logits, which decides the last step of every token. experts: the type of
    stacks of experts if no other rule is for them.
    """

    name: str
    file_type: int
    usual: str
    rules: dict[str, Rule] = field(default_factory=dict)
    output: str = "q6_k"
    experts: str | None = None


def _always(type_name: str) -> Rule:
    return lambda _place: type_name


def _sensitive(more: str, usual: str) -> Rule:
    return lambda place: more if place.is_sensitive else usual


def _first_layers(count: int, more: str, usual: str) -> Rule:
    return lambda place: more if place.layer < count else usual


def _first_part(parts: int, more: str, usual: str) -> Rule:
    return lambda place: more if place.layer < place.layers // parts else usual


def _shared_values(more: str, usual: str) -> Rule:
    """More bits if four query heads or more share a V, which is then small and used often."""
    return lambda place: more if place.query_groups >= 4 else usual


RECIPES: tuple[Recipe, ...] = (
    Recipe("f32", 0, "f32"),
    Recipe("f16", 1, "f16"),
    Recipe("bf16", 32, "bf16"),
    Recipe("q4_0", 2, "q4_0"),
    Recipe("q4_1", 3, "q4_1"),
    Recipe("q5_0", 8, "q5_0"),
    Recipe("q5_1", 9, "q5_1"),
    Recipe("q8_0", 7, "q8_0", output="q8_0"),
    Recipe(
        "q2_k",
        10,
        "q2_k",
        {"attn_v": _shared_values("q4_k", "q3_k"), "attn_output": _always("q3_k"), "ffn_down": _always("q3_k")},
    ),
    Recipe("q3_k_s", 11, "q3_k"),
    Recipe(
        "q3_k_m",
        12,
        "q3_k",
        {
            "attn_v": _first_layers(2, "q5_k", "q4_k"),
            "attn_output": _always("q4_k"),
            "ffn_down": _first_part(16, "q5_k", "q4_k"),
        },
    ),
    Recipe(
        "q3_k_l", 13, "q3_k", {"attn_v": _always("q5_k"), "attn_output": _always("q5_k"), "ffn_down": _always("q5_k")}
    ),
    Recipe(
        "q4_k_s", 14, "q4_k", {"attn_v": _first_layers(4, "q5_k", "q4_k"), "ffn_down": _first_part(8, "q5_k", "q4_k")}
    ),
    Recipe("q4_k_m", 15, "q4_k", {"attn_v": _sensitive("q6_k", "q4_k"), "ffn_down": _sensitive("q6_k", "q4_k")}),
    Recipe("q5_k_s", 16, "q5_k"),
    Recipe("q5_k_m", 17, "q5_k", {"attn_v": _sensitive("q6_k", "q5_k"), "ffn_down": _sensitive("q6_k", "q5_k")}),
    Recipe("q6_k", 18, "q6_k"),
    Recipe("iq3_s", 26, "iq3_s", {"attn_v": _shared_values("q4_k", "iq3_s")}),
    Recipe(
        "iq4_nl",
        25,
        "iq4_nl",
        {"attn_v": _shared_values("q5_k", "iq4_nl"), "ffn_down": _first_part(8, "q5_k", "iq4_nl")},
    ),
    Recipe(
        "iq4_xs",
        30,
        "iq4_xs",
        {"attn_v": _shared_values("q5_k", "iq4_xs"), "ffn_down": _first_part(8, "q5_k", "iq4_xs")},
    ),
    # Like the weights of gpt-oss: only stacks of experts in four bits. A model without experts gets q8_0.
    Recipe("mxfp4", 38, "q8_0", output="q8_0", experts="mxfp4"),
)
_STAY_F32 = (
    *("_norm", "ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ple_conv1d", "hc_attn_fn", "hc_ffn_fn"),
    *("position_embd", "token_types", "attn_rel_b"),
)
_BY_NAME = {recipe.name: recipe for recipe in RECIPES}

# Tensors that all recipes for blocks keep in 16 bits: the one that makes the layers' inputs of a Gemma 4.
_KEPT = {"per_layer_model_proj": "f16"}
# If rows do not fill blocks of 256: the type with blocks of 32 and as many bits or more.
_FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_FALLBACKS |= {"iq3_s": "iq4_nl", "iq4_xs": "iq4_nl"}
EXPERT_AXES = 3  # of a stack: experts, rows, columns
# Models of this depth share each V among eight query heads: more bits there cost next to nothing.
_LAYERS_70B = 80


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name in any case; raises ModelError listing the known ones if there is none."""
    recipe = _BY_NAME.get(name.lower())
    if recipe is None:
        raise ModelError(f"cannot convert to {name!r}; known are {', '.join(_BY_NAME)}")
    return recipe


def tensor_type(
    recipe: str,
    tensor_name: str,
    shape: tuple[int, ...],
    *,
    layer: int,
    layers: int,
    tied_output: bool,
    query_groups: int,
) -> str:
    """Return the type, in ggml's spelling, of a tensor of a converted model.

    tensor_name: as GGUF spells it. shape: NumPy order. layer: the number in `blk.N`, 0 for others. tied_output: the
    model has no `output.weight`, so the token embedding does its work. query_groups: query heads per K/V head.
    Vectors and everything that is no matrix of weights stay f32. Raises ModelError if there is no such recipe.
    """
    row = find_recipe(recipe)
    if not is_converted(tensor_name, shape):
        return "f32"
    if row.usual in ("f32", "f16", "bf16"):
        return row.usual
    kind = _find_kind(tensor_name)
    if kind in _KEPT:
        return _KEPT[kind]
    if tensor_name == "output.weight" or (tied_output and tensor_name == "token_embd.weight"):
        return fit_type(row.output, shape[-1])
    if row.experts is not None and len(shape) == EXPERT_AXES:
        return fit_type(row.experts, shape[-1])
    rule = row.rules.get(kind)
    chosen = rule(TensorPlace(layer, layers, query_groups)) if rule else row.usual
    if kind == "attn_v" and layers == _LAYERS_70B and chosen in ("q3_k", "q4_k"):
        chosen = "q5_k"
    return fit_type(chosen, shape[-1])


def _find_kind(tensor_name: str) -> str:
    """`attn_v` of `blk.7.attn_v.weight`; experts count as the matrix that they divide, and joined q, k and v as v."""
    stem = tensor_name.removesuffix(".weight").rsplit(".", 1)[-1]
    return "attn_v" if stem == "attn_qkv" else stem.removesuffix("_exps").removesuffix("_shexp")


def is_converted(tensor_name: str, shape: tuple[int, ...]) -> bool:
    """Return True if a recipe converts this tensor: matrices of weights, but no norms, routers and convolutions."""
    if len(shape) < 2 or not tensor_name.endswith(".weight"):
        return False
    return not any(part in tensor_name for part in _STAY_F32)


def fit_type(type_name: str, columns: int) -> str:
    """Return the type if its blocks fit rows of so many columns, else its fallback, last of all f16."""
    if columns % by_name(type_name).block_size == 0:
        return type_name
    fallback = _FALLBACKS.get(type_name, "f16")
    return fallback if columns % by_name(fallback).block_size == 0 else "f16"
