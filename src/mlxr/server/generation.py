"""The steps of every dialect between request and answer: borrow a model, start answers, count, pass on events.

`borrow` waits for the model, `start` hands the request to its session, and a `Generation` is the stream of events that
also counts them; `start_all` does so for several prompts of one request. `read_all` waits for all events of a whole
reply, `write_frames` makes a stream of them as they come; both stop at the end of an answer that failed. Everything is
put on the request's exit stack, so it ends with the request. Knows no dialect and no rendering.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request

from mlxr.core.errors import TOO_COMPLEX, Busy, DeviceError, InvalidRequest, NotFound, Unavailable
from mlxr.core.sampling import BY_SPELLING, read_params
from mlxr.core.settings import Settings
from mlxr.core.types import Event, Finish, FinishReason, PromptProgress
from mlxr.registry.modelfile import read_draft_tokens
from mlxr.registry.record import ModelRecord
from mlxr.server.activity import InFlight, Span, in_flight, log_prompt, log_reading, log_stand_in, start_span
from mlxr.server.errors import ServerError
from mlxr.server.metrics import RequestMetrics
from mlxr.server.parts import parts_of
from mlxr.server.request_fields import ParameterFields
from mlxr.server.routes import note_ignored
from mlxr.server.streaming import Frames, FrameWriter, until_disconnected
from mlxr.server.work import look
from mlxr.service.embedding import PromptChoice, choose_product
from mlxr.service.identity import Planned, current_identity, find_hooks
from mlxr.service.requests import ChatRequest, Prompt, R, TextRequest

if TYPE_CHECKING:
    from mlxr.registry import AdapterRecord
    from mlxr.service.embedding import EngineRequest, Kind, Pooling, Vector
    from mlxr.service.model_pool import ModelLease
    from mlxr.service.streams import AsyncStream

EXACT_HEADER = "x-mlxr-exact-model"  # with it, no other model answers for an unknown name


async def borrow(
    request: Request,
    model: str | None,
    *,
    keep_alive_s: float | None = None,
    exact: bool = False,
    lora: Sequence[tuple[int, float]] | None = None,
) -> ModelLease:
    """Borrow the model `model` (None: the default one) until the request ends; loads it if need be.

    Unless `exact` or the header `x-mlxr-exact-model` is given, another model may answer for a name that no model
    has (see `ServedModels.find_stand_in`); the name is then listed as having no effect. The name may be that of an
    adapter (see `ServedAdapters`); ids of adapters and factors in `lora` override it. Raises NotFound, DoesNotFit, or
    what loading raises; ClientGone if the client does not wait that long.
    """
    row = in_flight(request)
    lease = await until_disconnected(request, _acquire(request, model, keep_alive_s, exact, lora))
    await row.stack.enter_async_context(lease)
    row.model = lease.name
    row.adapter = lease.adapter_name
    if lease.load_s:
        parts_of(request).metrics.count_load(lease.name, lease.load_s)
    return lease


async def _acquire(
    request: Request,
    model: str | None,
    keep_alive_s: float | None,
    exact: bool,
    lora: Sequence[tuple[int, float]] | None,
) -> ModelLease:
    adapters = parts_of(request).served.adapters
    try:
        found = None if model is None else await adapters.matches.find(model)
    except (Unavailable, Busy):
        if model is None or parts_of(request).pool.find_loaded(model) is None:
            raise
        found = None
    lease = await _acquire_model(request, model if found is None else found[0], keep_alive_s, exact)
    try:
        shares: Sequence[tuple[AdapterRecord, float]] = [] if found is None else [(found[1], 1.0)]
        scales = adapters.read_scales(lease.record.short_name)
        if lora is not None:
            listed = await adapters.listed.find(lease.record.short_name) if lora else ()
            shares = adapters.choose(listed, lora)
        elif not shares and scales:
            listed = await adapters.listed.find(lease.record.short_name)
            shares = [(record, scales[record.name]) for record in listed if record.name in scales]
        if shares:
            lease.adapter = await lease.session.adapters.bring_sum(shares, adapters.is_served)
            lease.adapter_name = " + ".join(record.name for record, _ in shares)
            for record, _ in shares:
                lease.session.adapters.count_request(record.name)
    except DeviceError as error:
        lease.release()
        raise InvalidRequest("model", str(error)) from error
    except BaseException:
        lease.release()
        raise
    return lease


async def _acquire_model(request: Request, model: str | None, keep_alive_s: float | None, exact: bool) -> ModelLease:
    parts = parts_of(request)
    try:
        lease: ModelLease = await parts.pool.acquire(model, keep_alive_s=keep_alive_s)
    except (NotFound, InvalidRequest):
        exact = exact or EXACT_HEADER in request.headers
        other = None if exact else await look(request, parts.served.find_stand_in)
        if other is None or model is None:
            raise
        lease = await parts.pool.acquire(other, keep_alive_s=keep_alive_s)
        note_ignored(request, ["model"])
        log_stand_in(in_flight(request), model, lease.record.short_name)
    return lease


async def start(request: Request, lease: ModelLease, wanted: TextRequest | ChatRequest) -> Generation:
    """Start the answers; raises InvalidRequest, QueueFull, OutOfPages, TemplateError or EngineStopped here."""
    row, settings = in_flight(request), parts_of(request).settings
    if lease.adapter is not None:
        wanted = replace(wanted, adapter=lease.adapter)
    hooks = find_hooks(request.scope["state"])
    if hooks.is_plan:
        raise Planned(await lease.session.name_pages(wanted))
    wanted = fill_seed(wanted)
    if settings.log_prompts:
        log_prompt(row, wanted.prompt if isinstance(wanted, TextRequest) else wanted.messages)
    tells_progress, wanted = wanted.reports_progress, replace(wanted, reports_progress=True)
    stream = await lease.session.start(limit_deadline(wanted, settings), client=row.peer, source=hooks.source)
    note_ignored(request, (f"schema.{keyword}" for keyword in stream.relaxed))
    await row.stack.enter_async_context(stream)
    row.cancels.append(stream.cancel)
    if stream.thought_end is not None:
        row.thought_ends.append(stream.thought_end.end)
    span = row.stack.enter_context(start_span("mlxr.generate", request.headers, wanted=settings.tracing))
    operation = "chat" if isinstance(wanted, ChatRequest) else "text_completion"
    counts = RequestMetrics(parts_of(request).metrics, row, lease.name, operation, len(stream.prompt_ids))
    row.stack.callback(lambda: counts.count_left(stream.growing))  # before the stream is closed
    return Generation(stream, lease, row, counts, span, tells_progress=tells_progress)


def fill_seed(wanted: TextRequest | ChatRequest) -> TextRequest | ChatRequest:
    """Return the request with the seed of the identity in use, if there is one and the request has no seed."""
    identity = current_identity()
    if identity is None or wanted.params.seed is not None:
        return wanted
    return replace(wanted, params=replace(wanted.params, seed=identity.seed))


def note_prompts(request: Request, lease: ModelLease, prompts: Sequence[Sequence[int]]) -> None:
    """Count prompts that get vectors, not an answer in tokens."""
    row, parts = in_flight(request), parts_of(request)
    if parts.settings.log_prompts:
        log_prompt(row, [lease.session.decode(prompt) for prompt in prompts])
    tokens = sum(map(len, prompts))
    row.prompt_tokens += tokens
    parts.metrics.count_prompt(lease.name, tokens)


def limit_deadline(wanted: TextRequest | ChatRequest, settings: Settings) -> TextRequest | ChatRequest:
    """Return the request with a deadline no later than the setting `request_deadline_s`."""
    limit_s = settings.request_deadline_s
    if limit_s is None:
        return wanted
    return replace(wanted, deadline_s=limit_s if wanted.deadline_s is None else min(limit_s, wanted.deadline_s))


class Generation:
    """The events of all answers to one request, counted as they pass; prompt progress only if it `tells_progress`."""

    def __init__(
        self,
        stream: AsyncStream,
        lease: ModelLease,
        row: InFlight,
        counts: RequestMetrics,
        span: Span,
        *,
        tells_progress: bool,
    ) -> None:
        self._stream, self._row, self._counts, self._span = stream, row, counts, span
        self._read_tokens = 0  # of this prompt
        self._tells_progress = tells_progress
        self.name, self.load_s = lease.name, lease.load_s
        self.prompt_ids: list[int] = stream.prompt_ids

    async def take(self) -> list[Event]:
        """Return all events that are there, waiting for at least one; none once all answers have ended."""
        while taken := await self._stream.take():
            events = self._sift(taken)
            if events:
                return events
        return []

    def pour(self, is_ready: Callable[[], bool], write: Callable[[Sequence[Event]], None]) -> None:
        """Call `write` with events as they come, while `take` waits for them and `is_ready` returns True."""

        def pour(taken: Sequence[Event]) -> bool:
            if not is_ready():
                return False
            events = self._sift(taken)
            if events:
                write(events)
            return True

        self._stream.pour(pour)

    def _sift(self, taken: Sequence[Event]) -> list[Event]:
        """Count events; returns those that are passed on."""
        for event in taken:
            self._count(event)
        tells = self._tells_progress
        return [event for event in taken if tells or not isinstance(event, PromptProgress)]

    def _count(self, event: Event) -> None:
        if isinstance(event, Finish):
            self._counts.count_end(event)
            self._span.note(self._row, self._counts.operation, event)
        elif isinstance(event, PromptProgress):
            self._row.read_tokens += event.read_tokens - self._read_tokens  # the row has the sum over several prompts
            self._read_tokens = event.read_tokens
            log_reading(self._row, event)
        elif event.token_ids:
            self._counts.count_tokens(len(event.token_ids))


async def start_all(request: Request, lease: ModelLease, wanted: Sequence[TextRequest]) -> list[Generation]:
    """Start the answers to all prompts at once; raises what `start` raises for the first that is refused."""
    if len(wanted) == 1:
        return [await start(request, lease, wanted[0])]
    started = await asyncio.gather(*(start(request, lease, one) for one in wanted), return_exceptions=True)
    for one in started:
        if isinstance(one, BaseException):
            raise one
    return [one for one in started if isinstance(one, Generation)]


def find_failure(event: Event) -> ServerError | None:
    """Return the error of an event that ends an answer that failed, was late, or was cancelled by the server."""
    if not isinstance(event, Finish):
        return None
    if event.reason is FinishReason.ERROR:
        if event.error is not None and event.error.startswith(TOO_COMPLEX):
            return ServerError(400, "invalid_request", event.error)
        return ServerError(500, "internal", f"the answer failed: {event.error or 'no reason is known'}")
    if event.reason is FinishReason.DEADLINE:
        return ServerError(504, "deadline", "the answer was not finished within the time that the request may take")
    if event.reason is FinishReason.CANCELLED:
        return ServerError(503, "cancelled", "the answer was cancelled by the server", retry_after_s=1.0)
    return None


async def read_all(request: Request, generations: Sequence[Generation], answers_each: int = 1) -> list[Event]:
    """Return all events; raises ServerError if an answer failed, ClientGone if the client goes before."""

    async def read() -> list[Event]:
        return [event async for events in take_batches(generations, answers_each) for event in events]

    events = await until_disconnected(request, read())
    for failure in filter(None, map(find_failure, events)):
        raise failure
    return events


def write_frames(
    generations: Sequence[Generation],
    render: Callable[[Event], Iterable[bytes]],
    *,
    answers_each: int = 1,
    opening: bytes = b"",
    end: Callable[[], bytes] | None = None,
) -> Frames:
    """Make the frames of a stream: `opening`, then the rendered events, a batch in one frame, then `end`.

    Events of answers to a single prompt can be poured (see `Frames`), but not their ends. If an answer fails, raises
    ServerError after the frames before that.
    """

    def pour(writer: FrameWriter) -> None:
        def write(events: Sequence[Event]) -> None:
            frames = b"".join([frame for event in events for frame in render(event)])
            if frames:
                writer.write(frames)

        if len(generations) == 1:
            generations[0].pour(lambda: writer.is_ready, write)

    return Frames(_make_frames(generations, render, answers_each, opening, end), pour)


async def _make_frames(
    generations: Sequence[Generation],
    render: Callable[[Event], Iterable[bytes]],
    answers_each: int,
    opening: bytes,
    end: Callable[[], bytes] | None,
) -> AsyncGenerator[bytes, None]:
    if opening:
        yield opening
    async for events in take_batches(generations, answers_each):
        frames: list[bytes] = []
        failure = None
        for event in events:
            failure = find_failure(event)
            if failure is not None:
                break
            frames.extend(render(event))
        if frames:
            yield b"".join(frames)
        if failure is not None:
            raise failure
    if end is not None:
        yield end()


async def take_batches(
    generations: Sequence[Generation], answers_each: int = 1
) -> AsyncGenerator[Sequence[Event], None]:
    """Yield all events, in batches of those that are there at the same time. The answers to all prompts grow at the
    same time; their indices go through, `answers_each` to a prompt.
    """
    if len(generations) == 1:
        while events := await generations[0].take():
            yield events
        return
    queue: asyncio.Queue[Sequence[Event] | BaseException] = asyncio.Queue()

    async def pump(generation: Generation, offset: int) -> None:
        try:
            while events := await generation.take():
                queue.put_nowait([replace(event, index=event.index + offset) for event in events])
            queue.put_nowait(())
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(one, number * answers_each)) for number, one in enumerate(generations)]
    try:
        growing = len(tasks)
        while growing:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            growing -= not item
            if item:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def find_given(body: BaseModel) -> frozenset[str]:
    """Return the names of the SamplingParams that a request sets itself; null counts as not given."""
    names = {name for name in body.model_fields_set if getattr(body, name) is not None}
    names |= body.list_given().keys() if isinstance(body, ParameterFields) else set()
    return frozenset(BY_SPELLING[name].name if name in BY_SPELLING else name for name in names)


def fill_text(wanted: R, record: ModelRecord, body: BaseModel) -> R:
    """Return the request with the model's own parameters, if the body does not set them."""
    if not record.parameters:
        return wanted
    given = find_given(body)
    found = {name: value for name, value in read_params(record.parameters).items() if name not in given}
    drafts = wanted.drafts
    if "draft_tokens" not in given:
        drafts = replace(drafts, tokens=read_draft_tokens(record.parameters))
    return replace(wanted, params=replace(wanted.params, **found), drafts=drafts)


def fill_chat(wanted: ChatRequest, record: ModelRecord, body: BaseModel) -> ChatRequest:
    """Return the conversation with the model's own parameters and messages."""
    return replace(fill_text(wanted, record, body), messages=[*record.messages, *wanted.messages])


P = TypeVar("P")
POOLING_HEADER, PROMPT_HEADER, RANKING_HEADER = "x-mlxr-pooling", "x-mlxr-prompt", "x-mlxr-ranking"
UNSTATED_RANKING = "yes or no; the files of this model do not say that it ranks, so it may not be made for that"
MAX_AT_ONCE = 64  # so that one request with many texts does not fill the queue


async def embed_all(
    request: Request,
    lease: ModelLease,
    texts: Sequence[Prompt],
    asked: Pooling | None = None,
    choice: PromptChoice | None = None,
    *,
    field: str = "input",
    truncates: bool = False,
    parse_special: bool = False,
) -> tuple[list[Vector], int, dict[str, str]]:
    """Return a vector (hidden,) of each text, not normalised, the number of all tokens, and headers about the pooling.

    Raises ClientGone if the client goes before; InvalidRequest, naming `field`, for a model whose pooling mlxr does not
    have; and what `Session.encode_texts` and `Session.embed` raise, for the first text that fails, which ends the
    others.
    """
    session = lease.session
    pooling = session.choose_pooling(asked, field)
    encode = partial(session.encode_texts, truncates=truncates, parse_special=parse_special)
    prompts, name = await session.run(encode, texts, field, choice or PromptChoice(), reads=texts)
    if choice is not None and choice.input_type is not None and name is None:
        note_ignored(request, ["input_type"])  # the model has no prompt for it
    note_prompts(request, lease, prompts)
    deadline_s: float | None = parts_of(request).settings.request_deadline_s
    peer = in_flight(request).peer
    embed = partial(lease.session.embed, pooling=pooling, client=peer, deadline_s=deadline_s, adapter=lease.adapter)
    vectors = await until_disconnected(request, _gather(embed, prompts))
    headers = {POOLING_HEADER: session.describe_pooling(pooling)}
    headers |= {} if name is None else {PROMPT_HEADER: quote(name, safe=" .")}
    return vectors, sum(map(len, prompts)), headers


async def embed_tokens(
    request: Request,
    lease: ModelLease,
    texts: Sequence[Prompt],
    kind: Kind,
    choice: PromptChoice | None = None,
    *,
    field: str = "input",
    truncates: bool = False,
) -> tuple[list[dict[int, float] | Vector], int, dict[str, str]]:
    """Return token weights or vectors for each text, otherwise as `embed_all`; see `Session.finish_states`."""
    session = lease.session
    choose_product(session.loaded.text_rules, kind, "kind")
    encode = partial(session.encode_texts, truncates=truncates)
    prompts, _ = await session.run(encode, texts, field, choice or PromptChoice(), reads=texts)
    states, tokens, headers = await embed_all(request, lease, prompts, "none", field=field)
    made = await session.run(
        lambda: [session.finish_states(kind, one, ids, "kind") for one, ids in zip(states, prompts, strict=True)],
        reads=texts,
    )
    return made, tokens, headers | {POOLING_HEADER: kind}


async def rank_all(
    request: Request, lease: ModelLease, query: str, documents: Sequence[str], instruction: str | None
) -> tuple[list[Vector], int, dict[str, str]]:
    """Return the logits of each document with the query, the number of all tokens, and the headers of the reply.

    Raises as `embed_all` does.
    """
    session = lease.session
    pairs = await session.run(session.prepare_pairs, query, documents, instruction, reads=documents)
    headers = {} if session.ranker.is_stated else {RANKING_HEADER: UNSTATED_RANKING}
    return *await _read_logits(request, lease, pairs), headers


async def classify_all(request: Request, lease: ModelLease, texts: Sequence[str]) -> tuple[list[Vector], int]:
    """Return the classifier's logits for each text, and the number of all tokens. Raises as `embed_all` does."""
    session = lease.session
    asked = await session.run(lambda: [session.ranker.prepare_text(text) for text in texts], reads=texts)
    return await _read_logits(request, lease, asked)


async def _read_logits(request: Request, lease: ModelLease, asked: Sequence[EngineRequest]) -> tuple[list[Vector], int]:
    prompts = [one.token_ids for one in asked]
    note_prompts(request, lease, prompts)
    deadline_s: float | None = parts_of(request).settings.request_deadline_s
    rank = partial(lease.session.rank, client=in_flight(request).peer, deadline_s=deadline_s)
    return await until_disconnected(request, _gather(rank, asked)), sum(map(len, prompts))


async def _gather(embed: Callable[[P], Awaitable[Vector]], prompts: Sequence[P]) -> list[Vector]:
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def embed_in_turn(prompt: P) -> Vector:
        async with room:
            return await embed(prompt)

    tasks = [asyncio.ensure_future(embed_in_turn(prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
