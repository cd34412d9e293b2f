"""Answers for programs with an event loop: requests go in, events come out as they happen, hundreds at once.

The engine runs on a thread of its own and waits for nobody. The token events of one step arrive on the loop together
and become events of their answers right there, so a stop string ends an answer whether its reader is quick or slow;
what nobody has fetched yet is queued, at most the `max_tokens` of the request. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlxr.core.events import Event, Finish
from mlxr.core.live import MachineLimits, PageRecord, WatchedModel
from mlxr.core.settings import Settings
from mlxr.engine.async_engine import AsyncEngine, Ticket
from mlxr.engine.live import LiveReading
from mlxr.engine.page_exchange import PageExchange
from mlxr.engine.pooling import Floats, Pooling
from mlxr.engine.sequence import TokenEvent
from mlxr.engine.stats import EngineReport
from mlxr.loading import LoadedModel, ModelConfig
from mlxr.service.adapters import Adapters
from mlxr.service.identity import current_identity, use_identity
from mlxr.service.machine_limits import KeptLimits, explain_missing, measure_limits
from mlxr.service.opening import build_engine
from mlxr.service.page_source import Brought, PageSource
from mlxr.service.preparation import Preparation, Prepared
from mlxr.service.preparing_threads import PreparingThreads
from mlxr.service.prompt import Prompt
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.stats import OperatorCount, SessionStats, collect_dispatches, collect_stats
from mlxr.tokenizers import ChatTemplate, Tokenizer

logger = logging.getLogger(__name__)
# Preparing longer requests takes long enough to be felt by others on the loop.
INLINE_CHARACTERS = 4096
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageNames:
    """A prompt of `tokens` tokens and the names of the pages that it fills, of `page_size` tokens each."""

    keys: list[bytes]
    tokens: int
    page_size: int


class AsyncSession:
    """Texts and conversations with one loaded model, which it owns from now on.

    Making one takes the arena's memory and starts the engine's thread; that may be done on any thread. All else
    belongs on an event loop. `template` replaces the model's own chat template; `system` is the system message of
    conversations that have none. `memory_bytes` is the most that the cache may take where the settings leave that
    open; `size_bytes` is what weights and cache take. `room_tokens` is the most that one prompt and its answer can
    have together.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        *,
        template: ChatTemplate | None = None,
        system: str | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._loaded = loaded
        engine = build_engine(loaded, settings, memory_bytes=memory_bytes)
        self.context_tokens, self.room_tokens = engine.context_tokens, engine.room_tokens
        self.size_bytes = loaded.weight_bytes + engine.stats().arena_bytes
        self._measuring: asyncio.Task[MachineLimits] | None = None
        self._kv_cache, self._kept_limits = engine.plan.kv_cache, KeptLimits(settings)
        self._keys, self.page_size = engine.start_keys(), engine.plan.page_size
        self._engine = AsyncEngine(engine)
        self._threads = PreparingThreads()
        self.adapters = Adapters(loaded.load_adapter, settings.adapter_bytes)
        self._preparation = Preparation(
            loaded.tokenizer,
            template or loaded.chat_template,
            vocab_size=loaded.config.vocab_size,
            context_tokens=engine.context_tokens,
            model_name=loaded.name,
            system=system,
            host=loaded.ctx,
            adapters=self.adapters,
        )
        self._preparation.warm_up()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the loaded model."""
        return self._loaded.tokenizer

    @property
    def config(self) -> ModelConfig:
        """The configuration of the loaded model."""
        return self._loaded.config

    @property
    def failure(self) -> str | None:
        """Why the model can answer nothing more, None as long as it can."""
        return None if self._loaded.group is None else self._loaded.group.failure

    @property
    def capabilities(self) -> frozenset[str]:
        """What the model can do, of "completion", "tools", "thinking" and "embedding"."""
        return self._preparation.capabilities

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._preparation.can_chat

    def fit_think(self, think: bool | str | None) -> bool | str | None:
        """What comes nearest to `think` with this model: a level becomes "on" where it knows none, and "off" becomes
        None where its reasoning cannot be switched off.
        """
        return self._preparation.fit_think(think)

    def encode_prompt(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of plain text (special tokens in it count as such) or of ready ids; raises InvalidRequest."""
        return self._preparation.encode_prompt(prompt, add_special=add_special, parse_special=parse_special)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation; TemplateError without a chat template, InvalidRequest for bad messages."""
        return self._preparation.encode_chat(request)

    def render_chat(self, request: ChatRequest) -> str:
        """The text of a conversation's prompt, special tokens spelt out; raises as `encode_chat` does."""
        return self._preparation.render_chat(request)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without control tokens."""
        return self._loaded.tokenizer.decode(token_ids)

    async def run(self, work: Callable[..., T], *arguments: object, reads: object = None) -> T:
        """Do `work(*arguments)` on one of this model's own threads and return what it returns.

        What reads a prompt or renders a template belongs here: however long that takes, it holds up no other model.
        `reads` is the request, or the texts, that it reads: much of that is done when nobody else wants the time.
        """
        return await self._threads.run(work, *arguments, reads=reads)

    @property
    def pages(self) -> PageExchange | None:
        """Exchanges pages with other processes that have the same model; None where pages are not shared."""
        return self._engine.pages

    async def start(
        self, request: TextRequest | ChatRequest, *, client: str | None = None, source: PageSource | None = None
    ) -> AsyncStream:
        """Start the answers to a request. It is refused here and now, or its events follow.

        Clients share the engine evenly, however many requests each of them sends. A `source` is asked first for the
        pages of the prompt.

        Raises InvalidRequest, OutOfPages, QueueFull, TemplateError or EngineStopped.
        """
        if _is_slow(request):
            prepared = await self.run(self._preparation.prepare, request, reads=request)
        else:
            prepared = self._preparation.prepare(request)
        stream = AsyncStream(prepared)
        if source is not None and prepared.adapter is None and prepared.uses_cache and not prepared.scores_prompt:
            names = await self.run(self._name_pages, prepared.token_ids[:-1])  # the last one is always computed
            stream.keep(await source.bring(names))
        try:
            ticket = await self._engine.submit(
                prepared.token_ids,
                prepared.params,
                _forward_to(stream),
                priority=prepared.priority,
                client=client,
                deadline_s=prepared.deadline_s,
                uses_cache=prepared.uses_cache,
                boundary_tokens=prepared.boundary_tokens,
                constraint=prepared.constraint,
                scores_prompt=prepared.scores_prompt,
                adapter=prepared.adapter,
            )
        except BaseException:
            stream.keep(None)
            raise
        stream.attach(ticket)
        return stream

    async def embed(
        self, prompt: Prompt, pooling: Pooling, *, client: str | None = None, deadline_s: float | None = None
    ) -> Floats:
        """Return the embedding of a text, (hidden size,), not normalised: the mean over its tokens, or the last one's.

        Raises as `start` does, and RequestFailed when the text was accepted and could not be computed.
        """
        token_ids = self._preparation.encode_prompt(prompt)
        return await self._engine.embed(token_ids, pooling, client=client, deadline_s=deadline_s)

    async def name_pages(self, request: TextRequest | ChatRequest) -> PageNames:
        """Which pages the prompt of a request fills, by the names under which the cache knows them.

        Raises as `start` does for what cannot be a prompt.
        """
        token_ids = await self.run(self._preparation.encode_request, request, reads=request)
        return PageNames(self._name_pages(token_ids), len(token_ids), self.page_size)

    def _name_pages(self, token_ids: Sequence[int]) -> list[bytes]:
        return self._keys.fork(0).cover(token_ids, len(token_ids) // self.page_size)

    async def read_report(self, *, whole: bool = False) -> EngineReport:
        """What the engine has to do, and which pages came and went since the last report, of which there is one reader.

        If `whole`, all pages that can be found are named.
        """
        return await self._engine.read_report(whole=whole)

    async def stats(self) -> SessionStats:
        """What the model takes, what its cache holds, what was computed."""
        return collect_stats(self._loaded, await self._engine.stats())

    def describe(self, name: str) -> WatchedModel:
        """The model, called `name`, and where it runs."""
        loaded = self._loaded
        return WatchedModel(
            name=name,
            architecture=loaded.config.architecture,
            device=loaded.ctx.device,
            isa=loaded.ctx.isa,
            threads=loaded.ctx.threads,
            context_tokens=self.context_tokens,
            kv_cache=self._kv_cache,
            weight_bytes=loaded.weight_bytes,
        )

    async def read_live(self, *, full: bool) -> LiveReading:
        """What the engine did since the last reading, and with `full` its state now.

        The first reading begins the record; it ends with `stop_live`, or when nobody has read for ten seconds.
        """
        return await self._engine.read_live(self._loaded.model.work, full=full)

    async def stop_live(self) -> None:
        """Record no longer what the engine does."""
        await self._engine.stop_live()

    async def describe_page(self, group: int, page: int) -> PageRecord | None:
        """One page of the cache in full, None if there is no such page."""
        return await self._engine.describe_page(group, page)

    async def find_limits(self) -> MachineLimits | None:
        """What this machine can do, if it was ever measured."""
        return await asyncio.to_thread(self._kept_limits.find, self._loaded)

    async def measure_limits(self) -> MachineLimits:
        """Measure what this machine can do, and keep it; who asks meanwhile gets the same. Answers pause for a second.

        Raises DeviceError for a model that does not run on the processor, and where memory is short.
        """
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure_limits())
        return await asyncio.shield(self._measuring)

    async def _measure_limits(self) -> MachineLimits:
        limits = await self._engine.run_between_steps(lambda: measure_limits(self._loaded))
        await asyncio.to_thread(self._kept_limits.keep, self._loaded, limits)
        return limits

    def explain_missing_limits(self) -> str:
        """Why `find_limits` finds nothing, and what helps."""
        return explain_missing(self._loaded)

    def count_kernels(self) -> tuple[OperatorCount, ...]:
        """How often each kernel ran since the model was loaded."""
        return collect_dispatches(self._loaded)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those under way end for at most `drain_s` seconds, cancel the rest, free the model.

        Every stream gets its last events. May be called more than once.
        """
        await self._engine.stop(drain_s)
        self._threads.stop()
        self._loaded.close()


class AsyncStream:
    """The events of the answers to one request, as an asynchronous iterator that ends after the last Finish.

    Closing it early, or letting go of it, cancels what still grows. Belongs to the loop it was started on.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prompt_ids = prepared.token_ids
        self.relaxed = prepared.relaxed
        self._answers = prepared.answers
        self._events: deque[Event] = deque()
        self._unfetched = len(self._answers)  # Finish events that nobody has taken
        self._waiter: asyncio.Future[None] | None = None
        self._ticket: Ticket | None = None
        self._identity = current_identity()
        self._brought: Brought | None = None  # pages that wait for this request
        self._unwanted: list[int | None] = []  # what was to be cancelled before there was a ticket

    @property
    def growing(self) -> int:
        """How many answers have an end that nobody has taken yet."""
        return self._unfetched

    def attach(self, ticket: Ticket) -> None:
        """The engine has accepted the request; called once."""
        self._ticket = ticket
        for index in self._unwanted:
            ticket.cancel(index)

    def keep(self, brought: Brought | None) -> None:
        """Pages have been brought for this request; those before are dropped. They are until its first event."""
        if self._brought is not None:
            self._brought.close()
        self._brought = brought

    def receive(self, event: TokenEvent) -> None:
        """Take one event of the engine; called on the loop."""
        self.keep(None)
        answer = self._answers[event.index]
        if answer.finished:
            return
        was_over = answer.is_over
        try:
            with use_identity(self._identity):  # the loop calls this outside of the request's own task
                self._events.extend(answer.push(event))
        except Exception as error:  # one answer's failure must not take along the others of this step
            logger.exception("an answer failed")
            self._events.extend(answer.fail(f"{type(error).__name__}: {error}"))
        if event.finish_reason is None and (answer.finished or (answer.is_over and not was_over)):
            self._cancel(event.index)  # the engine does not know yet
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Stop all answers before the next step; their last events, each a Finish(CANCELLED), can still be fetched."""
        if self._unfetched:
            self._cancel(None)

    def close(self) -> None:
        """Stop what still grows and forget it; there are no more events."""
        self.cancel()
        self.keep(None)
        self._unfetched = 0
        self._events.clear()

    async def take(self) -> list[Event]:
        """All events that are there, at least one; none when all answers have ended."""
        while not self._events and self._unfetched:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events = list(self._events)
        self._events.clear()
        self._unfetched -= sum(isinstance(event, Finish) for event in events)
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self._unfetched:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        self._unfetched -= isinstance(event, Finish)
        return event

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()
        self.keep(None)

    def _cancel(self, index: int | None) -> None:
        if self._ticket is None:
            self._unwanted.append(index)
        else:
            self._ticket.cancel(index)


def _forward_to(stream: AsyncStream) -> Callable[[TokenEvent], None]:
    """A receiver for the engine that does not keep the stream alive: one that is forgotten cancels itself."""
    reference = weakref.ref(stream)

    def receive(event: TokenEvent) -> None:
        target = reference()
        if target is not None:
            target.receive(event)

    return receive


def _is_slow(request: TextRequest | ChatRequest) -> bool:
    """Whether preparing may take long enough for others to notice.

    That is so for a grammar to compile, much text to read, and every template, which is a stranger's program.
    """
    is_long = isinstance(request, ChatRequest) or len(request.prompt) > INLINE_CHARACTERS
    return is_long or request.grammar is not None
