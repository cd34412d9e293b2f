"""The requests of all callers, in one form: a text to continue or a conversation to answer.

Plain values. The dialects of the server and the command line make them; `service` turns them into token ids, parameters
and a grammar for the engine.

To continue a message, the template writes it with a mark at its end, and the prompt is the text before the mark. So
everything between the messages is as the template writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeVar

from mlxr.core.errors import ContextFull, InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.types import AUTO_DRAFTS, DraftOptions, Grammar, SamplingParams
from mlxr.service.messages import Message as Message
from mlxr.tokenizers import Tokenizer

if TYPE_CHECKING:
    from mlxr.loading import Adapter
    from mlxr.service.adapters import AdapterChoice


@frozen
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({"type": "object"}))


@frozen
class NamedTool:
    """The tool choice "this one"."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool
Ending = Literal["new turn", "continued", "closed"]


@frozen(kw_only=True)
class RequestOptions:
    """The options of every request, besides sampling."""

    grammar: Grammar | None = None  # of the answer's text, after any reasoning
    cache_prompt: bool = True  # off: the prompt uses nothing from the cache
    priority: int = 0  # -100 to 100; a higher one is served first
    deadline_s: float | None = None  # after this many seconds the answers end with DEADLINE
    window: Window | None = None  # its part of the context; None: all of it
    adapter: AdapterChoice | Adapter | None = None  # or the name of one; None: the one that the model was made with
    drafts: DraftOptions = AUTO_DRAFTS
    reports_progress: bool = False  # events tell how much of the prompt is computed


@frozen
class TextRequest(RequestOptions):
    """Continue a text, or token ids."""

    prompt: Prompt
    params: SamplingParams
    pictures: Sequence[bytes] = ()  # for the marks in the prompt, see `sight.MEDIA`
    pictures_field: str = "pictures"
    echo: str | None = None  # each answer begins with it; with logprobs, also with the prompt's tokens


@frozen
class ChatRequest(RequestOptions):
    """Answer a conversation. With tools to choose from, an answer is calls of them, or text that follows a grammar.

    The prompt ends where the assistant's turn begins (`ending` "new turn"), inside the last message, which is the
    assistant's ("continued"), or behind the last message ("closed").
    """

    messages: Sequence[Message]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    think: bool | str | None = None  # on, off or an effort, if the template has a switch; None: the template's default
    ending: Ending = "new turn"
    chat_template: str | None = None  # to use instead of the model's, or the name of one that comes with mlxr
    template_values: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))  # further variables
    thinking_message: str | None = None  # written before a thought over budget is closed; None: the setting's


R = TypeVar("R", TextRequest, ChatRequest)


@frozen
class Window:
    """A window: prompt and answer may have `tokens` tokens together.

    A prompt that leaves no room for an answer is refused, or cut if `kept_tokens` is given: that many tokens of its
    beginning stay, and as many of its end as leave half the window, or the answer's limit, for the answer.
    """

    tokens: int
    kept_tokens: int | None = None


def fit_window(
    token_ids: Sequence[int], params: SamplingParams, window: Window
) -> tuple[Sequence[int], SamplingParams]:
    """Fit the prompt and the parameters into the window; raises ContextFull if the prompt may not be cut."""
    if len(token_ids) >= window.tokens:
        token_ids = _cut(token_ids, params, window)
    left = window.tokens - len(token_ids)
    return token_ids, replace(params, max_tokens=left if params.max_tokens is None else min(params.max_tokens, left))


def _cut(token_ids: Sequence[int], params: SamplingParams, window: Window) -> Sequence[int]:
    answer_tokens = min(params.max_tokens or window.tokens, window.tokens // 2)
    room = window.tokens - answer_tokens
    if window.kept_tokens is None or not 0 < room < window.tokens:
        raise ContextFull.of("prompt", len(token_ids), window.tokens)
    kept = min(window.kept_tokens, room - 1)
    return [*token_ids[:kept], *token_ids[len(token_ids) - room + kept :]]


Prompt = str | Sequence[int]


def encode_prompt(
    tokenizer: Tokenizer, vocab_size: int, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Return the token ids of a prompt; raises InvalidRequest for an empty one, for text that is not Unicode and for
    ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt, add_special=add_special, parse_special=parse_special)
        except InvalidRequest as error:
            raise InvalidRequest("prompt", error.reason) from None
    else:
        ids = (
            list(prompt) if _are_token_ids(prompt, vocab_size) else [_check_token_id(one, vocab_size) for one in prompt]
        )
    if not ids:
        raise InvalidRequest("prompt", "is empty, and the model has no BOS token to start from")
    return ids


def find_message_ends(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the positions at which the messages of a prompt end, by its special tokens; other prompts may differ from
    there on.

    Templates close messages with the token that ends an answer. In a prompt without one, every other special token
    counts as a beginning.
    """
    found = set(token_ids)
    ends = found & tokenizer.eos_ids
    if ends:
        return tuple(place + 1 for place, token_id in enumerate(token_ids) if token_id in ends)
    starts = {token_id for token_id in found if tokenizer.is_special(token_id)}
    return tuple(place for place, token_id in enumerate(token_ids) if place and token_id in starts)


def _are_token_ids(values: Sequence[object], vocab_size: int) -> bool:
    """Return True if all are ints of the vocabulary, without a call for each: thousands of texts may come at once."""
    return {*map(type, values)} == {int} and min(values) >= 0 and max(values) < vocab_size  # type: ignore[type-var,operator]


def _check_token_id(value: object, vocab_size: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidRequest("prompt", f"must be text or token ids, got a {type(value).__name__} among the ids")
    token_id = int(value.__index__())
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest("prompt", f"token id {token_id} is outside the vocabulary of {vocab_size}")
    return token_id


_MARK = "\uf8ffcontinue\uf8ff"  # private-use characters, and none of those that `special_guard` uses


def is_unfinished(messages: Sequence[Mapping[str, object]]) -> bool:
    """Return True if the last message is the assistant's and can be continued: it has no tool calls."""
    if not messages or not isinstance(messages[-1], Mapping):
        return False
    last = messages[-1]
    return last.get("role") == "assistant" and not last.get("tool_calls")


def mark_end(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the checked messages with a mark at the end of the text to continue: the last content, else the reasoning.

    Raises InvalidRequest if there is no message to continue.
    """
    if not is_unfinished(messages):
        raise InvalidRequest("messages", "do not end with a text of the assistant, so there is nothing to continue")
    *others, last = map(dict, messages)
    place = "reasoning" if last.get("reasoning") and not last["content"] else "content"
    return [*others, {**last, place: f"{last[place]}{_MARK}"}]


def continues_reasoning(messages: Sequence[Mapping[str, object]]) -> bool:
    """Return True if the reasoning is to be continued: the unfinished message has reasoning and no content yet."""
    return is_unfinished(messages) and bool(messages[-1].get("reasoning")) and not messages[-1].get("content")


def cut_at_mark(text: str) -> str:
    """Return the prompt before the mark; raises InvalidRequest if the template did not write the mark."""
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest("messages", "cannot be continued: the chat template leaves out the assistant's last text")
    return before
