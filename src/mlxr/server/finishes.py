"""Answers that end without being one: what is an error to the client, whatever dialect it speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence

from mlxr.core.events import Event, Finish
from mlxr.core.types import FinishReason
from mlxr.server.errors import ServerError
from mlxr.server.generation import Generation


def find_failure(event: Event) -> ServerError | None:
    """The error that `event` is: the end of an answer that failed, ran out of time or was cancelled by the server."""
    if not isinstance(event, Finish):
        return None
    if event.reason is FinishReason.ERROR:
        return ServerError(500, "internal", f"the answer failed: {event.error or 'no reason is known'}")
    if event.reason is FinishReason.DEADLINE:
        return ServerError(504, "deadline", "the answer was not finished within the time that the request may take")
    if event.reason is FinishReason.CANCELLED:
        return ServerError(503, "cancelled", "the answer was cancelled by the server", retry_after_s=1.0)
    return None


def check_events(events: Iterable[Event]) -> Iterator[Event]:
    """The events as they come; raises ServerError at one that is a failure."""
    for event in events:
        failure = find_failure(event)
        if failure is not None:
            raise failure
        yield event


async def take_batches(generation: Generation) -> AsyncGenerator[Sequence[Event], None]:
    """All events, those together that are there at the same time."""
    while events := await generation.take():
        yield events


async def write_frames(
    batches: AsyncIterator[Sequence[Event]], render: Callable[[Event], Iterable[bytes]]
) -> AsyncGenerator[bytes, None]:
    """The frames of all events, those of a batch as one; raises ServerError after the frames before a failure."""
    async for events in batches:
        frames: list[bytes] = []
        failure = None
        for event in events:
            failure = find_failure(event)
            if failure is not None:
                break
            frames.extend(render(event))
        if frames:
            yield b"".join(frames)
        if failure is not None:
            raise failure
