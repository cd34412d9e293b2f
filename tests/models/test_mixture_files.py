"""Every way in which files keep experts gives the same model, with the golden logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from random_model import Weights, make_weights
from safetensors.numpy import save_file
from tiny_models import TinyRun, make_gguf, make_hf_tensors, make_source, read_golden

from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource, join_quantised, open_safetensors
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import TensorSource as WeightTensor
from mlxr.model_files.files import read_contents
from mlxr.models import Decoder, model_from_folder, model_from_gguf

TOLERANCE = 1e-4


def stack_names(weights: Weights, gate: str, up: str, down: str) -> Weights:
    """Experts as transformers 5 keeps them: gate and up in one tensor, all experts in one stack."""
    stacked: Weights = {name: values for name, values in weights.items() if ".experts." not in name}
    for name in [name for name in weights if f".experts.0.{gate}" in name]:
        prefix = name.split("experts.0.")[0]
        count = sum(f"{prefix}experts.{expert}.{gate}.weight" in weights for expert in range(99))
        parts = [
            [weights[f"{prefix}experts.{expert}.{part}.weight"] for expert in range(count)] for part in (gate, up, down)
        ]
        stacked[f"{prefix}experts.gate_up_proj"] = np.concatenate([np.stack(parts[0]), np.stack(parts[1])], axis=1)
        stacked[f"{prefix}experts.down_proj"] = np.stack(parts[2])
    return stacked


def rename_granite(weights: Weights) -> Weights:
    pairs = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    renamed = dict(weights)
    for name in weights:
        for old, new in pairs.items():
            if name.endswith(f"block_sparse_moe.{old}"):
                renamed[name.replace(old, new)] = renamed.pop(name)
    return renamed


def stack_nemotron(weights: Weights) -> Weights:
    """Stack experts as transformers 5 does: one stack for each product, below the prefix of other models."""
    stacked = {name.replace("backbone.", "model."): values for name, values in weights.items()}
    for name in [name for name in stacked if ".experts.0." in name]:
        parts = [name.replace(".experts.0.", f".experts.{expert}.") for expert in range(8)]
        target = name.replace(".experts.0.", ".experts.").removesuffix(".weight")
        stacked[target] = np.stack([stacked.pop(part) for part in parts])
    return stacked


def switch_names(weights: Weights) -> Weights:
    """Experts as MLX keeps them: a stack for each product."""
    stacked = stack_names(weights, "gate_proj", "up_proj", "down_proj")
    for name in [name for name in stacked if name.endswith("experts.gate_up_proj")]:
        gate, up = np.split(stacked.pop(name), 2, axis=1)
        prefix = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
        stacked |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        stacked[f"{prefix}down_proj.weight"] = stacked.pop(name.replace("gate_up_proj", "down_proj"))
    return stacked


def read_folder(folder: Path) -> tuple[dict[str, object], dict[str, WeightTensor]]:
    opened = open_safetensors(folder)
    return opened.config, dict(read_contents(opened).tensors)


def write_folder(folder: Path, config: dict[str, object], weights: dict[str, NDArray[np.generic]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(values) for name, values in weights.items()}, folder / "model.safetensors")
    return folder


LAYOUTS: list[tuple[str, Callable[[Weights], Weights]]] = [
    ("qwen2moe", lambda weights: stack_names(weights, "gate_proj", "up_proj", "down_proj")),
    ("qwen3moe", switch_names),
    ("olmoe", switch_names),
    ("glm4moe", lambda weights: stack_names(weights, "gate_proj", "up_proj", "down_proj")),
    ("mixtral", lambda weights: stack_names(weights, "w1", "w3", "w2")),
    (
        "mixtral",
        lambda weights: {
            name.replace("block_sparse_moe", "mlp"): values
            for name, values in stack_names(weights, "w1", "w3", "w2").items()
        },
    ),
    (
        "phimoe",  # as transformers names them
        lambda weights: {
            name.replace("block_sparse_moe.gate", "mlp.router").replace("block_sparse_moe", "mlp"): values
            for name, values in stack_names(weights, "w1", "w3", "w2").items()
        },
    ),
    ("granitemoe-shared", rename_granite),
    ("granite4h-moe", rename_granite),
    ("nemotron-h-moe", stack_nemotron),
]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_folders(case: str, layout: Callable[[Weights], Weights], tmp_path: Path) -> None:
    config, seed, tokens, golden = read_golden(case)
    weights = layout(make_weights(config, seed))
    _, tensors = read_folder(write_folder(tmp_path / "model", config, dict(weights)))
    model = Decoder(Context("reference"), model_from_folder(config), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE


@pytest.mark.parametrize("case", ["mixtral", "qwen2moe", "glm4moe"])
@pytest.mark.parametrize("layout", ["each", "joined"])
def test_gguf_files(case: str, layout: str) -> None:
    """A tensor for each expert, as old files of Mixtral have them, and gate and up as one."""
    config, seed, tokens, golden = read_golden(case)
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    for name in [name for name in tensors if name.endswith("_exps.weight")]:
        if layout == "each":
            stack = tensors.pop(name).to_float32()
            for expert, values in enumerate(stack):
                one = name.replace("_exps.weight", f".{expert}.weight")
                tensors[one] = make_source(one, values)
        elif "ffn_gate_exps" in name:
            joined = name.replace("ffn_gate_exps", "ffn_gate_up_exps")
            parts = [tensors.pop(name), tensors.pop(name.replace("ffn_gate_exps", "ffn_up_exps"))]
            tensors[joined] = make_source(joined, np.concatenate([part.to_float32() for part in parts], axis=1))
    model = Decoder(Context("reference"), model_from_gguf(metadata, tensors), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE


def draw_mxfp4(shape: tuple[int, ...], random: np.random.RandomState) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blocks and scales of random numbers, some below 1 and some of a few units."""
    blocks = random.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16)).astype(np.uint8)
    return blocks, random.randint(121, 125, blocks.shape[:-1]).astype(np.uint8)


def decode_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Two numbers a byte, the lower half first: a sign and one of eight levels, times two to the scale less 127."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.where(codes & 8, -levels[codes & 7], levels[codes & 7])
    values = values * np.exp2(scales[..., None].astype(np.float32) - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def test_mxfp4_folders_are_what_they_decode_to(tmp_path: Path) -> None:
    """gpt-oss as published, against the same numbers as floats, with the columns first."""
    config, seed, tokens, _ = read_golden("gpt-oss")
    floats: dict[str, NDArray[np.generic]] = dict(make_weights(config, seed))
    packed, random = dict(floats), np.random.RandomState(5)
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = floats[name].shape
        blocks, scales = draw_mxfp4((experts, rows, columns), random)
        floats[name] = decode_mxfp4(blocks, scales).transpose(0, 2, 1)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    stated = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    answers, kinds = [], []
    for folder, weights, extra in (("floats", floats, {}), ("packed", packed, stated)):
        _, tensors = read_folder(write_folder(tmp_path / folder, config | extra, weights))
        model = Decoder(Context("reference"), model_from_folder(config | extra), tensors)
        answers.append(TinyRun(model).run(tokens))
        kinds.append(tensors["blk.0.ffn_up_exps.weight"].type_name)
    assert kinds == ["f32", "mxfp4"]
    assert np.abs(answers[0]).max() > 1.0
    assert np.array_equal(*answers)


def test_other_quantised_folders_are_refused() -> None:
    config = read_golden("gpt-oss")[0] | {"quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(ModelError, match="quantised like this"):
        model_from_folder(config)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        ((2, 4, 1, 16), (2, 4, 2), "expected 16 bytes for each"),
        ((2, 4, 1, 15), (2, 4, 1), "expected 16 bytes for each"),
        (None, (2, 4, 1), "has no x_blocks"),
        ((2, 4, 1, 16), None, "x_scales is missing"),
    ],
)
def test_mxfp4_that_does_not_fit_is_refused(
    blocks: tuple[int, ...] | None, scales: tuple[int, ...] | None, message: str
) -> None:
    parts = {"x_blocks": blocks, "x_scales": scales}
    tensors = {
        name: TensorSource(name, "u8", shape, np.zeros(int(np.prod(shape)), np.uint8))
        for name, shape in parts.items()
        if shape is not None
    }
    with pytest.raises(ModelError, match=message):
        join_quantised(tensors, {})


def test_layers_that_draft_are_left_out() -> None:
    """GLM 4.5 has one at its end, in GGUF counted as a block."""
    config, seed, tokens, golden = read_golden("glm4moe")
    metadata, tensors = make_gguf(make_weights(config, seed), config)
    for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "attn_q"):
        tensors[f"blk.3.{name}.weight"] = make_source(name, np.zeros(3, np.float32))
    metadata |= {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    model = Decoder(Context("reference"), model_from_gguf(metadata, tensors), tensors)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE

    weights = make_weights(config, seed)
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens", "self_attn.q_proj"):
        weights[f"model.layers.3.{name}.weight"] = np.zeros(3, np.float32)
    named = make_hf_tensors(weights, config)
    model = Decoder(Context("reference"), model_from_folder(config | {"num_nextn_predict_layers": 1}), named)
    assert np.abs(TinyRun(model).run(tokens) - golden).max() < TOLERANCE
