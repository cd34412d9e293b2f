"""Drafts of a small model, or of a head, for all answers at once: one step of it for each place of the drafts.

A `Guesser` computes, with a cache of its own whose tables follow those of the answers: a table holds what the draft
model has computed of an answer, and behind that the drafted tokens, of which those that turn out right count as written
with the next draft. `DraftModel` decides what is computed when: it catches up with a prompt once the answer is so long
that drafts are likely to make up for it, and a draft ends where one more token would cost more than it promises. The
model's probabilities of its tokens, the likeliest ones, tell how often they are right (`Rates`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.core.errors import OutOfPages
from mlxr.core.frozen import frozen
from mlxr.engine.runner import BatchPart, Floats, ModelShape, Runner, build_batch, build_single, reserve_pages
from mlxr.engine.speculative.costs import MOST_ROWS, Curve, StepCosts
from mlxr.engine.speculative.drafters import HeadDrafter, ModelDrafter, Rates
from mlxr.kernels.context import Context
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.sample import SampleResult, SampleRow, fetch_logits, sample, sample_chain

Guesses = list[list[SampleResult]]  # by place, one for each answer


class HeadModel(Protocol):
    """A head that drafts; `mlxr.models.draft_head` has the real ones."""

    @property
    def config(self) -> ModelShape:
        """The head's sizes, in the form of a model's."""

    @property
    def read_share(self) -> float:
        """The time that the head takes to read tokens, as a rough share of the model's time for as many."""

    @property
    def taps(self) -> tuple[int, ...] | None:
        """The layers before which the model's stream is read as its state, side by side; None: after the last norm."""

    def fuse(self, states: Floats) -> Floats:
        """Return the states that `forward` reads, from states of the model, tokens by rows."""

    def forward(self, batch: RaggedBatch, states: Floats, arena: ModelArena) -> tuple[Floats, Floats]:
        """Return logits (R, n) after the output rows, and what stands for the model's states of these."""

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the token ids of columns of the logits."""


class Guesser(Protocol):
    """Computes the guesses of a `DraftModel`, whose drafters have tables with room for the positions to be written."""

    cache: KVCache

    @property
    def read_share(self) -> float:
        """The share that a head's `read_share` tells, used before anything is measured."""

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Make room for `tokens` more positions; raises OutOfPages if it fails."""

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        """Compute the next `tokens` inputs of an answer."""

    def start(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """Compute all inputs of answers that are not in their tables; return the likeliest column after the last ones.

        `places` are likely to be asked for. A GPU may give several of them at once, those after the first as if each
        answer had taken the one before.
        """

    def go_on(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """Compute the last drafted token of each answer; return the likeliest column after it, maybe of more places."""

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the token ids of columns of the logits."""


class ModelGuesser:
    """A small model, run by `runner`."""

    read_share = 1.0

    def __init__(self, ctx: Context, runner: Runner, cache: KVCache) -> None:
        self._ctx, self._runner, self.cache = ctx, runner, cache

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Make room for `tokens` more positions; raises OutOfPages if it fails."""
        self._runner.reserve(table, tokens)

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        """Compute the next `tokens` inputs of an answer."""
        table = drafter.open
        outputs = self._runner.forward([BatchPart(table, drafter.inputs[table.length_tokens :][:tokens], 1)])
        fetch_logits(self._ctx, outputs.logits)  # waits for a GPU, as the time counts

    def start(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """Return the likeliest column after all inputs."""
        pending = [drafter.inputs[drafter.open.length_tokens :] for drafter in drafters]
        parts = [BatchPart(drafter.open, own, len(own)) for drafter, own in zip(drafters, pending, strict=True)]
        logits, ends = self._runner.forward(parts).logits, np.cumsum([len(own) for own in pending]) - 1
        if logits.shape[0] == len(drafters):
            return sample_chain(self._ctx, logits, places)
        return [_choose(self._ctx, logits, ends.tolist())]

    def go_on(self, drafters: Sequence[ModelDrafter], places: int) -> Guesses:
        """Return the likeliest column after the last drafted tokens."""
        return sample_chain(self._ctx, self._runner.forward_single(*_list_last(drafters)), places)

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the columns, which are the tokens."""
        return numbers


class HeadGuesser:
    """A head with its arena and its cache; its drafters are `HeadDrafter`s."""

    def __init__(self, ctx: Context, head: HeadModel, arena: ModelArena, cache: KVCache) -> None:
        self._ctx, self._head, self._arena, self.cache = ctx, head, arena, cache
        self.read_share = head.read_share

    def reserve(self, table: SequenceTable, tokens: int) -> None:
        """Make room for `tokens` more positions; raises OutOfPages if it fails."""
        reserve_pages(self.cache, self._arena, table, tokens)

    def read(self, drafter: ModelDrafter, tokens: int) -> None:
        """Compute the next `tokens` inputs of an answer."""
        self._compute([drafter], tokens, outputs=0)

    def start(self, drafters: Sequence[ModelDrafter], _places: int) -> Guesses:
        """Return the likeliest column after all inputs; the drafters get what stands for the states there."""
        return [_choose(self._ctx, self._compute(drafters, None, outputs=1), range(len(drafters)))]

    def go_on(self, drafters: Sequence[ModelDrafter], _places: int) -> Guesses:
        """Return the likeliest column after the last drafted tokens."""
        states = np.stack([state for drafter in _as_heads(drafters) if (state := drafter.state) is not None])
        logits, made = self._head.forward(build_single(*_list_last(drafters)), states, self._arena)
        return [_choose(self._ctx, self._leave(drafters, logits, made), range(len(drafters)))]

    def name_tokens(self, numbers: list[int]) -> list[int]:
        """Return the token ids of columns of the logits."""
        return self._head.name_tokens(numbers)

    def _compute(self, drafters: Sequence[ModelDrafter], tokens: int | None, outputs: int) -> Floats:
        parts, states = [], []
        for drafter in _as_heads(drafters):
            pending = drafter.inputs[drafter.open.length_tokens :][:tokens]
            parts.append(BatchPart(drafter.open, pending, outputs))
            states.append(drafter.read_states()[: len(pending)])
        fused = self._head.fuse(np.concatenate(states))
        logits, made = self._head.forward(build_batch(parts), fused, self._arena)
        return self._leave(drafters if outputs else [], logits, made)

    @staticmethod
    def _leave(drafters: Sequence[ModelDrafter], logits: Floats, made: Floats) -> Floats:
        for drafter, state in zip(_as_heads(drafters), made, strict=True):
            drafter.state = state
        return logits


def _choose(ctx: Context, logits: Floats, ends: Sequence[int]) -> list[SampleResult]:
    """Return the likeliest column of each of these rows, and how likely it is."""
    if isinstance(logits, np.ndarray) and len(ends) < len(logits):
        logits, ends = logits[list(ends)], range(len(ends))
    drawn = sample(ctx, logits, [SampleRow()] * logits.shape[0], goes_on=False)
    return [drawn[end] for end in ends]


def _as_heads(drafters: Sequence[ModelDrafter]) -> list[HeadDrafter]:
    return [drafter for drafter in drafters if isinstance(drafter, HeadDrafter)]


def _list_last(drafters: Sequence[ModelDrafter]) -> tuple[list[SequenceTable], list[int], list[int]]:
    """Return tables, last drafted tokens, and the places where these belong."""
    return (
        [drafter.open for drafter in drafters],
        [drafter.drafted[-1] for drafter in drafters],
        [len(drafter.inputs) + len(drafter.drafted) - 1 for drafter in drafters],
    )


logger = logging.getLogger(__name__)
SHORT = 32  # tokens that the draft model may lag behind and still draft in this step
_MOST_PLACES = MOST_ROWS  # of a draft: a step checks no more
_LASTING = 8  # drafts for which the listed costs of steps stay valid
_PRIOR_PLACE = 0.1  # of the time of a step without drafts, before it is measured
_USUAL_LAG = 2  # tokens at most that are new to a draft model that drafted for the step before
_READ_PAUSE = 4  # steps until it is asked again whether to read a text
_FIRST_REST = 8  # steps after a trial that did not pay, until there is another; twice as many after each further one
_TRIAL_SHARE = 0.01  # of the time of all steps that trials may take where they do not pay
_TRIAL_RATE = 0.6  # how often guesses are taken to be right at least, to find out
_LEAST_GAIN = 1.03  # times as many tokens in a second, which drafts must promise, as estimates are never exact
_READING_GAIN = 1.02  # gain that is hoped for at least from a text that was not read
_SURPRISE = 2.0  # readings that take this many times what was expected count as this many: a GPU may have compiled
_ANSWER_WEIGHT = 0.1  # of the newest answer
_FIRST_ANSWER_TOKENS = 64.0  # how long answers are, before any has ended


@frozen
class Decision:
    """The answers that are to have drafts, and of how many places; `gain` times as many tokens per second are expected.

    `speed` is the expected number of tokens in the time of a step of one row. A trial serves to measure, whatever is
    expected.
    """

    chosen: list[tuple[ModelDrafter, int]]
    places: int
    gain: float
    speed: float
    is_trial: bool = False


class DraftModel:
    """The model, or the head, behind `guesser`, which has the cache for its pages.

    It reads and gives tokens below `vocab_size`, in texts of up to `context_tokens`; drafts end with one of `stop_ids`.
    Of one prompt it computes at most `chunk_tokens` in a step.
    """

    def __init__(
        self,
        guesser: Guesser,
        *,
        vocab_size: int,
        context_tokens: int,
        stop_ids: Collection[int],
        chunk_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._guesser, self.cache, self._clock = guesser, guesser.cache, clock
        self._vocab_size, self._context_tokens = vocab_size, context_tokens
        self._stop_ids, self._chunk_tokens = frozenset(stop_ids), chunk_tokens
        self._rates = Rates()
        self._costs: dict[int, Curve] = {}  # of places, by how many answers have drafts
        self._step_costs: dict[tuple[int, int], tuple[float, list[float]]] = {}  # see `_list_costs`
        self._drafts = 0
        self._chains = False  # True if several places are computed at once
        self._prompt_token_s: float | None = None
        self._read_s = clock()  # when a text was read last
        self._rest_steps, self._next_trial = _FIRST_REST, 0
        self._answer_tokens = _FIRST_ANSWER_TOKENS

    def open(self, tokens: list[int], shares: bool) -> ModelDrafter:
        """Make the drafter of an answer."""
        own = self._rates, self.cache.release, self._count_answer
        if isinstance(self._guesser, HeadGuesser):
            return HeadDrafter(tokens, shares, *own)
        return ModelDrafter(tokens, self.cache.start_keys() if shares else None, *own)

    def _count_answer(self, tokens: int) -> None:
        """Take in the length of an answer that has ended."""
        self._answer_tokens += _ANSWER_WEIGHT * (tokens - self._answer_tokens)

    def decide(
        self,
        wanted: Sequence[tuple[ModelDrafter, int]],
        answers: int,
        room_rows: int,
        steps: StepCosts,
        credit_s: float,
        now: int,
    ) -> Decision | None:
        """Choose the answers to draft for in the next step, and how far; None: no answer.

        `wanted` are drafters with the most tokens that each may have. A step of the other model decodes `answers` and
        has `room_rows` for drafts; `steps` tell what it costs. `credit_s` may be spent. `now` is the number of the
        step; drafters that get nothing rest until a later one. It may be called before the newest token is known.
        """
        wanted = [pair for pair in wanted if pair[1] > 0 and self._can_guess(pair[0])]
        plain_s = steps.read_seconds(answers)
        if plain_s is None or credit_s <= 0 or room_rows < 1 or not wanted:
            return None
        decision = self._choose_places(wanted, answers, room_rows, steps, 0.0)
        was_right = any(drafter.was_right for drafter, _ in wanted)
        if was_right:
            self._rest_steps = _FIRST_REST
        if decision.gain < _LEAST_GAIN:
            if not was_right and now < self._next_trial:
                for drafter, _ in wanted:
                    drafter.rests_until = self._next_trial
                return None
            decision = replace(self._choose_places(wanted, answers, room_rows, steps, _TRIAL_RATE), is_trial=True)
        able = []
        for drafter, most in decision.chosen:
            gain = 0.0 if decision.is_trial else decision.gain
            is_short = self._count_lag(drafter) <= SHORT
            if is_short or self._may_read(drafter, plain_s / answers, gain, credit_s):
                able.append((drafter, most))
            else:
                drafter.rests_until = now + _READ_PAUSE
        return replace(decision, chosen=able) if able else None

    def fill(
        self,
        wanted: Sequence[tuple[ModelDrafter, int]],
        answers: int,
        room_rows: int,
        steps: StepCosts,
        credit_s: float,
        now: int,
    ) -> bool:
        """Draft as `decide` says; return True if a prompt was computed for that."""
        decision = self.decide(wanted, answers, room_rows, steps, credit_s, now)
        one_s = steps.read_seconds(1)
        if decision is None or one_s is None:
            return False
        ready, has_read = [], False
        for drafter, most in decision.chosen:
            drafter.follow(self.cache)
            if self._count_lag(drafter) <= SHORT:
                ready.append((drafter, min(most, decision.places) if self._chains else most))
            elif not has_read:
                has_read = self._read(drafter)
        if ready := [pair for pair in ready if self._reserve(*pair)]:
            self._drafts += 1
            if self._drafts % _LASTING == 0 or self._drafts < _LASTING:
                self._step_costs.clear()
            if decision.is_trial:
                self._rest(decision, answers, steps, now)
            self._draft(ready, room_rows, decision, steps.row_slope, one_s)
        return has_read

    def _choose_places(
        self,
        wanted: Sequence[tuple[ModelDrafter, int]],
        answers: int,
        room_rows: int,
        steps: StepCosts,
        least_rate: float,
    ) -> Decision:
        """Choose the answers to draft for, and how many tokens each, so that the most tokens per second come out.

        Guesses are taken to be right as often as they were, but at least at `least_rate`.
        """
        ranked = sorted(wanted, key=lambda pair: -pair[0].rates.first) if len(wanted) > 1 else wanted
        best, found = (0.0, 0, 0.0), 0
        for width in range(1, min(len(ranked), room_rows) + 1):
            own, costs = self._list_costs(width, answers, steps)
            rates = [drafter.rates for drafter, _ in ranked[:width]]
            chances = [max(rate.first, least_rate) for rate in rates]
            laters = [max(rate.later, least_rate) for rate in rates]
            tokens, most = float(width), max(most for _, most in ranked[:width])
            for places, cost in enumerate(costs[: min(room_rows // width, most)], 1):
                tokens += sum(chances)
                speed = tokens / cost
                if speed * own / width > best[0]:
                    best, found = (speed * own / width, places, speed), width
                chances = [chance * later for chance, later in zip(chances, laters, strict=True)]
        gain, places, speed = best
        return Decision(list(ranked[:found]), places, gain, speed)

    def _list_costs(self, width: int, answers: int, steps: StepCosts) -> tuple[float, list[float]]:
        """Return the cost of `width` answers in a step without drafts, and by places that of a step with their drafts.

        Both leave out what the other `answers` cost: the answers with drafts end sooner, and the others then go on in
        steps that are shorter by the first number. Called in every step, and computed anew once in a while.
        """
        known = self._step_costs.get((width, answers))
        if known is None:
            plain = steps.estimate_plain
            own, curve = plain(answers) - (plain(answers - width) if width < answers else 0.0), self._read_curve(width)
            others, most = own - plain(answers), min(_MOST_PLACES, (MOST_ROWS - answers) // width)
            costs = [
                max(others + steps.estimate(answers + width * places), own) + curve.estimate(places)
                for places in range(1, most + 1)
            ]
            known = self._step_costs[width, answers] = own, costs if own > 0 else []
        return known

    def _rest(self, decision: Decision, answers: int, steps: StepCosts, now: int) -> None:
        """Begin a trial: there is another only after steps of which it is a small part, unless it turns out right."""
        self._step_costs.clear()
        width = len(decision.chosen)
        plain = steps.estimate_plain(answers)
        waits = steps.estimate(answers + width * decision.places) + steps.estimate(answers) - 2 * plain
        share = (self._read_curve(width).estimate(decision.places) + waits) / plain
        self._next_trial = now + self._rest_steps
        self._rest_steps = min(2 * self._rest_steps, max(_FIRST_REST, math.ceil(share / _TRIAL_SHARE)))
        for drafter, _ in decision.chosen:
            drafter.rests_until = self._next_trial
            drafter.rates.rest()

    def _read_curve(self, width: int) -> Curve:
        """Return the costs of drafts for so many answers by their places, in steps of one row."""
        curve = self._costs.get(width)
        if curve is None:
            curve = self._costs[width] = Curve(_MOST_PLACES, _PRIOR_PLACE, _PRIOR_PLACE)
        return curve

    def _can_guess(self, drafter: ModelDrafter) -> bool:
        """Return True if the model knows the answer's text, and there is no better guess."""
        is_long = len(drafter.tokens) + 1 >= self._context_tokens
        is_known = drafter.is_ready and not is_long and not drafter.is_foreign(self._vocab_size)
        return is_known and not drafter.takes_lookup

    def _count_lag(self, drafter: ModelDrafter) -> int:
        """Return how many of an answer's tokens are not in its table, which is opened if need be."""
        if drafter.table is None or isinstance(drafter, HeadDrafter):
            drafter.follow(self.cache)
        return len(drafter.inputs) - drafter.open.length_tokens - drafter.settled_tokens

    def _may_read(self, drafter: ModelDrafter, token_s: float, gain: float, credit_s: float) -> bool:
        """Return True if the model may compute text that it has not read: if drafts are likely to make up for it.

        An answer is expected to become as long as others did, and a longer one to have as many tokens more, as far as
        it may. Tokens that came since a trial are read for the next one if that takes as small a part of the time as
        trials may, and so is any text that would take so little of the time since the last reading.
        """
        if self._prompt_token_s is None:
            curve = self._read_curve(1)
            share = curve.estimate(1) if curve.is_measured else self._guesser.read_share
            self._prompt_token_s = token_s * share / SHORT
        lag, each_s = self._count_lag(drafter), self._prompt_token_s
        saved_s = token_s * (1 - 1 / max(gain, _READING_GAIN))
        length = len(drafter.tokens) - drafter.opened_tokens
        likely = min(max(self._answer_tokens - length, length), drafter.end_tokens - len(drafter.tokens))
        is_cheap = lag <= length and each_s <= _TRIAL_SHARE * token_s
        worth_s = min(credit_s, math.inf if is_cheap else likely * saved_s)
        return lag * each_s <= max(worth_s, _TRIAL_SHARE * (self._clock() - self._read_s))

    def _read(self, drafter: ModelDrafter) -> bool:
        """Compute the next part of a text up to its last token, which is left to the draft; False if pages lack."""
        table = drafter.open
        tokens = min(len(drafter.inputs) - 1 - table.length_tokens, self._chunk_tokens)
        try:
            self._guesser.reserve(table, tokens)
        except OutOfPages:
            return False
        start_s = self._clock()
        self._guesser.read(drafter, tokens)
        self.cache.commit(table, drafter.inputs, tokens)
        self._read_s = self._clock()
        each_s = (self._read_s - start_s) / tokens
        if (known_s := self._prompt_token_s) is not None:
            self._prompt_token_s = (known_s + min(each_s, _SURPRISE * known_s)) / 2
        return True

    def _reserve(self, drafter: ModelDrafter, most: int) -> bool:
        """Make room for an answer's inputs and its draft; return False if pages lack."""
        room = min(len(drafter.inputs) + most, self._context_tokens) - drafter.open.length_tokens
        try:
            self._guesser.reserve(drafter.open, room)
        except OutOfPages:
            return False
        return True

    def _draft(
        self,
        ready: list[tuple[ModelDrafter, int]],
        room_rows: int,
        decision: Decision,
        row_cost: float,
        one_s: float,
    ) -> None:
        """Draft for answers whose pages are reserved, place by place; a step of one row takes `one_s`."""
        drafters = [drafter for drafter, _ in ready]
        lags = [len(drafter.inputs) - drafter.open.length_tokens for drafter in drafters]
        curve, width = self._read_curve(len(ready)), len(ready)
        places = min(decision.places, *(self._count_room(*pair) for pair in ready))
        start_s = self._clock()
        guesses = self._guesser.start(drafters, places)
        computed = len(guesses)
        self._chains = self._chains or computed > 1
        is_usual = max(lags) <= _USUAL_LAG
        if is_usual:
            curve.count(computed, (self._clock() - start_s) / one_s)
        for drafter, lag in zip(drafters, lags, strict=True):
            self.cache.commit(drafter.open, drafter.inputs, lag)
            drafter.begin()
        # Where places are computed one by one, each costs as much as those before it; else it is another draft.
        place_cost = curve.estimate(1 if self._chains else places) / (1 if self._chains else places)
        growing, drafted, place = self._take(ready, guesses.pop(0)), len(ready), 1
        while growing:
            if not guesses:
                bound = (place_cost / len(growing) + row_cost) * decision.speed
                growing = [pair for pair in growing if self._goes_on(*pair, bound)]
            growing = [pair for pair in growing if self._has_room(*pair)][: max(0, room_rows - drafted)]
            if not growing:
                break
            if not guesses:
                drafters = [drafter for drafter, _ in growing]
                guesses = self._guesser.go_on(drafters, max(1, places - place))
                computed += len(guesses)
                if is_usual and len(growing) == width and not self._chains:
                    curve.count(computed, (self._clock() - start_s) / one_s)
            for drafter, _ in growing:
                drafter.written_tokens += 1
            of_all = dict(zip(map(id, drafters), guesses.pop(0), strict=True))
            results = [of_all[id(drafter)] for drafter, _ in growing]
            growing, drafted, place = self._take(growing, results), drafted + len(results), place + 1

    def _take(
        self, growing: list[tuple[ModelDrafter, int]], results: Sequence[SampleResult]
    ) -> list[tuple[ModelDrafter, int]]:
        """Give each answer its likeliest token; return those whose token the other model knows."""
        known = []
        token_ids = self._guesser.name_tokens([result.token_id for result in results])
        for pair, token_id, result in zip(growing, token_ids, results, strict=True):
            if token_id < self._vocab_size:
                pair[0].take(token_id, math.exp(result.logprob))
                known.append(pair)
        return known

    def _has_room(self, drafter: ModelDrafter, most: int) -> bool:
        """Return True if a draft may have one token more."""
        return len(drafter.drafted) < self._count_room(drafter, most) and drafter.drafted[-1] not in self._stop_ids

    @staticmethod
    def _goes_on(drafter: ModelDrafter, _: int, bound: float) -> bool:
        """Return True if one token more is likely to pay."""
        return drafter.reach * drafter.rates.later >= bound

    def _count_room(self, drafter: ModelDrafter, most: int) -> int:
        """Return how many drafted tokens an answer has room for that may have `most`."""
        return min(most, self._context_tokens - len(drafter.tokens))
