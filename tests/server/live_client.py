"""A watcher for tests: reads the live stream of a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from live_view import Json, LiveView


@contextmanager
def watch(client: httpx.Client, **params: str) -> Iterator[Iterator[tuple[str, Json]]]:
    """Watch a live stream; yields its events."""
    with client.stream("GET", "/v1/admin/live", params=params) as response:
        assert response.status_code == 200, response.read()
        yield read_events(response)


def read_events(response: httpx.Response) -> Iterator[tuple[str, Json]]:
    """Each event's name and data."""
    event = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield event, json.loads(line.removeprefix("data: "))


def follow(events: Iterator[tuple[str, Json]], is_done: Callable[[LiveView], bool]) -> LiveView:
    """Apply events until `is_done`; return the view."""
    view = LiveView()
    for event, data in events:
        view.apply(event, data)
        if is_done(view):
            return view
    raise AssertionError("the stream ended before that happened")
