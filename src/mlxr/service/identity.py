"""What would differ between two runs of one request: ids of replies, times, and seeds that nobody asked for.

Someone who may have to make a request again, and go on with the second answer where the first broke off, gives both the
same `Identity`. While one is in use, everything here is drawn from it, so that both answers are the same text. Without
one, ids cannot be guessed and times are those of the clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random

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


@contextmanager
def use_identity(identity: Identity | None) -> Iterator[None]:
    """Within, this task's ids, times and seeds come from `identity`."""
    token = _current.set(identity)
    try:
        yield
    finally:
        _current.reset(token)


def draw_hex(count: int, purpose: str) -> str:
    """`count` bytes in hexadecimal digits, for an id: from the identity in use, or else from the system."""
    identity = _current.get()
    return secrets.token_hex(count) if identity is None else identity.draw_hex(count, purpose)


def read_clock() -> float:
    """Seconds since 1970: when the request of the identity in use came, or else now."""
    identity = _current.get()
    return time.time() if identity is None else identity.created_s
