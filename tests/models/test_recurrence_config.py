"""Recurrent layers in files: all spellings, refusals by name, and tensors in any of their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_fields import find_block, look
from random_model import make_weights
from tiny_models import TinyRun, make_gguf, make_source, read_golden

from mlxr.cache.shapes import CacheShape, PagesAndState, StateShape
from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.models import Decoder, Model, model_from_folder, model_from_gguf
from mlxr.models.components import Mamba2
from mlxr.models.families import read_folder

GRANITE = read_golden("granite4h")[0]
METADATA = read_folder(GRANITE).values
NEMOTRON, NEMOTRON_MOE = read_golden("nemotron-h")[0], read_golden("nemotron-h-moe")[0]


def list_recurrent(model: Model) -> list[bool]:
    return [layer.recurrence is not None for layer in model.layers]


@pytest.mark.parametrize(
    ("changes", "mixer"),
    [
        ({}, Mamba2(6, 32, 2, 24, 4)),
        ({"mamba_d_head": 32, "mamba_expand": None}, Mamba2(6, 32, 2, 24, 4)),
        ({"mamba_d_head": 48, "mamba_expand": 3}, Mamba2(6, 48, 2, 24, 4)),
        ({"mamba_n_groups": None, "mamba_d_conv": 3}, Mamba2(6, 32, 1, 24, 3)),
        ({"time_step_limit": [0.0, float("inf")], "mamba_proj_bias": False}, Mamba2(6, 32, 2, 24, 4)),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, Mamba2(6, 32, 2, 24, 4)),
    ],
)
def test_folders_of_granite(changes: dict[str, Any], mixer: Mamba2) -> None:
    config = model_from_folder(GRANITE | changes)
    assert look(config, "recurrence") == mixer
    assert list_recurrent(config) == [True, False, True, True]


@pytest.mark.parametrize("types", [["mamba", "attention"] * 2, ["linear_attention", "full_attention"] * 2])
def test_layers_have_two_spellings(types: list[str]) -> None:
    assert list_recurrent(model_from_folder(GRANITE | {"layer_types": types})) == [True, False, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_n_heads": None}, "mamba_n_heads is missing, expected a whole number"),
        ({"mamba_n_heads": 5}, "mamba_d_head is 'auto', expected so many that 5 heads have the 192 columns of all"),
        ({"mamba_d_head": 64}, "mamba_d_head is 64, expected so many that 6 heads have the 192 columns of all"),
        ({"mamba_n_groups": 4}, "mamba_n_groups is 4, expected a divisor of the 6 heads"),
        ({"mamba_d_state": 0}, "mamba_d_state is 0"),
        ({"mamba_d_conv": 17}, "mamba_d_conv is 17, expected a whole number from 2 to 16"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True: not supported"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is False: not supported"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\], expected none"),
        ({"layer_types": ["mamba", "attention", "mamba"]}, "layer_types is .* expected a list of 4, each one linear"),
        ({"layer_types": ["conv", "attention", "mamba", "mamba"]}, "layer_types is .* expected a list of 4"),
        ({"layer_types": None}, "layer_types is missing"),
        ({"layer_types": ["mamba"] * 4}, "layer_types is .* expected a layer that attends"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi', expected rope or nope"),
        ({"shared_intermediate_size": None}, "shared_intermediate_size is missing"),
    ],
)
def test_refusals_of_folders_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_folder(GRANITE | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 190}, "ssm.inner_size is 190, expected a multiple of the 6 heads"),
        ({"ssm.group_count": 4}, "ssm.group_count is 4, expected a divisor of the 6 heads"),
        ({"ssm.state_size": None}, "ssm.state_size is missing"),
        ({"ssm.conv_kernel": 1}, "ssm.conv_kernel is 1"),
        ({"attention.head_count_kv": [0, 2, 0]}, "head_count_kv is .* expected a whole number from 0 to 1024, or 4"),
        ({"attention.head_count_kv": [0, 2, 0, 1]}, "head_count_kv is .* one number for all layers that attend"),
        ({"attention.head_count_kv": [0] * 4}, "head_count_kv is .* of which there must be one"),
        ({"rope.scaling.finetuned": 1}, "rope.scaling.finetuned is 1, expected true or false"),
    ],
)
def test_refusals_of_gguf_files_name_the_key(changes: dict[str, Any], message: str) -> None:
    metadata = METADATA | {f"granitehybrid.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=message):
        model_from_gguf(metadata, {})


@pytest.mark.parametrize(
    "stated",
    [
        {"hybrid_override_pattern": "M-*-M"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"]},
        {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
    ],
)
def test_layers_of_one_block_have_letters_or_words(stated: dict[str, Any]) -> None:
    config = model_from_folder(NEMOTRON | {"hybrid_override_pattern": None} | stated)
    assert (len(config.layers), look(config, "recurrence")) == (5, Mamba2(6, 20, 2, 24, 4))
    assert [spec.mixer is None for spec in config.layers] == [False, True, False, True, False]
    assert [spec.feed_forward is None for spec in config.layers] == [True, False, True, False, True]
    assert config.cache_layers[1] is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "M-X-M"}, "hybrid_override_pattern is 'M-X-M', expected one of M, "),
        (NEMOTRON | {"hybrid_override_pattern": "M-M"}, "hybrid_override_pattern is 'M-M', expected .* that attends"),
        (NEMOTRON | {"hybrid_override_pattern": ""}, "hybrid_override_pattern is '', expected"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        (NEMOTRON | {"layers_block_type": "M*"}, r"layers_block_type is 'M\*', expected one of linear_attention"),
        (NEMOTRON | {"use_conv_bias": False}, "use_conv_bias is False: not supported"),
        (NEMOTRON | {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu': not supported"),
        (NEMOTRON | {"mamba_head_dim": None}, "mamba_head_dim is missing"),
    ],
)
def test_refusals_of_nemotron_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_folder(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_d_ssm": 121}, "mamba_d_head is 'auto', expected so many that 6 heads have the 121 columns of all"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate is True: norms before"),
        ({"projectors_bias": True}, "projectors_bias is True: not supported"),
        ({"mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\], expected a list of 2 numbers"),
        ({"ssm_multipliers": [1.0, 1, 1, 1, 0]}, r"ssm_multipliers\[4\] is 0, expected a number from 1e-09"),
        ({"key_multiplier": "2"}, "key_multiplier is '2', expected a number"),
    ],
)
def test_refusals_of_falcon_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_folder(read_golden("falcon-h1")[0] | changes)


def test_two_mixers_in_a_layer_keep_both() -> None:
    fields = read_golden("falcon-h1")[0] | {"ssm_multipliers": None, "mamba_d_ssm": None, "ssm_in_multiplier": 1.0}
    config = model_from_folder(fields)
    mixer = Mamba2(6, 32, 2, 24, 4, normed=False)
    kept = PagesAndState(CacheShape(2, 32), StateShape(mixer.state_floats))
    assert (look(config, "recurrence"), config.cache_layers) == (mixer, (kept, kept))
    assert read_folder(fields).factors["ssm_in.weight"].factors == (1.0,) * 5


def test_blocks_and_experts_may_be_in_one_model() -> None:
    """A key of our own states which layers have experts."""
    config = model_from_folder(NEMOTRON_MOE | {"hybrid_override_pattern": "ME*-M"})
    assert [spec.experts is not None for spec in config.layers] == [False, True, False, False, False]


def test_files_state_what_layers_have_that_only_draft() -> None:
    """These are the last layers, which are left out."""
    metadata = read_folder(NEMOTRON).values
    for name, last in (("feed_forward_length", 160), ("attention.head_count_kv", 2)):
        metadata[f"nemotron_h.{name}"] += [last]  # type: ignore[operator]
    metadata |= {"nemotron_h.block_count": 6, "nemotron_h.nextn_predict_layers": 1}
    layers = model_from_gguf(metadata, {}).layers
    assert [layer.mixer is not None for layer in layers] == [True, False, True, False, True]
    metadata["nemotron_h.feed_forward_length"] = [0, 160, 0, 96, 0, 0]
    with pytest.raises(ModelError, match=r"feed_forward_length is .* one number for all layers that are no mixers"):
        model_from_gguf(metadata, {})


@pytest.mark.parametrize("finetuned", [True, False, None])
@pytest.mark.parametrize("case", ["granite4h", "granite4", "granite"])
def test_gguf_files_of_granite_say_whether_layers_rotate(case: str, finetuned: bool | None) -> None:
    metadata = read_folder(read_golden(case)[0]).values
    metadata[f"{metadata['general.architecture']}.rope.scaling.finetuned"] = finetuned
    config = model_from_gguf(metadata, {})
    attending = [layer.attention for layer in config.layers if layer.attention is not None]
    assert {attention.rope.dim > 0 for attention in attending} == {finetuned is not False}


@pytest.mark.parametrize(("moe", "architecture"), [(0, "granite"), (8, "granitemoe")])
def test_granite_whose_layers_all_attend_is_a_granite(moe: int, architecture: str) -> None:
    """llama.cpp expects such files."""
    config = model_from_folder(read_golden("granite4")[0] | {"num_local_experts": moe, "num_experts_per_tok": moe // 4})
    assert (config.architecture, look(config, "recurrence")) == (architecture, None)
    block, experts = find_block(config), look(config, "experts")
    assert (experts.features == 64) if moe else (block is not None and block.features == 160)


def test_writers_may_drop_axes_of_one() -> None:
    """In files that llama.cpp quantised, a norm of one group is a vector."""
    config, seed, tokens, golden = read_golden("granite4h-moe")
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    for name in [name for name in tensors if name.endswith("ssm_norm.weight")]:
        assert tensors[name].shape == (1, 192)
        tensors[name] = make_source(name, tensors[name].to_float32().reshape(-1))
    model = Decoder(Context("reference"), model_from_gguf(metadata, tensors), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < 1e-4
