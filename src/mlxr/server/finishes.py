"""Answers that end without being one: what is an error to the client, whatever dialect it speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from mlxr.core.events import Event, Finish
from mlxr.core.types import FinishReason
from mlxr.server.errors import ServerError


def check_finish(event: Event) -> None:
    """Raise ServerError when `event` ends an answer that failed, ran out of time or was cancelled by the server."""
    if not isinstance(event, Finish):
        return
    if event.reason is FinishReason.ERROR:
        raise ServerError(500, "internal", f"the answer failed: {event.error or 'no reason is known'}")
    if event.reason is FinishReason.DEADLINE:
        raise ServerError(504, "deadline", "the answer was not finished within the time that the request may take")
    if event.reason is FinishReason.CANCELLED:
        raise ServerError(503, "cancelled", "the answer was cancelled by the server", retry_after_s=1.0)


def check_events(events: Iterable[Event]) -> Iterator[Event]:
    """The events as they come, until one of them is such an end."""
    for event in events:
        check_finish(event)
        yield event


async def check_stream(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """As `check_events`, for events that are still to come."""
    async for event in events:
        check_finish(event)
        yield event
