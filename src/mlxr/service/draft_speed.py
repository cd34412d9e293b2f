"""How much faster a model answers with drafts: the same texts go on without and with them, in turns.

The texts are parts of Python's own library, as it lies in every installation; they are continued greedily. Random
tokens would tell nothing of drafts.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.loading import LoadedModel
from mlxr.service.opening import build_engine
from mlxr.service.speed import Load, Progress

_STRIDE_TOKENS = 97  # between the beginnings of two prompts


@dataclass(frozen=True, slots=True)
class DraftSpeed:
    """Tokens per second of the whole batch after the prompts, one number per repetition, and what was guessed."""

    plain_tokens_per_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    drafted_tokens: int
    accepted_tokens: int


def measure_drafts(
    loaded: LoadedModel, settings: Settings, load: Load, *, repeat: int, progress: Progress | None = None
) -> DraftSpeed:
    """Answer `load` `repeat` times each way, after one time that does not count.

    Raises MlxrError should any token differ, and InvalidRequest for a load that has no room.
    """
    prompts = _cut_prompts(loaded, load)
    speeds: tuple[list[float], list[float]] = ([], [])
    own = replace(settings, max_sequences=load.batch, arena_percent=max(1, settings.arena_percent // 2))
    with (
        closing(build_engine(loaded, replace(own, draft="off"))) as plain,
        closing(build_engine(loaded, own)) as drafting,
    ):
        for turn in range(repeat + 1):
            answers = []
            for engine, found in zip((plain, drafting), speeds, strict=True):
                tokens, speed = _answer(engine, prompts, load.generate_tokens)
                answers.append(tokens)
                found.append(speed)
            if answers[0] != answers[1]:
                raise MlxrError("answers with drafts differ from those without: please report this")
            if not turn:
                before = drafting.stats()
            elif progress is not None:
                progress(turn, repeat)
        stats = drafting.stats()
    return DraftSpeed(
        tuple(speeds[0][1:]),
        tuple(speeds[1][1:]),
        stats.drafted_tokens - before.drafted_tokens,
        stats.accepted_tokens - before.accepted_tokens,
    )


def _cut_prompts(loaded: LoadedModel, load: Load) -> list[list[int]]:
    tokens = loaded.tokenizer.encode(inspect.getsource(textwrap), add_special=False)
    while len(tokens) < load.prompt_tokens + load.batch * _STRIDE_TOKENS:
        tokens += tokens
    starts = (place * _STRIDE_TOKENS for place in range(load.batch))
    return [tokens[start : start + load.prompt_tokens] for start in starts]


def _answer(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[dict[int, list[int]], float]:
    """The answers by the place of their prompts, and tokens per second from when all prompts are computed."""
    if len(prompts[0]) + tokens > engine.context_tokens:
        raise InvalidRequest(
            "generate_tokens", f"prompt and answer have no room in the context of {engine.context_tokens} tokens"
        )
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    places = {engine.submit(EngineRequest(prompt, params)): place for place, prompt in enumerate(prompts)}
    answers: dict[int, list[int]] = {place: [] for place in places.values()}
    start_s, before, is_reading = time.perf_counter(), 0, True
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise MlxrError(event.error)
            if event.token_id is not None:
                answers[places[event.sequence_id]].append(event.token_id)
        if is_reading:
            is_reading = not all(answers.values())
            start_s, before = time.perf_counter(), sum(map(len, answers.values()))
    return answers, (sum(map(len, answers.values())) - before) / (time.perf_counter() - start_s)
