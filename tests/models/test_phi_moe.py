"""Phi-3.5-MoE as published, and what its GGUF files state or leave open about the choice of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_fields import look
from random_model import make_weights
from tiny_models import TinyRun, make_gguf, read_golden

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.kernels.moe import RoutingRule
from mlxr.models import Decoder, model_from_folder, model_from_gguf

JITTER = "phimoe.router_jitter_noise"
SCALING: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "short_mscale": 1.243163121016122,
    "long_mscale": 1.243163121016122,
    "original_max_position_embeddings": 4096,
}
# Of microsoft/Phi-3.5-MoE-instruct, whose folder brings its own code.
PUBLISHED: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "attention_bias": True,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "input_jitter_noise": 0.01,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": SCALING,
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}


def test_as_published() -> None:
    config = model_from_folder(PUBLISHED)
    assert config == model_from_folder(PUBLISHED | {"architectures": ["PhimoeForCausalLM"]})
    assert (look(config, "qkv_bias"), look(config, "output_bias"), config.has_output_bias) == (True, True, True)
    assert look(config, "experts").bias is False
    assert look(config, "experts").rule == RoutingRule(2, "sparsemixer", jitter=float(np.float32(0.01)))
    assert look(config, "rope_scaling").attention_factor == np.float32(1.243163121016122)
    layer = config.layers[0]
    assert (layer.norms.kind, layer.norms.bias, layer.norms.eps) == ("layer", True, np.float32(1e-5))
    assert layer.attention is not None
    assert layer.attention.window is None  # it is as long as the context


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3, expected 2, for which alone this routing is known"),
        ({"router_jitter_noise": -0.1}, r"router_jitter_noise is -0\.1, expected a number from"),
        ({"rope_scaling": SCALING | {"short_mscale": 1.5}}, r"short_mscale is 1\.5, expected the long_mscale 1\.24316"),
    ],
)
def test_what_is_not_known_of_it_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        model_from_folder(PUBLISHED | changes)


def test_a_file_that_states_no_jitter_shares_as_llama_cpp_does() -> None:
    """mlxr's own files state it and give the folder's model; in others the two shares sum up to 1."""
    config, seed, tokens, golden = read_golden("phimoe")
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    assert metadata[JITTER] == np.float32(config["router_jitter_noise"])
    assert metadata["phimoe.attention.layer_norm_rms_epsilon"] == np.float32(config["rms_norm_eps"])
    stated = model_from_gguf(metadata, tensors)
    del metadata[JITTER]
    unstated = model_from_gguf(metadata, tensors)
    assert look(unstated, "experts").rule == RoutingRule(2, "softmax_chosen")
    found = [TinyRun(Decoder(Context("reference"), each, tensors)).run(tokens) for each in (stated, unstated)]
    assert np.abs(found[0] - golden).max() < 1e-4
    assert np.abs(found[1] - golden).max() > 0.1
