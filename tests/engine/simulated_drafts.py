"""An engine whose steps take the time that a table says, to measure how much faster a draft model makes answers.

The engine, its scheduler and its planner are the real ones. The model gives the next token of a random text; the draft
model gives the same token with the probability that it `agrees`. A clock advances by the cost of each step, which
depends on its rows, on whether it could run ahead, and on the places of a draft, with some noise; now and then another
program makes one late, and a number of rows or places takes three times as long the first time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fake_model import FakeConfig, FakeModel, Floats, make_engine

from mlxr.cache.arena import ModelArena
from mlxr.cache.page_table import SequenceTable
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.speculative.draft_model import Guesses
from mlxr.engine.speculative.drafters import ModelDrafter
from mlxr.engine.speculative.planner import DraftSource
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sample import SampleResult

VOCABULARY = 50
CONTEXT = 1024
PROMPT_TOKENS = 24
NOISE, LATE_SHARE, LATE = 0.02, 0.01, 1.5


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step by its rows, of one that runs ahead (None: none does), and of a draft by its places.

    Each token that the draft model has not read takes `lag` of the time of a place, where it is more than two.
    On a machine that `chains`, all places of a draft are computed at once.
    """

    name: str
    step: Callable[[int], float]
    draft: Callable[[int], float]
    ahead: Callable[[int], float] | None = None
    lag: float = 0.2

    @property
    def chains(self) -> bool:
        return self.ahead is not None

    @property
    def plain_ms(self) -> float:
        """The milliseconds of a token without drafts."""
        return (self.ahead or self.step)(1)

    def gain(self, places: int, agrees: float) -> float:
        """Return how many times faster tokens come with drafts of so many places, all of them verified."""
        tokens = sum(agrees**place for place in range(places + 1))
        return tokens * self.plain_ms / (self.step(places + 1) + self.draft(places))

    def best_gain(self, agrees: float, most: int) -> float:
        """Return the gain with the best number of places, or 1 if no drafts are best."""
        return max(1.0, *(self.gain(places, agrees) for places in range(1, most + 1)))


H200 = Machine(
    "H200",
    lambda rows: 4.5 + 0.1 * max(0, rows - 2),
    lambda places: 0.65 + 0.0875 * (places - 1),
    lambda _: 3.72,
    lag=0.02,
)
CPU_FLAT = Machine("flat", lambda rows: 10 * (1 + 0.033 * (rows - 1)), lambda places: 1.0 * places)
CPU_STEEP = Machine("steep", lambda rows: 10 * (1 + 0.167 * (rows - 1)), lambda places: 3.0 * places)
CPU_TILES = Machine("tiles", lambda rows: 10 * (1.2 if rows <= 4 else 2.0), lambda places: 1.5 * places)
MACHINES = (H200, CPU_FLAT, CPU_STEEP, CPU_TILES)


class Clock:
    """A virtual clock, in seconds, which adds noise, late runs and slow first runs to the costs it is given."""

    def __init__(self, seed: int) -> None:
        self.now, self._chance, self._met = 0.0, random.Random(seed), set[tuple[str, int]]()

    def take(self, kind: str, size: int, milliseconds: float) -> None:
        """Let time pass for a piece of work, a little more or less than it costs."""
        factor = 1 + NOISE * self._chance.uniform(-1, 1)
        if self._chance.random() < LATE_SHARE:
            factor *= LATE
        made = kind, 0 if kind == "draft" else size.bit_length()
        if made not in self._met:
            self._met.add(made)
            factor *= 3
        self.now += milliseconds * factor / 1e3


class Texts:
    """A random text for each prompt, whose first token is its number, and the draft model's guesses."""

    def __init__(self, seed: int, agrees: Callable[[int], float]) -> None:
        self._seed, self._agrees = seed, agrees

    def token(self, text: int, position: int) -> int:
        """The token of a text."""
        return text if position == 0 else random.Random(f"{self._seed} {text} {position}").randrange(VOCABULARY)

    def guess(self, text: int, position: int) -> int:
        """Return the draft model's guess at a position of a text."""
        token = self.token(text, position)
        is_right = random.Random(f"right {self._seed} {text} {position}").random() < self._agrees(position)
        return token if is_right else (token + 1) % VOCABULARY


class TextModel(FakeModel):
    """Gives the next token of the text; its steps take the time of a `machine`."""

    def __init__(self, texts: Texts, machine: Machine, clock: Clock) -> None:
        super().__init__(FakeConfig(context_length=CONTEXT))
        self._texts, self._machine, self._clock = texts, machine, clock
        self.goes_on = self._runs_ahead = False

    def forward(self, batch: RaggedBatch, arena: ModelArena) -> Floats:
        is_plain = batch.tokens == batch.sequences
        rows, ahead = batch.tokens, self._machine.ahead
        if ahead is not None and is_plain and self._runs_ahead:
            self._clock.take("ahead", rows, ahead(rows))
        else:
            self._clock.take("step", rows, self._machine.step(min(rows, 16)))
        self.is_plain = is_plain
        logits = np.zeros((len(batch.output_rows), VOCABULARY), np.float32)
        starts = np.searchsorted(batch.query_starts, batch.output_rows, side="right") - 1
        for place, (row, sequence) in enumerate(zip(batch.output_rows, starts, strict=True)):
            text = self.read_text(batch, int(sequence), arena)
            logits[place, self._texts.token(text, int(batch.positions[row]) + 1)] = 50.0
        self._write(batch, arena)
        return logits

    def end_step(self, goes_on: bool) -> None:
        """Note before the step's tokens are drawn whether the next step may begin."""
        self._runs_ahead = goes_on and self.is_plain

    @staticmethod
    def read_text(batch: RaggedBatch, sequence: int, arena: ModelArena) -> int:
        """The number of the text: its first token, which is in the batch or in the first page."""
        start = int(batch.query_starts[sequence])
        if batch.positions[start] == 0:
            return int(batch.token_ids[start])
        return int(arena.k_pools[0][batch.page_table[sequence, 0], 0, 0, 0])  # type: ignore[index]

    @staticmethod
    def _write(batch: RaggedBatch, arena: ModelArena) -> None:
        pages, offsets = np.divmod(batch.slots, arena.page_size)
        arena.k_pools[0][pages, :, offsets, :] = batch.token_ids[:, None, None]  # type: ignore[index]


class TextGuesser:
    """The draft model, which computes nothing."""

    read_share = 1.0

    def __init__(self, guesser: Any, texts: Texts, machine: Machine, clock: Clock, sureness: float) -> None:
        self.cache, self._guesser = guesser.cache, guesser
        self._texts, self._machine, self._clock, self._logprob = texts, machine, clock, math.log(sureness)

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        self._guesser.reserve(table, tokens)

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        self._clock.take("read", tokens, self._machine.draft(1))

    def start(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        lag = max(len(drafter.tokens) - drafter.open.length_tokens for drafter in drafters)
        if lag > 2:
            self._clock.take("catch up", 0, self._machine.lag * lag * self._machine.draft(1))
        return self._guess(drafters, places, 0)

    def go_on(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        return self._guess(drafters, places, len(drafters[0].drafted))

    def name_tokens(self, numbers: list[int]) -> list[int]:
        return numbers

    def _guess(self, drafters: Sequence[ModelDrafter], places: int, first: int) -> Guesses:
        places = max(1, places) if self._machine.chains else 1
        self._clock.take("draft", places, self._machine.draft(places))
        return [
            [
                SampleResult(
                    self._texts.guess(drafter.tokens[0], len(drafter.tokens) + first + place), self._logprob, []
                )
                for drafter in drafters
            ]
            for place in range(places)
        ]


def make_simulation(
    machine: Machine, agrees: Callable[[int], float], seed: int, *, sureness: float = 0.1
) -> tuple[Engine, Clock, Texts]:
    """Make an engine with its clock. The draft model says of all its guesses that they are right in so many cases."""
    clock, texts = Clock(seed), Texts(seed, agrees)
    model = TextModel(texts, machine, clock)
    engine = make_engine(
        model,
        pages=400,
        page_size=8,
        max_batch_tokens=64,
        prefill_chunk_tokens=64,
        prefix_sharing=False,
        draft=DraftSource(FakeModel(FakeConfig(context_length=CONTEXT)), b"draft"),
        clock=lambda: clock.now,
    )
    planner = engine._planner
    assert planner is not None
    assert planner.model is not None
    if machine.ahead is not None:
        engine._planner = engine._scheduler._drafts = planner = type(planner)(
            planner._most_tokens, planner.model, planner._clock, runs_ahead=True
        )
    planner.model._guesser = TextGuesser(planner.model._guesser, texts, machine, clock, sureness)
    decide = engine._goes_on

    def goes_on(chunks: Any) -> bool:
        decided = decide(chunks)
        model.end_step(decided)
        return decided

    engine._goes_on = goes_on  # type: ignore[method-assign]
    return engine, clock, texts


def answer(engine: Engine, clock: Clock, texts: Texts, numbers: Sequence[int], tokens: int, most: int | None) -> float:
    """Answer some prompts at a time; return the seconds of the steps after these. All tokens must be the texts'."""
    prompts = [[texts.token(number, position) for position in range(PROMPT_TOKENS)] for number in numbers]
    params = SamplingParams(max_tokens=tokens)
    requests = [engine.submit(EngineRequest(prompt, params, draft_tokens=most)) for prompt in prompts]
    events = engine.step()
    start_s = clock.now
    while engine.has_work:
        events += engine.step()
    engine.check()
    for number, request in zip(numbers, requests, strict=True):
        found = [event.token_id for event in events if event.sequence_id == request]
        assert found == [texts.token(number, PROMPT_TOKENS + place) for place in range(tokens)]
    return clock.now - start_s


def measure_gain(
    machine: Machine,
    agrees: Callable[[int], float],
    seed: int,
    *,
    batches: Sequence[int] = (1, 1, 1),
    tokens: int = 400,
    sureness: float = 0.1,
) -> float:
    """Return how many times faster drafts make batches of answers, one batch after another, in a new engine."""
    seconds = []
    for most in (0, None):
        engine, clock, texts = make_simulation(machine, agrees, seed, sureness=sureness)
        first, spent_s = 0, 0.0
        for batch in batches:
            spent_s += answer(engine, clock, texts, range(first, first + batch), tokens, most)
            first += batch
        seconds.append(spent_s)
    return seconds[0] / seconds[1]
