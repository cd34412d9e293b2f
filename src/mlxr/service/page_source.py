"""Where pages of a prompt may come from that was computed elsewhere. Knows no network and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Brought(Protocol):
    """Pages that wait to be taken."""

    def close(self) -> None:
        """Drop those that nobody has taken. May be called more than once."""


class PageSource(Protocol):
    """Somebody who may have pages that are lacking here."""

    async def bring(self, names: Sequence[bytes]) -> Brought | None:
        """Bring what there is of the pages `names`; None if nothing was done. Never fails because pages do not come."""
