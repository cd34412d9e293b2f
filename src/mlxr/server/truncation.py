"""Conversations that are too long for the context: the oldest turns go. Knows no dialect.

A turn begins with the user and goes up to the user's next message, so that what is left begins with the user, as many
templates want it, and no result of a tool stays without its call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from mlxr.core.errors import TemplateError
from mlxr.service.async_session import AsyncSession
from mlxr.service.requests import ChatRequest

ANSWER_SHARE = 4  # where turns must go, so many go that the answer may take at least this part of the context
_SYSTEM = ("system", "developer")
_Places = frozenset[int]


def drop_oldest(session: AsyncSession, wanted: ChatRequest) -> ChatRequest:
    """The conversation without its oldest turns, if it is too long; system messages and the last message stay.

    Of the last turn go the oldest calls with their results, and at last the user's question, if nothing else helps.
    Where what has to stay is too long, its prompt is cut later, or refused. A conversation that fits is rendered once,
    another one as often as halving the number of its turns takes.
    """
    tokens = session.context_tokens if wanted.window is None else wanted.window.tokens
    if len(session.encode_chat(wanted)) < tokens:
        return wanted
    turns, parts = _list_droppable(wanted.messages)
    cuts = list(accumulate([*turns, *parts], lambda gone, more: gone | more))  # what is gone after each
    if not cuts:
        return wanted
    answer_tokens = min(wanted.params.max_tokens or tokens, tokens // ANSWER_SHARE)
    shorter = [_without(wanted, gone) for gone in cuts]
    found = _find_first(session, shorter[: len(turns)], tokens - answer_tokens)
    return found or _find_first(session, shorter[max(len(turns) - 1, 0) :], tokens - 1) or shorter[-1]


def _find_first(session: AsyncSession, shorter: Sequence[ChatRequest], most_tokens: int) -> ChatRequest | None:
    """The first of the conversations, each shorter than the one before, that has no more tokens than that."""
    low, high = 0, len(shorter)
    while low < high:
        middle = (low + high) // 2
        try:
            fits = len(session.encode_chat(shorter[middle])) <= most_tokens
        except TemplateError:  # the whole conversation was taken, and so will be one that is shorter still
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    return shorter[low] if low < len(shorter) else None


def _without(wanted: ChatRequest, gone: _Places) -> ChatRequest:
    return replace(wanted, messages=[message for place, message in enumerate(wanted.messages) if place not in gone])


def _list_droppable(messages: Sequence[Mapping[str, object]]) -> tuple[list[_Places], list[_Places]]:
    """Places of messages that go together, in the order in which they go: whole turns, and then parts of the last."""
    turns: list[list[int]] = []
    before: object = None
    for place, message in enumerate(messages):
        role = message.get("role")
        if role not in _SYSTEM:
            if not turns or (role == "user" and before != "user"):
                turns.append([])
            turns[-1].append(place)
            before = role
    if not turns:
        return [], []
    *older, last = turns
    asked = [place for place in last if messages[place].get("role") == "user"]
    rounds: list[list[int]] = []  # what the assistant says or calls, with the results
    for place in last[len(asked) :]:
        if not rounds or messages[place].get("role") == "assistant":
            rounds.append([])
        rounds[-1].append(place)
    questions = [[place] for place in (asked if rounds else asked[:-1])]
    return [frozenset(turn) for turn in older], [frozenset(part) for part in (*rounds[:-1], *questions)]
