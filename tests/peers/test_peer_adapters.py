"""Adapters against llama.cpp: the loss of each token of a text, of the same model with the same GGUF adapter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from llama_losses import compute_losses, open_llama
from numpy.typing import NDArray
from real_files import find_model
from test_families import BOUNDS, FAMILIES, TEXT, THEIR_OPTIONS, make_folder, run

from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.formats import TensorToWrite, open_gguf, write_gguf
from mlxr.loading import ASSETS, load
from mlxr.service.opening import build_engine

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
CASES = {  # the model, the weights that change, and the rank
    "linear": ("qwen2", LINEAR, 8),
    "llama": ("llama", LINEAR, 3),
    "joined": ("phi-short", ("attn_qkv", "ffn_up", "ffn_down"), 16),
    "embeddings": ("phi-short", ("token_embd", "attn_output"), 4),
    "output": ("phi-short", ("output", "ffn_down"), 4),
    "experts": ("mixtral", (*EXPERTS, "attn_q"), 4),
    "experts-of-many": ("qwen3moe", (*EXPERTS, "ffn_gate_inp"), 8),
    "experts-clamped": ("gpt-oss", EXPERTS, 3),
    "recurrent": ("granite4h", ("ssm_in", "ssm_out", "attn_q"), 4),
}
SIZE, SMALL_SIZE = (
    0.05,
    0.02,
)  # of numbers in b; small where larger ones bring routers in doubt, so that rounding decides
LEAST = 0.02  # nats by which the adapter must move the losses


def write_adapter(path: Path, model: Path, parts: Iterable[str], rank: int, size: float) -> None:
    """A GGUF adapter of random numbers, for the weights of a model that are named so."""
    chance, tensors = np.random.default_rng(rank), []
    with open_gguf(model) as base:
        about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0 * rank}
        about |= {"general.architecture": base.metadata["general.architecture"]}
        for name, tensor in base.tensors.items():
            if name.removesuffix(".weight").rpartition(".")[2] not in parts or not name.endswith(".weight"):
                continue
            *experts, rows, columns = tensor.shape
            sides = {"a": (*experts, rank, columns), "b": (*experts, rows, rank)}
            if name == "token_embd.weight":
                sides = {"a": (rows, rank), "b": (columns, rank)}
            for side, shape in sides.items():
                scale = size if side == "b" else shape[-1] ** -0.5
                values = chance.normal(0, scale, shape).astype(np.float32)
                tensors.append(TensorToWrite.from_array(f"{name}.lora_{side}", "f32", values))
    write_gguf(path, about, tensors)


def compute_our_losses(model: Path, adapter: Path | None) -> tuple[list[int], NDArray[np.float64]]:
    """The tokens of the text, and the loss of each but the first."""
    with load(model, device="cpu", threads=2) as loaded:
        engine = build_engine(loaded, Settings(max_sequences=1, kv_type="f32"))
        tokens = loaded.tokenizer.encode(TEXT)
        chosen = None if adapter is None else loaded.load_adapter(adapter)
        engine.submit(
            EngineRequest(tokens, SamplingParams(max_tokens=1, logprobs=0), scores_prompt=True, adapter=chosen)
        )
        events = [event for _ in range(99) if engine.has_work for event in engine.step()]
        engine.close()
    return tokens, -np.array([info.chosen.logprob for info in events[-1].prompt[1:]])


def compare(model: Path, adapter: Path) -> float:
    """Return by how much the losses of the worst eighth of the tokens differ, as a part of the mean loss.

    They must differ from those without the adapter by more.
    """
    tokens, ours = compute_our_losses(model, adapter)
    theirs = compute_losses(open_llama(model, len(tokens), lora_path=str(adapter), **THEIR_OPTIONS), tokens)
    worst = pick_worst(ours, theirs)
    moved = np.abs(compute_our_losses(model, None)[1] - ours).mean()
    print(f"{model.name}: mean loss {theirs.mean():.3f}, worst eighth {worst:.5f}, moved by {moved:.3f} nats")
    assert moved > LEAST
    return worst


def compare_without(model: Path) -> float:
    """The same without an adapter."""
    tokens, ours = compute_our_losses(model, None)
    return pick_worst(ours, compute_losses(open_llama(model, len(tokens), **THEIR_OPTIONS), tokens))


def pick_worst(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
    """Return the mean difference of the worst eighth of the tokens, as a part of the mean loss."""
    return float(np.sort(np.abs(ours - theirs))[-len(ours) // 8 :].mean() / theirs.mean())


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_losses_of_tokens(case: str, kind: str, tmp_path: Path) -> None:
    family, parts, rank = CASES[case]
    model, adapter = tmp_path / f"{family}-{kind}.gguf", tmp_path / "adapter.gguf"
    run("convert", make_folder(tmp_path / family, *FAMILIES[family]), model, "--type", kind)
    write_adapter(adapter, model, parts, rank, SIZE if set(EXPERTS).isdisjoint(parts) else SMALL_SIZE)
    worst = compare(model, adapter)
    assert worst < BOUNDS[kind] or worst < 2 * compare_without(model)  # of a router in doubt one token is much


@pytest.mark.parametrize("name", ["demo", "qwen2.5-coder-0.5b"])
def test_losses_of_real_models(name: str, tmp_path: Path) -> None:
    """The engines round quantised files differently; with an adapter they differ by no more than without."""
    model = ASSETS / "demo.gguf" if name == "demo" else find_model(name)
    write_adapter(tmp_path / "adapter.gguf", model, LINEAR, 16, 0.01)
    worst, without = compare(model, tmp_path / "adapter.gguf"), compare_without(model)
    print(f"{name}: worst eighth {worst:.5f} with the adapter, {without:.5f} without")
    assert worst < 1.5 * without
