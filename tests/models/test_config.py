"""Configurations from GGUF metadata and config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import encoder_models
import numpy as np
import pytest
import vision_models
from gguf_models import MODELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_fields import list_windows, look
from numpy.typing import NDArray
from random_model import RELATIVES
from tiny_models import CASES, GOLDENS, make_source, read_golden

from mlxr.cache.shapes import form_groups
from mlxr.core.errors import ModelError
from mlxr.kernels.rope import RopeScaling, inverse_frequencies, llama3_factors, yarn_attention_factor
from mlxr.models import Model, model_from_folder, model_from_gguf
from mlxr.models.components import Attention, ChannelDelta, FeedForward, Layer, Norms, Rope
from mlxr.models.families import FAMILIES, FOLDERS, read_folder, read_model
from mlxr.models.fields import OWN, OWN_KEYS
from mlxr.models.rotations import ROPE_FACTORS
from mlxr.models.weights import expected_tensors, gguf_name

TINYLLAMA_HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
TINYLLAMA_GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "tinyllama",
    "llama.block_count": 22,
    "llama.context_length": 2048,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 5632,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.tokens": ["x"] * 32000,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
PHI: dict[str, Any] = TINYLLAMA_HF | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "max_position_embeddings": 131072,
    "num_key_value_heads": None,
    "original_max_position_embeddings": 4096,
    "rope_scaling": LONGROPE,
    "sliding_window": 2047,
}
FACTOR = float(np.float32(1.5 / yarn_attention_factor(4.0))) * yarn_attention_factor(4.0)  # 1.5 in files' precision
NAMES = frozenset({"token_embd.weight", "output.weight", "output_norm.weight"})
TINYLLAMA_LAYER = Layer(
    Attention(32, 4, 64, scale=0.125, rope=Rope(10000.0, 64, interleaved=True)),
    FeedForward(5632, "silu"),
    Norms(float(np.float32(1e-5))),  # as GGUF files keep it
)
TINYLLAMA = Model("llama", (TINYLLAMA_LAYER,) * 22, 2048, 32000, 2048, interleaved_dim=64)
NOT_IN_GGUF = (  # which need keys of our own
    *("llama-bias-gelu", "llama-yarn-mscale", "gemma3-scale"),
    *("falcon", "gptneox", "mpt", "mpt-clamped"),  # GGUF has no key for their activation
    "qwen4exp",  # only the table itself says how many rows it has
    *("falcon-mamba", "gemma3n"),  # one's eps and the other's rank are not the published models'
)


def test_tinyllama_is_the_same_from_both() -> None:
    assert model_from_folder(TINYLLAMA_HF) == TINYLLAMA
    assert model_from_gguf(TINYLLAMA_GGUF, NAMES) == TINYLLAMA


@pytest.mark.parametrize("case", CASES)
def test_files_of_other_writers_say_the_same(case: str) -> None:
    """Without our own keys the names of a file's tensors decide; where they cannot, the model is another one."""
    fields = json.loads((GOLDENS / case / "config.json").read_text())
    stated, config = read_folder(fields), model_from_folder(fields)
    plain = {key: value for key, value in stated.values.items() if not key.startswith(OWN)}
    tensors = dict.fromkeys(gguf_name(name, config) for name in expected_tensors(config)) | stated.list_vectors()
    assert model_from_gguf(stated.values, tensors) == config
    assert (model_from_gguf(plain, tensors) == config) == (case not in NOT_IN_GGUF)  # type: ignore[arg-type]


def test_windows_that_differ_by_layer_are_kept() -> None:
    fields = QWEN2 | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 20}
    config = model_from_folder(fields)
    windowed = [window is not None for window in list_windows(config)]
    assert windowed == [False] * 20 + [True] * 2
    assert [cache.window for cache in config.cache_layers[19:]] == [None, 8, 8]
    assert read_folder(fields).values["mlxr.attention.sliding_window_layers"] == windowed


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
            "rope.scaling.yarn_truncate",
            False,
        ),
    ],
)
def test_what_gguf_cannot_state_has_keys_of_our_own(changes: dict[str, Any], key: str, value: object) -> None:
    assert OWN + key not in read_folder(TINYLLAMA_HF).values
    assert read_folder(TINYLLAMA_HF | changes).values[OWN + key] == value


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_proportional_rotations_are_factors_of_which_most_leave_nothing(factor: float) -> None:
    """The first pairs turn as those of a wholly rotated head would; the factors of the others stop them."""
    stated = read_folder(TINYLLAMA_HF | {"rope_scaling": PROPORTIONAL | {"factor": factor}})
    assert stated.values["llama.rope.dimension_count"] == 64
    assert stated.vectors[ROPE_FACTORS] == [factor] * 8 + [1e30] * 24


def test_llama3_is_a_tensor_of_factors() -> None:
    stated = read_folder(TINYLLAMA_HF | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}})
    factors = np.array(stated.vectors[ROPE_FACTORS])
    np.testing.assert_array_equal(factors, llama3_factors(inverse_frequencies(64, 10000.0), 8.0, 512, 1.0, 4.0))
    assert (factors[0], factors[-1]) == (1.0, 8.0)


@pytest.mark.slow
def test_keys_of_our_own_are_read_or_refused() -> None:
    assert all(
        OWN + key in json.dumps(list_own_keys()) for key in OWN_KEYS if not key.startswith(("dense", "embedding"))
    )
    with pytest.raises(ModelError, match=r"mlxr\.new is there, which this version of mlxr does not know"):
        model_from_gguf(TINYLLAMA_GGUF | {"mlxr.new": 1}, NAMES)
    smol = read_folder(read_golden("smollm3")[0]).values
    with pytest.raises(ModelError, match=r"mlxr\.rope\.layers is \[1\], expected [0-9]+ flags"):
        model_from_gguf(smol | {"mlxr.rope.layers": [1]}, NAMES)
    with pytest.raises(ModelError, match=r"mlxr\.rope\.layers is \[1\], expected none, as this family"):
        model_from_gguf(TINYLLAMA_GGUF | {"mlxr.rope.layers": [1]}, NAMES)
    with pytest.raises(ModelError, match=r"mlxr\.activation is 'x', expected one of silu"):
        model_from_gguf(TINYLLAMA_GGUF | {"mlxr.activation": "x"}, NAMES)


def list_own_keys() -> list[str]:
    """The keys of our own in the folders of the goldens, and of a few beside them."""
    folders = [read_golden(case)[0] for case in CASES]
    folders += [encoder_models.read_golden(case).config for case in encoder_models.CASES]
    smol, gptoss = read_golden("smollm3")[0], read_golden("gpt-oss")[0]
    folders += [
        smol | {"no_rope_layers": [1] * smol["num_hidden_layers"]},
        gptoss | {"rope_scaling": YARN | {"truncate": True}},
        QWEN2 | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 20},
        read_golden("mixtral")[0]
        | {"norm_topk_prob": False, "routed_scaling_factor": 2.0, "n_group": 2, "topk_group": 1},
    ]
    return [key for fields in folders for key in read_folder(fields).values if key.startswith(OWN)]


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"model_type": None, "num_key_value_heads": None}, "kv_heads", 32),
        ({"architectures": None}, "architecture", "llama"),
        ({"head_dim": 128}, "head_dim", 128),
        ({"num_key_value_heads": 1}, "kv_heads", 1),
        ({"partial_rotary_factor": 0.5}, "rope_dim", 32),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None}, "rope_theta", 5e5),
        ({"attention_bias": True}, "qkv_bias", True),
        ({"attention_bias": True}, "output_bias", True),
        ({"mlp_bias": True}, "ffn_bias", True),
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling", RopeScaling("linear", 2.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            "rope_scaling",
            RopeScaling("yarn", 4.0, original_context=2048, attention_factor=FACTOR),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "context_length", 8192),
    ],
)
def test_hf_fields(changes: dict[str, Any], field: str, value: object) -> None:
    assert look(model_from_folder(TINYLLAMA_HF | changes), field) == value


MISTRAL = TINYLLAMA_HF | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = TINYLLAMA_HF | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MISTRAL | {"sliding_window": 512}, 512),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL, None),  # as long as the context
        (MISTRAL | {"max_position_embeddings": 8192}, 4096),
        (QWEN2 | {"sliding_window": 512}, None),
        (QWEN2 | {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}, 512),
        (QWEN2 | {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 22}, None),
        (QWEN2 | {"sliding_window": 512, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 22}, 512),
        (QWEN2 | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 20}, 8),
        (TINYLLAMA_HF | {"sliding_window": 512}, None),
    ],
)
def test_hf_windows(config: dict[str, Any], window: int | None) -> None:
    assert look(model_from_folder(config), "sliding_window") == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["NoSuchModel"]},
            "supported are " + ", ".join(sorted({folder.hf_class for _, folder in FOLDERS})),
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not supported"),
        ({"architectures": []}, r"architectures is \[\], expected a list of one class"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list"),
        (
            {"architectures": None, "model_type": "unknown"},
            "architecture 'unknown' is not supported; .*supported are "
            + ", ".join(sorted({folder.model_type for _, folder in FOLDERS})),
        ),
        ({"architectures": None, "model_type": None}, "architecture '' is not supported"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2', expected llama"),
        ({"hidden_size": None}, "hidden_size is missing, expected a whole number"),
        ({"hidden_size": 2047}, "num_attention_heads is 32, expected a divisor of the hidden size 2047"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000, expected"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 2048.0}, "hidden_size is 2048.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number from 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5, expected a divisor of the 32 heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64, expected a divisor"),
        ({"head_dim": 63}, "head_dim 63 with partial_rotary_factor 1 rotates 63 elements"),
        ({"partial_rotary_factor": 0.0}, "rotates 0 elements"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_act": "selu"}, "hidden_act is 'selu', expected one of silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"num_local_experts": 8}, "num_local_experts is 8: mixture of experts is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: logit soft-capping"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config is .* convert the original weights"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type 'dynamic' is not supported"),
        ({"rope_scaling": LONGROPE | {"short_factor": None}}, "rope_scaling.short_factor is missing, expected a list"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1, "2"]}}, r"long_factor\[1\] is '2', expected a number from"),
        ({"rope_scaling": LONGROPE | {"long_factor": [0.0] * 32}}, r"long_factor\[0\] is 0.0, expected a number from"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "1 short_factors and 32 long_factors, expected as many"),
        ({"rope_scaling": LONGROPE, "head_dim": 80}, "rope_dim 80 with 32 longrope factors, expected 40"),
        ({"rope_scaling": LONGROPE | {"type": "yarn"}}, "short_factor is .*: only known with rope_type longrope"),
        (
            {"rope_scaling": {"type": "magic"}},
            "'magic', expected default, linear, longrope, ntk, proportional, yarn or llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor is 1.0, expected more than the low_freq_factor 1",
        ),
        ({"rope_scaling": PROPORTIONAL | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ({"rope_scaling": PROPORTIONAL | {"partial_rotary_factor": 0.0}}, "partial_rotary_factor is 0.0"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        ({"rope_theta": 10**5000}, "rope_theta is a number of 16610 bits, expected a number from"),
        ({"hidden_size": 10**5000}, "hidden_size is a number of 16610 bits, expected a whole number"),
        (
            {"head_dim": 64, "partial_rotary_factor": 0.04, "rope_scaling": {"type": "ntk", "factor": 2.0}},
            "rope_dim 2 with ntk scaling, which needs at least 4",
        ),
    ],
)
def test_hf_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_folder(TINYLLAMA_HF | changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types is .* expected a list of 22",
        ),
    ],
)
def test_family_refusals_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_folder(config)


@pytest.mark.parametrize(
    ("changes", "names", "field", "value"),
    [
        ({}, NAMES - {"output.weight"}, "is_tied", True),
        ({}, NAMES | {"blk.0.attn_q.bias"}, "qkv_bias", True),
        ({}, NAMES | {"blk.0.attn_output.bias"}, "output_bias", True),
        ({"llama.attention.head_count_kv": None}, NAMES, "kv_heads", 32),
        ({"llama.attention.head_count_kv": [4] * 22}, NAMES, "kv_heads", 4),
        ({"llama.attention.head_count_kv": np.full(22, 4, np.int32)}, NAMES, "kv_heads", 4),
        ({"llama.attention.key_length": 128, "llama.attention.value_length": 128}, NAMES, "head_dim", 128),
        ({"llama.rope.dimension_count": 32}, NAMES, "rope_dim", 32),
        ({"llama.rope.freq_base": 5e5}, NAMES, "rope_theta", 5e5),
        ({"llama.attention.sliding_window": 1024}, NAMES, "sliding_window", 1024),
        ({"llama.attention.sliding_window": 4096}, NAMES, "sliding_window", None),
        ({"llama.attention.sliding_window": 0}, NAMES, "sliding_window", None),
        ({"llama.vocab_size": 32000}, NAMES, "vocab_size", 32000),
        ({"llama.vocab_size": 77, "tokenizer.ggml.tokens": None}, NAMES, "vocab_size", 77),
        ({"llama.rope.scaling.factor": 4.0}, NAMES, "rope_scaling", RopeScaling("linear", 4.0)),
        ({"llama.rope.scale_linear": 4.0}, NAMES, "rope_scaling", RopeScaling("linear", 4.0)),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, NAMES, "rope_scaling", None),
        ({"llama.expert_count": 0}, NAMES, "experts", None),
    ],
)
def test_gguf_fields(changes: dict[str, Any], names: frozenset[str], field: str, value: object) -> None:
    assert look(model_from_gguf(TINYLLAMA_GGUF | changes, dict.fromkeys(names)), field) == value  # type: ignore[arg-type]


def test_gguf_yarn_multiplies_the_recommended_factor() -> None:
    changes: dict[str, object] = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    scaling = look(model_from_gguf(TINYLLAMA_GGUF | changes, NAMES), "rope_scaling")
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 4.0, 512)
    assert scaling.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
    stretched = model_from_gguf(TINYLLAMA_GGUF | changes | {"llama.rope.scaling.yarn_log_multiplier": 1.0}, NAMES)
    assert (
        look(stretched, "rope_scaling").attention_factor == 0.5
    )  # as llama.cpp has it: mscale 1 over mscale_all_dim 1


def test_command_r_states_its_context_twice() -> None:
    """The published models say 8192 positions, and state the context that they were made for in another field."""
    config = read_golden("cohere")[0]
    assert model_from_folder(config).context_length == 128
    assert model_from_folder(config | {"model_max_length": 131072}).context_length == 131072


def test_stablelm_with_two_norms_in_a_layer_has_blocks_in_a_row() -> None:
    """Converters state a parallel residual for every StableLM whose configuration says nothing about it."""
    metadata = read_folder(read_golden("stablelm")[0]).values | {"stablelm.use_parallel_residual": True}
    del metadata[f"{OWN}parallel_blocks"]
    assert not model_from_gguf(metadata, {"blk.0.ffn_norm.weight": None}).layers[0].is_parallel  # type: ignore
    assert model_from_gguf(metadata, {}).layers[0].is_parallel
    llama = {"llama.use_parallel_residual": True}
    with pytest.raises(ModelError, match="use_parallel_residual is True: parallel residual is not supported"):
        model_from_gguf(TINYLLAMA_GGUF | llama, {})


def test_starcoder_has_biases_unless_its_configuration_denies_them() -> None:
    config, biases = read_golden("starcoder2")[0], ("qkv_bias", "output_bias", "ffn_bias")
    unstated = model_from_folder({key: value for key, value in config.items() if key != "use_bias"})
    assert unstated == model_from_folder(config)
    assert [look(unstated, name) for name in biases] == [True] * 3
    without = model_from_folder(config | {"use_bias": False})
    assert [look(without, name) for name in biases] == [False] * 3


@pytest.mark.parametrize(
    ("case", "key", "message"),
    [
        ("cohere2", "use_qk_norm", "layer norms of queries and keys are not supported"),
        ("llama-mha", "qk_layernorm", "layer norms of queries and keys are not supported"),
        ("cohere", "use_parallel_residual", "parallel residual is not supported"),
    ],
)
def test_what_other_families_have_is_refused_by_name(case: str, key: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"{key} is True: {message}"):
        model_from_folder(read_golden(case)[0] | {key: True})


def test_the_part_for_text_is_what_counts() -> None:
    """Errors name keys as the file spells them; quantisation and tied embeddings are stated outside the part."""
    outer = {"model_type": "mistral3", "text_config": read_golden("ministral3")[0]}
    assert not model_from_folder(outer).is_tied
    assert model_from_folder(outer | {"tie_word_embeddings": True}).is_tied
    with pytest.raises(ModelError, match=r"quantization_config is .*: quantised like this is not supported"):
        model_from_folder(outer | {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(ModelError, match=r"text_config\.hidden_size is 0, expected"):
        model_from_folder(outer | {"text_config": outer["text_config"] | {"hidden_size": 0}})


def test_phi_as_published() -> None:
    """Phi-3.5-mini states the original context beside the scaling, Phi-3 the scaling's older name, Phi-4 no window."""
    config = model_from_folder(PHI)
    assert (config.context_length, look(config, "sliding_window")) == (131072, 2047)
    assert (config.kv_heads, look(config, "rope_dim")) == (32, 64)
    scaling = look(config, "rope_scaling")
    assert scaling is not None
    assert (scaling.original_context, scaling.attention_factor) == (4096, pytest.approx(1.1902380714238083))
    assert model_from_folder(PHI | {"rope_scaling": LONGROPE | {"type": "su"}}) == config
    assert look(model_from_folder(PHI | {"sliding_window": None}), "sliding_window") is None
    unstated = {key: value for key, value in PHI.items() if key != "sliding_window"}
    assert look(model_from_folder(unstated), "sliding_window") is None
    stated = look(model_from_folder(PHI | {"rope_scaling": LONGROPE | {"factor": 16.0}}), "rope_scaling")
    assert stated is not None
    assert stated.attention_factor == pytest.approx((1 + np.log(16) / np.log(4096)) ** 0.5)


def test_an_indexer_bounds_the_context_and_kimi_is_a_deepseek() -> None:
    for case, key in (("deepseek32", "index_topk"), ("glm-dsa", "index_topk"), ("qwen4exp", "indexer_budget")):
        config = read_golden(case)[0]
        assert config["max_position_embeddings"] == 256
        assert model_from_folder(config).context_length == config[key] == 160
    config = read_golden("glm5-next")[0]
    assert model_from_folder(config).context_length == 160 + 7  # and the tokens behind the last pool
    assert model_from_folder(config | {"model_type": "glm5_next"}) == model_from_folder(config)
    with pytest.raises(ModelError, match="index_kpool_always_select_tail is False"):
        model_from_folder(config | {"index_kpool_always_select_tail": False})
    with pytest.raises(ModelError, match="index_topk is 161, expected a multiple of the 8 tokens of a pool"):
        model_from_folder(config | {"index_topk": 161})
    linear = {"num_heads": 4, "head_dim": 24, "short_conv_kernel_size": 4}
    for changes, bound in (({}, -5.0), ({"gate_lower_bound": None}, -5.0), ({"gate_lower_bound": -2.0}, -2.0)):
        delta = model_from_folder(config | {"linear_attn_config": linear | changes}).layers[0].recurrence
        assert delta == ChannelDelta(4, 24, 4, bound, has_flat_rates=True)
    for free in (
        {"linear_lower_bound": None},
        {"linear_attn_config": linear | {"gate_lower_bound": None, "safe_gate": False}},
    ):
        delta = model_from_folder(config | free).layers[0].recurrence
        assert delta == ChannelDelta(4, 24, 4, has_flat_rates=True)
    config = read_golden("deepseek3")[0]
    assert model_from_folder(config | {"model_type": "kimi_k2"}) == model_from_folder(config)
    with pytest.raises(ModelError, match="model_type is 'llama', expected deepseek_v3, as architectures"):
        model_from_folder(config | {"model_type": "llama"})


def test_a_window_as_long_as_the_context_is_none() -> None:
    for window, seen in ((131071, 131071), (131072, None), (262144, None)):
        config = model_from_folder(PHI | {"sliding_window": window})
        assert {cache.window for cache in config.cache_layers} == {seen}


def test_the_context_that_is_served_decides_about_longrope() -> None:
    """Everything up to the original context is one model, everything beyond it is another one."""
    config = model_from_folder(PHI)
    assert config.limit_context(None) is config.limit_context(4097) is config.limit_context(1 << 20) is config
    short = config.limit_context(4096)
    assert short == config.limit_context(10) == replace(config, context_length=4096)
    assert model_from_folder(PHI | {"max_position_embeddings": 1024}).limit_context(512).context_length == 1024
    assert TINYLLAMA.limit_context(512) is TINYLLAMA


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"rope.scaling.type": "longrope"}, {}, "tensor rope_factors_short.weight is missing, expected a vector"),
        ({}, {"long": np.ones(32)}, "tensor rope_factors_short.weight is missing, expected a vector"),
        ({}, {"long": np.ones((32, 2)), "short": np.ones(32)}, r"rope_factors_long.weight is of shape \(32, 2\)"),
        ({}, {"long": np.ones(32), "short": np.zeros(32)}, "rope_factors_short.weight holds 0.0 at 0; it must be"),
        ({}, {"long": np.ones(31), "short": np.ones(31)}, "rope_dim 64 with 31 longrope factors, expected 32"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 32.0},
            {"long": np.ones(32), "short": np.ones(32)},
            "rope.scaling.factor is 32.0, expected none, as longrope has a factor for each pair",
        ),
    ],
)
def test_broken_longrope_in_gguf_is_refused(
    changes: dict[str, object], factors: dict[str, NDArray[np.float64]], message: str
) -> None:
    named = {f"rope_factors_{kind}.weight": values.astype(np.float32) for kind, values in factors.items()}
    tensors = dict.fromkeys(NAMES) | {name: make_source(name, values) for name, values in named.items()}
    with pytest.raises(ModelError, match=message):
        model_from_gguf(TINYLLAMA_GGUF | {f"llama.{key}": value for key, value in changes.items()}, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": 3}, "general.architecture is 3, expected a string"),
        (
            {"general.architecture": "unknown"},
            "'unknown', which is not supported; supported are " + ", ".join(sorted(family.name for family in FAMILIES)),
        ),
        ({"general.architecture": "llada-moe"}, "'llada-moe', which is not supported: it writes by diffusion"),
        (
            {"general.architecture": "qwen9exp"},
            "'qwen9exp', which is not supported; the nearest name that is: qwen4exp",
        ),
        ({"general.architecture": "olmo9" * 10**5}, "docs/adding.md says how to ask for a family"),
        ({"general.architecture": "qwen2"}, "qwen2.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count is 0, expected a whole number from 1"),
        ({"llama.block_count": 2**63}, "llama.block_count is 9223372036854775808"),
        ({"llama.embedding_length": 2050}, "head_count is 32, expected a divisor of the embedding length 2050"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv is 3, expected a divisor of the 32 heads"),
        ({"llama.attention.head_count_kv": [4, 8]}, r"head_count_kv is \[4, 8\], expected a whole number"),
        ({"llama.attention.head_count_kv": [[4]]}, r"head_count_kv is \[\[4\]\]"),
        ({"llama.attention.head_count_kv": []}, r"head_count_kv is \[\]"),
        ({"llama.attention.value_length": 32}, "value_length is 32, expected the key length 64"),
        ({"llama.rope.dimension_count": 63}, "dimension_count is 63, expected an even number up to the head size 64"),
        ({"llama.rope.dimension_count": 128}, "dimension_count is 128, expected an even number up to"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.context_length": -5}, "llama.context_length is -5"),
        ({"llama.feed_forward_length": 1 << 40}, "feed_forward_length is 1099511627776"),
        ({"llama.vocab_size": 31999}, "vocab_size is 31999, expected the 32000 tokens of tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": None}, "llama.vocab_size is missing"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: logit soft-capping"),
        ({"llama.attention.causal": False}, "attention.causal is False: only causal"),
        ({"llama.attention.sliding_window_pattern": np.ones(22, bool)}, "windows that differ by layer"),
        ({"llama.rope.scaling.type": "magic"}, "type is 'magic', expected none, linear, longrope or yarn"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scale_linear is missing, expected a factor above 0"),
        ({"llama.rope.scaling.factor": float("nan")}, "rope.scaling.factor is nan"),
        ({"llama.rope.scaling.alpha": 4.0}, "rope.scaling.alpha is 4.0"),
        ({"llama.rope.freq_base": -1.0}, "freq_base is -1.0"),
    ],
)
def test_gguf_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        model_from_gguf(TINYLLAMA_GGUF | changes, NAMES)
    assert "\n" not in str(caught.value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.lists(st.integers(), max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


# the machine may be busy: no limits on time
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(read: Callable[[], Model]) -> None:
    """A configuration or a ModelError of one line; nothing else may come out."""
    try:
        read()
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 -- an error is one of two allowed outcomes


@PATIENT
@given(st.dictionaries(st.sampled_from(sorted(TINYLLAMA_HF)), VALUES, max_size=3))
def test_any_hf_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    outcome(lambda: model_from_folder(TINYLLAMA_HF | changes))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "beta_fast": 32}


@PATIENT
@pytest.mark.parametrize("scaling", [YARN, LONGROPE | {"factor": 4.0}], ids=["yarn", "longrope"])
@given(st.data())
def test_any_hf_scaling_is_read_or_refused(scaling: dict[str, Any], data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(scaling)), VALUES, max_size=3))
    outcome(lambda: model_from_folder(TINYLLAMA_HF | {"rope_scaling": scaling | changes}))


@PATIENT
@given(st.dictionaries(st.sampled_from(sorted(TINYLLAMA_GGUF)), VALUES, max_size=3))
def test_any_gguf_metadata_is_read_or_refused(changes: dict[str, Any]) -> None:
    outcome(lambda: model_from_gguf(TINYLLAMA_GGUF | changes, NAMES))


ATTENTION, BLOCK = TINYLLAMA_LAYER.mixer, TINYLLAMA_LAYER.feed_forward


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (TINYLLAMA, {"layers": ()}, "model has layers 0"),
        (TINYLLAMA, {"logit_scale": 0.0}, "model has logit_scale 0.0"),
        (ATTENTION, {"heads": 31}, "model has 31 heads, which its kv_heads 4 do not divide"),
        (ATTENTION, {"rope": Rope(10000.0, 66, interleaved=True)}, "rope_dim 66, expected at most head_dim 64"),
        (ATTENTION, {"window": 0}, "sliding_window 0"),
        (ATTENTION, {"scale": 0.0}, "attention_scale 0.0"),
        (Rope(10000.0, 64, interleaved=True), {"dim": 65}, "rope_dim 65, expected even"),
        (Rope(10000.0, 64, interleaved=True), {"theta": 1.0}, "rope_theta 1.0"),
        (TINYLLAMA_LAYER.norms, {"eps": 0.0}, "norms with eps 0.0"),
        (TINYLLAMA_LAYER, {"residual_scale": 0.0}, "residual_scale 0.0"),
        (BLOCK, {"activation": "selu"}, "activation 'selu'"),
        (BLOCK, {"features": 0}, "model has ffn 0"),
    ],
)
def test_a_model_checks_itself(part: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(part, **changes)


def test_goldens_cover_every_architecture() -> None:
    folders = [read_golden(case)[0] for case in CASES]
    folders += [encoder_models.read_golden(case).config for case in encoder_models.CASES]
    seeing = [vision_models.read_golden(case).config["text_config"] for case in vision_models.CASES]
    assert {config["model_type"] for config in folders + seeing} == {folder.model_type for _, folder in FOLDERS} - {
        *("roberta", "kimi_k2", "glm5_next"),
        *("qwen2_vl", "qwen2_5_vl"),  # whose text has no part of its own: test_vision.py
    }
    names = {model_from_folder(config).architecture for config in folders}
    assert names | set(RELATIVES) | set(MODELS) == {family.name for family in FAMILIES}
    assert not names & set(RELATIVES)


def test_exaone4_of_64_layers_has_windows_unless_it_says_that_it_has_none() -> None:
    changes = {"num_hidden_layers": 64, "layer_types": ["full_attention"] * 64, "max_position_embeddings": 8192}
    stated = read_folder(read_golden("exaone4-full")[0] | changes)
    assert all(attention.window is None and attention.rope.dim for attention in list_attention(read_model(stated)))
    values = {key: value for key, value in stated.values.items() if "sliding_window" not in key}
    silent = list_attention(model_from_gguf(values, stated.list_vectors()))
    assert [attention.window for attention in silent] == [4096, 4096, 4096, None] * 16
    assert [attention.rope.dim > 0 for attention in silent] == [True, True, True, False] * 16


def list_attention(model: Model) -> list[Attention]:
    """The attention of each layer."""
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]


def test_layers_that_share_keys_keep_nothing_of_their_own() -> None:
    config = model_from_folder(read_golden("gemma4-shared")[0])
    groups = form_groups(config.cache_layers)
    assert groups.pools == (2, 2)  # of eight layers
    assert groups.places[4:] == (groups.places[2], groups.places[3]) * 2
    assert [shape.head_dim for shape in groups.shapes] == [48, 64]
    assert [shape.window for shape in groups.shapes] == [7, None]


def test_layers_have_inputs_unless_it_is_said_that_they_do_not() -> None:
    config = read_golden("gemma4-shared")[0]
    assert model_from_folder(config).layers[0].inputs is None
    assert model_from_folder(config | {"hidden_size_per_layer_input": None}).layers[0].inputs is None
    del config["hidden_size_per_layer_input"]
    unstated = model_from_folder(config).layers[0].inputs
    assert unstated is not None
    assert unstated.features == 256
    made = model_from_folder(config | {"hidden_size_per_layer_input": 24})
    changed = read_folder(config | {"hidden_size_per_layer_input": 24})
    assert changed.values["gemma4.embedding_length_per_layer_input"] == 24
    spec = made.layers[0].inputs
    assert spec is not None
    assert (spec.table_scale, spec.scale, spec.eps) == (24**0.5, 0.5**0.5, look(made, "rms_eps") * made.hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"enable_moe_block": True, "num_experts": 8}, "top_k_experts is missing"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1, expected a whole number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': only causal"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7, expected so many that each kind of layer"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9, expected a whole number from 0 to 8"),
        (
            {"per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 32}}},
            "per_layer_config is .* expected the same",
        ),
        ({"global_head_dim": 65}, "global_head_dim is 65, expected an even number"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads is 3, expected divisors of the 4 heads",
        ),
    ],
)
def test_gemma4_folders_that_make_no_sense(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_folder(read_golden("gemma4-shared")[0] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_length_per_layer_input": -1}, "embedding_length_per_layer_input is -1, expected a whole number"),
        ({"attention.head_count_kv": [2, 1] * 3 + [1, 2]}, "head_count_kv is .* as many for all layers with a window"),
        ({"attention.head_count_kv": [2] * 7}, "head_count_kv is .* or 8 of them"),
        ({"feed_forward_length": [160, 161] * 4}, "feed_forward_length is .* as many for all layers with keys"),
        ({"attention.value_length_swa": 32}, "value_length_swa is 32, expected the key length 48"),
        ({"attention.key_length_swa": None}, "key_length_swa is missing"),
        ({"attention.shared_kv_layers": -1}, "shared_kv_layers is -1"),
    ],
)
def test_gemma4_files_that_make_no_sense(change: dict[str, object], message: str) -> None:
    fields = read_golden("gemma4-shared")[0]
    metadata, factors = read_folder(fields).values, {ROPE_FACTORS: make_source(ROPE_FACTORS, np.ones(32, np.float32))}
    for name in ("attention.keys_as_values", "tied_embeddings"):
        del metadata[OWN + name]
    assert model_from_gguf(metadata, factors | {"blk.1.attn_v.weight": factors[ROPE_FACTORS]}) == model_from_folder(
        fields
    )
    with pytest.raises(ModelError, match=message):
        model_from_gguf(metadata | {f"gemma4.{key}": value for key, value in change.items()}, factors)
    with pytest.raises(ModelError, match=f"{ROPE_FACTORS} is missing"):
        model_from_gguf(metadata, {})
