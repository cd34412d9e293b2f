"""The bytes of a model that a token reads: of its file, of its layers, and of experts that several tokens share."""

from __future__ import annotations

import numpy as np
import pytest
from model_fields import find_experts
from random_model import make_weights
from tiny_models import make_gguf, make_hf_tensors, read_golden

from mlxr.kernels.context import Context
from mlxr.kernels.moe import expect_experts
from mlxr.models import Decoder, model_from_folder
from mlxr.models.footprint import measure_footprint, summarise_experts
from mlxr.models.weights import arrange_tensors

CASES = ["mixtral", "qwen2moe", "glm4moe", "gemma4moe", "gpt-oss", "gemma4e", "qwen3-128-tied"]
UNCOUNTED_BYTES = 512  # a few small vectors: sinks, biases of a choice, scales


@pytest.mark.parametrize("case", CASES)
def test_a_file_tells_what_a_step_of_the_model_reads(case: str) -> None:
    fields, seed, *_ = read_golden(case)
    config = model_from_folder(fields)
    tensors = make_hf_tensors(make_weights(fields, seed), fields)
    footprint = measure_footprint(config, arrange_tensors(config, tensors))
    model = Decoder(Context("reference"), config, tensors)
    assert footprint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert footprint.active_bytes == pytest.approx(model.step_bytes, abs=UNCOUNTED_BYTES)
    assert footprint.expert_bytes == sum(experts.nbytes for experts in model.work.experts)
    assert footprint.experts == summarise_experts(config)
    assert (footprint.expert_bytes > 0) == (find_experts(config) is not None)


def test_experts_are_summed_up_over_the_layers_that_have_them() -> None:
    fields, seed, *_ = read_golden("glm4moe")
    config = model_from_folder(fields)
    _, tensors = make_gguf(make_weights(fields, seed), fields)
    experts = measure_footprint(config, arrange_tensors(config, tensors)).experts
    assert experts is not None
    assert experts.layers == fields["num_hidden_layers"] - fields["first_k_dense_replace"]
    assert experts.experts == fields["n_routed_experts"]
    assert experts.used == fields["num_experts_per_tok"]
    assert experts.shared_features == fields["n_shared_experts"] * fields["moe_intermediate_size"]


def test_tokens_are_expected_at_so_many_experts_as_chance_sends_them_to() -> None:
    assert expect_experts(8, 2, 1) == pytest.approx(2)
    assert expect_experts(8, 2, 10**6) == pytest.approx(8)
    draw = np.random.default_rng(0)
    found = [len({expert for _ in range(5) for expert in draw.permutation(16)[:3]}) for _ in range(2000)]
    assert expect_experts(16, 3, 5) == pytest.approx(np.mean(found), rel=0.02)


def test_a_step_of_more_tokens_reads_more_experts_and_all_else_once() -> None:
    fields, seed, *_ = read_golden("qwen3moe")
    tensors = make_hf_tensors(make_weights(fields, seed), fields)
    model = Decoder(Context("reference"), model_from_folder(fields), tensors)
    (experts,) = model.work.experts
    assert model.step_bytes == model.work.weight_bytes + experts.nbytes * experts.used // experts.experts
    assert model.work.count_weight_bytes(10**6) == model.work.weight_bytes + experts.nbytes
    assert model.step_bytes < model.work.count_weight_bytes(2) < model.step_bytes + experts.nbytes
