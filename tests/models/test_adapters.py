"""Low-rank adapters: a model with an adapter has the logits of one with the adapter merged into its weights, and an
answer has the same bits whatever runs beside it.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import choose_pairs
from engines import open_engine
from random_model import make_weights
from safetensors.numpy import load_file, save_file
from tiny_models import build_hf, make_gguf, make_hf_tensors, make_source, read_golden

from mlxr import LLM
from mlxr.core.errors import FormatError, InvalidRequest, MlxrError
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.formats import AdapterFile, TensorToWrite, open_gguf, read_adapter, write_gguf
from mlxr.formats.adapter_file import MAX_PATTERNS
from mlxr.kernels.context import Context, load_native
from mlxr.loading import ASSETS
from mlxr.models import Decoder, model_from_folder, model_from_gguf
from mlxr.models.adapter import Adapter, make_adapter

Weights = dict[str, np.ndarray]
PLACES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
EXPERTS = ("w1", "w2", "w3")  # of Mixtral
RANK, ALPHA = 3, 5.0


def write_peft(folder: Path, weights: Weights, seed: int, **fields: Any) -> Weights:
    """An adapter of all linear weights in PEFT's layout; returns the weights with it merged in."""
    chance, tensors, merged = np.random.default_rng(seed), {}, dict(weights)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **fields}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(PLACES + EXPERTS) or values.ndim != 2:
            continue
        rank = config.get("rank_pattern", {}).get(module.rsplit(".", 1)[1], config["r"])
        alpha = config.get("alpha_pattern", {}).get(module.rsplit(".", 1)[1], config["lora_alpha"])
        a = chance.normal(0, 0.2, (rank, values.shape[1])).astype(np.float32)
        b = chance.normal(0, 0.2, (values.shape[0], rank)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        scale = alpha / (np.sqrt(rank) if config.get("use_rslora") else rank)
        merged[name] = (values + scale * (b @ a)).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def fit(model: Decoder, file: AdapterFile) -> Adapter:
    weights = model.linear_weights()
    return make_adapter("tiny", file.pairs, model.ctx, weights, model.config, is_gguf=file.is_gguf)


def open_tiny(model: Decoder, **settings: Any) -> Engine:
    return open_engine(model, model.ctx, **{"max_sequences": 8, "fingerprint": b"tiny", **settings})


def score(model: Decoder, prompt: list[int], adapter: Adapter | None = None) -> np.ndarray:
    """Log-probabilities of the prompt's tokens, by the engine."""
    with closing(open_tiny(model, kv_type="f32")) as engine:
        params = SamplingParams(max_tokens=1, logprobs=0)
        engine.submit(EngineRequest(prompt, params, scores_prompt=True, adapter=adapter))
        events = [event for _ in range(9) if engine.has_work for event in engine.step()]
    return np.array([info.chosen.logprob for info in events[-1].prompt[1:]])


@pytest.mark.parametrize(
    ("case", "layout", "device"),
    choose_pairs(
        ["llama-gqa-64", "qwen2", "qwen3", "gemma3", "phi3-short", "mixtral"], ["folder", "gguf"], ["cpu", "reference"]
    ),
)
def test_an_adapter_is_as_good_as_merged(case: str, layout: str, device: str, tmp_path: Path) -> None:
    fields, seed, prompt, _ = read_golden(case)
    weights = make_weights(fields, seed)
    alphas, ranks = {"o_proj": 7, "up_proj": 2}, {"v_proj": 5}
    rooted = case == "qwen2"
    merged = write_peft(tmp_path / "a", weights, 1, use_rslora=rooted, alpha_pattern=alphas, rank_pattern=ranks)
    ctx = Context(device) if device == "reference" else Context("cpu", threads=2)
    config, is_gguf = model_from_folder(fields), layout == "gguf"
    models = []
    for values in (weights, merged):
        if is_gguf:
            metadata, tensors = make_gguf(values, fields)
            models.append(Decoder(ctx, model_from_gguf(metadata, tensors), tensors))
        else:
            models.append(Decoder(ctx, config, make_hf_tensors(values, fields)))
    tokens = np.asarray(prompt).reshape(-1)[:24].tolist()
    adapter = fit(models[0], read_adapter(tmp_path / "a"))
    got, wanted = score(models[0], tokens, adapter), score(models[1], tokens)
    np.testing.assert_allclose(got, wanted, atol=2e-4)
    assert np.abs(score(models[0], tokens) - wanted).max() > 0.01


def open_schedule(
    case: str, threads: int, isa: str | None, tmp: Path, chance: random.Random
) -> tuple[Engine, list[Adapter]]:
    fields, seed, _, _ = read_golden(case)
    model = build_hf(Context("cpu", threads=threads, isa=isa), fields, seed)
    adapters = []
    for number in range(3):
        write_peft(tmp / f"a{number}", make_weights(fields, seed), number, r=(1, 3, 17)[number])
        adapters.append(fit(model, read_adapter(tmp / f"a{number}")))
    engine = open_tiny(
        model,
        page_size=chance.choice([4, 16]),
        prefill_chunk_tokens=chance.choice([3, 64]),
        store_bytes=chance.choice([0, 1 << 24]),
        store_folder=str(tmp / "store"),
    )
    return engine, adapters


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", ["llama-gqa-64", "mixtral"])
@pytest.mark.parametrize("schedule", range(6))
def test_an_answer_has_the_same_bits_whatever_runs_beside_it(schedule: int, case: str, tmp_path: Path) -> None:
    """Prompts that begin alike, with and without adapters, cut at random, on other threads and instruction sets, from
    pages that earlier answers left: each equals the answer alone, on one thread, without the cache.
    """
    chance = random.Random(schedule)
    isas = load_native().available_isas()
    base, adapters = open_schedule(case, 1, None, tmp_path, random.Random(0))
    engine, mixed = open_schedule(case, 2, chance.choice(isas), tmp_path, chance)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    shared = [chance.randrange(90) for _ in range(40)]
    with closing(base), closing(engine):
        wanted, given = {}, {}
        for _ in range(8):
            number = chance.choice([None, 0, 1, 2])
            prompt = (*shared[: chance.choice([9, 33, 40])], chance.randrange(3))
            request = engine.submit(EngineRequest(prompt, params, adapter=None if number is None else mixed[number]))
            given[request] = []
            alone = base.submit(
                EngineRequest(prompt, params, adapter=None if number is None else adapters[number], uses_cache=False)
            )
            events = []
            while base.has_work:
                events += base.step()
            assert {event.sequence_id for event in events} == {alone}
            wanted[request] = [(event.token_id, event.logprob) for event in events]
            for _ in range(chance.choice([0, 1, 4])):
                for event in engine.step():
                    given[event.sequence_id].append((event.token_id, event.logprob))
        while engine.has_work:
            for event in engine.step():
                given[event.sequence_id].append((event.token_id, event.logprob))
        engine.check()
        assert given == wanted


def test_a_gguf_adapter_says_the_same(tmp_path: Path) -> None:
    fields, seed, prompt, _ = read_golden("llama-gqa-64")
    weights = make_weights(fields, seed)
    write_peft(tmp_path / "a", weights, 1)
    file = read_adapter(tmp_path / "a")
    metadata, tensors = make_gguf(weights, fields)
    model = Decoder(Context("reference"), model_from_gguf(metadata, tensors), tensors)
    fitted = fit(model, file)
    written = []
    for weight, parts in fitted.parts[0].updates.payload[0].items():
        firsts = np.cumsum([0, *weight.splits]).tolist()
        for part in parts:
            name = weight.names[firsts.index(part.first)]
            written += [make_source(f"{name}.lora_a", part.a), make_source(f"{name}.lora_b", part.b)]
    path = tmp_path / "a.gguf"
    about = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    write_gguf(
        path,
        {**about, "adapter.lora.alpha": ALPHA},
        [TensorToWrite(one.name, one.type_name, one.shape, lambda one=one: [one.data]) for one in written],
    )
    tokens = np.asarray(prompt).reshape(-1)[:24].tolist()
    again = fit(model, read_adapter(path))
    assert again.digest == fitted.digest
    assert np.array_equal(score(model, tokens, again), score(model, tokens, fitted))


HOSTILE: dict[str, tuple[str, Any]] = {
    "dora": ("use_dora", True),
    "modules": ("modules_to_save", ["lm_head"]),
    "kind": ("peft_type", "IA3"),
    "bias": ("bias", "all"),
    "rank": ("r", 4),
    "alpha": ("lora_alpha", "much"),
    "pattern": ("alpha_pattern", {"(a+)+b": 1}),
    "transposed": ("fan_in_fan_out", True),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    fields, seed, _, _ = read_golden("llama-gqa-64")
    write_peft(tmp_path, make_weights(fields, seed), 1)
    name, value = HOSTILE[case]
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(FormatError, match=name):
        read_adapter(tmp_path)


def test_patterns_are_bounded_and_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, seed, _, _ = read_golden("llama-gqa-64")
    write_peft(tmp_path, make_weights(fields, seed), 1)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    most = {f"layers.{number}.x": 3 for number in range(MAX_PATTERNS)}
    path.write_text(json.dumps({**config, "rank_pattern": most}))
    compiled: list[str] = []
    compile_pattern = re.compile

    def count(pattern: str) -> re.Pattern[str]:
        compiled.append(pattern)
        return compile_pattern(pattern)

    with monkeypatch.context() as patch:
        patch.setattr(re, "compile", count)
        assert read_adapter(tmp_path).pairs
    assert len(compiled) == MAX_PATTERNS
    path.write_text(json.dumps({**config, "rank_pattern": {**most, "one.more": 3}}))
    with pytest.raises(FormatError, match=f"rank_pattern.* at most {MAX_PATTERNS} are read"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("harm", ["nan", "one side", "huge rank", "shapes", "truncated", "other model", "unknown"])
def test_broken_adapters_end_in_one_line(harm: str, tmp_path: Path) -> None:
    fields, seed, _, _ = read_golden("llama-gqa-64")
    write_peft(tmp_path, make_weights(fields, seed), 1)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(name for name in tensors if name.endswith("lora_A.weight"))
    rank, columns = tensors[key].shape
    match harm:
        case "nan":
            tensors[key][0, 0] = np.nan
        case "one side":
            del tensors[key]
        case "huge rank":
            tensors[key] = np.ones((300, columns), np.float32)
        case "shapes":
            tensors[key] = np.ones((rank, columns + 1), np.float32)
        case "unknown":
            tensors |= {
                f"base_model.model.model.layers.9.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)
                for side, shape in (("A", (rank, columns)), ("B", (columns, rank)))
            }
    save_file(tensors, path)
    if harm == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    other = "qwen3" if harm == "other model" else "llama-gqa-64"
    model = build_hf(Context("cpu", threads=1), read_golden(other)[0], 1)
    with pytest.raises(MlxrError) as caught:
        fit(model, read_adapter(tmp_path))
    assert "\n" not in str(caught.value)


def test_adapters_of_an_open_model_come_and_go(tmp_path: Path) -> None:
    """Chosen by name for each prompt, bounded in memory, unloaded while the model stays."""
    with LLM("demo", device="cpu", threads=2, adapter_bytes=1 << 22) as llm:
        names = ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.1.attn_output.weight")
        with open_gguf(ASSETS / "demo.gguf") as base:
            shapes = {name: base.tensors[name].shape for name in names}
        chance, sources = np.random.default_rng(2), []
        for name, (rows, columns) in shapes.items():
            for side, shape in (("a", (4, columns)), ("b", (rows, 4))):
                sources.append(make_source(f"{name}.lora_{side}", chance.normal(0, 0.5, shape).astype(np.float32)))
        about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
        written = [TensorToWrite(one.name, one.type_name, one.shape, lambda one=one: [one.data]) for one in sources]
        write_gguf(tmp_path / "own.gguf", about, written)
        params = SamplingParams(max_tokens=12, temperature=0.0)
        (plain,) = llm.generate("import os", params)
        assert llm.load_adapter(tmp_path / "own.gguf") == "own"
        assert llm.adapters == ["own"]
        first, second = llm.generate(["import os", "import os"], params, adapter=[None, "own"])
        assert first.text == plain.text != second.text
        assert llm.generate("import os", params, adapter="own")[0].text == second.text
        with pytest.raises(InvalidRequest, match="loaded already"):
            llm.load_adapter(tmp_path / "own.gguf")
        llm.unload_adapter("own")
        with pytest.raises(InvalidRequest, match="'own' is not loaded"):
            llm.generate("import os", params, adapter="own")
    with (
        LLM("demo", device="cpu", threads=1, adapter_bytes=1000) as llm,
        pytest.raises(InvalidRequest, match="raise adapter_bytes"),
    ):
        llm.load_adapter(tmp_path / "own.gguf")
    with LLM("demo", device="cpu", threads=2, adapter=tmp_path / "own.gguf") as llm:
        assert llm.generate("import os", params)[0].text == second.text
