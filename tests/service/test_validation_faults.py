"""`validate` accepts a right engine, however much rounding moves its model, and finds each planted fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxr.cli.main import main
from mlxr.core.settings import resolve
from mlxr.formats.tensor import TensorSource
from mlxr.kernels.context import Context
from mlxr.models.components import Weights
from mlxr.models.components.weights import ExpertBudget, RotatedWeights
from mlxr.service.opening import open_model
from mlxr.service.validation import LogitsCheck, validate_model

PROMPT = [int(token) for token in np.random.default_rng(3).integers(300, 4000, 40)]
FAULTY_LAYER = 1
Change = Callable[[TensorSource], TensorSource]


def swap_heads(tensor: TensorSource) -> TensorSource:
    """Exchange heads 0 and 1 of the queries."""
    rows = tensor.data.reshape(tensor.shape[0], -1).copy()
    rows[:128] = np.roll(rows[:128], 64, axis=0)
    return replace(tensor, data=rows.reshape(-1), mapping=None)


def turn_queries(tensor: TensorSource) -> TensorSource:
    """Rotate every query by half a radian more than its position says."""
    weights = tensor.to_float32().reshape(-1, 2, tensor.shape[1])
    one, other = weights[:, 0], weights[:, 1]
    turned = np.stack([one * np.cos(0.5) - other * np.sin(0.5), one * np.sin(0.5) + other * np.cos(0.5)], axis=1)
    data = np.ascontiguousarray(turned.reshape(-1), np.float32).view(np.uint8)
    return TensorSource(tensor.name, "f32", tensor.shape, data)


def double_a_scale(tensor: TensorSource) -> TensorSource:
    """Double one block of 32 weights: the f16 scale at the start of a Q8_0 block of 34 bytes."""
    data = tensor.data.copy()
    data[7 * 34 : 7 * 34 + 2].view(np.float16)[:] *= 2
    return replace(tensor, data=data, mapping=None)


FAULTS: dict[str, tuple[str, Change]] = {
    "head": ("attn_q.weight", swap_heads),
    "angle": ("attn_q.weight", turn_queries),
    "scale": ("ffn_down.weight", double_a_scale),
}


def validate(model: str | Path = "demo", **given: object) -> LogitsCheck:
    settings = resolve({"threads": 1, "arena_bytes": "64M", **given}, {})
    with open_model(str(model), settings) as loaded:
        return validate_model(loaded, settings, PROMPT, 8).logits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_in_one_layer_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, change = FAULTS[fault]

    def make_weights(
        ctx: Context,
        tensors: Mapping[str, TensorSource],
        budget: ExpertBudget | None,
        summed: Collection[str],
        rotated: RotatedWeights | None,
    ) -> Weights:
        name = f"blk.{FAULTY_LAYER}.{part}"
        changed = {**tensors, name: change(tensors[name])} if ctx.device == "cpu" else tensors
        return Weights(ctx, changed, budget, summed, rotated)  # type: ignore[arg-type]

    monkeypatch.setattr("mlxr.models.decoder.Weights", make_weights)
    found = validate()
    assert not found.agree, found
    if fault != "scale":  # which the logits alone do not show
        assert not replace(found, product_error=0.0).agree, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_type", ["bf16", "q8"])
@pytest.mark.parametrize("type_name", ["q8_0", "f16"])
def test_right_engines_agree(kv_type: str, type_name: str, tmp_path: Path) -> None:
    model: str | Path = "demo"
    if type_name != "q8_0":
        model = tmp_path / "model.gguf"
        assert main(["convert", "demo", str(model), "--type", type_name]) == 0
    found = validate(model, kv_type=kv_type)
    assert found.agree, found
