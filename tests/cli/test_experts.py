"""Commands report a model's experts: how many there are, and how many bytes of them a token reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.llm import LLM
from mlxr.loading import read_footprint
from mlxr.registry.record import ModelRecord
from mlxr.server.metrics import Metrics
from mlxr.service.model_pool import measure_weights

Run = Callable[..., str]
EXPERTS = {"layers": 2, "experts": 8, "used": 2, "features": 256, "shared_features": 0}
NAMED = "8 of 256 features in 2 layers, 2 of them for each token"


def test_show_names_experts_and_what_a_token_reads(moe_gguf: Path, gguf: Path, mlxr: Run) -> None:
    shown = json.loads(mlxr("show", moe_gguf, "--json", "--tensors"))
    assert shown["experts"] == EXPERTS
    sizes = {row["name"]: row["bytes"] for row in shown["tensors"]}
    assert shown["tensor_bytes"] == sum(sizes.values())
    assert shown["expert_bytes"] == sum(nbytes for name, nbytes in sizes.items() if "_exps" in name)
    rest = shown["tensor_bytes"] - shown["expert_bytes"] - sizes["token_embd.weight"]
    assert shown["active_bytes"] == rest + shown["expert_bytes"] // 4
    text = mlxr("show", moe_gguf)
    assert NAMED in text
    assert "of weights, 36% of all" in text
    dense = json.loads(mlxr("show", gguf, "--json"))
    assert dense["experts"] is None
    assert dense["active_bytes"] < dense["tensor_bytes"]


def test_show_tells_nothing_of_the_weights_of_what_is_no_model_here(tmp_path: Path, mlxr: Run) -> None:
    from mlxr.formats import write_gguf

    path = tmp_path / "other.gguf"
    write_gguf(path, {"general.architecture": "unheard-of"}, [])
    assert json.loads(mlxr("show", path, "--json"))["active_bytes"] is None
    assert "each token" not in mlxr("show", path)


@pytest.mark.slow
def test_validate_tells_the_share_of_what_the_machine_reads(
    moe_gguf: Path, mlxr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path))
    sizes = ("--prompt-tokens", 16, "--generate-tokens", 4, "--repeat", 1, "--batch", 3, "--threads", 1)
    told = json.loads(mlxr("bench", moe_gguf, *sizes, "--probe", "--json"))
    assert told["experts"] == EXPERTS
    assert told["active_bytes"] < told["step_bytes"] < told["weight_bytes"]
    assert told["decode_bandwidth_bytes_per_s"] == pytest.approx(
        told["step_bytes"] * told["decode_tokens_per_s"]["median"] / 3
    )
    text = mlxr("validate", moe_gguf, "--threads", 1)
    assert NAMED in text
    assert "% of what the machine reads" in text
    assert "of them read for each token" in text
    report = json.loads(mlxr("validate", moe_gguf, "--threads", 1, "--json"))
    assert report["experts"] == EXPERTS
    assert report["active_bytes"] == told["active_bytes"]


def test_routing_is_told_by_stats(moe_gguf: Path, gguf: Path) -> None:
    with LLM(moe_gguf, threads=1) as llm:
        before = llm.stats().routing
        assert before is not None
        assert before.rows == 0
        llm.generate("the quick brown fox", SamplingParams(max_tokens=4, ignore_eos=True))
        stats = llm.stats()
    routing = stats.routing
    assert routing is not None
    assert routing.rows % (EXPERTS["used"] * EXPERTS["layers"]) == 0
    assert routing.layer_steps == EXPERTS["layers"] * 4
    assert 0 < routing.evenness < 1 < routing.busiest < EXPERTS["experts"]
    assert routing.file_reads == 0
    told = {
        (sample.name, sample.labels["what"]): sample.value
        for metric in Metrics().collect([("tiny", stats)])
        for sample in metric.samples
        if sample.name.startswith(("mlxr_expert_balance", "mlxr_expert_routing"))
    }
    assert told["mlxr_expert_balance", "evenness"] == routing.evenness
    assert told["mlxr_expert_balance", "busiest"] == routing.busiest
    assert told["mlxr_expert_routing_total", "rows"] == routing.rows
    assert told["mlxr_expert_routing_total", "layer_steps"] == routing.layer_steps
    with LLM(gguf, threads=1) as llm:
        stats = llm.stats()
    assert stats.routing is None
    metrics = {metric.name: metric.samples for metric in Metrics().collect([("dense", stats)])}
    assert metrics["mlxr_expert_balance"] == metrics["mlxr_expert_routing"] == []


def test_experts_may_stay_in_the_file(
    moe_gguf: Path, mlxr: Run, refused: Run, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    texts = []
    for settings in ({}, {"expert_bytes": "1M"}):
        caplog.clear()
        with LLM(moe_gguf, **settings) as llm:  # type: ignore[arg-type]
            texts.append([answer.text for answer in llm.generate(["hello", "a" * 300, "the fox"], params)])
            stats = llm.stats()
    assert texts[0] == texts[1]
    assert stats.routing is not None
    assert stats.routing.file_reads > 16
    assert "experts: 0.0 of 0.0 GiB resident, the rest is read from the file as it is used" in caplog.text
    sizes = ("--prompt-tokens", 8, "--generate-tokens", 2, "--repeat", 1, "--json")
    held, left = (json.loads(mlxr("bench", moe_gguf, *sizes, *more)) for more in ((), ("--expert-bytes", "1M")))
    assert held["resident_expert_bytes"] == held["expert_bytes"] == left["expert_bytes"]
    assert 2**19 < left["resident_expert_bytes"] <= 2**20
    assert held["routing"]["file_reads"] == 0 < left["routing"]["file_reads"]
    assert left["active_bytes"] == held["active_bytes"]
    assert held["weight_bytes"] - left["weight_bytes"] == pytest.approx(0.8 * 2**20, rel=0.15)
    assert json.loads(mlxr("validate", moe_gguf, "--expert-bytes", "1M", "--json"))["passed"]
    assert "one expert of each layer takes" in refused("bench", moe_gguf, "--expert-bytes", "100K")
    assert "'reference'" in refused("bench", moe_gguf, "--expert-bytes", "1M", "--device", "reference")


@pytest.mark.slow
def test_experts_stay_in_the_file_where_free_memory_is_small(
    moe_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(moe_gguf) as llm:
        wanted = llm.generate("hello")[0].text
    monkeypatch.setattr("mlxr.models.decoder.read_available_bytes", lambda: 2_300_000)
    with LLM(moe_gguf) as llm:
        assert llm.generate("hello")[0].text == wanted
        assert llm.stats().routing.file_reads > 0  # type: ignore[union-attr]
    assert "the rest is read from the file" in caplog.text
    caplog.clear()
    monkeypatch.setattr("mlxr.models.decoder.read_available_bytes", lambda: 3_000_000)
    with LLM(moe_gguf):
        assert "the rest is read from the file" not in caplog.text


def test_a_budget_for_experts_counts_as_what_the_weights_take(moe_gguf: Path, gguf: Path) -> None:
    for path, expert_bytes, saved in ((moe_gguf, None, False), (moe_gguf, 2**20, True), (gguf, 2**20, False)):
        record = cast(ModelRecord, SimpleNamespace(path=path, size_bytes=path.stat().st_size))
        nbytes = measure_weights(record, Settings(expert_bytes=expert_bytes))
        assert (nbytes < record.size_bytes) == saved
    expert_bytes = read_footprint(moe_gguf).expert_bytes
    record = cast(ModelRecord, SimpleNamespace(path=moe_gguf, size_bytes=10**7))
    assert measure_weights(record, Settings(expert_bytes=2**20)) == 10**7 - expert_bytes + 2**20


@pytest.mark.slow
def test_memory_stays_within_the_setting(synthetic: ModuleType, tmp_path: Path) -> None:
    """A model of 108 MiB, with at most 24 MiB of its experts in memory: every expert is used."""
    shape = replace(
        synthetic.SHAPES["tiny-moe"], hidden=512, changes=synthetic.make_experts(64, 4, 512, 64) | {"vocab_size": 512}
    )
    path = tmp_path / "large.gguf"
    synthetic.write_model(path, shape, "q8_0", 0, lambda *_: None)
    assert path.stat().st_size > 100 * 2**20
    program = """
import sys
from mlxr.core.types import SamplingParams
from mlxr.llm import LLM
from mlxr.server.metrics import read_resident_bytes

settings = dict(threads=2, arena_bytes="4M", context_tokens=256)
with LLM(sys.argv[1], **settings, **dict(line.split("=") for line in sys.argv[2:])) as llm:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    llm.generate(["the quick brown fox " * 8] * 3, params)
    print(read_resident_bytes() or 0, llm.stats().routing.experts)
"""
    sizes = []
    for more in ((), ("expert_bytes=24M",)):
        command = [sys.executable, "-c", program, str(path), *more]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        sizes.append(int(told[0]))
        assert int(told[1]) > 128
    if not all(sizes):
        pytest.skip("this system tells no process its memory in /proc")
    assert sizes[0] - sizes[1] > 60 * 2**20
