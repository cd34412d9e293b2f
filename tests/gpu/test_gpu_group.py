"""Two GPUs as one: the answers of one GPU, the same bits on both, and the end of one of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import list_group_devices, skip_unless_emulated
from recording_rank import Digests

from mlxr.core.errors import MlxrError, SettingError
from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.loading import ASSETS
from mlxr.service import opening, tensor_parallel
from mlxr.service.model_pool import ModelPool
from mlxr.service.opening import build_engine, open_model
from mlxr.service.requests import TextRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
from test_model_pool import make_record

PROMPTS = ("import os", "def add(a, b):\n    return")
DEVICES = list_group_devices()


def make_settings(device: str, gpus: int = 2) -> Settings:
    """Return the settings of a small engine on one or several GPUs."""
    if device == "emulated":
        skip_unless_emulated()
    return Settings(
        device=device,
        gpus=gpus,
        context_tokens=128,
        max_sequences=4,
        page_size=8,
        prefill_chunk_tokens=16,
        kv_type="f32",
        arena_bytes=8 << 20,
    )


@dataclass(frozen=True)
class Work:
    """The results of an engine: the tokens of each answer, and an embedding."""

    tokens: list[list[int]]
    embedding: Any


def run(engine: Engine, tokenizer: Any) -> Work:
    """Greedy and drawn answers in one batch, two that share a prompt, one whose rows the host draws, and a text."""
    first, second = (tokenizer.encode(prompt) for prompt in PROMPTS)
    ids = [
        engine.submit(EngineRequest(first, SamplingParams(max_tokens=5, temperature=0))),
        engine.submit(EngineRequest(second, SamplingParams(max_tokens=4, temperature=0.8, seed=3))),
        engine.submit(EngineRequest(second * 2, SamplingParams(max_tokens=3, temperature=0.8, seed=4, n=2))),
    ]
    events = finish(engine)
    ids.append(engine.submit(EngineRequest(first, SamplingParams(max_tokens=3, temperature=0, repetition_penalty=1.2))))
    text = engine.submit(EngineRequest(second, pooling="mean"))
    events += finish(engine)
    tokens: dict[tuple[int, int], list[int]] = {}
    for event in events:
        if event.token_id is not None and event.sequence_id in ids:
            tokens.setdefault((event.sequence_id, event.index), []).append(event.token_id)
    (embedding,) = (event.embedding for event in events if event.sequence_id == text and event.embedding is not None)
    return Work([tokens[key] for key in sorted(tokens)], embedding)


def finish(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert not [event.error for event in events if event.error]
    return events


Both = tuple[Work, Work, list[list[str]]]


@pytest.fixture(scope="module", params=DEVICES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The results of one GPU, those of two, and what each of the two computed."""
    alone_settings, settings = (make_settings(request.param, gpus) for gpus in (1, 2))
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parent / "recording_rank.py"
    with open_model("demo", alone_settings) as loaded:
        alone = run(build_engine(loaded, alone_settings), loaded.tokenizer)
    own: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "COMMAND", (sys.executable, str(script), str(folder)))
        with open_model("demo", settings) as loaded:
            engine = build_engine(loaded, settings, Digests(loaded.model, own.append))  # type: ignore[arg-type]
            together = run(engine, loaded.tokenizer)
    theirs = (folder / "rank-1").read_text().splitlines(keepends=True)
    return alone, together, [own, theirs]


def test_answers_are_those_of_one(request: pytest.FixtureRequest, both: Both) -> None:
    alone, together, _ = both
    allowed = 1e-4 if request.node.callspec.params["both"] == "emulated" else 0.02  # products of 16 bits there
    if allowed < 0.02:
        assert together.tokens == alone.tokens
    assert together.tokens[0] == alone.tokens[0]
    assert [len(tokens) for tokens in alone.tokens] == [5, 4, 3, 3, 3]
    difference = abs(together.embedding - alone.embedding).max()
    assert 0 < difference < allowed * abs(alone.embedding).max()  # sums in another order


def test_both_compute_the_same_bits(both: Both) -> None:
    own, theirs = both[2]
    assert theirs == own[: len(theirs)]
    assert len(own) > 8
    assert len(own) - len(theirs) <= 1  # which was being written when it was ended


def end_other(loaded: Any) -> None:
    os.kill(loaded.group.processes[0].process_id, signal.SIGKILL)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_dies_ends_the_group_with_one_line(device: str) -> None:
    settings = make_settings(device)
    with open_model("demo", settings) as loaded:
        engine = build_engine(loaded, settings)
        engine.submit(EngineRequest(loaded.tokenizer.encode(PROMPTS[0]), SamplingParams(max_tokens=50, temperature=0)))
        engine.step()
        end_other(loaded)
        errors: list[str | None] = []
        while engine.has_work:
            errors += [event.error for event in engine.step() if event.error]
        engine.check()
        assert loaded.group is not None
        assert loaded.group.failure == "the process of GPU 1 ended (signal 9)"
        (error,) = errors
        assert error is not None
        assert "GPU" in error


@pytest.mark.parametrize("device", DEVICES)
def test_the_server_loads_it_again(device: str) -> None:
    settings = make_settings(device)
    record = make_record("demo", path=ASSETS / "demo.gguf")

    class Shelf:
        def find(self, name: str) -> Any:
            return record

        def find_default(self) -> str:
            return "demo"

        def touch(self, name: str) -> None:
            pass

    async def go() -> None:
        pool = ModelPool(settings, Shelf())
        async with await pool.acquire("demo") as session:
            first = session.session
        end_other(first.loaded)
        while first.failure is None:
            await asyncio.sleep(0.01)
        async with await pool.acquire("demo") as session:
            assert session.session is not first
            request = TextRequest(PROMPTS[0], SamplingParams(max_tokens=2, temperature=0))
            events = [event async for event in await session.session.start(request)]
            assert getattr(events[0], "text", "")
            assert session.session.failure is None
        await pool.stop()

    asyncio.run(go())


def test_what_cannot_be_several_is_refused() -> None:
    with pytest.raises(SettingError, match="store_bytes: several GPUs keep no pages on disk"):
        opening.open_model("demo", Settings(device="emulated", gpus=2, store_bytes=1 << 20))
    with pytest.raises(SettingError, match="gpus: device cpu cannot be several"):
        opening.open_model("demo", Settings(device="cpu", gpus=2))
    with pytest.raises(MlxrError, match="cannot be shared by 3 GPUs: layer 0 has"):
        opening.open_model("demo", make_settings("emulated", 3))
