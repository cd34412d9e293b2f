"""POST /v1/responses, what is kept of its answers, and how many tokens an input has.

Responses that are to be kept stay in memory for a while, as what they were asked and what they said, so that a later
request can go on from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.events import Event
from mlxr.server.activity import in_flight
from mlxr.server.errors import ServerError, spell_fields
from mlxr.server.generation import Generation, borrow, fill_chat, read_all, start, write_frames
from mlxr.server.openai.replies import ERRORS, STREAMED, Head, fit_effort, name_code, token_bytes_if
from mlxr.server.openai.response_reply import ResponseEvents, ResponseReply
from mlxr.server.openai.response_request import (
    Callee,
    InputItem,
    ReferenceItem,
    ResponseRequest,
    list_items,
    list_loaded,
    read_items,
    read_tools,
)
from mlxr.server.parts import parts_of
from mlxr.server.request_fields import drop_oldest
from mlxr.server.routes import JsonObject, ReplyModel, Router, reply_json
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
}  # the service's words for what may be wrong


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, what was asked for it alone, and what it gave as a later request would send it back."""

    owner: str | None
    response: ResponseReply
    input: tuple[InputItem, ...]
    output: tuple[InputItem, ...]
    size_bytes: int


class ResponseStore:
    """Responses by id. Belongs to the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[str, tuple[str, InputItem]] = {}  # id of an output item → id of its response, the item

    @property
    def is_on(self) -> bool:
        """Tell whether anything is kept."""
        return self._max_bytes > 0

    def keep(self, owner: str | None, response: ResponseReply, given: Sequence[InputItem]) -> None:
        """Keep a response that has ended, unless it is larger than the store."""
        whole = [item for item in response.output if item.status != "incomplete" or item.type == "message"]
        output = tuple(read_items([item.model_dump(exclude_none=True) for item in whole]))
        size_bytes = len(response.model_dump_json()) + sum(len(item.model_dump_json()) for item in given)
        if size_bytes > self._max_bytes:
            return
        self._kept[response.id] = Kept(owner, response, tuple(given), output, size_bytes)
        self._items |= {item.id: (response.id, read) for item, read in zip(whole, output, strict=True)}
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def find(self, owner: str | None, response_id: str, field: str = "response_id") -> Kept:
        """A response of this owner; raises ServerError 404."""
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            message = f"Response with id {response_id[:80]!r} not found: it was not kept, or is kept no longer"
            raise ServerError(404, "not_found", message, field)
        self._kept.move_to_end(response_id)
        return kept

    def find_history(self, owner: str | None, response_id: str) -> list[InputItem]:
        """All that was said until the end of a response; raises ServerError 400 where a part is not there."""
        turns: list[Kept] = []
        following: str | None = response_id
        while following is not None:
            try:
                turns.append(self.find(owner, following))  # the earliest is touched last: it goes after its followers
            except ServerError as error:
                field = "previous_response_id"
                raise ServerError(400, "previous_response_not_found", f"{field}: {error.message}", field) from None
            following = turns[-1].response.previous_response_id
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def find_item(self, owner: str | None, item_id: str) -> InputItem | None:
        """An item of the output of a response of this owner."""
        response_id, item = self._items.get(item_id, ("", None))
        kept = self._kept.get(response_id)
        return item if kept is not None and kept.owner == owner else None

    def delete(self, owner: str | None, response_id: str) -> None:
        """Forget a response; raises ServerError 404."""
        self.find(owner, response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._bytes -= kept.size_bytes
        for item in kept.response.output:
            self._items.pop(item.id, None)


class Deleted(ReplyModel):
    """A response that is kept no longer."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(ReplyModel):
    """Says how many tokens an input has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with what is kept for it: the items of its own, and all that the model is asked."""

    store: ResponseStore
    owner: str | None
    items: list[InputItem]
    wanted: ChatRequest
    callees: Mapping[str, Callee]

    @classmethod
    def read(cls, request: Request, body: ResponseRequest) -> Asked:
        """Raises ServerError for an earlier response that is not there, InvalidRequest naming the field otherwise."""
        store, owner = parts_of(request).responses, in_flight(request).key_id
        before = body.previous_response_id
        history = [] if before is None else store.find_history(owner, before)
        items = [
            (store.find_item(owner, item.id) or item) if isinstance(item, ReferenceItem) else item
            for item in list_items(body.input)
        ]
        callees = read_tools(body.tools, list_loaded([*history, *items])).callees
        return cls(store, owner, items, body.to_request(history, items), callees)

    async def fit(self, request: Request, lease: ModelLease, body: ResponseRequest) -> ChatRequest:
        """Return what the model is asked, with what it brings along, and shorter where the request lets it be cut."""
        wanted = fill_chat(fit_effort(request, lease, self.wanted, "reasoning.effort"), lease.record, body)
        return await lease.session.run(drop_oldest, lease.session, wanted) if body.truncation == "auto" else wanted

    def keep(self, response: ResponseReply) -> None:
        """Keep a response that has ended, if that was asked for."""
        if response.store:
            self.store.keep(self.owner, response, self.items)


@router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer an input. Unless `store` is false, the response is kept in memory for a while."""
    asked = Asked.read(request, body)
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
    """Return how many tokens an input has, as `/v1/responses` would read it."""
    asked = Asked.read(request, body)
    lease = await borrow(request, body.model, lora=body.shares)
    with spell_fields(FIELDS):
        ids = await lease.session.run(lease.session.encode_chat, await asked.fit(request, lease, body))
    return reply_json(InputTokens(input_tokens=len(ids)))


@router.get("/v1/responses/{response_id}", response_model=ResponseReply, responses=ERRORS)
async def get_response(request: Request, response_id: str) -> Response:
    """A response that is kept."""
    return reply_json(parts_of(request).responses.find(in_flight(request).key_id, response_id).response)


@router.delete("/v1/responses/{response_id}", response_model=Deleted, responses=ERRORS)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response that was kept; answers with its id."""
    parts_of(request).responses.delete(in_flight(request).key_id, response_id)
    return reply_json(Deleted(id=response_id))


def begin_response(body: ResponseRequest, head: Head, *, is_kept: bool = False) -> ResponseReply:
    """The response before there is an answer: what was asked for, with defaults filled in."""
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
