"""The engine: requests of token ids go in, events with token ids come out, one step at a time.

`submit` checks a request and queues it (`requests`), every `step` computes one batch of all that can advance and takes
in its results (`postprocess`), and `cancel` ends a request at any stage. `WarmUp` makes steps that belong to no
request, so that a GPU compiles and records what requests will need before the first one comes. Knows no text. Not for
several threads at once: one thread owns an engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import asdict

from mlxr.cache.kv_cache import KVCache
from mlxr.cache.prefix import PageKeys
from mlxr.core.errors import InvalidRequest, OutOfPages, SettingError
from mlxr.core.model_settings import MODEL_DEFAULTS, ModelSettings, StepSizes, size_steps
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.memory_plan import choose_context, count_pages_alone, is_light, open_store, plan_arenas, plan_memory
from mlxr.engine.pictures import Encoder, Pictures
from mlxr.engine.postprocess import Drawing, Postprocess
from mlxr.engine.request import EngineRequest
from mlxr.engine.requests import Admission, Limits, RequestTable
from mlxr.engine.runner import BatchPart, Doubles, Model, Runner, choose_chunk_tokens, score_tokens
from mlxr.engine.scheduler import Chunk, FairQueue, Scheduler
from mlxr.engine.sequence import Sequence, TokenEvent
from mlxr.engine.speculative import DrafterMaker
from mlxr.engine.speculative.planner import DraftSource, HeadSource, Planner, can_draft, open_drafts
from mlxr.engine.stats import CacheMemory, EngineReport, EngineStats, Live, Work, read_counters, read_queue
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import MAX_SEQUENCES
from mlxr.kernels.sample import SampleRow, sample

Progress = Callable[[int, int], None]
# Of a prompt, in a step that several clients share: fewer take hardly less time, as weights are expanded in any case.
CUDA_PART_TOKENS = 512
# After a step with prompts, answers have steps to themselves for this share of its time, on such a GPU. The time of a
# step hardly depends on its prompts as long as they are short, so prompts that come meanwhile share the next one.
CUDA_ANSWERS_SHARE = 1.0
MOST_OWED_S = 0.2  # at most: a step may also have compiled kernels, or stood still
FEW_TOKENS = (*range(2, 9), *range(16, 65, 8))  # of a prompt: numbers of rows for which some kernels have variants
DRAWS = (SampleRow(), SampleRow(params=SamplingParams(temperature=1.0), uniform=0.5))


class WarmUp:
    """Runs steps of at most `max_sequences` sequences with `context_tokens` each, and of prompts in pieces of at most
    `chunk_tokens`, before requests come."""

    def __init__(
        self,
        ctx: Context,
        runner: Runner,
        cache: KVCache,
        max_sequences: int,
        chunk_tokens: int,
        context_tokens: int,
    ) -> None:
        self._ctx, self._runner, self.cache = ctx, runner, cache
        self._max_sequences, self._chunk_tokens = min(max_sequences, MAX_SEQUENCES), chunk_tokens
        self._context_tokens = context_tokens

    def run(self, max_sequences: int | None = None, progress: Progress | None = None, *, is_brief: bool = False) -> int:
        """Run all steps of at most `max_sequences` sequences; return how many there were, 0 if nothing is compiled.

        Steps for which there are too few pages are left out. With `is_brief`, there are only one token and one prompt.
        `progress` is called with (steps done, steps in all).
        """
        if not self._ctx.compiles or not self._runner.is_causal:
            return 0
        most = self._max_sequences if max_sequences is None else min(max_sequences, self._max_sequences)
        longest = min(self._chunk_tokens, self._context_tokens)
        steps = [(1, 1, 1), (1, longest, longest)] if is_brief else [*self._list_steps(most)]
        with self._ctx.rehearse():
            for number, step in enumerate(steps):
                self._run_step(*step)
                if progress is not None:
                    progress(number + 1, len(steps))
        self.cache.forget_peak()
        return len(steps)

    def _list_steps(self, max_sequences: int) -> Iterator[tuple[int, int, int]]:
        """Yield numbers of sequences, of tokens of each, and of tokens for which each has pages."""
        for sequences in self._list_powers(1, max_sequences):
            yield sequences, 1, 1
            pages = min(self.cache.available_pages, default=0) // sequences
            if pages > 1:
                yield sequences, 1, min(self._context_tokens, pages * self.cache.page_size)
        longest = min(self._chunk_tokens, self._context_tokens)
        few = [tokens for tokens in FEW_TOKENS if tokens <= longest]
        for tokens in [*few, *self._list_powers(128, longest)]:
            yield 1, tokens, tokens
        if max_sequences > 1 and few:
            yield 2, few[0], few[0]

    @staticmethod
    def _list_powers(first: int, most: int) -> Iterator[int]:
        """Yield `first`, doubled as often as it stays below `most`, and `most`."""
        while first < most:
            yield first
            first *= 2
        if first < 2 * most:
            yield most

    def _run_step(self, sequences: int, tokens: int, room_tokens: int) -> None:
        with ExitStack() as held:
            parts = []
            for _ in range(sequences):
                table = self.cache.open_private_table()
                held.callback(self.cache.release, table)
                try:
                    self._runner.reserve(table, room_tokens)
                except OutOfPages:
                    return
                parts.append(BatchPart(table, [0] * tokens, output_tokens=1))
            logits = self._runner.forward(parts).logits
            for row in DRAWS:
                sample(self._ctx, logits, [row] * sequences, goes_on=False)


logger = logging.getLogger(__name__)


class Engine:
    """One model, its arena and its running requests.

    The `settings` bound what the engine takes and how much it does at a time; `memory_plan` and `Scheduler` describe
    them. `eos_ids` end an answer unless the request ignores them. The arena has `pages` pages, or as many as the
    settings want and free memory allows, of which at most `memory_bytes` count. `fingerprint` names the weights; the
    store and other processes give only pages of these weights. `draft` is a model or a head that guesses tokens, if the
    settings want that; `encoder` makes rows of pictures, and a model without one takes no pictures. `clock` returns
    seconds that only grow.
    """

    def __init__(
        self,
        model: Model,
        ctx: Context,
        settings: ModelSettings = MODEL_DEFAULTS,
        *,
        eos_ids: Collection[int],
        memory_bytes: int | None = None,
        pages: int | None = None,
        prefix_sharing: bool = True,
        fingerprint: bytes = b"",
        draft: DraftSource | HeadSource | None = None,
        encoder: Encoder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sizes = size_steps(settings, ctx.device, is_light=is_light(model.config, ctx.device), has_room=ctx.has_room)
        _check_positive(settings, "page_size", "max_waiting")
        _check_positive(sizes, "max_batch_tokens", "max_sequences", "prefill_chunk_tokens")
        self._ctx, self._config, self._clock = ctx, model.config, clock
        self.context_tokens = choose_context(settings.context_tokens, self._config.context_length)
        self.plan = plan_memory(
            settings, self.context_tokens, shares_prefixes=prefix_sharing, has_fingerprint=bool(fingerprint)
        )
        self.drafts = can_draft(settings, ctx.device, draft, self._config.cache_layers)
        draft = draft if self.drafts and settings.draft != "ngram" else None
        arena, draft_arena = plan_arenas(
            ctx,
            self._config,
            None if draft is None else draft.config,
            self.plan,
            settings,
            context_tokens=self.context_tokens,
            memory_bytes=memory_bytes,
            pages=pages,
        )
        self._arena, groups = arena.allocate(ctx)
        self.cache = KVCache(
            groups,
            fingerprint=fingerprint,
            store=open_store(self.plan),
            sharing=self.plan.shares_prefixes,
        )
        taps = draft.head.taps if isinstance(draft, HeadSource) else None
        self._encoder = encoder
        self._runner = Runner(model, self._arena, self.cache, taps, encoder)
        fair_queue = FairQueue()
        self._planner: Planner | None = None
        open_drafter: DrafterMaker | None = None
        if self.drafts:
            self._planner, open_drafter = open_drafts(
                ctx,
                settings,
                draft,
                draft_arena,
                vocab_size=self._config.vocab_size,
                stop_ids=frozenset(eos_ids),
                shares_prefixes=self.plan.shares_prefixes,
                clock=clock,
            )
        self._scheduler = Scheduler(
            self.cache,
            self._runner.reserve,
            fair_queue=fair_queue,
            max_batch_tokens=sizes.max_batch_tokens,
            max_sequences=sizes.max_sequences,
            prefill_chunk_tokens=sizes.prefill_chunk_tokens,
            shares_prefixes=self.plan.shares_prefixes,
            drafts=self._planner,
            takes_whole=not self._config.is_causal,
            runs_ahead=ctx.gpu is not None,
            encoder=encoder,
            least_part_tokens=CUDA_PART_TOKENS if ctx.device == "cuda" else 1,
        )
        self._ahead: list[Sequence] = []  # whose next tokens a GPU computes already
        self._answers_share = CUDA_ANSWERS_SHARE if ctx.device == "cuda" else 0.0
        self._owed_s = self._decode_s = 0.0  # time that answers still have to themselves; time of a step of theirs
        step_tokens = min(sizes.prefill_chunk_tokens, sizes.max_batch_tokens)
        self._least_pages = [
            group.arena.shape.count_peak(self.context_tokens, step_tokens, self.plan.page_size) for group in groups
        ]
        self._limits = Limits(
            self._config.vocab_size,
            self.context_tokens,
            min(count_pages_alone(group, self.context_tokens, step_tokens) for group in groups),
            self.plan.page_size,
            self._scheduler.max_running,
            self._config.is_causal,
        )
        self.warm_up = WarmUp(
            ctx, self._runner, self.cache, self._scheduler.max_running, step_tokens, self.context_tokens
        )
        chunk_pages = -(-step_tokens // self.plan.page_size)
        spacing_pages = 0 if arena.snapshot_pages is None else max(arena.snapshot_pages, chunk_pages)
        self._work = Work()
        self.live = Live(self._arena, self.cache, self._scheduler, self._work, ctx.ledger, clock)
        self._requests = RequestTable(
            self._scheduler,
            self.cache,
            fair_queue,
            self._work,
            self.live,
            max_waiting=settings.max_waiting,
            clock=clock,
        )
        self._score_tokens = choose_chunk_tokens(self._config.vocab_size, sizes.max_batch_tokens)
        self._admission = Admission(
            self._requests,
            self.cache,
            self._runner,
            self._limits,
            eos_ids=frozenset(eos_ids),
            open_drafter=open_drafter,
            has_head=isinstance(draft, HeadSource),
            drafts_pictures=draft is None,
            spacing_tokens=spacing_pages * self.plan.page_size,
            score_tokens=self._score_tokens,
            clock=clock,
        )
        self._postprocess = Postprocess(self._requests, self.cache, self._scheduler, self._work, self.live, clock)

    @property
    def room_tokens(self) -> int:
        """The most tokens that one prompt and its answer can have together, by the context and by the arena."""
        return min(self.context_tokens, self._limits.pages * self._limits.page_size)

    @property
    def has_work(self) -> bool:
        """True if any sequence waits or runs."""
        return self._scheduler.has_work

    def submit(self, request: EngineRequest) -> int:
        """Queue a request; return its id, which all its events carry.

        The answers of a prompt end one by one, each with an event that has a finish reason. Pages that a request with
        an adapter fills are found only by requests with the same one, and a prompt that is scored is computed without
        the cache. A constraint that fails, or leaves no token possible, ends its answer with ERROR. A text to embed
        goes through the same batches as prompts, but never through the cache; its one event has the embedding, (hidden
        size,) and not normalised.

        Raises InvalidRequest if there are no tokens, or some outside the vocabulary, or too many for the context, and
        for a constraint that needs an end token in a request that ignores them; OutOfPages for a request that not even
        the empty arena could serve; QueueFull when too many wait.
        """
        if request.pictures is not None and self._encoder is None:
            raise InvalidRequest("messages", "have pictures, which this model takes none of")
        return self._admission.submit(request)

    def step(self) -> list[TokenEvent]:
        """Advance every request that can: compute one batch and return the events that come of it.

        When the computation fails, its answers end with an ERROR event and their pages return; others go on.
        """
        start = self._clock()
        events = self._requests.end_late(start)
        accepted_tokens = self._work.accepted_tokens
        chunks, self._ahead = self._scheduler.schedule(self._ahead, gathers=self._owed_s > 0), []
        if not chunks:
            return events + self._encode(is_alone=True)
        record = self.live.record
        step = None if record is None else record.begin_step(chunks)
        try:
            outputs = self._runner.forward([chunk.to_part() for chunk in chunks])
            drawing = Drawing(self._ctx, outputs.logits, chunks, goes_on=self._goes_on(chunks))
            results = drawing.draw_first()
            if self._ctx.gpu is not None and self._ctx.gpu.steps.goes_on(outputs.logits):
                self._ahead = [chunk.sequence for chunk in drawing.chunks]
        except Exception as error:  # whatever it was, it must not take the other requests along
            logger.exception("a step with %d requests failed", len(chunks))
            return events + self._postprocess.fail(chunks, error)
        kept = [
            (answer, chunk.sequence.table.length_tokens + chunk.rows - len(rows), rows)
            for chunk, rows in zip(chunks, outputs.kept, strict=True)
            if rows is not None
            for answer in (chunk.sequence, *chunk.sequence.siblings)
        ]
        is_decoding = all(chunk.sequence.is_decoding for chunk in chunks)
        events += self._postprocess.take_first(chunks, results, outputs.hidden, start)
        events += self._postprocess.verify_drafts(drawing)
        for answer, start_token, states in kept:
            answer.keep_states(start_token, states)
        if not self._scheduler.running:
            self._ahead = []  # nobody asks for these again, and they hold requests
        seconds, computed_rows = self._clock() - start, sum(chunk.rows for chunk in chunks)
        self._requests.count_step(seconds, computed_rows)
        self._count_owed(seconds, is_decoding=is_decoding)
        if self._planner is not None and not self._planner.rests:
            answers = len(drawing.chunks)
            tokens = answers + self._work.accepted_tokens - accepted_tokens
            self._planner.count(computed_rows, seconds, answers if is_decoding else None, tokens)
        if record is not None and step is not None:
            record.end_step(step, seconds)
            self.live.stop_if_forgotten(start)
        return events + self._encode(is_alone=False)

    def _encode(self, *, is_alone: bool) -> list[TokenEvent]:
        """Go on encoding the picture that a prompt waits for, if one does; if that fails, the prompt's answers end."""
        encoder = self._encoder
        if encoder is None or not encoder.is_wanted:
            return []
        waiting = [row for row in self._scheduler.running if row.request.pictures and not row.is_decoding]
        waiting = [row for row in waiting if row.request.pictures and encoder.waits_for(row.request.pictures)]
        if not waiting:
            return []  # the request that wanted it has ended
        try:
            encoder.advance(is_alone=is_alone)
        except Exception as error:  # as in `step`
            logger.exception("a picture could not be encoded")
            text = f"the picture could not be encoded: {type(error).__name__}: {error}"
            answers = [answer for row in waiting for answer in (row, *row.siblings)]
            return self._requests.end(answers, FinishReason.ERROR, text)
        return []

    def cancel(self, request_id: int, index: int | None = None) -> list[TokenEvent]:
        """End a request, or one of its answers, at any stage, return its pages, and give its last events.

        There are no events if it had ended already. Of a request that withholds its answers until the best are known,
        `index` is the number before they are ranked.
        """
        growing = self._requests.list_growing(request_id)
        chosen = [sequence for sequence in growing if index in (None, sequence.index)]
        return self._requests.end(chosen, FinishReason.CANCELLED)

    def score(self, token_ids: Collection[int]) -> Doubles:
        """Return the natural log-probability of token_ids[1:], each given all tokens before it; shape
        (len(token_ids) - 1,).

        Runs at once, beside the requests. Raises InvalidRequest for fewer than two tokens or more than the context,
        OutOfPages if the pages that no request holds do not suffice.
        """
        self._limits.check_tokens("token_ids", token_ids)
        self._limits.check_score(len(token_ids))
        self.cache.check_room(len(token_ids) - 1, self._score_tokens)
        table = self.cache.open_private_table()
        try:
            return score_tokens(self._runner, table, list(token_ids), self._score_tokens)
        finally:
            self.cache.release(table)

    def stats(self) -> EngineStats:
        """Return the engine's numbers at this moment."""
        memory, cache = self.measure_cache(), self.cache.stats()
        counters = read_counters(self._work, self._scheduler, self.cache, self._ctx.ledger)
        return EngineStats(
            **asdict(counters),
            kv_cache=self.plan.kv_cache,
            page_size=self.cache.page_size,
            arena_bytes=memory.max_bytes,
            cache_in_use_bytes=memory.in_use_bytes,
            heads=self._config.heads,
            waiting_sequences=len(self._scheduler.waiting),
            running_sequences=len(self._scheduler.running),
            encoded_pictures=0 if self._encoder is None else self._encoder.encoded,
            queue=read_queue(self._scheduler),
            cache=cache,
        )

    def measure_cache(self) -> CacheMemory:
        """Return the memory of the cache, including the draft model's. Any thread may call it."""
        draft = None if self._planner is None else self._planner.cache
        caches = [self.cache] if draft is None else [self.cache, draft]
        return CacheMemory(
            in_use_bytes=sum(cache.written_bytes for cache in caches),
            held_bytes=sum(cache.held_bytes for cache in caches),
            max_bytes=self._arena.nbytes + (0 if self._planner is None else self._planner.arena_bytes),
        )

    def limit_cache(self, nbytes: int) -> None:
        """Let the cache take at most `nbytes` from now on, but at least what one sequence of a whole context needs.

        Cached pages beyond that are given up and their memory goes back; those that requests hold stay. On a GPU, which
        allocates its arena at the start, nothing happens.
        """
        if self._arena.arenas[0].is_on_host:
            beside_bytes = 0 if self._planner is None else self._planner.arena_bytes
            self.cache.limit(max(0, nbytes - beside_bytes), self._least_pages)

    def read_report(self, *, whole: bool = False) -> EngineReport:
        """Return the load, and the pages that came and went since the last report; with `whole`, all pages."""
        scheduler, names = self._scheduler, self.cache.read_names(whole=whole)
        prompts = [row for row in (*scheduler.waiting, *scheduler.running) if not row.is_decoding]
        return EngineReport(
            waiting_tokens=sum(row.pending_tokens for row in prompts),
            running=len(scheduler.running),
            steps=self._work.steps,
            prefill_tokens=self._work.prefill_tokens,
            names=names,
        )

    def start_keys(self, namespace: bytes = b"", pictures: Pictures | None = None) -> PageKeys:
        """Return an empty chain of page names, from which the names of any prompt's pages follow; see
        `KVCache.start_keys`."""
        return self.cache.start_keys(namespace, None if pictures is None else pictures.name_page)

    def check(self) -> None:
        """Raise AssertionError unless every page is free, cached or held by exactly the answers that grow."""
        growing = self._requests.list_growing()
        self._scheduler.check(growing)
        self.cache.check(sequence.table for sequence in growing)
        if self._planner is not None:
            self._planner.check(sequence.drafter for sequence in growing)

    def close(self) -> None:
        """Bring what should outlive the engine to disk, within bounded time; no step may follow."""
        self.cache.close()

    def _count_owed(self, seconds: float, *, is_decoding: bool) -> None:
        """Count a step of `seconds`, which answers had to themselves (`is_decoding`) or shared with prompts."""
        if is_decoding:
            self._owed_s, self._decode_s = max(0.0, self._owed_s - seconds), seconds
        else:
            self._owed_s = min(self._answers_share * seconds, MOST_OWED_S)

    def _goes_on(self, chunks: list[Chunk]) -> bool:
        """Return True if the next step will likely compute the tokens drawn now, without drafts and prompts."""
        if len(self._scheduler.running) > len(chunks) and self._owed_s <= self._decode_s:
            return False
        if self._planner is None or not self._planner.runs_ahead:
            return True
        drafters = [chunk.sequence.get_drafter() for chunk in chunks if chunk.draws_token]
        known = [drafter for drafter in drafters if drafter is not None]
        return not self._planner.expects(known, len(chunks), has_drafts=any(chunk.draft for chunk in chunks))


def _check_positive(settings: ModelSettings | StepSizes, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value < 1:
            raise SettingError(f"{name}: must be at least 1, got {value}")
