"""How a conversation's prompt ends: with a new turn of the assistant, inside its last message, or behind that.

To continue a message, the template writes it with a mark at its end, and the prompt is what stands before the mark. So
everything between the messages is as the template has it, whatever that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxr.core.errors import InvalidRequest

_MARK = "\uf8ffcontinue\uf8ff"  # private-use characters, and none of those that `special_guard` uses


def is_unfinished(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether the last message is one of the assistant that its model could go on with: text, and no calls of tools."""
    if not messages or not isinstance(messages[-1], Mapping):
        return False
    last = messages[-1]
    return last.get("role") == "assistant" and not last.get("tool_calls")


def mark_end(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The checked messages with a mark at the end of what is continued: the last content, or else its reasoning.

    Raises InvalidRequest where there is no message to continue.
    """
    if not is_unfinished(messages):
        raise InvalidRequest("messages", "do not end with a text of the assistant, so there is nothing to continue")
    *others, last = map(dict, messages)
    place = "reasoning" if last.get("reasoning") and not last["content"] else "content"
    return [*others, {**last, place: f"{last[place]}{_MARK}"}]


def continues_reasoning(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether what is continued is what the assistant thinks: there is reasoning and no content yet."""
    return is_unfinished(messages) and bool(messages[-1].get("reasoning")) and not messages[-1].get("content")


def cut_at_mark(text: str) -> str:
    """The prompt before the mark; raises InvalidRequest where the template did not write it."""
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest("messages", "cannot be continued: the chat template leaves out the assistant's last text")
    return before
