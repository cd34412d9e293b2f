"""What would differ between two runs of one request, and the hooks by which a cluster reaches into a server.

Someone who may have to make a request again, and go on with the second answer where the first broke off, gives both the
same `Identity`. While one is in use, ids of replies, times, and seeds that nobody asked for are drawn from it, so that
both answers are the same text. Without one, ids cannot be guessed and times are those of the clock.

A cluster has three hooks: `RequestHooks`, in the state of a request, ask only which pages its prompt fills, or say who
may have some; `use_identity`, around a request; and `Session.engine`, whose `cache` lends pages and takes in those of
others through its `peers`, and whose `read_report` says what there is to do. All else is in `mlxr.cluster`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from mlxr.core.errors import InvalidRequest

SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """`seed` decides all ids and the seed of an answer that has none; `created_s` is when the request came.

    A seed that cannot be guessed gives ids that cannot be guessed either.
    """

    seed: int
    created_s: float
    _streams: dict[str, Random] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def draw(cls) -> Identity:
        """A new one, of now."""
        return cls(secrets.randbits(SEED_BITS), time.time())

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Reverses `str`; raises InvalidRequest."""
        seed, _, created = text.partition("@")
        try:
            return cls(int(seed[:20]), float(created[:32]))
        except ValueError:
            raise InvalidRequest("identity", f"must be SEED@SECONDS, not {text[:60]!r}") from None

    def __str__(self) -> str:
        return f"{self.seed}@{self.created_s!r}"

    def draw_hex(self, count: int, purpose: str) -> str:
        """`count` bytes in hexadecimal digits: the next ones for `purpose`, whatever is drawn for other purposes."""
        stream = self._streams.setdefault(purpose, Random(f"{self.seed} {purpose}"))
        return stream.randbytes(count).hex()


_current: ContextVar[Identity | None] = ContextVar("identity", default=None)


def current_identity() -> Identity | None:
    """The identity in use, None outside of `use_identity`."""
    return _current.get()


class use_identity:  # noqa: N801 - used as a function; a class, since this is entered with each token
    """Within, this task's ids, times and seeds come from `identity`."""

    __slots__ = ("_identity", "_token")

    def __init__(self, identity: Identity | None) -> None:
        self._identity = identity

    def __enter__(self) -> None:
        self._token = _current.set(self._identity)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def draw_hex(count: int, purpose: str) -> str:
    """`count` bytes in hexadecimal digits, for an id: from the identity in use, or else from the system."""
    identity = _current.get()
    return secrets.token_hex(count) if identity is None else identity.draw_hex(count, purpose)


def read_clock() -> float:
    """Seconds since 1970: when the request of the identity in use came, or else now."""
    identity = _current.get()
    return time.time() if identity is None else identity.created_s


STATE_KEY = "cluster_hooks"  # in the state of a request's scope


class Brought(Protocol):
    """Pages that wait to be taken."""

    def close(self) -> None:
        """Drop those that nobody has taken. May be called more than once."""


class PageSource(Protocol):
    """Somebody who may have pages that are lacking here."""

    async def bring(self, names: Sequence[bytes]) -> Brought | None:
        """Bring what there is of the pages `names`; None if nothing was done. Never fails because pages do not come."""


@dataclass(frozen=True, slots=True)
class RequestHooks:
    """What a cluster wants of one request."""

    is_plan: bool = False  # no answer but `Planned`
    source: PageSource | None = None  # who may have pages of the prompt


NO_HOOKS = RequestHooks()


def find_hooks(state: Mapping[str, Any]) -> RequestHooks:
    """Return the hooks in the state of a request's scope."""
    hooks: RequestHooks = state.get(STATE_KEY, NO_HOOKS)
    return hooks


@dataclass(frozen=True, slots=True)
class PageNames:
    """A prompt of `tokens` tokens and the names of the pages that it fills, of `page_size` tokens each."""

    keys: list[bytes]
    tokens: int
    page_size: int


class Planned(Exception):  # the answer to a request that only wants to know
    """The request is not computed, as it asks only which pages its prompt fills."""

    def __init__(self, names: PageNames) -> None:
        super().__init__("the request is only planned")
        self.names = names
