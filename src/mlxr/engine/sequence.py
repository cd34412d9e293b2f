"""One answer while it grows: its tokens, its pages, its sampler, and its end.

`tokens` is prompt and answer; the first `table.length_tokens` of them are in the cache, the rest is pending. While more
than one is pending the sequence prefills; with one it decodes. A sequence that lost its pages has all of its tokens
pending again, and goes on where it was once they are computed. Several answers to one prompt start as one sequence with
`siblings`, which computes the prompt; then each sibling goes its own way on a fork of the pages.

`Boundaries` says where the state of recurrent layers is kept as a snapshot, which is as large as the keys and values of
many tokens: at the last boundary of the prompt; where a message ends, if the caller says so; where an earlier text was
found to differ from this one; and at regular distances, so that no recomputation is long. Of an answer only the last
boundary is kept. Knows no batch, no unrelated sequence and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import field, replace

from mlxr.cache.group import Snapshot
from mlxr.cache.page_table import SequenceTable
from mlxr.cache.prefix import PageKeys
from mlxr.core.frozen import frozen
from mlxr.core.types import FinishReason, PromptProgress, Timings, TokenInfo, TokenLogprob, Usage
from mlxr.engine.request import EngineRequest, MaskSource
from mlxr.engine.runner import Floats, Pool, PromptScores
from mlxr.engine.sampler import Sampler
from mlxr.engine.speculative import Drafter, DrafterMaker
from mlxr.engine.speculative.drafters import HeadDrafter, ModelDrafter, Prediction, StateTail, expect
from mlxr.kernels.sample import SampleResult

MAX_ASKED = 8  # boundaries of messages in one prompt: the first one, where instructions end, and the last ones


class Boundaries:
    """The positions at which a sequence keeps the state of recurrent layers: ends of full pages.

    The prompt has `prompt_tokens` tokens. `asked_tokens` are positions at which messages end. Besides snapshots that
    are known to be of use, there is one every `spacing_tokens`, a multiple of the page size.
    """

    def __init__(
        self, page_size: int, spacing_tokens: int, prompt_tokens: int, asked_tokens: Iterable[int] = ()
    ) -> None:
        self._page_size, self._spacing_tokens, self._prompt_tokens = page_size, spacing_tokens, prompt_tokens
        self._lasting: set[int] = set()
        asked = sorted({position for position in asked_tokens if position < prompt_tokens})
        for position in (*asked[:1], *asked[1:][1 - MAX_ASKED :], prompt_tokens - 1):
            self.add(position)

    def add(self, position: int) -> int:
        """Keep a snapshot at the last boundary not after `position`, where others will go on; return that boundary."""
        boundary = max(0, position) // self._page_size * self._page_size
        if boundary:
            self._lasting.add(boundary)
        return boundary

    def cut(self, start: int, tokens: int, pending_tokens: int) -> int:
        """Return how many of the next `tokens` tokens after `start` a step computes, to end where a state is kept.

        A step that leaves some of the `pending_tokens` ends with a page if it can: if the sequence stops there, its
        state is of use.
        """
        end = start + tokens
        spaced = (start // self._spacing_tokens + 1) * self._spacing_tokens
        nearest = min((boundary for boundary in (*self._lasting, spaced) if start < boundary < end), default=end)
        if nearest == end and tokens < pending_tokens and end // self._page_size * self._page_size > start:
            nearest = end // self._page_size * self._page_size
        return nearest - start

    def judge(self, position: int) -> Snapshot:
        """Return which snapshot, if any, is kept of the state after `position` tokens."""
        if position in self._lasting:
            return Snapshot.LASTING
        if position % self._spacing_tokens == 0:
            return Snapshot.PASSING
        return Snapshot.NONE if position < self._prompt_tokens else Snapshot.TRAILING


Rank = tuple[float, int, int]


class Stopwatch:
    """Times an answer from the request to its end; time lost by preemption counts where it falls."""

    def __init__(self, asked_s: float) -> None:
        self._asked_s = asked_s
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    def start(self, now_s: float) -> None:
        """Note that the prompt is being computed; only the first call counts."""
        if self._started_s is None:
            self._started_s = now_s

    def count_token(self, now_s: float) -> None:
        """Note that a token is there; only the first call counts."""
        if self._first_token_s is None:
            self._first_token_s = now_s

    def follow(self, other: Stopwatch) -> None:
        """Take over the start from another answer to the same request, which computed the prompt."""
        self._started_s = other._started_s

    def read(self, now_s: float) -> Timings:
        """Return the times if the answer ends now; what was never reached took no time."""
        started_s = now_s if self._started_s is None else self._started_s
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        return Timings(started_s - self._asked_s, first_token_s - started_s, now_s - first_token_s)


@frozen
class TokenEvent:
    """One more token of an answer, or its end, or both.

    `index` tells the answers to one request apart. `token_id` is None when the answer ends without a token
    (cancelled, deadline, error). A token that ends the answer (an end token, the last one allowed) is reported with its
    `finish_reason`. `logprob` and `top` are there when the request asked for logprobs. `error` says what failed when
    the reason is ERROR or DEADLINE. The last event of an answer has its `timings`, that of an embedding the vector. The
    first event of an answer has the `prompt` tokens with their log-probabilities, if the request asked for them. An
    event with `progress` tells how much of the prompt is computed, and nothing else. `withdrawn` are tokens that a
    constraint took back: this event and those that follow, which close the answer, stand in their place. They were
    never given out, and the last one has the reason and the timings with which the answer would have ended.
    """

    sequence_id: int
    token_id: int | None
    usage: Usage
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0
    timings: Timings | None = field(default=None, compare=False)
    embedding: Floats | None = field(default=None, compare=False)
    prompt: tuple[TokenInfo, ...] = ()
    progress: PromptProgress | None = None
    withdrawn: tuple[TokenEvent, ...] = ()


class Sequence:
    """Answer `index` to request `id`.

    Prompt and answer together have at most `end_tokens` tokens. Sequences are served in the order of their `rank`, and
    give up their pages in the reverse order; see `Scheduler`. `cached_tokens` of the prompt came out of the cache and
    were not computed for this answer; the first `computed_tokens` of all tokens were in its pages at some time. `keys`
    name its pages in the cache; without them its pages are neither found there nor left there for others. With a `pool`
    it is a text to embed. A text, or an answer of at most 0 tokens, ends once its tokens are computed: it never `draws`
    a token. `scores` collects the log-probabilities of the prompt's tokens. `boundaries` say where the state of
    recurrent layers is kept; None if there are no such layers, or its pages are not left for others. `open_drafter`
    makes the drafter of the answer from its tokens so far; None: there are no drafts. Of the `drafted_tokens` that were
    computed, the `accepted_tokens` were drawn. The `replay_tokens` before the last one were computed in drafts of which
    another token was wrong: the state of recurrent layers went past them and was dropped, so they are computed once
    more with the next token. Its last states are put into `tail`, where a head reads them to draft. `held` are the
    newest tokens of the answer, if a constraint may take them back; once it did, `answer_tokens` counts what the answer
    has in the end, and `tokens` stay those that were computed.
    """

    def __init__(
        self,
        sequence_id: int,
        request: EngineRequest,
        *,
        table: SequenceTable,
        stop_ids: Collection[int],
        end_tokens: int,
        index: int = 0,
        asked_s: float = 0.0,
        keys: PageKeys | None = None,
        masks: MaskSource | None = None,
        scores: PromptScores | None = None,
        boundaries: Boundaries | None = None,
        open_drafter: DrafterMaker | None = None,
        tail: StateTail | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.id = sequence_id
        self.request = request
        self.index = index
        self.tokens = list(request.token_ids)
        self.prompt_tokens = len(self.tokens)
        self.end_tokens = end_tokens
        self.table = table
        self.rank: Rank = (0.0, sequence_id, index)
        self.sampler = Sampler(request.params, self.tokens, index, masks, stop_ids, request.dry_breaker_ids)
        self.watch = Stopwatch(asked_s)
        self.keys = keys
        self.pool = pool
        self.tail = tail
        self.draws = request.pooling is None and request.params.max_tokens != 0
        self.scores = scores
        self.boundaries = boundaries
        self.siblings: list[Sequence] = []
        self.replay_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.logprob_sum = 0.0
        self.drafted_tokens = self.accepted_tokens = 0
        self.has_ended = False
        self.held: list[tuple[TokenEvent, float]] = []  # with their log-probabilities
        self.answer_tokens = 0
        self._open_drafter = open_drafter
        self.drafter: Drafter | None = None
        self._prediction: Prediction | None = None  # once there is a drafter
        self._told_tokens = 0
        self._stop_ids = frozenset(stop_ids)

    @property
    def pending_tokens(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.tokens) - self.table.length_tokens

    @property
    def is_decoding(self) -> bool:
        """True if only the last generated token is pending, besides the `replay_tokens`."""
        tokens = len(self.tokens)
        return tokens - self.table.length_tokens == 1 + self.replay_tokens and tokens > self.prompt_tokens

    @property
    def width(self) -> int:
        """The number of answers that this sequence stands for: itself and its siblings."""
        return 1 + len(self.siblings)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the answer's tokens; minus infinity while there are none."""
        return self.logprob_sum / self.answer_tokens if self.answer_tokens else float("-inf")

    @property
    def usage(self) -> Usage:
        """Tokens of prompt and answer so far."""
        return Usage(self.prompt_tokens, self.answer_tokens, self.cached_tokens)

    def get_drafter(self) -> Drafter | None:
        """Return the drafter of the answer, made at the first call and told all tokens since the last one.

        None if nothing drafts, or the request wants no drafts.
        """
        if self.drafter is not None:
            tokens, told = self.tokens, self._told_tokens
            if told < len(tokens):
                self._told_tokens = len(tokens)
                for token_id in tokens[told:]:
                    self.drafter.add(token_id)
            return self.drafter
        if self._open_drafter is not None and self.request.draft_tokens != 0:
            self.drafter = self._open_drafter(self.tokens, self.keys is not None)
            if isinstance(self.drafter, ModelDrafter):
                self.drafter.end_tokens = self.end_tokens
            if self.request.prediction_ids:
                self._prediction = self._compare_prediction()
                self.drafter = expect(self.drafter, self.tokens, self._prediction)
            self._told_tokens = len(self.tokens)
            if self.tail is not None and isinstance(self.drafter, HeadDrafter):
                self.drafter.tail = self.tail
        return self.drafter

    @property
    def draft_room(self) -> int:
        """The most tokens of a draft: the one after them must still belong to the answer."""
        room, wanted = self.end_tokens - len(self.tokens) - 1, self.request.draft_tokens
        if self.boundaries is not None:  # a step ends where a state may be kept
            page_size, start = self.table.page_size, self.table.length_tokens
            room = min(room, (start // page_size + 1) * page_size - len(self.tokens))
        return room if wanted is None else min(room, wanted)

    def cut_draft(self, draft: list[int]) -> list[int]:
        """Return the beginning of a draft that can be right: it ends with an end token, or before the first token that
        a grammar forbids."""
        for place, token_id in enumerate(draft):
            if token_id in self._stop_ids:
                draft = draft[: place + 1]
                break
        masks = self.sampler.masks
        return draft if masks is None or not draft else draft[: masks.count_allowed(draft)]

    def rest(self, release: Callable[[SequenceTable], None]) -> None:
        """Give all pages back, those of a draft model too: the answer has ended, or waits to go on."""
        release(self.table)
        self.replay_tokens = 0
        if self.tail is not None:
            self.tail.clear()
        if self.drafter is not None:
            self.drafter.release(has_ended=self.has_ended)

    def adopt(self, table: SequenceTable) -> None:
        """Go on with a table that holds what the cache has of the tokens; those never computed here count as cached.

        If the cache has more pages of them than states to go on from, a state will be kept where they end, for the next
        text.
        """
        self.table, self.replay_tokens = table, 0
        if self.boundaries is not None:
            self.boundaries.add(table.sought_pages * table.page_size)
        gained_tokens = table.length_tokens - self.computed_tokens
        if gained_tokens > 0:
            self.cached_tokens = min(self.cached_tokens + gained_tokens, self.prompt_tokens)
            self.computed_tokens = table.length_tokens

    def follow(self, leader: Sequence, table: SequenceTable) -> None:
        """Go on after `leader`, which has computed the prompt, on a fork of its pages."""
        self.table, self.keys = table, table.keys or self.keys
        self.watch.follow(leader.watch)
        if self.tail is not None and leader.tail is not None:
            self.tail.follow(leader.tail)
        self.cached_tokens, self.computed_tokens = leader.cached_tokens, leader.computed_tokens

    def keep_states(self, start: int, rows: Floats) -> None:
        """Keep the states of the positions from `start` on, as far as these hold tokens of the answer."""
        if self.tail is not None and not self.has_ended:
            self.tail.add(start, rows[: max(0, len(self.tokens) - 1 - start)])

    def count_computed(self, tokens: int) -> int:
        """Note that the next `tokens` pending tokens will count as cached; return how many were computed before."""
        start, stop = self.table.length_tokens, self.table.length_tokens + tokens
        again = max(0, min(self.computed_tokens, stop) - start)
        self.computed_tokens = max(self.computed_tokens, stop)
        return again

    def judge_state(self, tokens: int) -> Snapshot:
        """Return which snapshot, if any, is kept of the state after the next `tokens` pending tokens."""
        if self.boundaries is None:
            return Snapshot.NONE
        return self.boundaries.judge(self.table.length_tokens + tokens)

    def append(self, result: SampleResult, now_s: float) -> FinishReason | None:
        """Add a generated token; return the reason if the answer ends with it, else None."""
        self.tokens.append(result.token_id)
        self.answer_tokens += 1
        self.logprob_sum += result.logprob
        self.watch.count_token(now_s)
        reason = FinishReason.LENGTH if len(self.tokens) >= self.end_tokens else None
        if result.token_id in self._stop_ids:
            reason = FinishReason.STOP
        self.sampler.accept(result.token_id, result.surprise, goes_on=reason is not FinishReason.STOP)
        return reason

    def report(self, result: SampleResult, reason: FinishReason | None, now_s: float) -> list[TokenEvent]:
        """Return the events that are certain now that a token was appended: its own, unless it is held."""
        wants_logprobs = self.request.params.logprobs is not None
        event = TokenEvent(
            self.id,
            result.token_id,
            self.usage,
            logprob=result.logprob if wants_logprobs else None,
            top=tuple(result.top),
            finish_reason=reason,
            index=self.index,
            timings=None if reason is None else self._read_timings(now_s),
            prompt=self._read_scores(first_of=1),
        )
        masks = self.sampler.masks
        if masks is None:
            return [event]
        self.held.append((event, result.logprob))
        held_tokens = 0 if reason is FinishReason.STOP else masks.held_tokens
        certain = len(self.held) - held_tokens
        events = [event for event, _ in self.held[:certain]]
        del self.held[:certain]
        return events + self._close(masks.close(), now_s) if held_tokens and reason is not None else events

    def _close(self, token_ids: Collection[int], now_s: float) -> list[TokenEvent]:
        """End the answer with these tokens instead of those that are held.

        No other token was possible in their places, so each has the log-probability 0.
        """
        withdrawn, wanted, events = self._take_back(), self.request.params.logprobs, list[TokenEvent]()
        for token_id in token_ids:
            self.answer_tokens += 1
            top = (TokenLogprob(token_id, 0.0),) if wanted else ()
            logprob = None if wanted is None else 0.0
            events.append(TokenEvent(self.id, token_id, self.usage, logprob=logprob, top=top, index=self.index))
        events = events or [TokenEvent(self.id, None, self.usage, index=self.index)]
        timings = self._read_timings(now_s, token_ids)
        events[-1] = replace(events[-1], finish_reason=FinishReason.LENGTH, timings=timings)
        events[0] = replace(events[0], withdrawn=withdrawn, prompt=withdrawn[0].prompt)
        return events

    def _take_back(self) -> tuple[TokenEvent, ...]:
        """Remove the held tokens from the answer; return their events."""
        self.answer_tokens -= len(self.held)
        self.logprob_sum -= sum(logprob for _, logprob in self.held)
        withdrawn = tuple(event for event, _ in self.held)
        self.held.clear()
        return withdrawn

    def report_end(self, reason: FinishReason, now_s: float, error: str | None = None) -> TokenEvent:
        """Return the event that ends the answer without a token; for a text that is all computed, with its embedding.

        Tokens that are held are not given out: what was shown begins the answer that more time would have given.
        """
        withdrawn = self._take_back()
        return TokenEvent(
            self.id,
            None,
            self.usage,
            finish_reason=reason,
            error=error,
            index=self.index,
            timings=self._read_timings(now_s),
            embedding=self.pool.read() if self.pool is not None and reason is FinishReason.STOP else None,
            prompt=withdrawn[0].prompt if withdrawn else self._read_scores(first_of=0),
        )

    def report_progress(self, before_tokens: int, now_s: float) -> list[TokenEvent]:
        """Return the events of a step that computed more of the prompt than the `before_tokens` computed before it.

        The first such step also tells where it began. Empty if the request does not ask for progress.
        """
        is_reading = before_tokens < min(self.computed_tokens, self.prompt_tokens)
        if not (is_reading and self.request.reports_progress):
            return []
        counts = self.prompt_tokens, self.cached_tokens
        reached = PromptProgress(*counts, self.computed_tokens, self.watch.read(now_s).prompt_s)
        is_first = before_tokens == self.cached_tokens
        told = (PromptProgress(*counts, before_tokens), reached) if is_first else (reached,)
        return [TokenEvent(self.id, None, self.usage, index=self.index, progress=progress) for progress in told]

    def _read_timings(self, now_s: float, closing: Collection[int] = ()) -> Timings:
        """Return the times if the answer ends now, with counts of drafts; a constraint ended it with `closing`."""
        times, expected = self.watch.read(now_s), self.request.prediction_ids
        own = {"drafted_tokens": self.drafted_tokens, "accepted_tokens": self.accepted_tokens}
        if expected:  # the same whether there were drafts or not
            if self._prediction is not None:
                self.get_drafter()  # which is told all tokens
            drawn_tokens = self.answer_tokens - len(closing)
            is_whole = self.prompt_tokens + drawn_tokens == len(self.tokens)
            prediction = self._prediction if is_whole else None
            right_tokens = (prediction or self._compare_prediction(drawn_tokens, closing)).right_tokens
            right_tokens = min(right_tokens, len(expected))
            own |= {"expected_tokens": right_tokens, "missed_tokens": len(expected) - right_tokens}
        return replace(times, **own)

    def _compare_prediction(self, drawn_tokens: int | None = None, closing: Collection[int] = ()) -> Prediction:
        """Compare the text that the request predicted with the answer so far, or with its beginning and its end."""
        drawn = self.tokens[self.prompt_tokens :][:drawn_tokens]
        return Prediction(self.request.prediction_ids, [*drawn, *closing])

    def _read_scores(self, first_of: int) -> tuple[TokenInfo, ...]:
        """Return the prompt's scores for the answer's first event, which has `first_of` tokens; else nothing."""
        is_first = len(self.tokens) - self.prompt_tokens == first_of
        return self.scores.read() if self.scores is not None and is_first else ()
