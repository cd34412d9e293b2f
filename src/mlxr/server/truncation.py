"""Conversations that are too long for the context: the oldest messages go. Knows no dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlxr.service.async_session import AsyncSession
from mlxr.service.requests import ChatRequest

_SYSTEM = ("system", "developer")


def drop_oldest(session: AsyncSession, wanted: ChatRequest) -> ChatRequest:
    """The conversation without its oldest messages, if it is too long; system messages and the last one stay.

    Where those alone are too long, their prompt is cut later, or refused.
    """
    if _fits(session, wanted):
        return wanted
    kept = [message.get("role") in _SYSTEM for message in wanted.messages]
    droppable = [index for index, stays in enumerate(kept[:-1]) if not stays]
    low, high = 1, len(droppable)
    while low < high:  # the fewest that must go
        middle = (low + high) // 2
        if _fits(session, _without(wanted, droppable[:middle])):
            high = middle
        else:
            low = middle + 1
    return _without(wanted, droppable[:high])


def _fits(session: AsyncSession, wanted: ChatRequest) -> bool:
    tokens = session.context_tokens if wanted.window is None else wanted.window.tokens
    return len(session.encode_chat(wanted)) < tokens


def _without(wanted: ChatRequest, dropped: Sequence[int]) -> ChatRequest:
    gone = set(dropped)
    messages = [message for index, message in enumerate(wanted.messages) if index not in gone]
    while len(messages) > 1 and _is_result(messages):
        del messages[next(index for index, message in enumerate(messages) if message.get("role") not in _SYSTEM)]
    return replace(wanted, messages=messages)


def _is_result(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether the conversation begins with the result of a tool whose call was dropped."""
    first = next((message for message in messages if message.get("role") not in _SYSTEM), None)
    return first is not None and first is not messages[-1] and first.get("role") == "tool"
