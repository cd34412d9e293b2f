"""The requests that are in flight: one row each, for logs, metrics and the admin routes.

A row is made when a request arrives and lives in its scope; what the request borrows or starts is kept on the row's
exit stack, which is closed when the request ends, however it ends. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from ipaddress import ip_address
from time import monotonic

from starlette.requests import HTTPConnection
from starlette.types import Scope

from mlxr.server.errors import ServerError


@dataclass(slots=True)
class InFlight:
    """One request, from its arrival to its end."""

    id: str  # in the log, and in the header x-request-id
    method: str
    path: str
    client: str  # an address
    stack: AsyncExitStack  # closed when the request ends, with what it borrowed or started
    arrived_s: float = field(default_factory=monotonic)  # by the monotonic clock, as all times here
    route: str = "unknown"  # the template of the path
    peer: str = ""  # counts its share of the engine, see `_name_peer`
    key_id: str | None = None  # of the key that it brought
    model: str | None = None  # that it borrowed
    adapter: str | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    ignored: list[str] = field(default_factory=list)  # fields of its body that have no effect, see `note_ignored`
    failure: ServerError | None = None  # why it was refused or failed
    is_gone: bool = False  # the client closed the connection before it had its answer
    cancels: list[Callable[[], None]] = field(default_factory=list)  # end its answers at the next step
    thought_ends: list[Callable[[], None]] = field(default_factory=list)  # close the thoughts of its answers
    reply_id: str | None = None  # what the reply calls itself
    task: asyncio.Task[object] | None = None  # what serves it
    is_cut_off: bool = False  # by a server that stops

    def cancel(self) -> None:
        """End all answers that grow."""
        for cancel in self.cancels:
            cancel()

    def cut_off(self) -> None:
        """End the request for a server that stops: its answers, or else whatever it waits for."""
        if self.cancels:
            self.cancel()
        elif self.task is not None:
            self.is_cut_off = True
            self.task.cancel()


class Activity:
    """All requests in flight by id."""

    def __init__(self) -> None:
        self._rows: dict[str, InFlight] = {}

    def __iter__(self) -> Iterator[InFlight]:
        return iter(list(self._rows.values()))

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, scope: Scope, wanted_id: str | None, stack: AsyncExitStack) -> InFlight:
        """The row of a new request, also put into its scope; its id is `wanted_id` where that is free and plain."""
        request_id = wanted_id if wanted_id and self._is_usable(wanted_id) else f"{random.getrandbits(64):016x}"
        client = scope.get("client")
        row = InFlight(request_id, scope["method"], scope["path"], client[0] if client else "local", stack)
        row.peer = _name_peer(client, request_id)
        row.task = asyncio.current_task()
        self._rows[request_id] = row
        scope.setdefault("state", {})["in_flight"] = row
        return row

    def close(self, row: InFlight) -> None:
        """Take out the row of a request that has ended."""
        self._rows.pop(row.id, None)

    def find(self, request_id: str) -> InFlight | None:
        """The row of a request, by its id or by that of its reply; None when there is none such."""
        found = self._rows.get(request_id)
        return found or next((row for row in self if row.reply_id == request_id), None)

    def end_thoughts(self, request_id: str, key_id: str | None, field: str) -> None:
        """Close the thoughts of a request that came with the same key, so that the model answers.

        Raises ServerError naming `field` where there are none.
        """
        row = self.find(request_id)
        if row is None or row.key_id != key_id:
            raise ServerError(404, "not_found", f"there is no request {request_id[:100]} in flight", field)
        if not row.thought_ends:
            reason = f"the answers to {request_id[:100]} have no thoughts to end"
            raise ServerError(400, "invalid_request", f"{field}: {reason}", field)
        for end in row.thought_ends:
            end()

    def cut_off_all(self) -> None:
        """End all requests for a server that stops."""
        for row in self:
            row.cut_off()

    def _is_usable(self, request_id: str) -> bool:
        plain = request_id.isascii() and request_id.replace("-", "").replace("_", "").isalnum()
        return plain and len(request_id) <= 64 and request_id not in self._rows


def in_flight(connection: HTTPConnection) -> InFlight:
    """The row of the request that is being served."""
    row = connection.scope["state"]["in_flight"]
    assert isinstance(row, InFlight)
    return row


def _name_peer(client: tuple[str, int] | None, request_id: str) -> str:
    """Return who asks, as far as that can be told: an address; on this machine, where all share one, a connection."""
    if client is None:
        return request_id  # a Unix socket, whose connections have no names
    address, port = client
    try:
        is_shared = ip_address(address).is_loopback
    except ValueError:
        is_shared = True
    return f"{address}:{port}" if is_shared else address
