"""Guesses of a small model, or of a head, for all answers at once: one step of it for each place of the drafts.

It has a cache of its own, whose tables follow those of the answers: a table holds what the draft model has computed of
an answer, and behind that the drafted tokens, of which those that turn out right count as written with the next draft.
Prompts are caught up with when their answers have become so long that drafts are likely to make up for it.

Its tokens are the likeliest ones. How sure the model is of them tells how often they are right (`Rates`), and a draft
ends where one more token would cost more than it promises.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

from mlxr.core.errors import OutOfPages
from mlxr.engine.drafts.costs import StepCosts
from mlxr.engine.drafts.guesser import Guesser, HeadGuesser
from mlxr.engine.drafts.head_drafter import HeadDrafter
from mlxr.engine.drafts.model_drafter import ModelDrafter
from mlxr.engine.drafts.rates import Rates
from mlxr.kernels.sample import SampleResult

logger = logging.getLogger(__name__)
SHORT = 32  # tokens that the draft model may lag behind and still draft in this step
_MOST_ROWS = 16  # of its steps that are told apart
_READ_PAUSE = 4  # steps until it is asked again whether to read a text
_FIRST_REST = 8  # steps after a trial that did not pay, until there is another; twice as many after each further one
_TRIAL_SHARE = 0.01  # of the time of all steps that trials may take where they do not pay
_GAIN_WEIGHT = 0.05  # of the newest step
_ANSWER_WEIGHT = 0.1  # of the newest answer
_FIRST_ANSWER_TOKENS = 64.0  # how long answers are, before any has ended
_FIRST_GAIN = 1.3  # times as many tokens in a second, before it is measured
_LEAST_GAIN = 1.02  # what is hoped for in any case, so that there is a second trial


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
        self._usual_places = 1  # of the last draft
        self._vocab_size, self._context_tokens = vocab_size, context_tokens
        self._stop_ids, self._chunk_tokens = frozenset(stop_ids), chunk_tokens
        self._rates, self._costs = Rates(), StepCosts(_MOST_ROWS)
        self._prompt_token_s: float | None = None
        self._has_read = False
        self._gains = [_FIRST_GAIN] * (_MOST_ROWS + 1)  # by the answers of a step
        self._rest_steps, self._next_trial = _FIRST_REST, 0
        self._answer_tokens = _FIRST_ANSWER_TOKENS

    def open(self, tokens: list[int], shares: bool) -> ModelDrafter:
        """Who drafts for an answer."""
        own = self._rates, self.cache.release, self._count_answer
        if isinstance(self._guesser, HeadGuesser):
            return HeadDrafter(tokens, shares, *own)
        return ModelDrafter(tokens, self.cache.start_keys() if shares else None, *own)

    def _count_answer(self, tokens: int) -> None:
        """An answer has come to its end after so many tokens."""
        self._answer_tokens += _ANSWER_WEIGHT * (tokens - self._answer_tokens)

    def count_gain(self, answers: int, gain: float) -> None:
        """A step with drafts of this model gave so many times the tokens of a second that one without gives."""
        before = self._gains[answers]
        self._gains[answers] += _GAIN_WEIGHT * (min(gain, 2 * before) - before)

    def fill(
        self,
        wanted: Sequence[tuple[ModelDrafter, int]],
        answers: int,
        room_rows: int,
        steps: StepCosts,
        credit_s: float,
        now: int,
    ) -> bool:
        """Draft for those who want it and may have so many tokens; whether a prompt was computed for that.

        A step of the other model decodes `answers` and has `room_rows` for drafts; `steps` tell what it costs.
        `credit_s` may be spent. `now` is the number of the step; those who get nothing rest until a later one.
        """
        plain_s = steps.read_seconds(answers)
        wanted = [pair for pair in wanted if self._can_guess(pair[0])]
        if plain_s is None or credit_s <= 0 or room_rows < 1 or not wanted:
            return False
        room_rows = self._choose_rows(wanted, answers, room_rows, steps)
        row_s = (steps.estimate(answers + room_rows) / steps.estimate(answers) - 1) * plain_s / room_rows
        prices = _Prices(self._costs, row_s, plain_s / answers, max(self._gains[answers], 1.0))
        chosen = [pair for pair in wanted if self._is_worth(pair, prices, len(wanted), now)]
        ready, has_read = [], False
        for drafter, most in chosen:
            if self._count_lag(drafter) <= SHORT:
                ready.append((drafter, most))
            elif not has_read and self._may_read(drafter, most, plain_s / answers, self._gains[answers], credit_s):
                has_read = self._read(drafter)
            else:
                drafter.rests_until = now + _READ_PAUSE
        if ready := [pair for pair in ready if self._reserve(*pair)]:
            self._draft(ready, room_rows, prices)
        return has_read

    def _choose_rows(
        self, wanted: Sequence[tuple[ModelDrafter, int]], answers: int, room_rows: int, steps: StepCosts
    ) -> int:
        """How many drafted tokens, spread evenly, would make the tokens of a second most: some rows are far dearer."""
        width, one_s = len(wanted), steps.read_seconds(1)
        rate = sum(drafter.rates.first for drafter, _ in wanted) / width
        own_s = self._costs.read_seconds(width)
        place_cost = 0.0 if one_s is None or own_s is None else own_s / one_s * steps.estimate(1)
        best, chosen, tokens = 0.0, 1, float(answers)
        for rows in range(1, room_rows + 1):
            place = -(-rows // width)
            tokens += rate**place
            speed = tokens / (steps.estimate(answers + rows) + place_cost * place)
            if speed > best:
                best, chosen = speed, rows
        return chosen

    def _can_guess(self, drafter: ModelDrafter) -> bool:
        """Whether the model knows the answer's text, and there is no better guess."""
        is_long = len(drafter.tokens) + 1 >= self._context_tokens
        is_known = drafter.is_ready and not is_long and not drafter.is_foreign(self._vocab_size)
        return is_known and not drafter.takes_lookup

    def _is_worth(self, pair: tuple[ModelDrafter, int], prices: _Prices, answers: int, now: int) -> bool:
        """Whether the model shall draft for an answer now: where that is likely to pay, or a trial is due."""
        drafter, _ = pair
        if drafter.was_right:
            self._rest_steps = _FIRST_REST
            return True
        if drafter.rates.first >= prices.find_bound(answers):
            return True
        is_due = now >= self._next_trial
        if is_due:
            self._next_trial = now + self._rest_steps
            self._rest_steps = min(2 * self._rest_steps, math.ceil(prices.read_share(answers) / _TRIAL_SHARE))
        drafter.rests_until = self._next_trial
        return is_due

    def _count_lag(self, drafter: ModelDrafter) -> int:
        """Bring the books of an answer's table up to date; how many of its tokens are not in it."""
        drafter.follow(self.cache)
        return len(drafter.inputs) - drafter.open.length_tokens

    def _may_read(self, drafter: ModelDrafter, most: int, token_s: float, gain: float, credit_s: float) -> bool:
        """Whether to compute a part of the text that the model has not read: when drafts are likely to make up for it.

        An answer is likely to become as long as others did, and one that is longer to have as many tokens more.
        """
        lag = len(drafter.inputs) - drafter.open.length_tokens
        each_s = self._prompt_token_s
        if each_s is None:
            step_s = self._costs.read_seconds(SHORT)
            each_s = (token_s * self._guesser.read_share if step_s is None else step_s) / SHORT
        saved_s = token_s * (1 - 1 / max(gain, _LEAST_GAIN))
        length = len(drafter.tokens) - drafter.opened_tokens
        likely = min(max(self._answer_tokens - length, length), most)
        return lag * each_s <= min(credit_s, likely * saved_s)

    def _read(self, drafter: ModelDrafter) -> bool:
        """Compute the next part of a text up to its last token, which is left to the draft."""
        table = drafter.open
        tokens = min(len(drafter.inputs) - 1 - table.length_tokens, self._chunk_tokens)
        try:
            self._guesser.reserve(table, tokens)
        except OutOfPages:
            return False
        start_s = self._clock()
        self._guesser.read(drafter, tokens)
        self.cache.commit(table, drafter.inputs, tokens)
        each_s = (self._clock() - start_s) / tokens
        if self._has_read:  # the first time, a GPU makes what later ones need
            self._prompt_token_s = each_s if self._prompt_token_s is None else (self._prompt_token_s + each_s) / 2
        self._has_read = True
        return True

    def _reserve(self, drafter: ModelDrafter, most: int) -> bool:
        """Make room for what an answer has and for its draft."""
        room = min(len(drafter.inputs) + most, self._context_tokens) - drafter.open.length_tokens
        try:
            self._guesser.reserve(drafter.open, room)
        except OutOfPages:
            return False
        return True

    def _draft(self, ready: list[tuple[ModelDrafter, int]], room_rows: int, prices: _Prices) -> None:
        """Drafts for answers whose pages are reserved, place by place."""
        drafters = [drafter for drafter, _ in ready]
        lags = [len(drafter.inputs) - drafter.open.length_tokens for drafter in drafters]
        places = min(self._usual_places, *(self._count_room(*pair) for pair in ready))
        start_s = self._clock()
        guesses = self._guesser.start(drafters, places)
        self._count_places(sum(lags), len(guesses), self._clock() - start_s)
        for drafter, lag in zip(drafters, lags, strict=True):
            self.cache.commit(drafter.open, drafter.inputs, lag)
            drafter.begin()
        growing, drafted, place = self._take(ready, guesses.pop(0)), len(ready), 1
        while growing := [pair for pair in growing if self._goes_on(*pair, prices.find_bound(len(growing)))]:
            growing = growing[: max(0, room_rows - drafted)]
            if not growing:
                break
            if not guesses:
                drafters = [drafter for drafter, _ in growing]
                start_s = self._clock()
                guesses = self._guesser.go_on(drafters, places - place)
                self._count_places(len(drafters), len(guesses), self._clock() - start_s)
            for drafter, _ in growing:
                drafter.written_tokens += 1
            of_all = dict(zip(map(id, drafters), guesses.pop(0), strict=True))
            results = [of_all[id(drafter)] for drafter, _ in growing]
            growing, drafted, place = self._take(growing, results), drafted + len(results), place + 1
        self._usual_places = place

    def _count_places(self, rows: int, places: int, seconds: float) -> None:
        """Steps of so many rows, one for each place, took so long together."""
        for _ in range(places):
            self._costs.count(rows, seconds / places)

    def _take(
        self, growing: list[tuple[ModelDrafter, int]], results: Sequence[SampleResult]
    ) -> list[tuple[ModelDrafter, int]]:
        """Give each answer its likeliest token; those that the other model knows go on."""
        known = []
        token_ids = self._guesser.name_tokens([result.token_id for result in results])
        for pair, token_id, result in zip(growing, token_ids, results, strict=True):
            if token_id < self._vocab_size:
                pair[0].take(token_id, math.exp(result.logprob))
                known.append(pair)
        return known

    def _goes_on(self, drafter: ModelDrafter, most: int, bound: float) -> bool:
        """Whether one token more is likely to be worth its while."""
        has_room = len(drafter.drafted) < self._count_room(drafter, most)
        is_last = drafter.drafted[-1] in self._stop_ids
        return has_room and not is_last and drafter.reach * drafter.rates.first >= bound

    def _count_room(self, drafter: ModelDrafter, most: int) -> int:
        """How many drafted tokens an answer has room for that may have `most`."""
        return min(most, self._context_tokens - len(drafter.tokens))


class _Prices:
    """Seconds of a step's rows and of drafted tokens, compared with those of a token without drafts."""

    __slots__ = ("_costs", "_gain", "_row_s", "_token_s")

    def __init__(self, costs: StepCosts, row_s: float, token_s: float, gain: float) -> None:
        self._costs, self._row_s, self._token_s, self._gain = costs, row_s, token_s, gain

    def find_bound(self, answers: int) -> float:
        """How likely a drafted token must be right to be worth its while, when so many answers get one."""
        return self.read_share(answers) * self._gain

    def read_share(self, answers: int) -> float:
        """How much of the time of a token without drafts one drafted token takes; 0 before anything is measured."""
        step_s = self._costs.read_seconds(answers)
        return 0.0 if step_s is None else (step_s / answers + self._row_s) / self._token_s
