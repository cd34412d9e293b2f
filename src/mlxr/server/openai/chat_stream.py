"""A chat completion while it grows: each event of the service becomes the chunks that OpenAI's stream has.

Chunks are plain dictionaries, since there is one for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlxr.core.events import Event, Finish, PromptProgress, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.server.json_models import JsonObject
from mlxr.server.openai.chat_reply import name_finish
from mlxr.server.openai.replies import RunningTimings, Tally, TokenBytes, describe_progress, describe_tokens


class ChatChunks:
    """Makes the chunks of one reply."""

    def __init__(
        self,
        head: JsonObject,
        *,
        prompt_tokens: int,
        answers: int,
        includes_usage: bool,
        token_bytes: TokenBytes | None,
        opening: JsonObject | None = None,
        running: RunningTimings | None = None,
    ) -> None:
        """`head` is what all chunks begin with: id, object, created, model, system_fingerprint.

        `opening` is the first delta of each answer. Without it that depends on what comes first: only where that is
        text, `content` is an empty one, which some clients take for the beginning of a text; before thoughts and calls
        it is null. `running` gives every token its timings.
        """
        self._opening = opening
        self._head = {**head, "usage": None} if includes_usage else head
        self._tally = Tally(prompt_tokens, answers)
        self._includes_usage, self._running = includes_usage, running
        self._token_bytes = token_bytes
        self._opened: set[int] = set()

    def push(self, event: Event) -> Iterator[JsonObject]:
        """The chunks of one event; the first of an answer says whose turn it is."""
        self._tally.add(event)
        if self._running is not None:
            self._running.add(event)
        if event.index not in self._opened:
            self._opened.add(event.index)
            yield self._make_chunk(event.index, self._opening or _open_with(event), says_tokens=False)
        match event:
            case PromptProgress():
                yield {**self._make_chunk(event.index, {}), **describe_progress(event)}
            case TextDelta():
                yield self._make_chunk(event.index, {"content": event.text}, event.tokens)
            case ReasoningDelta():
                yield self._make_chunk(event.index, {"reasoning_content": event.text})
            case ToolCallDelta():
                yield self._make_chunk(event.index, {"tool_calls": [_describe_call(event)]})
            case Finish():
                chunk = self._make_chunk(event.index, {}, finish_reason=name_finish(event.reason))
                yield chunk if self._includes_usage else {**chunk, **self._tally.last_timings()}

    def end(self) -> Iterator[JsonObject]:
        """The chunk of token counts, where it was asked for."""
        if self._includes_usage:
            usage = self._tally.usage().model_dump()
            yield {**self._head, "choices": [], "usage": usage, **self._tally.last_timings()}

    def _make_chunk(
        self,
        index: int,
        delta: JsonObject,
        tokens: Sequence[TokenInfo] = (),
        finish_reason: str | None = None,
        *,
        says_tokens: bool = True,
    ) -> JsonObject:
        logprobs = None
        if self._token_bytes is not None and tokens:
            described = describe_tokens(tokens, self._token_bytes)
            logprobs = {"content": [token.model_dump() for token in described], "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        timings = self._running.read() if self._running is not None and says_tokens and finish_reason is None else {}
        return {**self._head, "choices": [choice], **timings}


def _open_with(event: Event) -> JsonObject:
    """The first delta of an answer that begins with `event`."""
    content = "" if isinstance(event, TextDelta | Finish) else None
    return {"role": "assistant", "content": content, "refusal": None}


def _describe_call(event: ToolCallDelta) -> JsonObject:
    if event.id is None:
        return {"index": event.call, "function": {"arguments": event.arguments}}
    function = {"name": event.name, "arguments": event.arguments}
    return {"index": event.call, "id": event.id, "type": "function", "function": function}
