"""POST /v1/responses, the store of its answers, token counts of inputs, and summaries in place of conversations.

Kept responses stay for a while with their input and output, so that a later request can continue them: in memory, or in
a file that outlives the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import MlxrError, SettingError, Unavailable
from mlxr.core.frozen import frozen
from mlxr.core.types import Event
from mlxr.core.work_threads import WorkThreads
from mlxr.server.activity import in_flight
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import Generation, borrow, fill_chat, read_all, start, write_frames
from mlxr.server.openai.replies import ERRORS, STREAMED, Head, fit_effort, name_code, token_bytes_if
from mlxr.server.openai.response_reply import ResponseEvents, ResponseReply, ResponseUsage, count_response
from mlxr.server.openai.response_request import (
    Callee,
    CompactionItem,
    InputItem,
    MessageItem,
    ReferenceItem,
    ResponseRequest,
    dump_items,
    list_items,
    list_loaded,
    read_items,
    read_tools,
)
from mlxr.server.parts import parts_of
from mlxr.server.request_fields import drop_oldest
from mlxr.server.routes import JsonObject, ReplyModel, Router, make_id, reply_json
from mlxr.server.streaming import SSE, EventStream, sse
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest
from mlxr.service.streams import ReplyFold

router = Router()
FIELDS = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "think": "reasoning",
}  # the service's names of fields that may be wrong, and this dialect's


T = TypeVar("T")
logger = logging.getLogger(__name__)
APPLICATION_ID = 0x6D6C7852  # marks the file as ours
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, owner TEXT, before TEXT, used INTEGER NOT NULL,
  bytes INTEGER NOT NULL, response TEXT NOT NULL, input TEXT NOT NULL, output TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON responses (used, bytes);
CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, item TEXT NOT NULL,
  response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE);
CREATE INDEX IF NOT EXISTS by_response ON items (response);
"""
PATIENCE_S, WAIT_S, CLOSE_S = 10.0, 5.0, 5.0
MAX_WAITING = 256  # reads and writes; with more, responses are not kept


class ResponseStore:
    """Responses by id, in an SQLite database that its own thread reads and writes in the order of requests.

    They take `max_bytes` as JSON; the least recently used are forgotten first. `path` is the file, None for memory.
    Raises SettingError for a file that is not ours or cannot be opened.
    """

    def __init__(self, max_bytes: int, path: str | Path | None = None) -> None:
        self._max_bytes, self._place = max_bytes, "memory" if path is None else str(path)
        hint = f"kept responses in {self._place} are slow to come; try again"
        self._threads = WorkThreads(
            "mlxr-kept", 1, max_waiting=MAX_WAITING, patience_s=PATIENCE_S, remedy=hint, refusal=Unavailable
        )
        try:
            self._db = _open_database(path)
        except (sqlite3.Error, OSError) as error:
            raise SettingError(f"responses_file: {path} cannot be used: {error}; name another file") from error

    @property
    def is_on(self) -> bool:
        """True if responses are kept at all."""
        return self._max_bytes > 0

    def keep(self, owner: str | None, response: ResponseReply, given: Sequence[InputItem]) -> None:
        """Keep a response that has ended, unless it is larger than the store."""
        self._threads.submit(self._try_to_keep, owner, response, given)

    async def find(self, owner: str | None, response_id: str) -> str:
        """Return the JSON of a response of this owner; raises ServerError 404."""
        return await self._ask(partial(self._find, owner, response_id, "response"))

    async def find_history(self, owner: str | None, response_id: str) -> list[InputItem]:
        """Return the whole conversation up to the end of a response; raises ServerError 400 if a part is missing."""
        return await self._ask(partial(self._find_history, owner, response_id))

    async def find_item(self, owner: str | None, item: ReferenceItem) -> InputItem:
        """Return the item of the output of a response of this owner, or `item` if there is none."""
        return await self._ask(partial(self._find_item, owner, item))

    async def delete(self, owner: str | None, response_id: str) -> None:
        """Forget a response; raises ServerError 404."""
        await self._ask(partial(self._delete, owner, response_id))

    async def stop(self) -> None:
        """Write waiting responses, unless the disk is too slow, and close the file."""
        with suppress(TimeoutError, MlxrError):
            await asyncio.wait_for(self._threads.run(self._db.close), CLOSE_S)
        self._threads.stop()

    async def _ask(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work)
        except sqlite3.Error as error:
            raise Unavailable(f"{self._place}: kept responses cannot be read: {error}") from error

    def _try_to_keep(self, owner: str | None, response: ResponseReply, given: Sequence[InputItem]) -> None:
        try:
            self._keep(owner, response, given)
        except sqlite3.Error as error:
            logger.warning("%s: a response cannot be kept: %s", self._place, error)

    def _keep(self, owner: str | None, response: ResponseReply, given: Sequence[InputItem]) -> None:
        whole = [item for item in response.output if item.status != "incomplete" or item.type == "message"]
        output = read_items([item.model_dump(exclude_none=True) for item in whole])
        text, asked, said = response.model_dump_json(by_alias=True), dump_items(given), dump_items(output)
        size_bytes = len(text) + len(asked) + len(said)
        if size_bytes > self._max_bytes:
            return
        with self._db:
            row = (response.id, owner, response.previous_response_id, size_bytes, text, asked, said)
            self._db.execute(f"INSERT OR REPLACE INTO responses VALUES (?, ?, ?, {_NEXT}, ?, ?, ?, ?)", row)
            items = [(one.id, dump_items([read]), response.id) for one, read in zip(whole, output, strict=True)]
            self._db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", items)
            while self._db.execute("SELECT sum(bytes) FROM responses").fetchone()[0] > self._max_bytes:
                self._db.execute("DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY used LIMIT 1)")

    def _find(self, owner: str | None, response_id: str, columns: str) -> str:
        """Return `columns` of a response as they are in the file, and note that it was used now."""
        query = f"SELECT {columns} FROM responses WHERE id = ? AND owner IS ?"
        row = self._db.execute(query, (response_id, owner)).fetchone()
        if row is None:
            message = f"Response with id {response_id[:80]!r} not found: it was not kept, or is kept no longer"
            raise ServerError(404, "not_found", message, "response_id")
        with self._db:
            self._db.execute(f"UPDATE responses SET used = {_NEXT} WHERE id = ?", (response_id,))
        return str(row[0])

    def _find_history(self, owner: str | None, response_id: str) -> list[InputItem]:
        turns: list[list[JsonObject]] = []
        following: str | None = response_id
        while following is not None:
            try:  # the earliest turn is touched last, so it is forgotten after its followers
                turn = self._find(owner, following, "json_array(json(input), json(output), before)")
            except ServerError as error:
                field = "previous_response_id"
                raise ServerError(400, "previous_response_not_found", f"{field}: {error.message}", field) from None
            asked, said, following = json.loads(turn)
            turns.append([*asked, *said])
        return read_items([item for turn in reversed(turns) for item in turn])

    def _find_item(self, owner: str | None, item: ReferenceItem) -> InputItem:
        query = (
            "SELECT item FROM items JOIN responses ON responses.id = items.response WHERE items.id = ? AND owner IS ?"
        )
        row = self._db.execute(query, (item.id, owner)).fetchone()
        return item if row is None else read_items(json.loads(row[0]))[0]

    def _delete(self, owner: str | None, response_id: str) -> None:
        self._find(owner, response_id, "id")
        with self._db:
            self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))


_NEXT = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"


def _open_database(path: str | Path | None) -> sqlite3.Connection:
    """Open the database of kept responses, made if there is none; only its owner may read the file."""
    if path is not None:
        with closing(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, stat.S_IRUSR | stat.S_IWUSR), "rb")):
            pass
    db = sqlite3.connect(":memory:" if path is None else path, WAIT_S, check_same_thread=False)
    try:
        (own,), (tables,) = (
            db.execute(query).fetchone() for query in ("PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
        )
        if tables and own != APPLICATION_ID:
            raise sqlite3.DatabaseError("it is a database of something else")
        for line in (
            f"application_id = {APPLICATION_ID}",
            "foreign_keys = ON",
            "secure_delete = ON",
            "journal_mode = WAL",  # a write waits for no disk
            "synchronous = NORMAL",
        ):
            db.execute(f"PRAGMA {line}")
        db.executescript(SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


class Deleted(ReplyModel):
    """A confirmation that a response is no longer kept."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(ReplyModel):
    """The number of tokens of an input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CompactedMessage(ReplyModel):
    """A message of the conversation that stays unchanged."""

    type: Literal["message"] = "message"
    id: str
    status: Literal["completed"] = "completed"
    role: Literal["user", "system", "developer"]
    content: list[JsonObject]


class CompactionReply(ReplyModel):
    """A summary in place of the whole conversation."""

    type: Literal["compaction"] = "compaction"
    id: str
    encrypted_content: str = Field(description="The summary, which is not encrypted but in base64.")


class CompactedReply(ReplyModel):
    """A compacted conversation: messages that stay, and a summary."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactedMessage | CompactionReply]
    usage: ResponseUsage


SUMMARY_SHARE = 4  # a summary may take a quarter of the context
SUMMARISE = (
    "Summarise our conversation so far for whoever continues it without having seen it: what was asked, what was done "
    "and found, names of files and values that matter, decisions, and what is still to do. Write only the summary."
)


@frozen
class Asked:
    """A request: its own items, those of earlier responses, and the service's request made of both."""

    store: ResponseStore
    owner: str | None
    history: list[InputItem]
    items: list[InputItem]
    wanted: ChatRequest
    callees: Mapping[str, Callee]

    @classmethod
    async def read(cls, request: Request, body: ResponseRequest) -> Asked:
        """Read a request. Raises ServerError for a missing earlier response, else InvalidRequest naming the field."""
        store, owner = parts_of(request).responses, in_flight(request).key_id
        before = body.previous_response_id
        history = [] if before is None else await store.find_history(owner, before)
        items = [
            await store.find_item(owner, item) if isinstance(item, ReferenceItem) else item
            for item in list_items(body.input)
        ]
        callees = read_tools(body.tools, list_loaded([*history, *items])).callees
        return cls(store, owner, history, items, body.to_request(history, items), callees)

    async def fit(self, request: Request, lease: ModelLease, body: ResponseRequest) -> ChatRequest:
        """Return the service's request with the model's own parameters, cut if it is too long and allows that."""
        wanted = fill_chat(fit_effort(request, lease, self.wanted, "reasoning.effort"), lease.record, body)
        return await lease.session.run(drop_oldest, lease.session, wanted) if body.truncation == "auto" else wanted

    def keep(self, response: ResponseReply) -> None:
        """Keep a response that has ended, if that was asked for."""
        if response.store:
            self.store.keep(self.owner, response, self.items)


@router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer an input. Unless `store` is false, the response is kept for a while."""
    asked = await Asked.read(request, body)
    lease = await borrow(request, body.model, lora=body.shares)
    head = Head.make("resp_", lease, body.model)
    token_bytes = token_bytes_if(body.wants_logprobs, lease)
    with spell_fields(FIELDS):
        generation = await start(request, lease, await asked.fit(request, lease, body))
    in_flight(request).reply_id = head.id
    begun = begin_response(body, head, is_kept=asked.store.is_on and body.store is not False)
    fold = ReplyFold([len(generation.prompt_ids)])
    times_tokens = bool(body.stream and body.timings_per_token)
    events = ResponseEvents(begun, fold, token_bytes, asked.callees, times_tokens=times_tokens)
    if body.stream:
        return _stream(request, generation, events, asked)
    for event in await read_all(request, [generation]):
        for _ in events.push(event):
            pass
    asked.keep(events.response)
    return reply_json(events.response)


@router.post("/v1/responses/input_tokens", response_model=InputTokens, responses=ERRORS)
async def count_input_tokens(request: Request, body: ResponseRequest) -> Response:
    """Return the number of tokens of an input, as `/v1/responses` would read it."""
    asked = await Asked.read(request, body)
    lease = await borrow(request, body.model, lora=body.shares)
    with spell_fields(FIELDS):
        ids = await lease.session.run(lease.session.encode_chat, await asked.fit(request, lease, body))
    return reply_json(InputTokens(input_tokens=len(ids)))


@router.post("/v1/responses/compact", response_model=CompactedReply, responses=ERRORS)
async def compact(request: Request, body: ResponseRequest) -> Response:
    """Compact a conversation to the messages of user and system, and a summary of all, which the model writes.

    The next request sends these items in place of the conversation.
    """
    asked = await Asked.read(request, body)
    lease = await borrow(request, body.model, lora=body.shares)
    wanted = fill_chat(fit_effort(request, lease, asked.wanted, "reasoning.effort"), lease.record, body)
    most = lease.session.context_tokens // SUMMARY_SHARE
    params = replace(wanted.params, max_tokens=min(wanted.params.max_tokens or most, most), logprobs=None)
    messages = [*wanted.messages, {"role": "user", "content": SUMMARISE}]
    wanted = replace(wanted, messages=messages, params=params, tool_choice="none", grammar=None)
    wanted = await lease.session.run(drop_oldest, lease.session, wanted)
    head = Head.make("resp_", lease, body.model)
    with spell_fields(FIELDS):
        generation = await start(request, lease, wanted)
    fold = ReplyFold([len(generation.prompt_ids)])
    for event in await read_all(request, [generation]):
        fold.add(event)
    kept = [
        CompactedMessage(id=make_id("msg_"), role=item.role, content=item.list_parts())
        for item in (*asked.history, *asked.items)
        if isinstance(item, MessageItem) and item.role != "assistant"
    ]
    content = CompactionItem.close(fold.answers[0].text.strip())
    summary = CompactionReply(id=make_id("cmp_"), encrypted_content=content)
    return reply_json(
        CompactedReply(id=head.id, created_at=head.created, output=[*kept, summary], usage=count_response(fold))
    )


@router.get("/v1/responses/{response_id}", response_model=ResponseReply, responses=ERRORS)
async def get_response(request: Request, response_id: str) -> Response:
    """Return a response that is kept."""
    text = await parts_of(request).responses.find(in_flight(request).key_id, response_id)
    return Response(text, media_type="application/json")


@router.delete("/v1/responses/{response_id}", response_model=Deleted, responses=ERRORS)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response that was kept; answers with its id."""
    await parts_of(request).responses.delete(in_flight(request).key_id, response_id)
    return reply_json(Deleted(id=response_id))


def begin_response(body: ResponseRequest, head: Head, *, is_kept: bool = False) -> ResponseReply:
    """Return the response before there is an answer: the request's fields, with defaults filled in."""
    text: JsonObject = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning: JsonObject = {"effort": body.reasoning.effort if body.reasoning else None, "summary": None}
    choice = body.tool_choice or "auto"
    return ResponseReply(
        id=head.id,
        created_at=head.created,
        status="in_progress",
        model=head.model,
        output=[],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=is_kept,
        truncation=body.truncation or "disabled",
        max_output_tokens=body.read("max_output_tokens", None),
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=reasoning,
        temperature=body.read("temperature", 1.0),
        presence_penalty=body.read("presence_penalty", 0.0),
        frequency_penalty=body.read("frequency_penalty", 0.0),
        text=text,
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.read("top_p", 1.0),
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def _stream(request: Request, generation: Generation, events: ResponseEvents, asked: Asked) -> EventStream:
    def write(event: Event) -> list[bytes]:
        frames = [*map(_frame, events.push(event))]
        if events.response.status != "in_progress":  # the client may go on as soon as it has the last event
            asked.keep(events.response)
        return frames

    def fail(error: ServerError) -> bytes:
        return _frame(events.fail(name_code(error), error.message))

    opening = b"".join(map(_frame, events.start()))
    frames = write_frames([generation], write, opening=opening)
    return EventStream(request, frames, media_type=SSE, on_error=fail)


def _frame(event: JsonObject) -> bytes:
    return sse(event, event=str(event["type"]))
