"""How much may be asked: bytes of a body and the time that it takes to come, requests per minute.

The queue has its own bound in the engine (`max_waiting`), and time has `request_deadline_s`. Knows no dialect; refusals
are ServerErrors.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

from starlette.types import Message, Receive

from mlxr.server.errors import ServerError

MAX_CALLERS = 10_000


class RateLimit:
    """A bucket for each caller that holds `per_minute` requests and fills again evenly; 0 is no limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller → (left, when)

    def take(self, caller: str) -> None:
        """Count one request; raises ServerError 429 with the time until there is room for it."""
        if not self._per_minute:
            return
        now_s, per_s = self._clock(), self._per_minute / 60
        left, then_s = self._buckets.pop(caller, (float(self._per_minute), now_s))
        left = min(float(self._per_minute), left + (now_s - then_s) * per_s)
        self._buckets[caller] = (left - 1 if left >= 1 else left, now_s)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        if left < 1:
            message = f"more than {self._per_minute} requests per minute; see the setting requests_per_minute"
            raise ServerError(429, "rate_limited", message, retry_after_s=(1 - left) / per_s)


def check_length(content_length: str | None, limit_bytes: int) -> None:
    """Raise ServerError 413 for a body that says itself that it is too large."""
    if content_length is not None and content_length.isdigit() and int(content_length[:20]) > limit_bytes:
        raise ServerError(413, "too_large", _explain(limit_bytes), "body")


def bound_body(receive: Receive, limit_bytes: int, timeout_s: float) -> Receive:
    """`receive`, until the body has more than `limit_bytes` or takes longer than `timeout_s`."""
    seen_bytes, end_s, is_whole = 0, monotonic() + timeout_s, False

    async def receive_bounded() -> Message:
        nonlocal seen_bytes, is_whole
        if is_whole:  # what comes now is the end of the connection
            return await receive()
        message = await _receive_within(receive, end_s - monotonic(), timeout_s)
        if message["type"] == "http.request":
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > limit_bytes:
                raise ServerError(413, "too_large", _explain(limit_bytes), "body")
            is_whole = not message.get("more_body", False)
        return message

    return receive_bounded


def bound_silence(receive: Receive, timeout_s: float) -> Receive:
    """`receive`, until nothing of the body has come for `timeout_s`. For bodies that are files, of any size."""
    is_whole = False

    async def receive_bounded() -> Message:
        nonlocal is_whole
        message = await (receive() if is_whole else _receive_within(receive, timeout_s, timeout_s))
        is_whole = is_whole or not message.get("more_body", False)
        return message

    return receive_bounded


async def _receive_within(receive: Receive, seconds: float, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(seconds):
            return await receive()
    except TimeoutError:
        message = f"the request did not arrive within {timeout_s:g} s; see the setting request_timeout_s"
        raise ServerError(408, "timeout", message) from None


def _explain(limit_bytes: int) -> str:
    return f"the body is larger than {limit_bytes} bytes; see the setting max_body_bytes"
