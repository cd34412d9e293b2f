"""Shares of a model: every tensor is whole or divided, and the shares of a product add up, for all types."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gpu_cases import QUANTISED, make_tensor, random_floats

from mlxr.core.errors import ModelError
from mlxr.core.settings import Settings
from mlxr.engine.memory_plan import estimate_arena
from mlxr.formats import by_name, open_gguf
from mlxr.kernels.sources import cut_columns
from mlxr.loading import ASSETS
from mlxr.models import Model, model_from_gguf
from mlxr.models.components import Attention, FeedForward, Layer, Norms, Rope
from mlxr.models.shares import Place, make_share, share_model, share_out
from mlxr.models.weights import arrange_tensors, expected_tensors

ATTENTION = Attention(8, 4, 32, scale=32**-0.5, rope=Rope(10000.0, 32, interleaved=True))
LAYER = Layer(ATTENTION, FeedForward(1280, "silu"), Norms(1e-5))
NARROW = replace(LAYER, mixer=replace(ATTENTION, heads=4, kv_heads=2))
LLAMA = Model("llama", (LAYER,) * 2, hidden=64, vocab_size=1000, context_length=64)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16", *QUANTISED])
@pytest.mark.parametrize("count", [2, 3])
def test_products_of_shares_of_the_inputs_add_up(type_name: str, count: int) -> None:
    tensor, x = make_tensor(type_name, 3, 1280), random_floats(1, 2, 1280).astype(np.float64)
    ends = np.cumsum([0, *share_out(1280, count)])
    parts = [cut_columns(tensor, start, stop) for start, stop in pairwise(ends)]
    assert sum(part.nbytes for part in parts) == tensor.nbytes == sum(len(part.data) for part in parts)
    decoded = [by_name(type_name).decode(part.data.reshape(-1, by_name(type_name).type_size)) for part in parts]
    for part, values in zip(parts, decoded, strict=True):
        np.testing.assert_array_equal(values.reshape(part.shape), part.to_float32())
    whole = x @ tensor.to_float32().T.astype(np.float64)
    added = sum(
        x[:, start:stop] @ part.to_float32().T.astype(np.float64)
        for part, start, stop in zip(parts, ends[:-1], ends[1:], strict=True)
    )
    np.testing.assert_allclose(added, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.smoke
@pytest.mark.parametrize(("features", "count", "shares"), [
    (14336, 2, [7168, 7168]), (11008, 2, [5376, 5632]), (11008, 4, [2560, 2816, 2816, 2816]),
    (128256, 2, [64000, 64256]), (300, 2, [160, 140]), (5, 3, [1, 2, 2]),
])  # fmt: skip
def test_features_are_cut_between_blocks(features: int, count: int, shares: list[int]) -> None:
    assert share_out(features, count) == shares


def make_tensors(config: Model) -> dict[str, Any]:
    return {
        name: make_tensor("f32", *(shape if len(shape) == 2 else (1, *shape)), seed=number)
        for number, (name, shape) in enumerate(expected_tensors(config).items())
    }


@pytest.mark.parametrize("count", [2, 4])
def test_every_tensor_is_whole_or_divided(count: int) -> None:
    tensors = make_tensors(LLAMA)
    shares = [make_share(LLAMA, tensors, Place(rank, count)) for rank in range(count)]
    summed = {f"blk.{layer}.{name}.weight" for layer in range(2) for name in ("attn_output", "ffn_down")}
    assert all(share.summed == summed for share in shares)
    for name, tensor in tensors.items():
        parts = [share.tensors[name].to_float32() for share in shares]
        if "norm" in name or name == "token_embd.weight":
            assert all(share.tensors[name] is tensor for share in shares)
        else:
            joined = np.concatenate(parts, axis=int(name in summed))
            np.testing.assert_array_equal(joined, tensor.to_float32())
    for index, share in enumerate(shares):
        for name, shape in share.model.layers[0].tensors(64):
            if len(shape) == 2:
                assert share.tensors[f"blk.0.{name}"].shape == shape, index


def test_the_first_rank_alone_adds_the_bias_of_a_sum() -> None:
    attention = replace(ATTENTION, output_bias=True, qkv_bias=True)
    layer = replace(LAYER, mixer=attention, feed_forward=FeedForward(1280, "silu", bias=True))
    config = replace(LLAMA, layers=(layer,) * 2, has_output_bias=True)
    whole = dict.fromkeys(expected_tensors(config))
    tensors = make_tensors(config)
    for name in whole:
        if name.endswith("bias"):
            (length,) = expected_tensors(config)[name]
            values = random_floats(len(name), length)
            tensors[name] = type(tensors[name])(name, "f32", (length,), values.view(np.uint8))
    first, second = (make_share(config, tensors, Place(rank, 2)) for rank in range(2))
    for name in whole:
        if not name.endswith("bias") or "norm" in name:
            continue
        if "attn_output" in name or "ffn_down" in name:
            assert first.tensors[name] is tensors[name]
            assert name not in second.tensors
        else:
            parts = [share.tensors[name].to_float32().reshape(-1) for share in (first, second)]
            np.testing.assert_array_equal(np.concatenate(parts), tensors[name].to_float32())


@pytest.mark.parametrize(("changes", "count", "what"), [
    ({"layers": (NARROW,)}, 4, "layer 0 has 4 heads with 2 of keys, which 4 does not divide"),
    ({"vocab_size": 1}, 2, "it has 1280 features in layer 0, and 1 tokens"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(changes: dict[str, Any], count: int, what: str) -> None:
    with pytest.raises(ModelError, match=f"cannot be shared by {count} GPUs: {what}"):
        share_model(replace(LLAMA, **changes), Place(0, count))


def test_blocks_are_not_cut() -> None:
    with pytest.raises(ModelError, match="tensor w of type q4_k cannot be cut at columns 0 and 128"):
        cut_columns(make_tensor("q4_k", 2, 256), 0, 128)


def test_the_demo_model_is_shared() -> None:
    with open_gguf(ASSETS / "demo.gguf") as file:
        config = model_from_gguf(file.metadata, file.tensors)
        share = make_share(config, arrange_tensors(config, file.tensors), Place(1, 2))
        assert share.model.heads * 2 == config.heads
        assert sum(share.columns) == config.vocab_size


def test_the_cache_of_a_share_is_planned_before_it_is_loaded() -> None:
    sizes = [
        estimate_arena(LLAMA, Settings(device="cpu", gpus=gpus, context_tokens=64, max_sequences=1), None)
        for gpus in (1, 2)
    ]
    assert sizes[0] == 2 * sizes[1] > 0
