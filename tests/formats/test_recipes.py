"""Recipes: the mixes llama.cpp makes, the fallbacks for narrow rows, what stays f32, and bad names."""

from __future__ import annotations

import gguf
import pytest

from mlxr.core.errors import ModelError
from mlxr.formats.ggml_types import by_name
from mlxr.formats.recipes import RECIPES, find_recipe, fit_type, tensor_type


def choose(
    recipe: str,
    name: str,
    *,
    columns: int = 512,
    layer: int = 0,
    layers: int = 22,
    tied: bool = False,
    groups: int = 8,
) -> str:
    place = f"blk.{layer}.{name}.weight" if name.startswith(("attn", "ffn")) else f"{name}.weight"
    shape = (64, columns)
    return tensor_type(recipe, place, shape, layer=layer, layers=layers, tied_output=tied, query_groups=groups)


# Made with llama_model_quantize of llama-cpp-python 0.3.36 from a model of 10 layers with rows of 256 (ffn_down 512),
# 4 query heads per K/V head and a tied output: of each recipe the usual type, the output's, and layer by layer the
# types of attn_v and ffn_down.
LLAMA_CPP = {
    "q4_0": (
        "q4_0",
        "q6_k",
        "q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0",
        "q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0 q4_0",
    ),
    "q4_1": (
        "q4_1",
        "q6_k",
        "q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1",
        "q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1 q4_1",
    ),
    "q5_0": (
        "q5_0",
        "q6_k",
        "q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0",
        "q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0 q5_0",
    ),
    "q5_1": (
        "q5_1",
        "q6_k",
        "q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1",
        "q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1 q5_1",
    ),
    "q8_0": (
        "q8_0",
        "q8_0",
        "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0",
        "q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0",
    ),
    "q2_k": (
        "q2_k",
        "q6_k",
        "q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k",
        "q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k",
    ),
    "q3_k_s": (
        "q3_k",
        "q6_k",
        "q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k",
        "q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k q3_k",
    ),
    "q3_k_m": (
        "q3_k",
        "q6_k",
        "q5_k q5_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k",
        "q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k",
    ),
    "q3_k_l": (
        "q3_k",
        "q6_k",
        "q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k",
        "q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k",
    ),
    "q4_k_s": (
        "q4_k",
        "q6_k",
        "q5_k q5_k q5_k q5_k q4_k q4_k q4_k q4_k q4_k q4_k",
        "q5_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k q4_k",
    ),
    "q4_k_m": (
        "q4_k",
        "q6_k",
        "q6_k q4_k q4_k q6_k q4_k q4_k q6_k q4_k q6_k q6_k",
        "q6_k q4_k q4_k q6_k q4_k q4_k q6_k q4_k q6_k q6_k",
    ),
    "q5_k_s": (
        "q5_k",
        "q6_k",
        "q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k",
        "q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k",
    ),
    "q5_k_m": (
        "q5_k",
        "q6_k",
        "q6_k q5_k q5_k q6_k q5_k q5_k q6_k q5_k q6_k q6_k",
        "q6_k q5_k q5_k q6_k q5_k q5_k q6_k q5_k q6_k q6_k",
    ),
    "q6_k": (
        "q6_k",
        "q6_k",
        "q6_k q6_k q6_k q6_k q6_k q6_k q6_k q6_k q6_k q6_k",
        "q6_k q6_k q6_k q6_k q6_k q6_k q6_k q6_k q6_k q6_k",
    ),
    "iq4_nl": (
        "iq4_nl",
        "q6_k",
        "q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k",
        "q5_k iq4_nl iq4_nl iq4_nl iq4_nl iq4_nl iq4_nl iq4_nl iq4_nl iq4_nl",
    ),
    "iq4_xs": (
        "iq4_xs",
        "q6_k",
        "q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k q5_k",
        "q5_k iq4_xs iq4_xs iq4_xs iq4_xs iq4_xs iq4_xs iq4_xs iq4_xs iq4_xs",
    ),
}


@pytest.mark.parametrize("recipe", LLAMA_CPP)
def test_mixes_are_those_of_llama_cpp(recipe: str) -> None:
    usual, output, attn_v, ffn_down = LLAMA_CPP[recipe]
    assert choose(recipe, "token_embd", columns=256, tied=True) == output
    for name in ("attn_q", "attn_k", "ffn_gate", "ffn_up"):
        assert choose(recipe, name, columns=256, layers=10, groups=4) == usual
    for name, columns, wanted in (("attn_v", 256, attn_v), ("attn_qkv", 256, attn_v), ("ffn_down", 512, ffn_down)):
        got = [choose(recipe, name, columns=columns, layer=layer, layers=10, groups=4) for layer in range(10)]
        assert got == wanted.split(), name


def test_q4_k_m_gives_more_bits_to_the_first_and_last_eighth_and_every_third_between() -> None:
    more = [layer for layer in range(32) if choose("q4_k_m", "ffn_down", layer=layer, layers=32) == "q6_k"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def test_values_shared_by_many_heads_get_more_bits() -> None:
    for recipe, shared, alone in (("q2_k", "q4_k", "q3_k"), ("iq4_xs", "q5_k", "iq4_xs"), ("iq4_nl", "q5_k", "iq4_nl")):
        assert choose(recipe, "attn_v", groups=4, layer=9) == shared
        assert choose(recipe, "attn_v", groups=3, layer=9) == alone
    assert choose("q4_k_m", "attn_v", layer=11, layers=80) == "q5_k"
    assert choose("q4_k_m", "attn_v", layer=12, layers=80) == "q6_k"


def test_the_output_gets_six_bits_at_least() -> None:
    assert choose("q4_0", "output") == "q6_k"
    assert choose("q8_0", "output") == "q8_0"
    assert choose("q2_k", "token_embd") == "q2_k"
    assert choose("q2_k", "token_embd", tied=True) == "q6_k"
    assert choose("q4_k_m", "output", columns=320) == "q8_0"


def test_mxfp4_is_for_experts_alone_as_in_llama_cpp() -> None:
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        place, shape = f"blk.1.{name}.weight", (8, 64, 96)
        assert tensor_type("mxfp4", place, shape, layer=1, layers=4, tied_output=False, query_groups=1) == "mxfp4"
    for name in ("token_embd", "output", "attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down_shexp"):
        assert choose("mxfp4", name) == "q8_0"


@pytest.mark.parametrize(
    ("recipe", "name", "fallback"),
    [
        ("q2_k", "attn_q", "q4_0"),
        ("q3_k_m", "attn_q", "q4_0"),
        ("q4_k_m", "attn_q", "q5_0"),
        ("q4_k_m", "attn_v", "q8_0"),
        ("q5_k_m", "attn_q", "q5_1"),
        ("q6_k", "attn_q", "q8_0"),
        ("iq4_xs", "attn_q", "iq4_nl"),
        ("q8_0", "attn_q", "q8_0"),
    ],
)
def test_narrow_rows_fall_back(recipe: str, name: str, fallback: str) -> None:
    assert choose(recipe, name, columns=320) == fallback
    assert choose(recipe, name, columns=40) == "f16"


def test_what_makes_the_inputs_of_layers_keeps_16_bits() -> None:
    for recipe in RECIPES:
        is_plain = recipe.usual in ("f32", "f16", "bf16")
        made = choose(recipe.name, "per_layer_model_proj", columns=256)
        assert made == (recipe.usual if is_plain else "f16")
        assert choose(recipe.name, "per_layer_token_embd", columns=256) == recipe.usual


@pytest.mark.parametrize("recipe", ["f32", "f16", "bf16"])
def test_plain_recipes(recipe: str) -> None:
    assert {choose(recipe, name, columns=33) for name in ("token_embd", "output", "attn_v")} == {recipe}


@pytest.mark.parametrize("recipe", [recipe.name for recipe in RECIPES])
def test_what_stays_f32(recipe: str) -> None:
    for name, shape in (
        ("output_norm.weight", (512,)),
        ("blk.0.attn_norm.weight", (512,)),
        ("blk.0.attn_q_norm.weight", (2, 512)),
        ("blk.0.attn_q.bias", (512,)),
        ("blk.0.ffn_gate_inp.weight", (8, 512)),
        ("rope_freqs.weight", (32,)),
        ("position_embd.weight", (512, 512)),
        ("token_types.weight", (2, 512)),
    ):
        assert tensor_type(recipe, name, shape, layer=0, layers=2, tied_output=False, query_groups=1) == "f32"


def test_experts_count_as_what_they_are_experts_of() -> None:
    name, shape = "blk.0.ffn_down_exps.weight", (8, 64, 512)
    assert tensor_type("q4_k_m", name, shape, layer=0, layers=8, tied_output=False, query_groups=1) == "q6_k"


def test_the_table_is_sound() -> None:
    for recipe in RECIPES:
        assert find_recipe(recipe.name.upper()) is recipe
        assert by_name(recipe.usual).encode is not None
        if recipe.name not in ("f32", "mxfp4"):
            assert gguf.LlamaFileType[f"MOSTLY_{recipe.name.upper()}"].value == recipe.file_type
    assert len({recipe.file_type for recipe in RECIPES}) == len(RECIPES)


def test_unknown_recipes_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot convert to 'q4_k_xl'; known are f32, f16, bf16, q4_0"):
        find_recipe("q4_k_xl")
    with pytest.raises(ModelError, match="cannot convert to 'iq1_s'"):
        tensor_type("iq1_s", "output.weight", (4, 4), layer=0, layers=1, tied_output=False, query_groups=1)
    assert fit_type("q4_k", 512) == "q4_k"
