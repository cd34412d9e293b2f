"""How fast a model runs: prefill and decode through the engine, with random prompts, timed over whole steps."""

from __future__ import annotations

import inspect
import random
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.model_settings import StepSizes, size_steps
from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.loading import LoadedModel
from mlxr.service.opening import build_engine


def read_peak_memory_bytes() -> int:
    """The most resident memory this process ever had, mapped files included."""
    try:
        # VmHWM starts anew with the program; getrusage also counts what the parent held when it forked.
        match = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux and the BSDs count KiB


WARM_UP_TOKENS = 16
Progress = Callable[[int, int], None]
Watch = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the smallest and the largest of several measurements."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: `batch` requests at once, each with a random prompt of its own. Raises InvalidRequest."""

    prompt_tokens: int
    generate_tokens: int
    batch: int

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "generate_tokens", "batch"):
            if getattr(self, field) < 1:
                raise InvalidRequest(field, f"must be at least 1, got {getattr(self, field)}")


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of the whole batch, one number per repetition."""

    prefill_tokens_per_s: tuple[float, ...]
    decode_tokens_per_s: tuple[float, ...]


def summarise(values: Sequence[float]) -> Spread:
    """The median and the extremes of `values`, which must not be empty."""
    return Spread(statistics.median(values), min(values), max(values))


def measure_speed(
    loaded: LoadedModel, settings: Settings, load: Load, *, repeat: int, progress: Progress | None = None
) -> Speed:
    """Run `load` `repeat` times after a short warm-up; end tokens are ignored.

    Prefill counts from the first step to the last request's first token; decode from there, over `generate_tokens`
    steps in which every request grows by one token. Raises InvalidRequest for a load that cannot run all at once.
    """
    if repeat < 1:
        raise InvalidRequest("repeat", f"must be at least 1, got {repeat}")
    lead_tokens = bound_lead(load, size_steps(settings, loaded.ctx.device))
    prefill, decode = [], []
    with closing(build_engine(loaded, without_drafts(settings))) as engine:
        bench = LoadRunner(engine, list_plain_tokens(loaded), random.Random(0))
        bench.run(Load(min(load.prompt_tokens, WARM_UP_TOKENS), 1, 1), 0)
        for index in range(repeat):
            prefill_s, decode_s = bench.run(load, lead_tokens)
            prefill.append(load.batch * load.prompt_tokens / prefill_s)
            decode.append(load.batch * load.generate_tokens / decode_s)
            if progress is not None:
                progress(index + 1, repeat)
    return Speed(tuple(prefill), tuple(decode))


def without_drafts(settings: Settings) -> Settings:
    """The settings for steps that give one token of each answer: random tokens tell nothing of drafts."""
    return replace(settings, draft="off")


def list_plain_tokens(loaded: LoadedModel) -> list[int]:
    """Token ids that both model and tokenizer know and that are no control tokens."""
    tokenizer = loaded.tokenizer
    count = min(tokenizer.vocab_size, loaded.config.vocab_size)
    return [token_id for token_id in range(count) if not tokenizer.is_special(token_id)]


def bound_lead(load: Load, sizes: StepSizes) -> int:
    """The most tokens that the first request can be ahead of the last: no more than the steps of all prefills."""
    if load.batch == 1:
        return 0
    free_tokens = max(sizes.max_batch_tokens - load.batch, 1)
    return -(-load.batch * load.prompt_tokens // free_tokens) + -(-load.prompt_tokens // sizes.prefill_chunk_tokens)


class LoadRunner:
    """Runs loads on one engine; `watch` is entered for the phases "prefill" and "decode", and for each "step"."""

    def __init__(
        self, engine: Engine, token_ids: Sequence[int], draw: random.Random, watch: Watch = lambda _: nullcontext()
    ) -> None:
        self._engine, self._watch = engine, watch
        self._token_ids = token_ids
        self._draw = draw

    def run(self, load: Load, lead_tokens: int) -> tuple[float, float]:
        """Seconds of prefill and seconds of decode."""
        room_tokens = self._engine.context_tokens - load.prompt_tokens
        if load.generate_tokens >= room_tokens:
            raise InvalidRequest(
                "generate_tokens",
                f"prompt and answer need {load.prompt_tokens + load.generate_tokens + 1} tokens, the context has "
                f"{self._engine.context_tokens}; ask for fewer",
            )
        params = SamplingParams(max_tokens=min(load.generate_tokens + 1 + lead_tokens, room_tokens), ignore_eos=True)
        prompts = [self._draw.choices(self._token_ids, k=load.prompt_tokens) for _ in range(load.batch)]
        sequence_ids = [self._engine.submit(EngineRequest(prompt, params)) for prompt in prompts]
        try:
            return self._time(load, set(sequence_ids))
        finally:
            for sequence_id in sequence_ids:
                self._engine.cancel(sequence_id)

    def _time(self, load: Load, not_started: set[int]) -> tuple[float, float]:
        with self._watch("prefill"):
            start_s = time.perf_counter()
            while not_started:
                not_started.difference_update(self._step(load, not_started))
            prefill_s = time.perf_counter() - start_s
        with self._watch("decode"):
            start_s = time.perf_counter()
            for _ in range(load.generate_tokens):
                self._step(load, ())
            return prefill_s, time.perf_counter() - start_s

    def _step(self, load: Load, waiting: Collection[int]) -> list[int]:
        """One step; the requests that grew. Those not in `waiting` must all be among them, for a fair measurement."""
        with self._watch("step"):
            events = self._engine.step()
        failed = next((event.error for event in events if event.error), None)
        if failed is not None:
            raise MlxrError(failed)
        if len(events) < load.batch - len(waiting) or self._engine.stats().waiting_sequences:
            raise InvalidRequest(
                "batch",
                f"{load.batch} requests do not run side by side; lower it or the tokens asked for, or raise the "
                "settings max_sequences, arena_bytes or context_tokens",
            )
        return [event.sequence_id for event in events]


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
