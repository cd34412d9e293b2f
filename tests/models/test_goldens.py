"""Logits of tiny models of every family against those of `transformers` in float32 (tools/make_goldens.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_fields import change as change_model
from model_fields import find_experts, look
from random_model import RELATIVES, count_experts, give_name, make_weights
from safetensors.numpy import save_file
from tiny_models import (
    CASES,
    TinyRun,
    build_gguf,
    build_hf,
    change_layers,
    make_gguf,
    make_hf_tensors,
    make_source,
    read_golden,
)

from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource, TensorToWrite, open_gguf, open_safetensors, write_gguf
from mlxr.kernels.activate import Activation
from mlxr.kernels.context import Context
from mlxr.kernels.rope import QueryTemperature
from mlxr.model_files.files import read_contents
from mlxr.models import Decoder, Model, model_from_folder, model_from_gguf
from mlxr.models.components import BalancedStreams, ChannelDelta, Experts, FeedForward, GatedDelta, Mamba
from mlxr.models.components.attention import Slopes
from mlxr.models.rotations import LONG_FACTORS, SHORT_FACTORS
from mlxr.models.weights import arrange_tensors

TOLERANCE = 1e-4
PARTS = (0.9, 1.4, 0.8, 1.1, 0.7)  # of the golden Falcon: its `ssm_multipliers`


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_reference_equals_golden(case: str) -> None:
    config, seed, tokens, golden = read_golden(case)
    logits = TinyRun(build_hf(Context("reference"), config, seed)).run(tokens)
    assert logits.shape == golden.shape
    assert np.abs(logits - golden).max() < TOLERANCE


@pytest.mark.parametrize("name", RELATIVES)
def test_other_names_of_the_same_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seed, tokens, golden = read_golden(RELATIVES[name])
    give_name(monkeypatch, config["model_type"], name)
    model = build_gguf(Context("reference"), config, seed)
    assert model.config.architecture == name
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE


def test_layers_of_deci_may_lack_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without attention is one whose attention adds nothing; the same holds without a feed-forward block."""
    config, seed, tokens, _ = read_golden("llama-llama3")
    weights = make_weights(config, seed)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        weights[name] = np.zeros_like(weights[name])
    golden = TinyRun(Decoder(Context("reference"), model_from_folder(config), make_hf_tensors(weights, config))).run(
        tokens
    )
    give_name(monkeypatch, "llama", "deci")
    metadata, tensors = make_gguf(weights, config)
    lists = {"head_count": (4, 0), "head_count_kv": (2, 0)}
    metadata |= {f"deci.attention.{name}": list(counts) for name, counts in lists.items()}
    metadata["deci.feed_forward_length"] = [0, config["intermediate_size"]]
    kept = {name: one for name, one in tensors.items() if not name.startswith(("blk.0.ffn_", "blk.1.attn_"))}
    found = TinyRun(Decoder(Context("reference"), model_from_gguf(metadata, kept), kept)).run(tokens)
    np.testing.assert_allclose(found, golden, atol=1e-5)
    for name, counts, message in (
        ("attention.head_count_kv", [0, 0], "0 in layers without heads alone"),
        ("feed_forward_length", [0, 0], "in layers that do not attend"),
    ):
        with pytest.raises(ModelError, match=message):
            model_from_gguf(metadata | {f"deci.{name}": counts}, kept)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_gguf_layout_equals_golden(case: str) -> None:
    """Permuted rows and interleaved rotation, metadata written and read back: the same model."""
    config, seed, tokens, golden = read_golden(case)
    model = build_gguf(Context("reference"), config, seed)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_chunked_reference_equals_golden(case: str) -> None:
    config, seed, tokens, golden = read_golden(case)
    logits = TinyRun(build_hf(Context("reference"), config, seed)).run(tokens, chunk_tokens=7)
    assert np.abs(logits - golden).max() < TOLERANCE


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama-linear", {"rope_scaling": None}),
        ("mixtral", {"rope_theta": 10000.0}),
        ("granitemoe", {"residual_scale": 1.0}),
        ("granitemoe-shared", {"residual_scale": 1.0}),
        ("granitemoe", {"attention_scale": None}),
        ("glm4moe", {"rope_dim": 32}),
        ("glm4moe-groups", {"rope_dim": 12}),
        ("gpt-oss", {"sliding_window": 8}),
        ("gpt-oss", {"window_layers": None}),
        ("gpt-oss", {"window_layers": (False, True, False, True)}),
        ("gpt-oss", {"rope_scaling": None}),
        ("gpt-oss", {"rms_eps": 1e-2}),
        ("llama-yarn", {"rope_scaling": None}),
        ("llama-yarn-mscale", {"rope_scaling": None}),
        ("llama-bias-gelu", {"activation": "silu"}),
        ("mistral-window", {"sliding_window": None}),
        ("ministral3", {"query_temperature": None}),
        ("ministral3", {"query_temperature": QueryTemperature(0.25, 11)}),
        ("ministral3", {"rope_scaling": None}),
        ("phimoe", {"rope_scaling": None}),
        ("phimoe", {"rms_eps": 1e-2}),
        ("phi3-long", {"rope_scaling": None}),
        ("phi3-short", {"rope_scaling": None}),
        ("phi3-short", {"context_length": 128}),
        ("phi3-short", {"sliding_window": None}),
        ("phi3-short", {"sliding_window": 12}),
        ("gptj", {"rope_interleaved": False}),
        ("gptj", {"rope_dim": 8}),
        ("bitnet", {"rope_theta": 10000.0}),
        ("gptneox", {"rope_theta": 10000.0}),
        ("gptneox", {"rope_dim": 24}),
        ("gptneox", {"activation": "silu"}),
        ("falcon", {"rope_interleaved": True}),
        ("falcon-40b", {"rope_theta": 100.0}),
        ("bloom", {"biases": None}),
        ("mpt", {"biases": None}),
        ("mpt", {"activation": "silu"}),
        ("mpt-clamped", {"clamp": None}),
        ("mpt-clamped", {"biases": Slopes(128)}),
        ("olmo-clamped", {"clamp": None}),
        ("dbrx", {"clamp": None}),
        ("dbrx", {"rope_theta": 10000.0}),
        ("dbrx", {"rope_interleaved": True}),
        ("dbrx", {"rms_eps": 1e-2}),
        ("olmo", {"rope_theta": 10000.0}),
        ("jais2", {"activation": "silu"}),
        ("granite-swa", {"rope_layers": None}),
        ("granite-swa", {"window_layers": None}),
        ("granite-swa", {"residual_scale": 1.0}),
        ("granite-swa", {"attention_scale": None}),
        ("cohere2moe", {"logit_scale": 1.0}),
        ("cohere2moe", {"rope_layers": (False, True, False, True)}),
        ("hunyuan3", {"rope_theta": 100.0}),
        ("mellum", {"rope_scaling": None}),
        ("mellum", {"sliding_window": 8}),
        ("olmo2", {"rope_theta": 10000.0}),
        ("olmo3", {"rope_scaling": None}),
        ("olmo3", {"window_layers": None}),
        ("olmo3", {"sliding_window": 8}),
        ("olmo3", {"window_rope_theta": None}),
        ("granite", {"embedding_scale": 1.0}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"attention_scale": None}),
        ("granite", {"logit_scale": 1.0}),
        ("exaone4", {"rope_layers": None}),
        ("exaone4", {"rope_layers": (True, True, True, True, True)}),
        ("exaone4", {"window_layers": None}),
        ("exaone4", {"sliding_window": 8}),
        ("exaone4", {"rope_theta": 10000.0}),
        ("exaone4", {"rms_eps": 1e-2}),
        ("exaone4-full", {"rope_theta": 500.0}),
        ("hunyuan", {"rope_theta": 10000.0}),
        ("hunyuan", {"head_norms": "each"}),
        ("hunyuan", {"rms_eps": 0.1}),
        ("seed-oss", {"rope_theta": 10000.0}),
        ("seed-oss", {"rope_interleaved": True}),
        ("seed-oss", {"rms_eps": 1e-2}),
        ("smollm3", {"rope_layers": None}),
        ("cohere", {"rope_interleaved": False}),
        ("cohere", {"rope_theta": 10000.0}),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere-heads", {"rms_eps": 0.1}),
        ("cohere-heads", {"rope_interleaved": False}),
        ("stablelm-heads", {"rms_eps": 1e-2}),
        ("stablelm", {"rope_dim": 32}),
        ("stablelm", {"rope_dim": 22}),
        ("stablelm", {"rope_theta": 10000.0}),
        ("stablelm", {"rms_eps": 1e-2}),
        ("qwen35", {"recurrence": GatedDelta(2, 6, 32, 32, 4, tiled=False)}),
        ("qwen35", {"rope_theta": 10000.0}),
        ("qwen35", {"rope_sections": None, "rope_dim": 24}),
        ("qwen35", {"rms_eps": 1e-2}),
        ("qwen3next", {"recurrence": GatedDelta(2, 6, 32, 32, 4, tiled=True)}),
        ("qwen3next", {"rope_theta": 10000.0}),
        ("qwen3next", {"rms_eps": 1e-2}),
        ("kimi-linear", {"rms_eps": 1e-2}),
        ("glm5-next", {"rms_eps": 1e-2}),
        ("glm5-next", {"recurrence": ChannelDelta(4, 24, 4, -2.0, has_flat_rates=True)}),
        ("glm5-next", {"recurrence": ChannelDelta(4, 24, 4, has_flat_rates=True)}),
        ("qwen4exp", {"rope_theta": 10000.0}),
        ("qwen4exp", {"recurrence": GatedDelta(2, 6, 32, 32, 4, tiled=True)}),
        ("mamba", {"rms_eps": 1e-2}),
        ("mamba", {"recurrence": Mamba(192, 8, 10, 4, "bare", 1e-4)}),
        ("falcon-mamba", {"recurrence": Mamba(192, 8, 6, 4)}),
        ("falcon-mamba", {"recurrence": Mamba(192, 8, 6, 4, "bare", 1e-4)}),
        ("jamba", {"rms_eps": 1e-2}),
        ("jamba", {"recurrence": Mamba(192, 8, 10, 3, "weighted", 1e-2)}),
        ("jamba", {"rope_layers": None}),
        ("lfm2", {"rope_theta": 10000.0}),
        ("lfm2", {"rms_eps": 1e-2}),
        ("lfm2", {"rope_interleaved": True}),
        ("granite4h", {"rope_layers": None}),
        ("granite4h", {"rms_eps": 1e-2}),
        ("granite4h", {"embedding_scale": 1.0}),
        ("granite4h", {"residual_scale": 1.0}),
        ("granite4h", {"attention_scale": None}),
        ("granite4h", {"logit_scale": 1.0}),
        ("granite4h-moe", {"rope_layers": (False,) * 4}),
        ("granite4h-moe", {"rope_theta": 500.0}),
        ("granite4h-moe", {"residual_scale": 1.0}),
        ("granite4", {"rope_layers": (False,) * 4}),
        ("granite4", {"attention_scale": None}),
        ("nemotron-h", {"rope_layers": None}),
        ("nemotron-h", {"activation": "silu"}),
        ("nemotron-h", {"rms_eps": 1e-2}),
        ("nemotron-h", {"attention_scale": 1.0}),
        ("nemotron-h-moe", {"rope_layers": None}),
        ("nemotron-h-moe", {"rms_eps": 1e-2}),
        ("falcon-h1", {"rope_theta": 500.0}),
        ("falcon-h1", {"rms_eps": 1e-2}),
        ("falcon-h1", {"attention_scale": 1.0}),
        ("falcon-h1", {"rope_interleaved": True}),
        ("starcoder2", {"activation": "silu"}),
        ("starcoder2", {"sliding_window": None}),
        ("starcoder2", {"rope_theta": 10000.0}),
        ("starcoder2", {"rms_eps": 0.1}),
        ("cohere2", {"rope_layers": None}),
        ("cohere2", {"rope_interleaved": False}),
        ("cohere2", {"window_layers": None}),
        ("cohere2", {"logit_scale": 1.0}),
        ("gemma2", {"window_layers": None}),
        ("gemma2", {"window_layers": (False, True, False)}),
        ("gemma2", {"sliding_window": 12}),
        ("gemma3-scale", {"attention_scale": None}),
        ("gemma3-scale", {"window_layers": (True, False, False)}),
        ("gemma3-scale", {"is_tied": True}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"final_softcap": None}),
        ("gemma2", {"embedding_scale": 1.0}),
        ("gemma2", {"activation": "silu"}),
        ("gemma4", {"attention_scale": None}),
        ("gemma4", {"embedding_scale": 1.0}),
        ("gemma4", {"final_softcap": None}),
        ("gemma4", {"rope_theta": 10000.0}),
        ("gemma4", {"sliding_window": 9}),
        ("gemma4", {"window_rope_theta": 10000.0}),
        ("gemma4-shared", {"sliding_window": 8}),
        ("gemma3n", {"sliding_window": 8}),
        ("gemma3n", {"window_rope_theta": None}),
        ("gemma3n", {"rope_theta": 500.0}),
        ("gemma3n", {"attention_scale": None}),
        ("gemma3n", {"final_softcap": None}),
        ("gemma3n", {"embedding_scale": 1.0}),
        ("gemma3n", {"rms_eps": 1e-2}),
        ("gemma4e", {"activation": "silu"}),
        ("gemma4e", {"embedding_scale": 1.0}),
        ("gemma4e", {"rms_eps": 1e-5}),
        ("gemma3", {"window_layers": None}),
        ("gemma3", {"sliding_window": 8}),
        ("gemma3", {"window_rope_theta": None}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"rope_theta": 10000.0}),
        ("gemma3", {"embedding_scale": 1.0}),
        ("mistral-window", {"sliding_window": 12}),
        ("qwen2-window", {"sliding_window": None}),
        ("llama-gqa-64", {"rope_interleaved": False}),
        ("llama-gqa-64", {"rope_theta": 20000.0}),
    ],
)
def test_goldens_see_every_feature(case: str, change: dict[str, object]) -> None:
    """Leaving a feature out moves the logits far beyond the tolerance, so the goldens really test it."""
    assert_seen(case, change_model(model_from_folder(read_golden(case)[0]), change))


def assert_seen(case: str, changed: Model) -> None:
    config, seed, tokens, golden = read_golden(case)
    tensors = make_hf_tensors(make_weights(config, seed), config)
    if look(changed, "rope_scaling") is None:  # then nothing reads longrope's lists
        for name in (LONG_FACTORS, SHORT_FACTORS):
            tensors.pop(name, None)
    model = Decoder(Context("reference"), changed, tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() > 100 * TOLERANCE


def test_goldens_see_how_streams_mix_and_what_limits_gates() -> None:
    model = model_from_folder(read_golden("glm5-next")[0])
    for streams in (BalancedStreams(4, 1, 1e-3), BalancedStreams(4, 5, 1e-6)):
        assert_seen("glm5-next", replace(model, layers=tuple(replace(one, streams=streams) for one in model.layers)))
    for kind in (FeedForward, Experts):
        layers = [one for one in model.layers if isinstance(one.feed_forward, kind)]
        wide = [replace(one, feed_forward=replace(one.feed_forward, parameters=(0.8,))) for one in layers]  # type: ignore[type-var]
        made = dict(zip(layers, wide, strict=True))
        assert_seen("glm5-next", replace(model, layers=tuple(made.get(one, one) for one in model.layers)))


def test_goldens_see_what_is_cut_of_gates() -> None:
    model = model_from_folder(read_golden("gemma3n")[0])
    blocks = [layer.feed_forward for layer in model.layers]
    assert [isinstance(block, FeedForward) and block.cut for block in blocks][2:4] == [None, None]
    for cut in (None, 0.3):
        layers = tuple(replace(one, feed_forward=replace(one.feed_forward, cut=cut)) for one in model.layers)  # type: ignore[type-var]
        assert_seen("gemma3n", replace(model, layers=layers))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3moe", {"renormalises": False}),
        ("qwen3moe", {"used": 2}),
        ("qwen2moe", {"renormalises": True}),
        ("qwen2moe", {"used": 4}),
        ("mixtral", {"renormalises": False}),
        ("mixtral", {"used": 3}),
        ("mellum", {"renormalises": False}),
        ("cohere2moe", {"scoring": "softmax"}),
        ("dbrx", {"renormalises": False}),
        ("dbrx", {"used": 2}),
        ("jamba", {"renormalises": True}),
        ("jamba", {"used": 1}),
        ("hunyuan3", {"scale": 1.0}),
        ("phimoe", {"scoring": "softmax_chosen"}),
        ("phimoe", {"scoring": "softmax"}),
        ("phimoe", {"jitter": 0.01}),
        ("phimoe", {"used": 3}),
        ("phimoe", {"renormalises": True}),
        ("olmoe", {"renormalises": True}),
        ("olmoe", {"used": 2}),
        ("granitemoe", {"renormalises": False}),
        ("granitemoe-shared", {"used": 2}),
        ("granite4h-moe", {"renormalises": False}),
        ("granite4h-moe", {"used": 2}),
        ("nemotron-h-moe", {"scale": 1.0}),
        ("nemotron-h-moe", {"scoring": "softmax"}),
        ("nemotron-h-moe", {"renormalises": False}),
        ("glm4moe", {"scale": 1.0}),
        ("glm4moe", {"scoring": "softmax"}),
        ("glm4moe", {"renormalises": False}),
        ("glm4moe", {"groups": 4, "groups_used": 2}),
        ("glm4moe-groups", {"groups_used": 3}),
        ("glm4moe-groups", {"groups": 2, "groups_used": 1}),
        ("gemma4moe", {"renormalises": False}),
        ("gemma4moe", {"used": 2}),
        ("gpt-oss", {"scoring": "softmax"}),
        ("gpt-oss", {"used": 2}),
    ],
)
def test_goldens_see_each_part_of_routing(case: str, change: dict[str, object]) -> None:
    experts = find_experts(model_from_folder(read_golden(case)[0]))
    assert experts is not None
    test_goldens_see_every_feature(case, {"experts": replace(experts, rule=replace(experts.rule, **change))})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "activation"),
    [("gpt-oss", "silu"), ("qwen2moe", "gelu_tanh"), ("gemma4moe", "silu"), ("nemotron-h-moe", "silu")],
)
def test_goldens_see_the_activation_of_experts(case: str, activation: Activation) -> None:
    experts = find_experts(model_from_folder(read_golden(case)[0]))
    assert experts is not None
    test_goldens_see_every_feature(case, {"experts": replace(experts, activation=activation)})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "ending"),
    [
        ("qwen2moe", "mlp.shared_expert_gate.weight"),
        ("qwen2moe", "mlp.shared_expert.down_proj.weight"),
        ("granitemoe-shared", "shared_mlp.output_linear.weight"),
        ("apertus", "self_attn.k_norm.weight"),
        ("exaone4", "self_attn.k_norm.weight"),
        ("exaone4", "post_feedforward_layernorm.weight"),
        ("seed-oss", "self_attn.k_proj.bias"),
        ("seed-oss", "self_attn.v_proj.bias"),
        ("phimoe", "lm_head.bias"),
        ("phimoe", "self_attn.o_proj.bias"),
        ("phimoe", "input_layernorm.bias"),
        ("phimoe", "model.norm.bias"),
        ("granite4h", "mamba.conv1d.bias"),
        ("granite4h", "mamba.dt_bias"),
        ("granite4h", "mamba.A_log"),
        ("granite4h", "mamba.D"),
        ("granite4h-moe", "mamba.D"),
        ("granite4h-moe", "shared_mlp.output_linear.weight"),
        ("mamba", "mixer.conv1d.bias"),
        ("mamba", "mixer.dt_proj.bias"),
        ("mamba", "mixer.A_log"),
        ("mamba", "mixer.D"),
        ("jamba", "mamba.dt_layernorm.weight"),
        ("jamba", "mamba.b_layernorm.weight"),
        ("jamba", "mamba.c_layernorm.weight"),
        ("jamba", "self_attn.o_proj.weight"),
        ("falcon-h1", "self_attn.o_proj.weight"),
        ("falcon-h1", "mamba.out_proj.weight"),
        ("falcon-h1", "mamba.D"),
        ("nemotron-h", "mixer.D"),
        ("nemotron-h", "mixer.dt_bias"),
        ("nemotron-h-moe", "mixer.gate.e_score_correction_bias"),
        ("nemotron-h-moe", "mixer.shared_experts.down_proj.weight"),
        ("nemotron-h-latent", "mixer.fc2_latent_proj.weight"),
        ("qwen4exp", "ple.conv1d.weight"),
        ("qwen4exp", "ple.key_proj.weight"),
        ("qwen4exp", "ple_embedding.ngram_embedding.shard_3.weight"),
        ("qwen4exp", "attn_hyper_connection.block_inject_weight.weight"),
        ("qwen4exp", "hyper_connection_mixer.input_mix_weight_up.weight"),
        ("glm5-next", "hc_attn_fn"),
        ("glm5-next", "hc_ffn_base"),
        ("glm5-next", "hc_ffn_scale"),
        ("glm5-next", "self_attn.dt_bias"),
        ("kimi-linear", "self_attn.A_log"),
        ("kimi-linear", "self_attn.dt_bias"),
        ("kimi-linear", "self_attn.f_b_proj.weight"),
        ("kimi-linear", "self_attn.g_a_proj.weight"),
        ("kimi-linear", "block_sparse_moe.gate.e_score_correction_bias"),
        ("glm4moe", "mlp.gate.e_score_correction_bias"),
        ("glm4moe-groups", "mlp.gate.e_score_correction_bias"),
        ("glm4moe", "mlp.shared_experts.down_proj.weight"),
        ("gemma3n", "altup.modality_router.weight"),
        ("gemma3n", "altup.prediction_coefs.weight"),
        ("gemma3n", "altup.correction_coefs.weight"),
        ("gemma3n", "altup.correct_output_scale"),
        ("gemma3n", "laurel.linear_right.weight"),
        ("gemma3n", "altup_projections.2.weight"),
        ("gemma3n", "altup_unembed_projections.0.weight"),
        ("gemma3n", "per_layer_projection.weight"),
        ("gemma4moe", "router.scale"),
        ("gemma4moe", "router.per_expert_scale"),
        ("gemma4moe", "post_feedforward_layernorm_1.weight"),
        ("gemma4moe", "pre_feedforward_layernorm_2.weight"),
        ("gemma4moe", "post_feedforward_layernorm_2.weight"),
        ("gpt-oss", "self_attn.sinks"),
        ("gpt-oss", "mlp.router.bias"),
        ("gpt-oss", "mlp.experts.gate_up_proj_bias"),
        ("gpt-oss", "mlp.experts.down_proj_bias"),
    ],
)
def test_goldens_see_tensors_that_few_families_have(case: str, ending: str) -> None:
    config, seed, tokens, golden = read_golden(case)
    weights = make_weights(config, seed)
    for name in [name for name in weights if name.endswith(ending)]:
        weights[name] = np.zeros_like(weights[name])
    model = Decoder(Context("reference"), model_from_folder(config), make_hf_tensors(weights, config))
    assert np.abs(TinyRun(model).run(tokens) - golden).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        *({f"{name}_multiplier": 1.0} for name in ("embedding", "lm_head", "attention_in", "key", "attention_out")),
        *({f"{name}_multiplier": 1.0} for name in ("ssm_in", "ssm_out")),
        *({"mlp_multipliers": numbers} for numbers in ([1.0, 0.4], [0.6, 1.0])),
        *({"ssm_multipliers": [*PARTS[:part], 1.0, *PARTS[part + 1 :]]} for part in range(5)),
    ],
)
def test_goldens_see_each_multiplier(change: dict[str, object]) -> None:
    config, seed, tokens, golden = read_golden("falcon-h1")
    assert all(config[key] != value for key, value in change.items())
    logits = TinyRun(build_hf(Context("reference"), config | change, seed)).run(tokens)
    assert np.abs(logits - golden).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["llama-ntk", "llama-llama3", "exaone4-full", "gemma4", "gemma4-values"])
def test_goldens_see_how_files_stretch_rotations(case: str) -> None:
    """They use another base, or a tensor of factors."""
    config, seed, tokens, golden = read_golden(case)
    change: dict[str, Any] = {"rope_scaling": None}
    if case.startswith("gemma4"):
        rope = config["rope_parameters"]
        plain = {"rope_type": "default", "rope_theta": rope["full_attention"]["rope_theta"]}
        change = {"rope_parameters": rope | {"full_attention": plain}}
    logits = TinyRun(build_hf(Context("reference"), config | change, seed)).run(tokens)
    assert np.abs(logits - golden).max() > 100 * TOLERANCE


def test_folders_of_falcon_that_mlx_wrote_are_refused() -> None:
    """Their convolutions have the channels last, and their weights include factors of the configuration."""
    config, seed, _, _ = read_golden("falcon-h1")
    weights, name = make_weights(config, seed), "model.layers.1.mamba.conv1d.weight"
    weights[name] = np.ascontiguousarray(weights[name].swapaxes(1, 2))
    with pytest.raises(ModelError, match=r"tensor .* is laid out as MLX does, .* take the original folder"):
        make_hf_tensors(weights, config)


def test_qwen3_next_reads_files_with_all_inputs_in_one_tensor() -> None:
    """Old GGUF files keep the inputs as folders do; a tensor of another size is refused by name."""
    config, seed, tokens, golden = read_golden("qwen3next")
    weights = make_weights(config, seed)
    metadata, tensors = make_gguf(weights, config)
    for index in (0, 2):
        name = f"blk.{index}.ssm_in.weight"
        for part in ("attn_qkv", "attn_gate"):
            del tensors[f"blk.{index}.{part}.weight"]
        tensors[name] = make_source(name, weights[f"model.layers.{index}.linear_attn.in_proj_qkvz.weight"])
    read = model_from_gguf(metadata, tensors)
    found = TinyRun(Decoder(Context("reference"), read, tensors)).run(tokens)
    np.testing.assert_allclose(found, golden, atol=TOLERANCE)
    tensors[name] = make_source(name, np.zeros((511, 96), np.float32))
    with pytest.raises(ModelError, match=r"tensor blk\.2\.attn_qkv\.weight is missing"):
        Decoder(Context("reference"), read, tensors)


@pytest.mark.parametrize("type_name", ["bf16", "f16", "q8_0"])
def test_weights_that_are_multiplied_keep_their_type(type_name: str) -> None:
    """Types of blocks become f32; floats lose less than half of the last bit."""
    config, seed, _, _ = read_golden("falcon-h1")
    weights = make_weights(config, seed)
    unit = {key: 1.0 for key in config if key.endswith("_multiplier")} | {"mlp_multipliers": None}
    plain = make_hf_tensors(weights, config | unit, type_name)
    made = make_hf_tensors(weights, config, type_name)
    for name, factor in (("token_embd", 3.1), ("blk.0.attn_k", 1.3 * 0.7), ("blk.1.ffn_down", 0.4)):
        tensor, source = made[f"{name}.weight"], plain[f"{name}.weight"]
        assert tensor.type_name == ("f32" if type_name == "q8_0" else type_name)
        stored = make_source(f"{name}.weight", tensor.to_float32(), tensor.type_name)
        assert bytes(stored.data) == bytes(tensor.data)
        assert tensor.nbytes == tensor.data.size
        exact, last = source.to_float32(3, 5) * np.float32(factor), {"f16": 2**-11, "bf16": 2**-8}.get(type_name, 1e-6)
        np.testing.assert_allclose(tensor.to_float32(3, 5), exact, rtol=last, atol=1e-7)
        assert bytes(tensor.take_rows(3, 5).data) == bytes(stored.take_rows(3, 5).data)
        tensor.release()
        assert bytes(stored.data) == bytes(tensor.data)


@pytest.mark.parametrize("change", [{"truncate": True}, {"attention_factor": 1.0}, {"factor": 3.0}])
def test_goldens_see_each_part_of_yarn(change: dict[str, object]) -> None:
    scaling = look(model_from_folder(read_golden("gpt-oss")[0]), "rope_scaling")
    assert scaling is not None
    test_goldens_see_every_feature("gpt-oss", {"rope_scaling": replace(scaling, **change)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("phi3-long", {"original_context": 128}),
        ("phi3-long", {"attention_factor": 1.0}),
        ("phimoe", {"original_context": 128}),
        ("phimoe", {"attention_factor": 1.0}),
        ("phi3-short", {"original_context": 63}),
        ("phi3-short", {"attention_factor": 1.0}),
    ],
)
def test_goldens_see_each_part_of_longrope(case: str, change: dict[str, object]) -> None:
    scaling = look(model_from_folder(read_golden(case)[0]), "rope_scaling")
    assert scaling is not None
    test_goldens_see_every_feature(case, {"rope_scaling": replace(scaling, **change)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama4", {"chunked": False}),
        ("llama4", {"window": None}),
        ("mimo2", {"value_scale": 1.0}),
        ("laguna", {"softplus": False}),
    ],
)
def test_goldens_see_how_a_few_families_attend(case: str, change: dict[str, Any]) -> None:
    config, seed, tokens, golden = read_golden(case)
    right, tensors = model_from_folder(config), make_hf_tensors(make_weights(config, seed), config)
    specs = [replace(spec, mixer=replace(spec.mixer, **change)) for spec in right.layers]
    logits = TinyRun(Decoder(Context("reference"), change_layers(right, specs), tensors)).run(tokens)
    assert np.abs(logits - golden).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["cohere-heads", "stablelm-heads"])
@pytest.mark.parametrize("change", [{"head_norms": "joint"}, {"head_norms": "each"}, {"head_norms": None}])
def test_goldens_see_how_heads_are_normed(case: str, change: dict[str, Any]) -> None:
    """Each head by itself, less its mean, and by its own weight."""
    config, seed, tokens, golden = read_golden(case)
    right = model_from_folder(config)
    specs = [replace(spec, mixer=replace(spec.mixer, **change)) for spec in right.layers]
    tensors = arrange_tensors(right, make_hf_tensors(make_weights(config, seed), config))
    for name, tensor in list(tensors.items()):
        if "_norm.weight" in name and len(tensor.shape) == 2:
            values = tensor.to_float32()
            tensors[name] = make_source(
                name, values[0].copy() if change["head_norms"] == "each" else values.reshape(-1)
            )
            if change["head_norms"] is None:
                del tensors[name]
    model = Decoder(Context("reference"), change_layers(right, specs), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["gemma4", "gemma4-values", "gemma4-shared"])
def test_queries_keys_and_values_may_be_one_tensor(case: str) -> None:
    """Some layers of Gemma 4 have no values, and some have queries alone."""
    config, seed, tokens, golden = read_golden(case)
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    for index in range(config["num_hidden_layers"]):
        names = [f"blk.{index}.attn_{part}.weight" for part in "qkv"]
        parts = [tensors.pop(name).to_float32() for name in names if name in tensors]
        tensors[f"blk.{index}.attn_qkv.weight"] = make_source(f"blk.{index}.attn_qkv.weight", np.concatenate(parts))
    model = Decoder(Context("reference"), model_from_gguf(metadata, tensors), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE


@pytest.mark.parametrize(
    "change", [{"table_scale": 1.0}, {"scale": 1.0}, {"eps": 0.02}, {"activation": "silu"}, {"features": 16}, None]
)
def test_goldens_see_each_part_of_the_inputs_of_layers(change: dict[str, Any] | None) -> None:
    """The layers have embeddings of their own; a change to 16 features leaves out half of each, None leaves out all."""
    config, seed, tokens, golden = read_golden("gemma4e")
    right = model_from_folder(config)
    tensors = make_hf_tensors(make_weights(config, seed), config)
    specs = []
    for spec in right.layers:
        assert spec.inputs is not None
        specs.append(replace(spec, inputs=None if change is None else replace(spec.inputs, **change)))
    for name in list(tensors):
        if change is None and ("per_layer" in name or name.split(".")[-2] in ("inp_gate", "proj", "post_norm")):
            del tensors[name]
        elif change == {"features": 16} and name in tensors:
            tensors[name] = halve_inputs(tensors[name])
    model = Decoder(Context("reference"), change_layers(right, specs), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() > 100 * TOLERANCE


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_table_of_inputs_stays_where_it_is(device: str) -> None:
    """Rows are read when their tokens come, so later writes into the table count."""
    config, seed, tokens, golden = read_golden("gemma4e")
    tensors = make_hf_tensors(make_weights(config, seed), config)
    model = Decoder(Context(device), model_from_folder(config), tensors)
    table = tensors["per_layer_token_embd.weight"].data.view(np.float32).reshape(config["vocab_size"], -1)
    table[tokens[20]] += 1
    logits = TinyRun(model).run(tokens)
    first = int(np.flatnonzero(tokens == tokens[20])[0])
    assert np.abs(logits[:first] - golden[:first]).max() < TOLERANCE
    assert np.abs(logits[first] - golden[first]).max() > 100 * TOLERANCE


def halve_inputs(tensor: TensorSource) -> TensorSource:
    """Return the part of a tensor that belongs to every other one of each layer's inputs."""
    values = tensor.to_float32()
    match tensor.name:
        case "per_layer_token_embd.weight":
            values = values[:, ::2]
        case "per_layer_model_proj.weight" | "per_layer_proj_norm.weight":
            values = values[::2]
        case name if name.endswith("inp_gate.weight"):
            values = values[::2]
        case name if name.endswith(".proj.weight"):
            values = values[:, ::2]
    return make_source(tensor.name, np.ascontiguousarray(values))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_cpu_equals_golden(case: str, threads: int) -> None:
    config, seed, tokens, golden = read_golden(case)
    logits = TinyRun(build_hf(Context("cpu", threads=threads), config, seed)).run(tokens)
    assert np.abs(logits - golden).max() < TOLERANCE


# Relative error (of the logits' spread) that storing weights, activations and cache in fewer bits may cause.
MOVED_MORE = {"qwen35": 2, "falcon-mamba": 2}  # a state adds up what rounding moved before
CPU_ERRORS = [
    ("f16", "f32", 0.0015),
    ("f32", "f16", 0.001),
    ("f32", "bf16", 0.006),
    ("bf16", "f16", 0.013),
    ("q8_0", "f16", 0.045),
]
# With experts a rounding may send a token to another one, which moves all later results; kernels/test_moe.py has types.
WITHOUT_EXPERTS = [case for case in CASES if not count_experts(read_golden(case)[0])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("type_name", "kv_type", "allowed"), CPU_ERRORS)
@pytest.mark.parametrize("case", WITHOUT_EXPERTS)
def test_cpu_is_within_quantisation_error(case: str, type_name: str, kv_type: str, allowed: float) -> None:
    config, seed, tokens, golden = read_golden(case)
    model = build_hf(Context("cpu", threads=2), config, seed, type_name)
    logits = TinyRun(model, kv_type=kv_type).run(tokens)  # type: ignore[arg-type]
    error = np.sqrt(np.mean((logits - golden) ** 2)) / golden.std()
    assert error < allowed * MOVED_MORE.get(case, 1)


@pytest.mark.parametrize(("prefix", "plain"), [("language_model.", ""), ("model.language_model.", "model.")])
def test_text_of_a_model_with_images_equals_golden(prefix: str, plain: str) -> None:
    """Ministral 3 as published: the text's configuration is nested, its tensors have a prefix, and others lie beside
    them.
    """
    config, seed, tokens, golden = read_golden("ministral3")
    weights = {
        prefix + name.removeprefix(plain) if name.startswith(plain) else name: values
        for name, values in make_weights(config, seed).items()
    }
    for part in ("vision_tower.patch_conv", "model.multi_modal_projector.norm"):
        weights[f"{part}.weight"] = np.zeros(3, np.float32)
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {key: value for key, value in config.items() if key != "architectures"},
    }
    tensors = make_hf_tensors(weights, outer)
    model = Decoder(Context("reference"), model_from_folder(outer), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE


FILE_CASES = ["llama-llama3", "llama-yarn", "llama-gqa-80-tied", "mistral-window", "qwen2", "qwen3"]


@pytest.mark.parametrize("case", FILE_CASES)
def test_model_folder_equals_golden(case: str, tmp_path: Path) -> None:
    config, seed, tokens, golden = read_golden(case)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(make_weights(config, seed), tmp_path / "model.safetensors")
    folder = open_safetensors(tmp_path)
    contents = read_contents(folder)
    model = Decoder(Context("cpu"), contents.config, contents.tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE
    folder.close()


@pytest.mark.parametrize("case", FILE_CASES)
def test_gguf_file_equals_golden(case: str, tmp_path: Path) -> None:
    config, seed, tokens, golden = read_golden(case)
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, [TensorToWrite.from_source(t, name=n, type_name="f32") for n, t in tensors.items()])
    with open_gguf(path) as file:
        model = Decoder(Context("cpu"), model_from_gguf(file.metadata, file.tensors), file.tensors)
        assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE
