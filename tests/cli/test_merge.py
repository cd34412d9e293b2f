"""`mlxr merge`: the merged model answers as the base does with the adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_folder import make_folder
from safetensors.numpy import load_file, save_file

from mlxr import LLM, SamplingParams
from mlxr.cli.main import main
from mlxr.core.settings import Settings
from mlxr.engine.request import EngineRequest
from mlxr.formats import TensorToWrite, open_gguf, write_gguf
from mlxr.loading import ASSETS, load
from mlxr.service.opening import build_engine

TEXT = "the quick brown fox sleeps in the sun"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Run = Callable[..., str]


def write_adapter(folder: Path, base: Path, modules: tuple[str, ...], seed: int = 1) -> Path:
    """A PEFT adapter of some modules of a folder's model, of random numbers."""
    chance, tensors = np.random.default_rng(seed), {}
    for name, values in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(modules) or values.ndim != 2:
            continue
        rows, columns = values.shape
        key, kinds = f"base_model.model.{module}.lora_", (("A.weight", (3, columns)), ("B.weight", (rows, 3)))
        if module.endswith("embed_tokens"):
            kinds = (("embedding_A", (3, rows)), ("embedding_B", (columns, 3)))
        tensors |= {key + kind: chance.normal(0, 0.3, shape).astype(np.float32) for kind, shape in kinds}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 4}))
    return folder


def score(path: Path, adapter: Path | None = None) -> np.ndarray:
    """Log-probabilities of the tokens of TEXT."""
    with load(path, device="reference") as loaded:
        engine = build_engine(loaded, Settings(max_sequences=1))
        chosen = None if adapter is None else loaded.load_adapter(adapter)
        params = SamplingParams(max_tokens=1, logprobs=0)
        engine.submit(EngineRequest(loaded.tokenizer.encode(TEXT), params, scores_prompt=True, adapter=chosen))
        events = [event for _ in range(9) if engine.has_work for event in engine.step()]
        engine.close()
    return np.array([info.chosen.logprob for info in events[-1].prompt[1:]])


@pytest.mark.parametrize("base_kind", ["folder", "gguf"])
@pytest.mark.parametrize("modules", [MODULES, ("embed_tokens", "q_proj")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_model_says_what_base_and_adapter_say(
    base_kind: str, modules: tuple[str, ...], tied: bool, tmp_path: Path, mlxr: Run
) -> None:
    folder = make_folder(tmp_path / "model", tie_word_embeddings=tied)
    adapter, base, out = write_adapter(tmp_path / "own", folder, modules), folder, tmp_path / "out.gguf"
    if base_kind == "gguf":
        base = tmp_path / "base.gguf"
        mlxr("convert", folder, base, "--type", "f32")
    wanted = score(base, adapter)
    assert np.abs(score(base) - wanted).max() > 0.01
    mlxr("merge", base, adapter, out, "--type", "f32")
    np.testing.assert_allclose(score(out), wanted, atol=2e-4)
    report = json.loads(mlxr("merge", base, adapter, tmp_path / "f16.gguf", "--type", "f16", "--json"))
    assert report["tensors_by_type"]["f16"] >= len(modules)
    np.testing.assert_allclose(score(tmp_path / "f16.gguf"), wanted, atol=2e-2)


def test_without_a_type_tensors_keep_theirs(tmp_path: Path, mlxr: Run) -> None:
    """With a GGUF adapter of the demo, all other tensors stay the same, byte for byte."""
    chance, tensors, name = np.random.default_rng(3), [], "blk.1.ffn_down.weight"
    with open_gguf(ASSETS / "demo.gguf") as base:
        rows, columns = base.tensors[name].shape
    for side, shape in (("a", (4, columns)), ("b", (rows, 4))):
        values = chance.normal(0, 0.2, shape).astype(np.float32)
        tensors.append(TensorToWrite.from_array(f"{name}.lora_{side}", "f32", values))
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    write_gguf(tmp_path / "own.gguf", about, tensors)
    out = tmp_path / "merged.gguf"
    assert "merged.gguf" in mlxr("merge", "demo", tmp_path / "own.gguf", out)
    with open_gguf(ASSETS / "demo.gguf") as base, open_gguf(out) as merged:
        assert [*merged.metadata] == [*base.metadata]
        changed = [key for key, one in base.tensors.items() if not np.array_equal(one.data, merged.tensors[key].data)]
        assert changed == [name]
        assert {key: one.type_name for key, one in merged.tensors.items()} == {
            key: one.type_name for key, one in base.tensors.items()
        }
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM("demo", device="cpu", threads=1, adapter=tmp_path / "own.gguf") as llm:
        wanted = llm.generate("import os", params)[0].token_ids
    with LLM(out, device="cpu", threads=1) as llm:
        assert llm.generate("import os", params)[0].token_ids[:2] == wanted[:2]


def test_experts_are_merged_and_the_others_keep_their_bytes(tmp_path: Path, moe_gguf: Path, mlxr: Run) -> None:
    """Stacks of matrices for all experts, and one expert's own pair."""
    chance, adapter, tensors = np.random.default_rng(4), tmp_path / "own.gguf", []
    with open_gguf(moe_gguf) as base:
        shapes = {name: one.shape for name, one in base.tensors.items()}
    for name in ("blk.0.ffn_gate_exps", "blk.1.ffn_down_exps", "blk.1.ffn_up.2", "blk.0.ffn_gate_inp"):
        *stack, rows, columns = shapes[f"{name.replace('up.2', 'up_exps')}.weight"]
        stack = [] if name.endswith(".2") else stack
        for side, shape in (("a", (*stack, 4, columns)), ("b", (*stack, rows, 4))):
            values = chance.normal(0, 0.05, shape).astype(np.float32)
            tensors.append(TensorToWrite.from_array(f"{name}.weight.lora_{side}", "f32", values))
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    write_gguf(adapter, about, tensors)
    wanted, plain = score(moe_gguf, adapter), score(moe_gguf)
    assert np.abs(wanted - plain).max() > 0.01
    mlxr("merge", moe_gguf, adapter, tmp_path / "f32.gguf", "--type", "f32")
    np.testing.assert_allclose(score(tmp_path / "f32.gguf"), wanted, atol=2e-3)
    mlxr("merge", moe_gguf, adapter, tmp_path / "kept.gguf")
    with open_gguf(moe_gguf) as base, open_gguf(tmp_path / "kept.gguf") as merged:
        for name, one in base.tensors.items():
            assert merged.tensors[name].type_name == one.type_name
            for index in range(one.shape[0] if len(one.shape) == 3 else 1):
                own, other = (file.tensors[name] for file in (base, merged))
                if len(one.shape) == 3:
                    own, other = own.take_matrix(index), other.take_matrix(index)
                changes = name.startswith(("blk.0.ffn_gate_exps", "blk.1.ffn_down_exps", "blk.0.ffn_gate_inp"))
                changes |= name.startswith("blk.1.ffn_up_exps") and index == 2
                assert np.array_equal(own.data, other.data) != changes, (name, index)


@pytest.mark.parametrize("harm", ["other model", "no adapter", "exists", "suffix", "type"])
def test_what_cannot_be_merged_ends_in_one_line(harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = make_folder(tmp_path / "model"), tmp_path / "out.gguf"
    adapter, extra = write_adapter(tmp_path / "own", folder, MODULES), []
    match harm:
        case "other model":
            folder = Path("demo")
        case "no adapter":
            adapter = tmp_path / "none"
        case "exists":
            out.write_text("mine")
        case "suffix":
            out = tmp_path / "out.bin"
        case "type":
            extra = ["--type", "q9_9"]
    assert main(["merge", str(folder), str(adapter), str(out), *extra]) != 0
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("error") or "mlxr" in printed
    assert len(printed.splitlines()) <= 2
    assert not out.exists() or out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in ("", ".gguf")] == []
