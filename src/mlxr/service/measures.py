"""Measurements of a model on this machine: prefill and decode speed, a profile of the time, perplexity of a text."""

from __future__ import annotations

import inspect
import math
import random
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mlxr.core.errors import InvalidRequest, MlxrError, ModelError
from mlxr.core.frozen import frozen
from mlxr.core.model_settings import StepSizes, size_steps
from mlxr.core.settings import Settings
from mlxr.core.stats import Profile
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.loading import LoadedModel
from mlxr.service.opening import build_engine
from mlxr.tokenizers import Tokenizer


def read_peak_memory_bytes() -> int:
    """Return the most resident memory that this process ever had, mapped files included."""
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


@frozen
class Spread:
    """The median, the smallest and the largest of several measurements."""

    median: float
    min: float
    max: float


@frozen
class Load:
    """The work to measure: `batch` requests at once, each with its own random prompt. Raises InvalidRequest."""

    prompt_tokens: int
    generate_tokens: int
    batch: int

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "generate_tokens", "batch"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, got {getattr(self, name)}")


@frozen
class Speed:
    """Tokens per second of the whole batch, one number per repetition."""

    prefill_tokens_per_s: tuple[float, ...]
    decode_tokens_per_s: tuple[float, ...]


def summarise(values: Sequence[float]) -> Spread:
    """Return the median and the extremes of `values`, which must not be empty."""
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
    """Return the settings without drafts, so that a step gives one token; random tokens tell nothing of drafts."""
    return replace(settings, draft="off")


def list_plain_tokens(loaded: LoadedModel) -> list[int]:
    """Return the token ids that both model and tokenizer know and that are no control tokens."""
    tokenizer = loaded.tokenizer
    count = min(tokenizer.vocab_size, loaded.config.vocab_size)
    return [token_id for token_id in range(count) if not tokenizer.is_special(token_id)]


def bound_lead(load: Load, sizes: StepSizes) -> int:
    """Return the most tokens that the first request can be ahead of the last: one for each step of all prefills."""
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
        """Run the load; returns the seconds of prefill and of decode."""
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
        """Run one step; returns the requests that grew, which must be all but those in `waiting`, to be fair."""
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


@frozen
class DraftSpeed:
    """Tokens per second of the whole batch after the prompts, one number per repetition, and counts of drafts."""

    plain_tokens_per_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    drafted_tokens: int
    accepted_tokens: int


def measure_drafts(
    loaded: LoadedModel, settings: Settings, load: Load, *, repeat: int, progress: Progress | None = None
) -> DraftSpeed:
    """Answer `load` `repeat` times with drafts and without, after one run that does not count.

    Raises MlxrError if any token differs, and InvalidRequest if the load has no room.
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
    """Return the answers by the place of their prompts, and the tokens per second once all prompts are computed."""
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


PHASES = ("prefill", "decode")
STEPS_ROW, KERNELS_ROW = 1, 2  # rows of the trace


@frozen
class PhaseProfile:
    """`seconds` that `tokens` tokens took in `steps` (start and end of each, in ns), `plain_seconds` without profiling.

    Time outside of kernels is spent in Python, by the engine and the operators, and in native code between kernels.
    """

    name: str
    tokens: int
    seconds: float
    plain_seconds: float
    steps: list[tuple[int, int]]
    profile: Profile


def profile_model(loaded: LoadedModel, settings: Settings, load: Load) -> list[PhaseProfile]:
    """Run `load` once as always, and once with every kernel timed: prefill, then decode.

    The first run is also the warm-up. Raises InvalidRequest if the load cannot run all at once, DeviceError if the
    device has no kernels.
    """
    lead_tokens = bound_lead(load, size_steps(settings, loaded.ctx.device))
    watcher = _Watcher(loaded.ctx.make_profiler())
    with closing(build_engine(loaded, without_drafts(settings))) as engine:
        plain = LoadRunner(engine, list_plain_tokens(loaded), random.Random(0))
        plain_seconds = plain.run(load, lead_tokens)
        watched = LoadRunner(engine, list_plain_tokens(loaded), random.Random(1), watcher.watch)
        seconds = watched.run(load, lead_tokens)
    tokens = (load.batch * load.prompt_tokens, load.batch * load.generate_tokens)
    return [
        PhaseProfile(name, count, took_s, plain_s, watcher.steps[name], watcher.profiles[name])
        for name, count, took_s, plain_s in zip(PHASES, tokens, seconds, plain_seconds, strict=True)
    ]


class _Profiler(Protocol):
    def start(self) -> None:
        """Time calls from here on."""

    def stop(self) -> Profile:
        """Stop timing and return what ran."""


@dataclass
class _Watcher:
    """Profiles the phases of a load."""

    profiler: _Profiler
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Profile the phase `name`, or note a step in it."""
        if name in PHASES:
            self.steps[name] = []
            self.profiler.start()
            try:
                yield
            finally:
                self.profiles[name] = self.profiler.stop()
            return
        start_ns = time.perf_counter_ns()
        yield
        next(reversed(self.steps.values())).append((start_ns, time.perf_counter_ns()))


def make_trace(phases: list[PhaseProfile]) -> dict[str, object]:
    """Steps and kernels as events of the Trace Event Format, in microseconds since the first step."""
    start_ns = phases[0].steps[0][0]
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
        for row, name in ((STEPS_ROW, "steps"), (KERNELS_ROW, "kernels"))
    ]

    def add(row: int, name: str, category: str, first_ns: int, last_ns: int, **args: object) -> None:
        times = {"ts": (first_ns - start_ns) / 1000, "dur": (last_ns - first_ns) / 1000}
        events.append({"name": name, "cat": category, "ph": "X", "pid": 1, "tid": row, **times, "args": args})

    for phase in phases:
        for first_ns, last_ns in phase.steps:
            add(STEPS_ROW, phase.name, "step", first_ns, last_ns)
        for moment in phase.profile.moments:
            add(KERNELS_ROW, moment.operator, phase.name, moment.start_ns, moment.end_ns, kernel=moment.variant)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


MIN_WINDOW_TOKENS = 2
MAX_MEAN_NATS = 700.0  # e to this is nearly the largest float; uniform guessing has ln(vocabulary), about 12


@frozen
class TokenScore:
    """A scored token: its position among the tokens of the text, and its negative log-probability in nats."""

    position: int
    token_id: int
    nats: float


@frozen
class TextScore:
    """The sum over all scored tokens: how many, their bytes of text, and their negative log-probability in nats."""

    tokens: int
    text_bytes: int
    nats: float

    @property
    def perplexity(self) -> float:
        """e to the mean negative log-probability of a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Negative log-probability in bits for each byte of text: comparable across vocabularies."""
        return self.nats / math.log(2) / self.text_bytes


def score_text(
    engine: Engine,
    tokenizer: Tokenizer,
    text: str,
    context_tokens: int,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[TokenScore], None] | None = None,
) -> TextScore:
    """Score `text` in windows of `context_tokens` tokens, each on its own.

    A window starts with BOS if the vocabulary wants it; every token but a window's first is scored. The end of the text
    is scored too, in a shorter window. `note` gets every scored token. Raises InvalidRequest if there is nothing to
    score or the window is too large for the engine, ModelError if the model's log-probabilities are no numbers.
    """
    if not MIN_WINDOW_TOKENS <= context_tokens <= engine.context_tokens:
        raise InvalidRequest(
            "context", f"must be from {MIN_WINDOW_TOKENS} to {engine.context_tokens} tokens, got {context_tokens}"
        )
    token_ids = tokenizer.encode(text, add_special=False)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    windows = list(split_windows(token_ids, context_tokens, bos))
    if not windows:
        raise InvalidRequest("text", f"has {len(token_ids)} tokens, too few to score one")
    tokens = text_bytes = 0
    nats = 0.0
    for index, window in enumerate(windows):
        scored, logprobs = window[1:], engine.score(window)
        nats -= float(logprobs.sum())
        if note is not None:
            start = index * (context_tokens - len(bos)) + 1 - len(bos)
            for offset, (token_id, logprob) in enumerate(zip(scored, logprobs.tolist(), strict=True)):
                note(TokenScore(start + offset, token_id, -logprob))
        tokens += len(scored)
        text_bytes += sum(len(tokenizer.token_bytes(token_id)) for token_id in scored)
        if progress is not None:
            progress(index + 1, len(windows))
    if not math.isfinite(nats):
        raise ModelError(f"the model's log-probabilities sum up to {nats}: its weights or a kernel are broken")
    if nats / tokens > MAX_MEAN_NATS:
        raise ModelError(f"the model's log-probabilities are {-nats / tokens:.0f} on average: its weights are broken")
    return TextScore(tokens, text_bytes, nats)


def split_windows(token_ids: list[int], context_tokens: int, bos: list[int]) -> Iterator[list[int]]:
    """Yield windows of `bos` and the next tokens, `context_tokens` together, but none without a token to score."""
    step = context_tokens - len(bos)
    for start in range(0, len(token_ids), step):
        window = bos + token_ids[start : start + step]
        if len(window) >= MIN_WINDOW_TOKENS:
            yield window
