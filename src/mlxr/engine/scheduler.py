"""Chooses what the next step computes, and which sequences hold pages. Knows no model and no sampling.

Requests are ordered by rank: first come, first served, where every point of priority counts as if the request had come
AGING_S seconds earlier. So a high priority overtakes, and nobody is overtaken for ever. `FairQueue` is fair between
clients, in seconds: a request counts as having come when the client's earlier ones would have been done, had the engine
worked for this client alone. In the order of their ranks waiting sequences are admitted when there is room for their
tokens, decoding sequences get one token each, and prompts share what is left of the step's tokens, in chunks
(continuous batching, chunked prefill). Prompts of a model with recurrent layers are cut where their state is kept.

Room is promised for the tokens that are known, not for the worst case (`PageBudget`): a group that keeps everything
wants a page for every page of tokens, one with a window those of the window and of the chunk, recurrent layers the
slots of a state. When a sequence then lacks a page, the one that ranks last gives its pages back and waits again; its
tokens stay, and those that the cache no longer has are computed again. A waiting sequence of a higher priority takes
the place of running ones in the same way, and so does one whose client has fewer answers running than another.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter, itemgetter

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import SequenceTable
from mlxr.cache.shapes import GroupShape
from mlxr.core.errors import OutOfPages
from mlxr.core.frozen import frozen
from mlxr.engine.pictures import Encoder
from mlxr.engine.runner import BatchPart
from mlxr.engine.sequence import Rank, Sequence
from mlxr.engine.speculative.drafters import KEPT_ROWS
from mlxr.engine.speculative.planner import Planner

_WEIGHT = 0.1  # of the newest value in running means: some ten steps or requests back still count
_GUESSED_TOKEN_S = 0.001  # until a step has been measured
SHARED_STEP_S = 0.04  # that prompts may take of a step while several clients share the engine
LONG_ROWS = 64  # rows from which on a step tells how long a token of a prompt takes: weights are read for many
LEAST_SHARE = 8  # a shared step has at least a chunk's tokens divided by this, as each step reads the weights
ANSWER_TOKENS = 16  # that an answer counts for: its length is not known yet, and its tokens share their steps
_UNMEASURED_S = 1.0  # hint before anything has been measured
MAX_HINT_S = 600.0


@dataclass(slots=True)
class _Account:
    open: int = 0
    until_s: float = 0.0


class FairQueue:
    """The accounts of all clients that have requests in the engine; requests without a client have none."""

    def __init__(self) -> None:
        self.token_s = _GUESSED_TOKEN_S
        self._long_token_s: float | None = None  # of the steps of LONG_ROWS
        self._accounts: dict[tuple[str, int], _Account] = {}

    def enter(self, client: str | None, priority: int, now: float, tokens: int, answers: int) -> float:
        """Count a request of so many tokens to compute; return when it counts as having come, `now` or later."""
        if client is None:
            return now
        account = self._accounts.setdefault((client, priority), _Account())
        start_s = max(now, account.until_s)
        account.open += 1
        account.until_s = start_s + (tokens + ANSWER_TOKENS * answers) * self.token_s
        return start_s

    def leave(self, client: str | None, priority: int) -> None:
        """Forget a request that has ended. A client without any owes nothing."""
        if client is None:
            return
        account = self._accounts[client, priority]
        account.open -= 1
        if not account.open:
            del self._accounts[client, priority]

    def count_step(self, seconds: float, tokens: int) -> None:
        """Take in that a step with so many tokens took `seconds`."""
        self.token_s += _WEIGHT * (seconds / tokens - self.token_s)
        if tokens >= LONG_ROWS:
            self._long_token_s = _blend(self._long_token_s, seconds / tokens)

    def limit_chunk(self, tokens: int) -> int:
        """Return how many of `tokens` of prompts a step should compute while several clients share the engine.

        With so many, the next token of one client waits for the prompts of others no longer than SHARED_STEP_S, if that
        is possible.
        """
        if self._long_token_s is None:
            return tokens
        return min(tokens, max(tokens // LEAST_SHARE, int(SHARED_STEP_S / self._long_token_s)))


class Throughput:
    """Running means of the seconds per step and of the seconds between two requests that end."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._between_ends_s: float | None = None
        self._last_end: float | None = None

    def count_step(self, seconds: float) -> None:
        """Take in that a step took `seconds`."""
        self._step_s = _blend(self._step_s, seconds)

    def count_end(self, now: float, *, is_idle: bool) -> None:
        """Take in that a request ended at `now`. If the engine `is_idle`, the time to the next end says nothing."""
        if self._last_end is not None:
            self._between_ends_s = _blend(self._between_ends_s, now - self._last_end)
        self._last_end = None if is_idle else now

    def estimate_room_s(self, steps_to_end: int) -> float:
        """Return the seconds until a waiting request can expect its turn, from 1 to MAX_HINT_S.

        Uses the measured time between two ends; as long as that is unknown, `steps_to_end` (steps until the first of
        the running answers must end) at the measured pace.
        """
        if self._between_ends_s is not None:
            hint_s = self._between_ends_s
        elif self._step_s is not None:
            hint_s = steps_to_end * self._step_s
        else:
            hint_s = _UNMEASURED_S
        return min(max(hint_s, 1.0), MAX_HINT_S)


def _blend(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)


Pages = tuple[int, ...]  # of each group
Promise = tuple[int, int, int]  # pages of a group: missing, for a chunk of a prompt; and 1 if there is one


@frozen
class PageBudget:
    """Counts pages that sequences need, by the groups' shapes and the most tokens of a step, and of one prompt in
    it."""

    shapes: Items[GroupShape]
    page_size: int
    max_batch_tokens: int
    prefill_chunk_tokens: int
    keeps_pictures: bool = False  # whole pictures in one step

    def want(self, candidate: Sequence) -> Pages:
        """Return the pages that a sequence holds while all of its tokens are computed, however many are cached."""
        tokens, chunk_tokens = len(candidate.tokens), self._count_chunk(candidate)
        return tuple(shape.count_peak(tokens, chunk_tokens, self.page_size) for shape in self.shapes)

    def hold(self, cached_tokens: int) -> Pages:
        """Return the pages of a table that was found in the cache with `cached_tokens` tokens, all in full pages."""
        boundary = cached_tokens // self.page_size
        return tuple(boundary - shape.first_needed(boundary, self.page_size) for shape in self.shapes)

    def promise(self, sequence: Sequence) -> list[Promise]:
        """Return for each group the pages that a running sequence will want soon, beyond those it holds, and those for
        its chunk of a prompt alone."""
        return [self._promise_group(number, sequence) for number in range(len(self.shapes))]

    def _promise_group(self, number: int, sequence: Sequence) -> Promise:
        shape, page_size, tokens = self.shapes[number], self.page_size, len(sequence.tokens)
        ahead_pages = shape.count_resting(tokens + page_size, page_size)  # one more for every answer
        worst_pages = shape.count_resting(sequence.end_tokens - 1, page_size)
        held_pages = sequence.table.groups[number].count_held()
        fork_pages = len(sequence.siblings) * shape.fork_pages
        missing_pages = max(0, min(ahead_pages, worst_pages) + fork_pages - held_pages)
        if sequence.is_decoding:
            return missing_pages, 0, 0
        peak_pages = shape.count_peak(tokens, self._count_chunk(sequence), page_size)
        return missing_pages, peak_pages - shape.count_resting(tokens, page_size), 1

    def _count_chunk(self, sequence: Sequence) -> int:
        tokens, pictures = min(self.prefill_chunk_tokens, self.max_batch_tokens), sequence.request.pictures
        if self.keeps_pictures and pictures is not None:
            tokens = max(tokens, *(one.stop - one.start for one in pictures.placed))
        return min(sequence.pending_tokens, tokens)


class Promises:
    """Pages that running sequences will want soon: each sequence is counted once while others are admitted."""

    def __init__(self, budget: PageBudget, running: Iterable[Sequence]) -> None:
        self._budget = budget
        self._each: dict[Sequence, list[Promise]] = {}
        self._totals = [[0, 0, 0] for _ in budget.shapes]
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Count one more running sequence."""
        self._each[sequence] = self._budget.promise(sequence)
        self._count(sequence, 1)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that no longer runs."""
        self._count(sequence, -1)
        del self._each[sequence]

    def _count(self, sequence: Sequence, sign: int) -> None:
        for totals, promise in zip(self._totals, self._each[sequence], strict=True):
            for place, pages in enumerate(promise):
                totals[place] += sign * pages

    @property
    def pages(self) -> Pages:
        """The pages promised of each group; a step computes no more of prompts than its tokens."""
        most = self._budget.max_batch_tokens // self._budget.page_size
        return tuple(missing + min(chunk_pages, most + chunks) for missing, chunk_pages, chunks in self._totals)


def count_room(available: Pages, promised: Pages) -> Pages:
    """Return the pages of each group that are not promised; below zero if more is promised than there is."""
    return tuple(map(int.__sub__, available, promised))


def fits(wanted: Pages, held: Pages, room: Pages) -> bool:
    """Return True if every group has room for what is wanted beyond what is held."""
    return all(want - have <= free for want, have, free in zip(wanted, held, room, strict=True))


AGING_S = 10.0  # seconds of waiting that make up for one point of priority
MAX_OVERTAKING_S = 30.0  # how much later a request may come and still be admitted before one that does not fit yet
MAX_PARTS = 8  # into which clients divide the prompts of a step
MAX_HELD_CLIENTS = 8  # clients whose first request does not fit, before a step looks no further
MIN_PRIORITY, MAX_PRIORITY = -100, 100
FOR_PLACE, FOR_PAGES = "place", "pages"  # what a sequence is preempted for
_BY_RANK = attrgetter("rank")


@frozen
class Chunk:
    """A sequence's part of a step: its next `tokens` pending tokens, and the drafted ones after them."""

    sequence: Sequence
    tokens: int
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """The number of tokens that are computed, drafted ones included."""
        return self.tokens + len(self.draft)

    @property
    def output_rows(self) -> int:
        """The number of rows of logits that are wanted: of the last pending token, and of each drafted one."""
        return 1 + len(self.draft) if self.draws_token else 0

    @property
    def completes(self) -> bool:
        """True if nothing is pending afterwards, so that the next token can be drawn, or the text is embedded."""
        sequence = self.sequence  # without its properties, as each step asks this of each chunk several times
        return self.tokens == len(sequence.tokens) - sequence.table.groups[0].length_tokens

    @property
    def draws_token(self) -> bool:
        """True if the next token can be drawn afterwards."""
        return self.completes and self.sequence.draws

    @property
    def waits_for_draft(self) -> bool:
        """True if nothing counts as written before all of the draft was checked: states do not go back."""
        return bool(self.draft) and self.sequence.table.states is not None

    @property
    def hidden_tokens(self) -> int:
        """The number of hidden states at the end of the chunk that an embedding or scores need."""
        pool, scores = self.sequence.pool, self.sequence.scores
        if pool is not None:
            return pool.count_wanted(
                self.tokens, is_first=not self.sequence.table.length_tokens, completes=self.completes
            )
        return self.tokens if scores is not None and scores.is_open else 0

    @property
    def kept_tokens(self) -> int:
        """The number of states at the end of the chunk that are kept for a head that drafts."""
        return 0 if self.sequence.tail is None else min(self.rows, KEPT_ROWS)

    def to_part(self) -> BatchPart:
        """Return the chunk as a part of a batch."""
        table, pool = self.sequence.table, self.sequence.pool
        token_ids = self.sequence.tokens[table.length_tokens : table.length_tokens + self.tokens]
        return BatchPart(
            table,
            [*token_ids, *self.draft],
            self.output_rows,
            self.hidden_tokens,
            self.sequence.request.adapter,
            self.kept_tokens,
            self.sequence.request.second_start,
            self.sequence.request.pictures,
            pool is not None and pool.takes_sums,
        )


def compute_arrival(now: float, priority: int) -> float:
    """Return the first part of a rank: the arrival that gives a request of priority 0 the same place in the order."""
    return now - priority * AGING_S


class Scheduler:
    """Waiting and running sequences of one engine, both in the order of their ranks.

    A step computes at most `max_batch_tokens` tokens, at most `prefill_chunk_tokens` of one prompt. At most
    `max_sequences` answers run at a time, and never more than a step has tokens, so that none of them is left out for
    long. `reserve(table, tokens)` makes room in a table for good, or raises OutOfPages. If prompts of several clients
    share a step, each client has at least `least_part_tokens` of it, as far as they go. With `shares_prefixes`, prompts
    that begin alike are computed one after the other, so that the later ones find the pages. `drafts` plans how many
    tokens are drafted for answers in steps that compute no prompt. With `takes_whole` a prompt is computed in one step,
    alone in it if it is longer than all that. With `runs_ahead` a step of answers may start before the one in front was
    read, so answers get pages a step early. A prompt waits at a picture until an `encoder` has its rows.
    """

    def __init__(
        self,
        cache: KVCache,
        reserve: Callable[[SequenceTable, int], None],
        *,
        fair_queue: FairQueue,
        max_batch_tokens: int,
        max_sequences: int,
        prefill_chunk_tokens: int,
        shares_prefixes: bool,
        drafts: Planner | None = None,
        takes_whole: bool = False,
        runs_ahead: bool = False,
        encoder: Encoder | None = None,
        least_part_tokens: int = 1,
    ) -> None:
        self._cache, self._least_part_tokens = cache, least_part_tokens
        self._reserve, self._encoder = reserve, encoder
        self._fair_queue = fair_queue
        self._drafts = drafts
        self._max_batch_tokens = max_batch_tokens
        self.max_running = min(max_sequences, max_batch_tokens)
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._shares_prefixes, self._takes_whole, self._runs_ahead = shares_prefixes, takes_whole, runs_ahead
        shapes = [group.arena.shape for group in cache.groups]
        keeps_pictures = encoder is not None and encoder.is_whole
        self._budget = PageBudget(shapes, cache.page_size, max_batch_tokens, prefill_chunk_tokens, keeps_pictures)
        self._refused: tuple[Sequence, Pages, int] | None = None  # what did not fit, with what room and cached tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._parts = 1  # into which clients divided the prompts of the last step
        self.preemptions = 0
        self.preempted: list[tuple[Sequence, str]] | None = None  # and why; a list while somebody watches

    @property
    def has_work(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def running_answers(self) -> int:
        """Answers that grow, or will as soon as their prompt is computed."""
        return sum(sequence.width for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence in its place in the queue; alone, it must fit in the arena."""
        bisect.insort(self.waiting, sequence, key=_BY_RANK)

    def join(self, sequence: Sequence) -> None:
        """Put a sequence in its place among the running ones."""
        bisect.insort(self.running, sequence, key=_BY_RANK)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs; its pages are the caller's to release."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def replace(self, leader: Sequence, sibling: Sequence) -> None:
        """Let `sibling` take the place of its leader, in the queue and with the pages."""
        queue = self.running if leader in self.running else self.waiting
        queue.remove(leader)
        bisect.insort(queue, sibling, key=_BY_RANK)

    def schedule(self, ahead: Items[Sequence] = (), *, gathers: bool = False) -> list[Chunk]:
        """Admit what fits; return the chunks of the next step with their pages reserved, maybe none.

        `ahead` are the sequences whose next tokens a GPU computes already. If no others decode, the step is theirs
        alone, and prompts have the one after it: else what was started would be of no use. With `gathers`, prompts wait
        as well, unless one of them has begun or all together would fill a step.
        """
        self._admit()
        if self._encoder is not None:
            self._encoder.begin_step()
        chunks: dict[Sequence, Chunk] = {}
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        if (ahead and decoding == [*ahead]) or (gathers and decoding and self._are_few(prefilling)):
            for sequence in prefilling:
                self._limit_to_pictures(sequence, self._prefill_chunk_tokens)  # they are encoded meanwhile
            prefilling = []
        for sequence in decoding:
            self._take(sequence, sequence.pending_tokens, chunks)
        quotas = self._share_prompts(prefilling)
        for sequence in sorted(prefilling, key=self._find_turn):
            waits = sequence not in self.running or self._waits_for_prefix(sequence, chunks)
            budget_tokens = self._max_batch_tokens - sum(chunk.tokens for chunk in chunks.values())
            budget_tokens = min(budget_tokens, quotas.get(sequence.request.client, 0))
            if budget_tokens > 0 and not waits:
                self._look_again(sequence)
                tokens = min(sequence.pending_tokens, self._prefill_chunk_tokens, budget_tokens)
                if self._takes_whole:
                    if tokens < sequence.pending_tokens and chunks:
                        continue  # in a later step, of which it is the first
                    tokens = sequence.pending_tokens
                tokens = self._limit_to_pictures(sequence, tokens)
                if not tokens:
                    continue  # its picture is encoded between steps
                if sequence.boundaries is not None:
                    tokens = sequence.boundaries.cut(sequence.table.length_tokens, tokens, sequence.pending_tokens)
                self._take(sequence, tokens, chunks)
                if sequence.request.client is not None:
                    quotas[sequence.request.client] -= tokens
        if self._runs_ahead and len(chunks) == len(decoding):
            self._reserve_ahead(chunks)
        planner = self._drafts
        if planner is not None and len(chunks) > len(decoding):
            planner.rests = 0  # so that it looks at answers that begin in the next step
        elif planner is not None and planner.rests:
            planner.rests -= 1
        elif planner is not None and planner.begin_step(len(chunks)):
            planner.end_step(has_drafts=self._add_drafts(planner, chunks), answers=len(chunks))
        return list(chunks.values())

    def _limit_to_pictures(self, sequence: Sequence, tokens: int) -> int:
        """Return how many of the next `tokens` of a prompt can be computed before a picture without rows."""
        if self._encoder is None or sequence.request.pictures is None:
            return tokens
        return self._encoder.limit(sequence.request.pictures, sequence.table.length_tokens, tokens)

    def _are_few(self, prompts: Iterable[Sequence]) -> bool:
        """Return True if none of the prompts has begun and all together would not fill a step."""
        tokens = 0
        for sequence in prompts:
            tokens += sequence.pending_tokens
            if sequence.computed_tokens > sequence.cached_tokens or tokens >= self._max_batch_tokens:
                return False
        return True

    def _reserve_ahead(self, chunks: Iterable[Sequence]) -> None:
        """Reserve each answer's page for the step after this one, too, which can then start before this one is read.

        Answers reach the ends of their pages in different steps, so one of many does so in nearly every step.
        """
        for sequence in chunks:
            tokens = sequence.pending_tokens + 1
            if sequence.table.length_tokens + tokens < sequence.end_tokens:
                try:
                    self._reserve(sequence.table, tokens)
                except OutOfPages:
                    return

    def _add_drafts(self, planner: Planner, chunks: dict[Sequence, Chunk]) -> bool:
        """Add drafts to chunks of answers that decode, as far as there are pages that nobody has to give up.

        Returns True if anything was drafted.
        """
        answers, drafters = len(chunks), {}
        for sequence in chunks:
            drafter = sequence.get_drafter()
            if drafter is not None and planner.is_due(drafter, answers):
                drafters[sequence] = drafter, sequence.draft_room
        if not drafters:
            return False
        rows = sum(chunk.tokens for chunk in chunks.values())
        room_rows = self._max_batch_tokens - rows
        drafts = planner.plan(drafters, room_rows, answers, rows, Sequence.cut_draft)
        for sequence, draft in drafts.items():
            tokens = chunks[sequence].tokens
            try:
                self._reserve(sequence.table, tokens + len(draft))
            except OutOfPages:
                continue
            chunks[sequence] = Chunk(sequence, tokens, tuple(draft))
        return bool(drafts)

    def _share_prompts(self, prefilling: Items[Sequence]) -> dict[str | None, int]:
        """Return the tokens of prompts that each client may have in a step.

        Several clients share what one alone would get, down to an eighth, so that nobody's next token waits for all
        that another one's prompt could fill a step with. On a CPU the prompts of up to MAX_PARTS clients together
        have what takes SHARED_STEP_S, unless texts are computed whole; a GPU computes a full step sooner, and is less
        efficient with smaller ones. The number of parts falls at most by half from step to step: short answers often
        end together, and their clients' next questions arrive while the next step runs.
        """
        clients = {sequence.request.client for sequence in self.running}
        self._parts = max(1, self._parts // 2, min(len(clients - {None}), MAX_PARTS))
        share = self._prefill_chunk_tokens // self._parts
        if self._parts > 1 and not self._runs_ahead and not self._takes_whole:
            prompting = len({sequence.request.client for sequence in prefilling})
            limit_tokens = self._fair_queue.limit_chunk(self._prefill_chunk_tokens)
            share = min(share, limit_tokens // max(1, min(prompting, MAX_PARTS)))
        share = max(self._least_part_tokens, share)
        return {client: self._max_batch_tokens if client is None else share for client in clients}

    def preempt(self, sequence: Sequence, reason: str = FOR_PAGES) -> None:
        """Take the pages of a running sequence, which then waits for its next turn; `reason` is for the record."""
        self.running.remove(sequence)
        sequence.rest(self._cache.release)
        self.add(sequence)
        self.preemptions += 1
        if self.preempted is not None:
            self.preempted.append((sequence, reason))

    def check(self, growing: Iterable[Sequence]) -> None:
        """Raise AssertionError unless each `growing` sequence has one place, in order, and only running ones hold
        pages."""
        queued = [*self.waiting, *self.running]
        placed = [answer for sequence in queued for answer in (sequence, *sequence.siblings)]
        if sorted(map(_BY_RANK, placed)) != sorted(map(_BY_RANK, growing)):
            raise AssertionError(f"{len(placed)} answers are queued or run, not exactly those that grow")
        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=_BY_RANK):
                raise AssertionError("sequences are out of order")
        if self.running_answers > self.max_running:
            raise AssertionError(f"{self.running_answers} answers run, {self.max_running} may")
        for sequence in self.waiting:
            if sequence.table.holds_pages:
                raise AssertionError(f"answer {sequence.index} to request {sequence.id} waits and holds pages")

    def _admit(self) -> None:
        """Move sequences from waiting to running in their order.

        One that does not fit holds back the later ones of its client. It also holds back all others that come
        MAX_OVERTAKING_S after it, unless its client has answers that run: then it is not overlooked, it has its share.
        """
        if not self.waiting:
            return
        held: set[str | None] = set()
        end, promises = math.inf, Promises(self._budget, self.running)
        for candidate in list(self.waiting):
            if candidate.rank[0] > end or len(held) == MAX_HELD_CLIENTS:
                break
            if candidate.request.client in held:
                continue
            if self._make_place(candidate, promises):
                self.waiting.remove(candidate)
                self.join(candidate)
                promises.add(candidate)
            else:
                held.add(candidate.request.client)
                if not self._count_running(candidate.request.client):
                    end = min(end, candidate.rank[0] + MAX_OVERTAKING_S)

    def _make_place(self, candidate: Sequence, promises: Promises) -> bool:
        """Return True if `candidate` can run now, if need be in the place of others; see `_find_victim`."""
        while not self._open_if_fits(candidate, promises.pages):
            victim = self._find_victim(candidate)
            if victim is None:
                return False
            self.preempt(victim, FOR_PLACE)
            promises.drop(victim)
        return True

    def _find_victim(self, candidate: Sequence) -> Sequence | None:
        """Return the sequence that must make place, if any.

        That is the last in rank if its priority is lower, or the last of the client with most answers, if that client
        then still has no fewer answers than the candidate's.
        """
        last = self.running[-1] if self.running else None
        if last is not None and last.request.priority < candidate.request.priority and last.rank > candidate.rank:
            return last
        answers = Counter[str | None]()
        for sequence in self.running:
            answers[sequence.request.client] += sequence.width
        own = answers.pop(candidate.request.client, 0) + candidate.width
        client, most = max(answers.items(), key=itemgetter(1), default=(None, 0))
        for sequence in reversed(self.running):
            if (
                sequence.request.client == client
                and sequence.request.priority <= candidate.request.priority
                and most - sequence.width >= own
            ):
                return sequence
        return None

    def _count_running(self, client: str | None) -> int:
        return sum(sequence.request.client == client for sequence in self.running)

    def _find_turn(self, sequence: Sequence) -> tuple[float, Rank]:
        """Return when a prompt's next chunk is due: the more is computed, the later, so that long ones let others
        by."""
        spent_s = 0.0 if sequence.request.client is None else sequence.table.length_tokens * self._fair_queue.token_s
        return sequence.rank[0] + spent_s, sequence.rank

    def _open_if_fits(self, candidate: Sequence, promised: Pages) -> bool:
        """Give `candidate` what the cache has of its tokens, if there is room for the rest of them as well, beside what
        is promised; return True if there is."""
        if self.running_answers + candidate.width > self.max_running:
            return False
        room = count_room(self._cache.available_pages, promised)
        wanted = self._budget.want(candidate)
        cached_tokens = self._lookup(candidate)
        if not fits(wanted, self._budget.hold(cached_tokens), room):
            return False
        if self._refused == (candidate, room, cached_tokens):
            return False  # cached pages that nobody holds take room as well: known from the last time
        candidate.adopt(self._open_table(candidate))
        if fits(wanted, candidate.table.held_pages, count_room(self._cache.available_pages, promised)):
            return True
        self._cache.release(candidate.table)
        self._refused = candidate, room, cached_tokens
        return False

    def _look_again(self, sequence: Sequence) -> None:
        """Take over pages of the prompt that others have computed since `sequence` was admitted."""
        if self._lookup(sequence) > sequence.table.length_tokens:
            self._cache.release(sequence.table)
            sequence.adopt(self._open_table(sequence))

    def _lookup(self, sequence: Sequence) -> int:
        """Return how many tokens the cache has for `sequence`; the last one is computed in any case, for its logits."""
        if sequence.keys is None:
            return 0
        return self._cache.lookup(sequence.tokens, sequence.keys, limit_tokens=len(sequence.tokens) - 1)

    def _open_table(self, sequence: Sequence) -> SequenceTable:
        if sequence.keys is None:
            return self._cache.open_private_table()
        return self._cache.open_table(sequence.tokens, sequence.keys, limit_tokens=len(sequence.tokens) - 1)

    def _waits_for_prefix(self, sequence: Sequence, chunks: dict[Sequence, Chunk]) -> bool:
        """Return True if this step computes the prompt's next page for another prompt that begins alike."""
        pages = sequence.table.full_pages + 1
        key = self._name_page(sequence, pages)
        if key is None or not self._shares_prefixes or pages * self._cache.page_size >= len(sequence.tokens):
            return False
        for other in chunks:
            if not other.is_decoding and self._name_page(other, pages) == key:
                self._keep_junction(other, sequence, chunks)
                return True
        return False

    def _keep_junction(self, leader: Sequence, sequence: Sequence, chunks: dict[Sequence, Chunk]) -> None:
        """Have `leader` keep its state where `sequence`, which waits for it, will go on differently."""
        if leader.boundaries is None or leader.keys is None or sequence.keys is None:
            return
        pairs = zip(leader.keys.chain[1:], sequence.keys.chain[1:], strict=False)
        pages = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        boundary = leader.boundaries.add(min(pages * self._cache.page_size, len(sequence.tokens) - 1))
        start = leader.table.length_tokens
        if start < boundary < start + chunks[leader].tokens:
            chunks[leader] = Chunk(leader, boundary - start)

    def _name_page(self, sequence: Sequence, pages: int) -> bytes | None:
        """Return the key of the last of the first `pages` pages of `sequence`; equal tokens have equal keys."""
        if sequence.keys is None or pages * self._cache.page_size > len(sequence.tokens):
            return None
        sequence.keys.cover(sequence.tokens, pages)
        return sequence.keys.chain[pages]

    def _take(self, sequence: Sequence, tokens: int, chunks: dict[Sequence, Chunk]) -> None:
        """Put a chunk in the step if its pages can be had, at the cost of sequences that rank after its own."""
        while sequence in self.running:
            try:
                self._reserve(sequence.table, tokens)
            except OutOfPages:
                last = self.running[-1]
                if last is sequence:
                    return  # it keeps what it has; those before it will end, or take it
                self.preempt(last)
                chunks.pop(last, None)
            else:
                chunks[sequence] = Chunk(sequence, tokens)
                return
