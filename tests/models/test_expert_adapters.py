"""Adapters of experts as files have them: a pair for each, PEFT's stacks of old and new, and GGUF's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_model import make_weights
from safetensors.numpy import load_file, save_file
from test_adapters import ALPHA, RANK, fit, score, write_peft
from tiny_models import build_gguf, build_hf, make_gguf, read_golden

from mlxr.core.errors import MlxrError
from mlxr.formats import TensorToWrite, read_adapter, write_gguf
from mlxr.kernels.context import Context
from mlxr.loading import inspect_adapter
from mlxr.models import Decoder

Arrays = dict[str, np.ndarray]
PEFT = re.compile(
    r"base_model\.model\.(?P<block>.+\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.lora_(?P<side>[AB])\.weight"
)
PARTS = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def write_experts(folder: Path, case: str = "qwen3moe") -> dict[tuple[str, str, str], np.ndarray]:
    """An adapter with a pair for each expert; returns stacks (experts, ...) by block, part and side."""
    fields, seed, _, _ = read_golden(case)
    weights = {name: values for name, values in make_weights(fields, seed).items() if ".experts." in name}
    write_peft(folder, weights, 3)
    found: dict[tuple[str, str, str], list[np.ndarray]] = {}
    tensors = load_file(folder / "adapter_model.safetensors")
    numbers = {name: int(match["expert"]) for name in tensors if (match := PEFT.fullmatch(name))}
    for name in sorted(tensors, key=numbers.__getitem__):
        match = PEFT.fullmatch(name)
        assert match is not None
        found.setdefault((match["block"], match["part"], match["side"]), []).append(tensors[name])
    return {key: np.stack(values) for key, values in found.items()}


def stack_peft(folder: Path, stacks: dict[tuple[str, str, str], np.ndarray], *, turned: bool = False) -> Arrays:
    """Stack the same as PEFT does for parameters: gate and up in one pair of twice the rank, and down."""
    tensors: Arrays = {}
    for block in {key[0] for key in stacks}:
        a, b = ({part: stacks[block, part, side] for part in PARTS} for side in "AB")
        both = np.concatenate([a["gate_proj"], a["up_proj"]], 1)
        gate, up = b["gate_proj"], b["up_proj"]
        none = np.zeros_like(gate)
        apart = np.concatenate([np.concatenate([gate, none], 2), np.concatenate([none, up], 2)], 1)
        for module, first, second in ((".base_layer", both, apart), ("", a["down_proj"], b["down_proj"])):
            if turned:
                first, second = second.transpose(0, 2, 1), first.transpose(0, 2, 1)
            name = f"base_model.model.{block}{module}"
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(first.reshape(-1, first.shape[2]))
            second = second.transpose(1, 2, 0)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(second.reshape(second.shape[0], -1))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "peft_version": "0.18.1" if turned else "0.19.0",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 2 * RANK},
        "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA},
    }
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def write_adapter(path: Path, tensors: Arrays) -> Path:
    """A GGUF adapter."""
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": ALPHA}
    write_gguf(path, about, [TensorToWrite.from_array(name, "f32", values) for name, values in tensors.items()])
    return path


def stack_gguf(path: Path, stacks: dict[tuple[str, str, str], np.ndarray]) -> Path:
    """Stack the same as llama.cpp does."""
    tensors = {}
    for (block, part, side), values in stacks.items():
        layer = block.split(".")[2]
        tensors[f"blk.{layer}.{PARTS[part]}_exps.weight.lora_{side.lower()}"] = values
    return write_adapter(path, tensors)


def build(ctx: Context, case: str = "qwen3moe", *, is_gguf: bool = False) -> Decoder:
    fields, seed, _, _ = read_golden(case)
    return (build_gguf if is_gguf else build_hf)(ctx, fields, seed)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_all_files_say_the_same(is_gguf: bool, tmp_path: Path) -> None:
    stacks = write_experts(tmp_path / "each")
    stack_peft(tmp_path / "new", stacks)
    stack_peft(tmp_path / "old", stacks, turned=True)
    gguf = stack_gguf(tmp_path / "a.gguf", stacks)
    model = build(Context("cpu", threads=2), is_gguf=is_gguf)
    tokens = np.asarray(read_golden("qwen3moe")[2]).reshape(-1)[:24].tolist()
    each = fit(model, read_adapter(tmp_path / "each"))
    wanted, plain = score(model, tokens, each), score(model, tokens)
    assert np.abs(wanted - plain).max() > 0.01
    assert fit(model, read_adapter(gguf)).digest == each.digest
    new, old = (fit(model, read_adapter(tmp_path / name)) for name in ("new", "old"))
    assert new.digest == old.digest != each.digest
    np.testing.assert_allclose(score(model, tokens, new), wanted, atol=1e-4)


def test_an_adapter_of_some_experts_leaves_the_others(tmp_path: Path) -> None:
    write_experts(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {name: values for name, values in load_file(path).items() if ".experts.1." in name}
    save_file(tensors, path)
    adapter = fit(build(Context("cpu", threads=1)), read_adapter(tmp_path))
    assert len(adapter.parts[0].updates.weights) == 4  # up and down of one expert, in two layers


def drop(part: str) -> Callable[[Arrays, dict[str, Any]], None]:
    def harm(tensors: Arrays, _: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return harm


def cut_experts(tensors: Arrays, _: dict[str, Any]) -> None:
    for name, values in tensors.items():
        if "base_layer" not in name:
            tensors[name] = values[:-RANK].copy() if "lora_A" in name else values[:, :-RANK].copy()


def cut_rank(tensors: Arrays, _: dict[str, Any]) -> None:
    for name, values in tensors.items():
        if "lora_A" in name:
            tensors[name] = values[:-1].copy()


HOSTILE: dict[str, tuple[Callable[[Arrays, dict[str, Any]], None], str]] = {
    "no gate and up": (drop("base_layer"), "matrices of 1 parameters, and gate_up_proj, down_proj"),
    "no down": (drop("experts.lora"), "matrices of 1 parameters"),
    "one side": (drop("base_layer.lora_B"), "has a alone"),
    "fewer experts": (cut_experts, "is for 7 experts, and the model has 8"),
    "another rank": (cut_rank, "ranks are equal"),
    "rank": (lambda _, config: config.update(r=5), "says 5"),
    "endless rank": (lambda _, config: config.update(r=float("inf")), "says inf"),
    "no list": (lambda _, config: config.update(target_parameters={"a": 1}), "not a list of names"),
    "others": (lambda _, config: config.update(target_parameters=["experts.x", "experts.y"]), "not of|tensor|matrices"),
    "untold": (lambda _, config: config.update(target_parameters=[]), "says 3"),
    "not finite": (lambda tensors, _: tensors[min(tensors)].fill(np.nan), "not finite"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_broken_stacks_end_in_one_line(case: str, tmp_path: Path) -> None:
    harm, words = HOSTILE[case]
    tensors = stack_peft(tmp_path / "new", write_experts(tmp_path / "each"))
    config_path = tmp_path / "new" / "adapter_config.json"
    config = json.loads(config_path.read_text())
    harm(tensors, config)
    config_path.write_text(json.dumps(config))
    save_file(tensors, tmp_path / "new" / "adapter_model.safetensors")
    with pytest.raises(MlxrError, match=words) as caught:
        fit(build(Context("reference")), read_adapter(tmp_path / "new"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("blk.0.ffn_gate_exps", ((8, 3, 96), (7, 64, 3)), "a of shape"),
        ("blk.0.ffn_gate_exps", ((8, 3, 96), (8, 64, 4)), "a of shape"),
        ("blk.0.ffn_gate_exps", ((7, 3, 96), (7, 64, 3)), "is for 7 experts, and the model has 8"),
        ("blk.0.ffn_gate_exps", ((3, 96), (64, 3)), "is for 1 experts"),
        ("blk.0.ffn_gate_exps", ((3, 96), (8, 64, 3)), "a of shape"),
        ("blk.0.ffn_gate_exps", ((8, 3, 64), (8, 96, 3)), r"shape \(96, 64\)"),
        ("blk.0.ffn_gate_exps", ((8, 300, 96), (8, 64, 300)), "from 1 to 256"),
        ("blk.1.ffn_gate_exps", ((8, 3, 96), (8, 64, 3)), "the model has none there"),
        ("blk.0.ffn_gate.8", ((3, 96), (64, 3)), "expert 8, and the model has 8"),
        ("blk.0.attn_q", ((8, 3, 96), (8, 128, 3)), "no stack of experts"),
    ],
)
def test_broken_gguf_stacks_end_in_one_line(name: str, shapes: Any, words: str, tmp_path: Path) -> None:
    own = zip("ab", shapes, strict=True)
    write_adapter(tmp_path / "a.gguf", {f"{name}.weight.lora_{side}": np.ones(shape, "f4") for side, shape in own})
    with pytest.raises(MlxrError, match=words) as caught:
        fit(build(Context("reference"), is_gguf=True), read_adapter(tmp_path / "a.gguf"))
    assert "\n" not in str(caught.value)


def test_a_headers_only_look_knows_experts(tmp_path: Path) -> None:
    fields, seed, _, _ = read_golden("qwen3moe")
    metadata, tensors = make_gguf(make_weights(fields, seed), fields)
    base = tmp_path / "base.gguf"
    write_gguf(
        base, metadata, [TensorToWrite.from_source(one, name=name, type_name="f32") for name, one in tensors.items()]
    )
    stacks = write_experts(tmp_path / "each")
    assert inspect_adapter(tmp_path / "each", base).weights == 2 * 3 * 8
    assert inspect_adapter(stack_gguf(tmp_path / "a.gguf", stacks), base).rank == RANK
