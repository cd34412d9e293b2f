"""Whole models on two ranks: their logits are the goldens', with the same bits on both; or a refusal says why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_cases import list_group_devices, skip_unless_emulated
from rank_processes import run_ranks

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.models import model_from_folder
from mlxr.models.shares import Place, share_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import TinyRun, build_hf, read_golden

CASES = [
    "llama-gqa-80-tied",
    "cohere",
    "cohere-heads",
    "gemma2",
    "gemma4-shared",
    "gemma4-values",
    "granite",
    "mistral-window",
    "llama-bias-gelu",
    "phi3-long",
    "qwen3",
    "qwen2",
    "smollm3",
    "stablelm-heads",
    "starcoder2",
]
TOKENS = 7  # the first five at once, the others one by one, which is recorded


def run_model(ctx: Context, case: str) -> Any:
    """The logits of some tokens."""
    config, seed, tokens, _ = read_golden(case)
    story = TinyRun(build_hf(ctx, config, seed, "f32"), kv_type="f32")
    steps = [tokens[:5], *tokens[5:TOKENS, None]]
    return np.concatenate([np.asarray(story.step({0: step})) for step in steps])


@pytest.fixture(scope="module", params=list_group_devices())
def results(request: pytest.FixtureRequest) -> tuple[float, dict[str, list[Any]]]:
    """The error that is allowed, and the logits of both ranks by case."""
    if request.param == "emulated":
        skip_unless_emulated()
    found = dict(zip(CASES, run_ranks(request.param, run_model, CASES), strict=True))
    return 5e-6 if request.param == "emulated" else 1e-3, found


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_logits_of_the_golden(results: tuple[float, dict[str, list[Any]]], case: str) -> None:
    allowed, found = results
    first, second = found[case]
    golden = read_golden(case)[3][:TOKENS]
    assert first.tobytes() == second.tobytes()
    assert np.sqrt(np.mean((first - golden) ** 2)) / golden.std() < allowed


@pytest.mark.parametrize(("case", "why"), [
    ("mixtral", "layer 0 has experts"),
    ("qwen35", "layer 0 is recurrent"),
    ("olmo2", "layer 0 norms all its heads together"),
    ("bloom", "layer 0 has scores that depend on the distance of keys"),
    ("gemma4e", "its layers have inputs of their own"),
    ("llama-mqa-96", "layer 0 has .* heads with 1 of keys, which 2 does not divide"),
])  # fmt: skip
def test_what_is_not_shared_yet_is_refused(case: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"cannot be shared by 2 GPUs: {why}"):
        share_model(model_from_folder(read_golden(case)[0]), Place(0, 2))
