"""Chooses how many tokens to draft for each answer of a step: as many as give the most tokens per second.

`Planner` knows estimates and measured costs alone; whatever it decides, no answer changes. `can_draft` tells whether an
engine drafts at all, by its settings, its device and its models; `open_drafts` makes its planner and what makes its
drafters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.shapes import LayerCache, PagesAndState, StateShape
from mlxr.core.errors import SettingError
from mlxr.core.frozen import frozen
from mlxr.core.model_settings import DRAFT_WORDS, ModelSettings, size_steps
from mlxr.engine.memory_plan import ArenaPlan
from mlxr.engine.runner import Model, ModelShape, Runner
from mlxr.engine.speculative.costs import MOST_ROWS, Credit, StepCosts
from mlxr.engine.speculative.draft_model import DraftModel, Guesser, HeadGuesser, HeadModel, ModelGuesser
from mlxr.engine.speculative.drafters import Drafter, DrafterMaker, Lookup, ModelDrafter
from mlxr.kernels.context import Context

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
_LEAST_GAIN = 1.05  # drafts must promise this much, as estimates are never exact
_LOOK_EVERY = 4  # of so many steps without drafts, one is measured
_PLAIN_EVERY, _PLAIN_SELDOM = 4, 256  # steps with drafts between two without that are measured, at least and at most
_AS_EXPECTED = 0.1  # of its time that such a step may differ from what was expected for the next one to come later
_PATIENCE = 8  # steps without drafts in a row, until the planner rests between looks
_LONGEST_REST = 8  # steps between two looks, when looks found nothing again and again


class Planner:
    """Chooses the lengths of drafts, at most `most_tokens` for one answer. Without `model` they cost nothing.

    In steps of more than `most_answers` the model does not guess: there its steps took longer than they saved.

    If it `runs_ahead`, a step may begin before the tokens are known that the one before it draws. Such a step has no
    drafts. So it must be known before tokens are drawn whether the next step is likely to have any (`expects`).

    If looks for drafts find none again and again, the planner `rests` after each: for so many more steps, which the
    scheduler counts, nobody asks or tells it anything, as that takes time as well.
    """

    most_answers = 2

    def __init__(
        self,
        most_tokens: int,
        model: DraftModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self.runs_ahead = runs_ahead
        self._was_ahead = self._ran_ahead = False  # the step that runs, and the one after it
        self._most_tokens, self.model, self._clock = most_tokens, model, clock
        self._costs, self._credit = StepCosts(MOST_ROWS, runs_ahead=runs_ahead), Credit()
        self._guess_s = 0.0
        self._since_plain = self._plain_steps = self._steps = 0
        self._plain_every = _PLAIN_EVERY
        self.rests, self._rest_steps, self._idle_steps = 0, 1, 0

    def count(self, rows: int, seconds: float, answers: int | None = None, tokens: int = 0) -> None:
        """Take in a step that decoded `answers`, with so many rows, and gave so many tokens.

        Its seconds count from before the planning. `answers` is None if it computed prompts, too.
        """
        step_s, guess_s = seconds - self._guess_s, self._guess_s
        self._guess_s = 0.0
        waits = self.runs_ahead and not self._was_ahead
        is_plain = rows == answers and not waits
        if is_plain and not guess_s:
            self._plain_steps += 1
            if self._plain_steps % _LOOK_EVERY and self._plain_steps > _LOOK_EVERY and not self._since_plain:
                return
        if answers is not None and is_plain:
            self._time_plain(step_s, rows)
        elif answers is not None:
            self._since_plain += rows > answers
            self._costs.count(rows, step_s, is_plain=False)
        self._credit.count_step(step_s * (_LOOK_EVERY if is_plain else 1), self._costs.read_seconds(1))
        plain_s = self._costs.read_seconds(answers or 1)
        usual_s = self._costs.read_seconds(rows, waits=waits or not is_plain)  # this one may have been held up
        if guess_s and answers and plain_s and usual_s and self.model is not None:
            plain_s *= tokens / answers
            self._credit.save(plain_s - usual_s - min(guess_s, plain_s))

    def _time_plain(self, seconds: float, rows: int) -> None:
        """Take in a step without drafts, for comparison; the more it is as expected, the later the next one comes."""
        expected_s = self._costs.read_seconds(rows)
        if self._since_plain and expected_s is not None:
            is_known = abs(seconds - expected_s) < _AS_EXPECTED * expected_s
            every = 2 * self._plain_every if is_known else self._plain_every // 2
            self._plain_every = min(max(every, _PLAIN_EVERY), _PLAIN_SELDOM)
        self._costs.count(rows, seconds)
        self._since_plain = 0

    def begin_step(self, answers: int) -> bool:
        """Begin to plan a step that decodes so many answers; return True if it has room for drafts."""
        self._steps += 1
        return answers < MOST_ROWS and not self._ran_ahead

    def end_step(self, *, has_drafts: bool, answers: int) -> None:
        """End planning the step; if there are no drafts, the next steps may pass without a look for them."""
        self._idle_steps = 0 if has_drafts else self._idle_steps + 1
        if self._idle_steps <= _PATIENCE or self.runs_ahead:
            self._rest_steps = 1
            return
        self.rests = self._rest_steps
        self._rest_steps = min(2 * self._rest_steps, _LONGEST_REST)
        self._steps += self.rests
        plain_s = self._costs.read_seconds(answers)
        if plain_s is not None:
            self._credit.count_step(plain_s * self.rests, self._costs.read_seconds(1))

    def is_due(self, drafter: Drafter, answers: int) -> bool:
        """Return True if an answer may have a guess in this step that pays; called for each in each step."""
        if isinstance(drafter, ModelDrafter):
            if self._asks_model(drafter, answers):
                return True
            drafter = drafter.lookup
        return drafter.is_due() and drafter.estimate(1)[0] >= self._costs.find_bound(answers, _LEAST_GAIN)

    def _asks_model(self, drafter: ModelDrafter, answers: int) -> bool:
        is_due = self._steps >= drafter.rests_until and answers <= self.most_answers
        return is_due and self._credit.seconds > 0 and self.model is not None

    def expects(self, drafters: Sequence[Drafter], answers: int, *, has_drafts: bool = False) -> bool:
        """Return True if the next step is likely to have drafts; called before the tokens of this one are drawn.

        If this one `has_drafts`, nobody knows yet what the next one is to compute, so it waits in any case.
        """
        found = has_drafts
        if not has_drafts and (self._since_plain < self._plain_every or self._ran_ahead):
            found = self._expects_model(drafters, answers) or self._expects_lookup(drafters, answers)
        self._was_ahead, self._ran_ahead = self._ran_ahead, not found
        return found

    def _expects_model(self, drafters: Sequence[Drafter], answers: int) -> bool:
        wanted = [
            (drafter, self._most_tokens)
            for drafter in drafters
            if isinstance(drafter, ModelDrafter) and self._asks_model(drafter, answers)
        ]
        if not wanted or self.model is None:
            return False
        room_rows = MOST_ROWS - answers
        return bool(self.model.decide(wanted, answers, room_rows, self._costs, self._credit.seconds, self._steps))

    def _expects_lookup(self, drafters: Sequence[Drafter], answers: int) -> bool:
        """Return True if what the text offers now would pay: its offer after one more token is then likely to."""
        rates = {
            place: drafter.estimate(self._most_tokens) for place, drafter in enumerate(drafters) if drafter.propose(1)
        }
        return bool(rates) and bool(self._choose(rates, answers, answers, MOST_ROWS - answers, from_ahead=True))

    def plan(
        self,
        drafters: Mapping[K, tuple[Drafter, int]],
        room_rows: int,
        answers: int,
        rows: int,
        cut: Callable[[K, list[int]], list[int]],
    ) -> dict[K, list[int]]:
        """Return drafts for answers that decode: each with its drafter and the most tokens that it has room for.

        The step has `answers` in all, with so many `rows`. Drafts take at most `room_rows` rows besides. The likeliest
        tokens come first. `cut` leaves of an answer's draft what can be right.
        """
        if self._since_plain >= self._plain_every:
            return {}
        room_rows = max(0, min(room_rows, MOST_ROWS - rows))
        limits = {key: (drafter, min(most, self._most_tokens)) for key, (drafter, most) in drafters.items()}
        if self.model is not None:
            self._guess(self.model, limits, room_rows, answers)
        offers = {}
        for key, (drafter, most) in limits.items():
            proposed = cut(key, drafter.propose(most)) if most > 0 else []
            if proposed:
                offers[key] = proposed, drafter.estimate(len(proposed))
        lengths = self._choose({key: rates for key, (_, rates) in offers.items()}, answers, rows, room_rows)
        return {key: offers[key][0][:length] for key, length in lengths.items()}

    @property
    def cache(self) -> KVCache | None:
        """The draft model's cache, if there is one."""
        return None if self.model is None else self.model.cache

    @property
    def arena_bytes(self) -> int:
        """Bytes that the draft model's cache may take."""
        return 0 if self.model is None else sum(group.arena.nbytes for group in self.model.cache.groups)

    def check(self, drafters: Iterable[Drafter | None]) -> None:
        """Raise AssertionError unless exactly these drafters hold the pages of the draft model."""
        if self.model is not None:
            own = [drafter for drafter in drafters if isinstance(drafter, ModelDrafter)]
            self.model.cache.check(drafter.table for drafter in own if drafter.table is not None)

    def _guess(
        self, model: DraftModel, drafters: Mapping[K, tuple[Drafter, int]], room_rows: int, answers: int
    ) -> None:
        """Let the draft model guess. If it fails, it is not used any more, and the answers go on."""
        wanted = [
            (drafter, most)
            for drafter, most in drafters.values()
            if isinstance(drafter, ModelDrafter) and most > 0 and self._asks_model(drafter, answers)
        ]
        if not wanted:
            return
        start_s = self._clock()
        try:
            model.fill(wanted, answers, room_rows, self._costs, self._credit.seconds, self._steps)
        except Exception:  # whatever it was, only guesses need the model
            logger.exception("the draft model failed; answers go on without it")
            for drafter, _ in wanted:
                drafter.release(has_ended=False)
            self.model = None
        self._guess_s = self._clock() - start_s

    def _choose(
        self, rates: Mapping[K, list[float]], answers: int, rows: int, room_rows: int, *, from_ahead: bool = False
    ) -> dict[K, int]:
        """Return how many tokens of each offer to take, given how likely each is right if those before it are.

        `from_ahead`: without drafts the step would run ahead; else it would wait as well.
        """
        steps: list[tuple[float, int, K]] = []
        for key, given in rates.items():
            chance = 1.0
            for place, rate in enumerate(given):
                chance *= rate
                steps.append((chance, place, key))
        steps.sort(key=lambda step: -step[0])  # stable: a token never stands before those that it follows
        estimate, offers = self._costs.estimate, len(rates)
        plain = self._costs.estimate_plain if from_ahead else estimate
        # Those with drafts end sooner, and the others go on in steps that are shorter by `own` alone.
        own, tokens = plain(answers) - (plain(answers - offers) if offers < answers else 0.0), float(offers)
        if own <= 0:  # as measured, the others would not go on any sooner
            return {}
        one_s = self._costs.read_seconds(1)
        spent = self._guess_s / one_s if one_s else 0.0  # whether what was guessed is taken or not
        step, chosen, best = plain(rows), 0, offers / (own + spent) * _LEAST_GAIN
        for count, (chance, _, _) in enumerate(steps[:room_rows], 1):
            tokens += chance
            speed = tokens / (spent + max(own + estimate(rows + count) - step, own))
            if speed > best:
                best, chosen = speed, count
        lengths: dict[K, int] = {}
        for _, place, key in steps[:chosen]:
            lengths[key] = place + 1
        return lengths


HOST_DEVICES = ("cpu", "reference")


@frozen
class DraftSource:
    """A model that drafts, with the same vocabulary as the one it drafts for. `fingerprint` names its weights.

    `ctx` is its own context, if it has one, as on a GPU, where steps of two models do not mix.
    """

    model: Model
    fingerprint: bytes = b""
    ctx: Context | None = None

    @property
    def config(self) -> ModelShape:
        """The sizes of the model that drafts."""
        return self.model.config


@frozen
class HeadSource:
    """A head that drafts from the states of the model. `fingerprint` names its weights and the model's."""

    head: HeadModel
    fingerprint: bytes = b""
    ctx: Context | None = None

    @property
    def config(self) -> ModelShape:
        """The sizes of the head."""
        return self.head.config


def can_draft(
    settings: ModelSettings, device: str, draft: DraftSource | HeadSource | None, layers: Sequence[LayerCache] = ()
) -> bool:
    """Return True if answers of a model with these layers get drafts. Raises SettingError for wanted, impossible ones.

    A recurrent layer keeps one state, that after the last token of a step. After a wrong draft the tokens that were
    right are computed once more with the next ones, from the state before; a draft model, whose guesses are often
    dropped, may have no such layers. On a GPU decoding steps are recorded, and one with drafts has each token as a
    sequence of its own, which shares the pages but could not share a state. There drafts have to be asked for.
    """
    if settings.draft == "off" or (settings.draft == "auto" and device not in HOST_DEVICES):
        return False
    reason = None
    if device not in HOST_DEVICES and _has_states(layers):
        reason = f"on the device {device} a decoding step takes one token of an answer that has states"
    elif device not in HOST_DEVICES and isinstance(draft, HeadSource):
        reason = f"on the device {device} no layer drafts"
    elif draft is not None and _has_states(draft.config.cache_layers):
        reason = "the draft model has recurrent layers, whose state cannot drop tokens"
    elif settings.draft == "mtp" and not isinstance(draft, HeadSource):
        reason = "the model has no layer that drafts"
    elif draft is None and settings.draft not in DRAFT_WORDS:
        reason = "no such model was loaded"
    if reason is not None and settings.draft != "auto":
        raise SettingError(f"draft: {settings.draft} cannot be used: {reason}; leave it at auto, or off")
    return reason is None


def _has_states(layers: Sequence[LayerCache]) -> bool:
    return any(isinstance(layer, StateShape | PagesAndState) for layer in layers)


def open_drafts(
    ctx: Context,
    settings: ModelSettings,
    draft: DraftSource | HeadSource | None,
    arena: ArenaPlan | None,
    *,
    vocab_size: int,
    stop_ids: Collection[int],
    shares_prefixes: bool,
    clock: Callable[[], float],
) -> tuple[Planner, DrafterMaker]:
    """Return the planner of drafts, and the maker of drafters; allocates the `arena` of the draft model or head."""
    if draft is None or arena is None:
        return Planner(settings.draft_tokens, runs_ahead=ctx.gpu is not None), look_up
    own = draft.ctx or ctx
    pools, groups = arena.allocate(own)
    cache = KVCache(groups, fingerprint=draft.fingerprint, sharing=shares_prefixes)
    config = draft.config
    if isinstance(draft, HeadSource):
        guesser: Guesser = HeadGuesser(own, draft.head, pools, cache)
    else:
        guesser = ModelGuesser(own, Runner(draft.model, pools, cache), cache)
    model = DraftModel(
        guesser,
        vocab_size=min(vocab_size, config.vocab_size),
        context_tokens=config.context_length,
        stop_ids=stop_ids,
        chunk_tokens=size_steps(settings, ctx.device).prefill_chunk_tokens,
        clock=clock,
    )
    return Planner(settings.draft_tokens, model, clock, runs_ahead=ctx.gpu is not None), model.open


def look_up(tokens: list[int], _: bool) -> Drafter:
    """Return a drafter that drafts from the text itself."""
    return Lookup(tokens)
