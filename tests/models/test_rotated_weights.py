"""Weights that PrismML's files have rotated: their inputs are rotated alike, so that products stay the same.

A file of plain weights, and the same with every named weight times signs and the Walsh-Hadamard matrix, which is made
here by its definition, give the same logits but for rounding; with wrong signs, blocks or orders of heads they do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from random_model import make_head_weights, make_tokens, make_weights
from test_draft_head import run_head
from tiny_models import TinyRun, build_head, make_gguf, make_hf_tensors, make_source, read_golden

from mlxr.cli.main import main
from mlxr.core.errors import ModelError
from mlxr.formats import TensorSource, TensorToWrite, open_gguf, write_gguf
from mlxr.kernels.context import Context
from mlxr.models import Decoder, model_from_gguf
from mlxr.models.adapter import merge_pairs
from mlxr.models.draft_head import DraftHead
from mlxr.models.draft_layer import take_draft_layer

Keys = dict[str, object]
Tensors = dict[str, TensorSource]
BLOCK, TOKENS = 32, 12
SIDES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
DELTA = ("attn_qkv", "attn_gate", "ssm_out")  # not ssm_alpha and ssm_beta, which read the same input
TRANSFORM = "normalized-sylvester-walsh-hadamard"


def make_matrix(size: int) -> NDArray[np.float64]:
    ones = np.array([[(row & column).bit_count() for column in range(size)] for row in range(size)])
    return (-1.0) ** ones / np.sqrt(size)


def rotate(values: NDArray[np.float32], signs: NDArray[np.int32]) -> NDArray[np.float32]:
    blocks = (values.astype(np.float64) * signs).reshape(-1, BLOCK) @ make_matrix(BLOCK)
    return blocks.reshape(values.shape).astype(np.float32)


def group_heads(values: NDArray[np.float32], keys: int, rep: int) -> NDArray[np.float32]:
    """Columns of the output of a gated delta net, whose heads are `rep` times those of all keys, key after key."""
    heads = values.reshape(len(values), rep, keys, -1)
    return heads.transpose(0, 2, 1, 3).reshape(values.shape)


def fold(
    metadata: Keys, tensors: Tensors, kinds: tuple[str, ...] = SIDES + DELTA, **keys: object
) -> tuple[Keys, Tensors]:
    """Make a file with these weights rotated, and the table and the output; `keys` replace the right metadata."""
    made, rng = dict(tensors), np.random.default_rng(5)
    is_tied, signs, names = "output.weight" not in tensors, dict[int, NDArray[np.int32]](), list[str]()
    name = metadata["general.architecture"]
    keys_of_delta, heads = (metadata.get(f"{name}.ssm.{key}", 1) for key in ("group_count", "time_step_rank"))
    for full, tensor in tensors.items():
        kind = full.removesuffix(".weight").rpartition(".")[2]
        is_end = full in ("output.weight", "token_embd.weight")
        if not is_end and (kind not in kinds or not full.endswith(".weight") or len(tensor.shape) != 2):
            continue
        own = signs.setdefault(tensor.shape[1], rng.choice(np.array([-1, 1], np.int32), tensor.shape[1]))
        values = tensor.to_float32()
        if kind == "ssm_out":
            values = group_heads(values, keys_of_delta, heads // keys_of_delta)  # type: ignore[arg-type,operator]
        made[full] = make_source(full, rotate(values, own))
        names += [full] if full != "token_embd.weight" else []
    stated = {
        "version": 2 if is_tied else 1,
        "block_size": BLOCK,
        "transform": TRANSFORM,
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": [*signs],
        "sign_values": np.concatenate([*signs.values()]),
        "weight_names": names,
        "inverse_weight_names": ["token_embd.weight"],
        "gdn_v_grouped": "ssm_out" in kinds,
        **({"tied_output": True} if is_tied else {}),
    } | keys
    return metadata | {f"prism.hadamard.{key}": value for key, value in stated.items() if value is not None}, made


def make(case: str) -> tuple[Keys, Tensors]:
    config, seed, _, _ = read_golden(case)
    return make_gguf(make_weights(config, seed), config)  # type: ignore[return-value]


def run(ctx: Context, metadata: Keys, tensors: Tensors, chunk: int | None = None) -> NDArray[np.float32]:
    model = Decoder(ctx, model_from_gguf(metadata, tensors), tensors)
    tokens = make_tokens({"vocab_size": model.config.vocab_size}, TOKENS, 3)
    return np.asarray(TinyRun(model).run(tokens, chunk))


def differ(result: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(result - expected).max() / expected.std())


@pytest.mark.parametrize("case", ["qwen35", "qwen3-128-tied", "qwen3", "llama-mha"])
def test_rotated_weights_and_rotated_inputs_give_the_logits_of_plain_ones(case: str) -> None:
    """In NumPy, natively with equal bits on all tiers, threads and chunks, and where only some weights are rotated."""
    plain = make(case)
    expected = run(Context("reference"), *plain)
    folded = fold(*plain)
    assert differ(run(Context("reference"), *folded), expected) < 1e-4
    native = [run(Context("cpu", threads=1), *folded, chunk) for chunk in (None, 1, 5)]
    native += [run(Context("cpu", threads=2, isa=isa), *folded) for isa in Context("cpu").module.available_isas()]
    assert differ(native[0], run(Context("cpu"), *plain)) < 0.05  # whose activations are rounded in another basis
    for other in native[1:]:
        np.testing.assert_array_equal(other, native[0])
    some = fold(*plain, kinds=("attn_q", "ffn_up", "attn_qkv"))
    assert differ(run(Context("reference"), *some), expected) < 1e-4
    wrong = {"signs": {"sign_mode": "identity", "sign_widths": None, "sign_values": None}, "block": {"block_size": 16}}
    wrong |= {"order": {"gdn_v_grouped": False}} if case == "qwen35" else {}
    for keys in wrong.values():
        assert differ(run(Context("reference"), *fold(*plain, **keys)), expected) > 0.5


def test_the_layer_that_drafts_is_rotated_too() -> None:
    config, seed, tokens, _ = read_golden("qwen35")
    model, head = build_head(Context("reference"), config, seed)
    expected = run_head(model, head, tokens[:TOKENS])
    weights = make_weights(config, seed) | make_head_weights(config, seed)
    metadata, tensors = make_gguf(weights, config)
    block = f"blk.{config['num_hidden_layers']}."
    drafting = {name: one for name, one in _name_drafting(config, weights).items() if name.startswith(block)}
    keys, made = fold(metadata, tensors | drafting)
    own = Decoder(Context("reference"), model_from_gguf(keys, made), made)
    layer = take_draft_layer(own.config, made)
    assert layer is not None
    result = run_head(own, DraftHead(own, layer), tokens[:TOKENS])
    assert differ(result, expected) < 1e-4


def _name_drafting(config: dict[str, Any], weights: dict[str, Any]) -> Tensors:
    return {name: make_source(name, one.to_float32()) for name, one in make_hf_tensors(weights, config).items()}


BAD: dict[str, tuple[dict[str, object], str]] = {
    "version": ({"version": 3}, "version is 3"),
    "transform": ({"transform": "haar"}, "transform is 'haar', expected normalized-sylvester"),
    "axis": ({"axis": "output"}, "axis is 'output', expected input-last-dimension"),
    "mode": ({"sign_mode": "seeded"}, "sign_mode is 'seeded', expected identity or explicit"),
    "no power": ({"block_size": 24}, "block_size is 24, expected a power of two"),
    "large": ({"block_size": 1 << 20}, "block_size is 1048576, expected a whole number from 1 to 8192"),
    "wider than rows": (
        {"block_size": 512, "sign_mode": "identity"},
        "has 128 columns, expected a multiple of the blocks",
    ),
    "no names": ({"weight_names": []}, "weight_names is"),
    "numbers": ({"weight_names": [1, 2]}, "weight_names is"),
    "twice": ({"weight_names": ["output.weight"] * 2}, "weight_names is"),
    "not there": ({"weight_names": ["blk.9.attn_q.weight"]}, "tensor blk.9.attn_q.weight is said to be rotated"),
    "a norm": ({"weight_names": ["blk.0.attn_norm.weight"]}, "tensor blk.0.attn_norm.weight is said to be rotated"),
    "another table": ({"inverse_weight_names": ["output.weight"]}, "inverse_weight_names is"),
    "tied": ({"tied_output": True}, "tied_output is True"),
    "second version": ({"version": 2}, "tied_output is missing"),
    "widths": ({"sign_widths": [100]}, "sign_widths is"),
    "no width": (
        {"sign_widths": [32], "sign_values": [1] * 32},
        "columns, expected some that its rotation has signs for",
    ),
    "few signs": ({"sign_values": [1, -1]}, "sign_values is"),
    "zeros": ({"sign_values": np.zeros(288, np.int32)}, "sign_values is"),
    "fractions": ({"sign_values": [0.5]}, "sign_values is"),
    "unknown key": ({"stages": 2}, "stages is 2, expected none, as mlxr knows rotations by version"),
    "no version": ({"version": None}, "version is missing"),
}


def build(metadata: Keys, tensors: Tensors) -> Decoder:
    return Decoder(Context("reference"), model_from_gguf(metadata, tensors), tensors)


@pytest.mark.parametrize("what", BAD)
def test_keys_that_say_something_else_are_refused_by_name(what: str) -> None:
    keys, message = BAD[what]
    with pytest.raises(ModelError, match=message):
        build(*fold(*make("llama-mha"), **keys))


def test_files_are_shown_and_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys stay, so a converted file gives the same logits; an adapter is not merged into rotated weights."""
    metadata, tensors = fold(*make("qwen35"))
    path, out = tmp_path / "folded.gguf", tmp_path / "out.gguf"
    rows = [TensorToWrite.from_source(one, name=name, type_name="f32") for name, one in tensors.items()]
    write_gguf(path, metadata, rows)
    assert main(["show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rotated_tensors"] == len(metadata["prism.hadamard.weight_names"]) + 1  # type: ignore[arg-type]
    assert shown["bits_per_weight"] == 32
    assert shown["unknown_keys"] == []
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "tensors in blocks of 32 (Hadamard), and what they multiply" in text
    assert "32.00 bits on average" in text
    assert main(["convert", str(path), str(out), "--type", "bf16", "--tensor-type", "weight=f32"]) == 0
    with open_gguf(out) as file:
        made = file.metadata
        result = run(Context("reference"), made, dict(file.tensors))
    np.testing.assert_array_equal(result, run(Context("reference"), metadata, tensors))
    with pytest.raises(ModelError, match="weights of the model are rotated"):
        merge_pairs("a", [], tensors, model_from_gguf(metadata, tensors), is_gguf=True)
