"""The ids, times and seeds that would differ between two runs of one request, and a cluster's hooks in a server.

A caller that may have to repeat a request, and continue the second answer where the first broke off, gives both the
same `Identity`. While one is in use, ids of replies, times, and seeds that the request leaves open are drawn from it,
so both answers are the same text. Without one, ids cannot be guessed and times are those of the clock.

A cluster has three hooks: `RequestHooks`, in the state of a request, ask only which pages its prompt fills, or name a
source of pages; `use_identity` goes around a request; and `Session.engine`, whose `cache` lends pages and takes in
those of others through its `peers`, and whose `read_report` tells its load. All else is in `mlxr.cluster`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import field
from random import Random
from typing import Any, Protocol

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen

SEED_BITS = 64


@frozen
class Identity:
    """`seed` decides all ids, and the seed of an answer whose request gives none; `created_s` is the request's time.

    A seed that cannot be guessed gives ids that cannot be guessed either.
    """

    seed: int
    created_s: float
    _streams: dict[str, Random] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def draw(cls) -> Identity:
        """Return a new identity, with a random seed and the current time."""
        return cls(secrets.randbits(SEED_BITS), time.time())

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Read what `str` wrote; raises InvalidRequest."""
        seed, _, created = text.partition("@")
        try:
            return cls(int(seed[:20]), float(created[:32]))
        except ValueError:
            raise InvalidRequest("identity", f"must be SEED@SECONDS, not {text[:60]!r}") from None

    def __str__(self) -> str:
        return f"{self.seed}@{self.created_s!r}"

    def draw_hex(self, count: int, purpose: str) -> str:
        """Return `count` bytes in hexadecimal digits; each `purpose` has a sequence of its own."""
        stream = self._streams.setdefault(purpose, Random(f"{self.seed} {purpose}"))
        return stream.randbytes(count).hex()


_current: ContextVar[Identity | None] = ContextVar("identity", default=None)


def current_identity() -> Identity | None:
    """Return the identity in use, None outside of `use_identity`."""
    return _current.get()


class use_identity:  # noqa: N801 - used as a function; a class, since this is entered with each token
    """Inside this context, the task's ids, times and seeds come from `identity`."""

    __slots__ = ("_identity", "_token")

    def __init__(self, identity: Identity | None) -> None:
        self._identity = identity

    def __enter__(self) -> None:
        self._token = _current.set(self._identity)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def draw_hex(count: int, purpose: str) -> str:
    """Return `count` bytes in hexadecimal digits, for an id: from the identity in use, or else from the system."""
    identity = _current.get()
    return secrets.token_hex(count) if identity is None else identity.draw_hex(count, purpose)


def read_clock() -> float:
    """Return seconds since 1970: the time of the identity in use, or else now."""
    identity = _current.get()
    return time.time() if identity is None else identity.created_s


STATE_KEY = "cluster_hooks"  # in the state of a request's scope


class Brought(Protocol):
    """Pages that were brought and wait to be taken."""

    def close(self) -> None:
        """Drop the pages that were not taken. May be called more than once."""


class PageSource(Protocol):
    """A source of cache pages that are missing here, such as another server of the cluster."""

    async def bring(self, names: Sequence[bytes]) -> Brought | None:
        """Bring those of the pages `names` that there are; None if nothing was done. Missing pages are no error."""


@frozen
class RequestHooks:
    """A cluster's instructions for one request."""

    is_plan: bool = False  # raise `Planned` instead of answering
    source: PageSource | None = None  # may have pages of the prompt


NO_HOOKS = RequestHooks()


def find_hooks(state: Mapping[str, Any]) -> RequestHooks:
    """Return the hooks in the state of a request's scope."""
    hooks: RequestHooks = state.get(STATE_KEY, NO_HOOKS)
    return hooks


@frozen
class PageNames:
    """A prompt of `tokens` tokens and the names of the pages that it fills, of `page_size` tokens each."""

    keys: list[bytes]
    tokens: int
    page_size: int


class Planned(Exception):  # the answer to a request that only wants to know
    """The request is not computed, since it asks only which pages its prompt fills."""

    def __init__(self, names: PageNames) -> None:
        super().__init__("the request is only planned")
        self.names = names
