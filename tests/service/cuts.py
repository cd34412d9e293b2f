"""Texts in pieces, and pieces joined again: the cuts must not matter to a reader of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from hypothesis import strategies as st

from mlxr.core.types import Event
from mlxr.service.reasoning import Thought
from mlxr.service.streams import Completion, fold_events
from mlxr.service.tools.format import CallPiece


@st.composite
def cut_text(draw: st.DrawFn, text: str) -> list[str]:
    """Cut `text` in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def merge(parts: list[Any]) -> list[Any]:
    """Join neighbours of one kind, and leave out empty ones."""
    merged: list[Any] = []
    for part in parts:
        last = merged[-1] if merged else None
        if part == "" or part == Thought(""):
            continue
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            merged[-1] = Thought(last.text + part.text)
        elif isinstance(part, CallPiece) and isinstance(last, CallPiece) and part.call == last.call:
            merged[-1] = CallPiece(last.call, last.arguments + part.arguments, last.name)
        else:
            merged.append(part)
    return merged


async def fold_stream(events: AsyncIterable[Event]) -> Completion:
    """Add up the events of an answer that come one by one."""
    return fold_events([event async for event in events])
