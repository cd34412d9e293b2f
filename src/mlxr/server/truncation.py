"""Conversations that are too long for the context: the oldest turns go. Knows no dialect.

A turn begins with the user and goes up to the user's next message, so that what is left begins with the user, as many
templates want it, and no result of a tool stays without its call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from mlxr.core.errors import TemplateError
from mlxr.service.requests import ChatRequest
from mlxr.service.session import Session

ANSWER_SHARE = 4  # where turns must go, so many go that the answer may take at least this part of the context
_SYSTEM = ("system", "developer")


def drop_oldest(session: Session, wanted: ChatRequest) -> ChatRequest:
    """The conversation without its oldest turns, if it is too long; system messages and the last message stay.

    Of the last turn go the oldest calls with their results, and at last the user's question, if nothing else helps.
    Where what has to stay is too long, its prompt is cut later, or refused. A conversation that fits is rendered once,
    another one as often as halving the number of its turns takes.
    """
    tokens = session.context_tokens if wanted.window is None else wanted.window.tokens
    if len(session.encode_chat(wanted)) < tokens:
        return wanted
    turns, parts = _list_droppable(wanted.messages)
    answer_tokens = min(wanted.params.max_tokens or tokens, tokens // ANSWER_SHARE)

    def drop(count: int) -> ChatRequest:
        gone = set(chain.from_iterable([*turns, *parts][:count]))
        return replace(wanted, messages=[message for place, message in enumerate(wanted.messages) if place not in gone])

    def fits(count: int, most_tokens: int) -> bool:
        try:
            return len(session.encode_chat(drop(count))) <= most_tokens
        except TemplateError:  # the whole conversation was taken, and so will be one that is shorter still
            return False

    found = _find_first(1, len(turns), lambda count: fits(count, tokens - answer_tokens))
    found = found or _find_first(max(len(turns), 1), len(turns) + len(parts), lambda count: fits(count, tokens - 1))
    return drop(found or len(turns) + len(parts))


def _find_first(low: int, last: int, fits: Callable[[int], bool]) -> int | None:
    """The first number from `low` to `last` that fits, where all after it do as well; None where none does."""
    high = last + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low if low <= last else None


def _list_droppable(messages: Sequence[Mapping[str, object]]) -> tuple[list[list[int]], list[list[int]]]:
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
    return older, [*rounds[:-1], *questions]
