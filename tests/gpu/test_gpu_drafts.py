"""Drafts on a GPU: the rows of a draft are sequences of one recorded step that share their pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from amounts import choose_pairs
from gpu_cases import REFERENCE
from test_gpu_draw import list_ways
from test_gpu_engine import finish

from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.planner import DraftSource
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import RecordedStep
from mlxr.kernels.gpu.steps import Steps

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("models", "engine")]
from fake_drafts import EagerPlanner  # noqa: E402
from oracle import Oracle  # noqa: E402
from tiny_models import build_hf, give_windows, read_golden  # noqa: E402

CASE = "llama-gqa-80-tied"
REQUESTS = (
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, seed=5),
    SamplingParams(max_tokens=27, temperature=1.2, top_k=20, min_p=0.02, seed=6, n=2),
)
HOST_REQUESTS = (
    SamplingParams(max_tokens=20, temperature=0.8, seed=2, repetition_penalty=1.3),
    SamplingParams(max_tokens=20, temperature=0, logprobs=2),
)


def make_engine(
    ctx: Context,
    *,
    windows: tuple[int | None, ...] | None = None,
    draft: str = "off",
    source: DraftSource | None = None,
) -> Engine:
    config, seed, _, _ = read_golden(CASE)
    model = build_hf(ctx, config, seed, "f32")
    if windows is not None:
        give_windows(model, windows)
    settings = ModelSettings(page_size=8, kv_type="f32", prefill_chunk_tokens=7, draft=draft)
    return Engine(model, ctx, settings, eos_ids=(), pages=60, draft=source)


def ask(engine: Engine, requests: tuple[SamplingParams, ...]) -> list[list[int]]:
    _, _, tokens, _ = read_golden(CASE)
    text = tokens.reshape(-1).tolist()
    ids = [engine.submit(EngineRequest(text[: 5 + 2 * index], one)) for index, one in enumerate(requests)]
    events = finish(engine)
    return [
        [event.token_id for event in events if (event.sequence_id, event.index) == (one, index)]
        for one, params in zip(ids, requests, strict=True)
        for index in range(params.n)
    ]


def list_texts(answers: list[list[int]], requests: tuple[SamplingParams, ...]) -> list[list[int]]:
    _, _, tokens, _ = read_golden(CASE)
    owners = [index for index, one in enumerate(requests) for _ in range(one.n)]
    return [
        tokens.reshape(-1).tolist()[: 5 + 2 * owner] + answer for owner, answer in zip(owners, answers, strict=True)
    ]


@pytest.mark.parametrize(
    ("requests", "windows", "runs_ahead"),
    choose_pairs([REQUESTS[:1], REQUESTS, (*REQUESTS[:2], *HOST_REQUESTS)], [None, (5, None)], [False, True]),
)
def test_answers_are_those_without_drafts(
    gpu: Context, requests: tuple[SamplingParams, ...], windows: tuple[int | None, ...] | None, *, runs_ahead: bool
) -> None:
    """Drafts that are right up to some place, one after another and beside steps that ran ahead for nothing."""
    expected = ask(make_engine(REFERENCE, windows=windows), requests)
    texts = list_texts(expected, requests)
    engine = make_engine(gpu, windows=windows, draft="ngram")
    engine._planner = engine._scheduler._drafts = EagerPlanner(6)
    engine._planner.runs_ahead = runs_ahead
    engine._admission.open_drafter = lambda tokens, _: Oracle(tokens, texts)
    assert ask(engine, requests) == expected
    assert list_ways(engine) == {"RecordedStep"}
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.smoke
@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.slow
def test_a_draft_model_guesses_on_a_context_of_its_own(
    gpu: Context, monkeypatch: pytest.MonkeyPatch, *, is_same: bool
) -> None:
    """With the same weights it is always right; its places are started one after another without waiting."""
    config, seed, _, _ = read_golden(CASE)
    own = Context(gpu.device)
    source = DraftSource(build_hf(own, config, seed + (not is_same), "f32"), b"draft", own)
    engine = make_engine(gpu, draft="little", source=source)
    planner = engine._planner
    assert planner is not None
    engine._planner = engine._scheduler._drafts = EagerPlanner(6, planner.model)
    engine._planner.runs_ahead = True
    starts: list[bool] = []
    start = RecordedStep.start

    def watch(step: RecordedStep, *args: Any) -> Any:
        if step.gpu is own.gpu:
            starts.append(args[2] is not None)
        return start(step, *args)

    monkeypatch.setattr(RecordedStep, "start", watch)
    chains: list[int] = []
    draw_chain = Steps.draw_chain

    def count(steps: Steps, places: int) -> Any:
        made = draw_chain(steps, places)
        chains.append(len(made))
        return made

    monkeypatch.setattr(Steps, "draw_chain", count)
    assert ask(engine, REQUESTS[:1]) == ask(make_engine(REFERENCE), REQUESTS[:1])
    stats = engine.stats()
    assert stats.drafted_tokens > 0
    assert (stats.accepted_tokens == stats.drafted_tokens) == is_same
    assert sum(starts) == sum(chains) - len(chains)
    assert max(chains) > 2
