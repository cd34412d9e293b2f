"""The events of `GET /v1/admin/live` as values, and as the bytes that are sent. docs/page-live.md explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from mlxr.core.live import KernelCalls, LiveChange, LiveState, MachineLimits, PageRecord, WatchedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(LiveState):
    """All there is to know."""

    time: float
    models: list[str]
    model: WatchedModel | None = None
    kernels: list[KernelCalls] = field(default_factory=list)
    limits: MachineLimits | None = None
    limits_hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(LiveChange):
    """What has changed in the `seconds` before `time`."""

    time: float
    seconds: float
    models: list[str] = field(default_factory=list)
    kernels: list[KernelCalls] = field(default_factory=list)
    limits: MachineLimits | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__ if name not in ("time", "seconds"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDetails(PageRecord):
    """One page of a model's cache, with the answers that hold it."""

    model: str
    group: int
    page: int


@dataclass(frozen=True, slots=True)
class LiveEvents:
    """The data of each event of the stream by the event's name."""

    snapshot: Snapshot
    change: Change


def parts_of(value: LiveState | LiveChange | PageRecord) -> dict[str, Any]:
    """The fields of `value` by name, as they are."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def write_snapshot(snapshot: Snapshot) -> bytes:
    """The frame of a snapshot."""
    return _write_frame("snapshot", _adapt(Snapshot).dump_json(snapshot))


def write_change(change: Change) -> bytes:
    """The frame of a change, without the sections in which nothing has changed."""
    return _write_frame("change", _adapt(Change).dump_json(change, exclude_defaults=True))


def write_page(details: PageDetails) -> bytes:
    """The body that tells about one page."""
    return _adapt(PageDetails).dump_json(details)


def write_limits(limits: MachineLimits) -> bytes:
    """The body that tells what the machine can do."""
    return _adapt(MachineLimits).dump_json(limits)


def _write_frame(event: str, data: bytes) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


@cache
def _adapt(kind: type[Any]) -> TypeAdapter[Any]:
    """What turns such values into JSON; made when the first is sent."""
    return TypeAdapter(kind)
