"""The hooks by which a cluster reaches into the server of one machine, where nobody sets them. There are three:

* `RequestHooks`, in the state of a request: it asks only which pages its prompt fills, or says who may have some.
* `identity.use_identity`, around a request: whoever makes it again elsewhere gets the same ids, times and seeds.
* `Session.engine`, whose `cache` lends pages and takes in those of others through its `peers`, and whose `read_report`
  says what there is to do.

Everything else about several replicas is in `mlxr.cluster`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
