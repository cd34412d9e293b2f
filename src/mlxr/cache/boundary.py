"""How far a text is known: the longest boundary between pages at which every group of layers has what it needs.

Integers only. `kv_cache` asks where pages are; here is what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Needs(Protocol):
    """What must be known of a group."""

    @property
    def is_linked(self) -> bool:
        """Whether all pages up to a boundary are needed there."""

    def first_needed(self, boundary: int) -> int:
        """The first of the pages before `boundary` that are needed to go on from there."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """All groups have what they need after `pages` pages; one of them had it after `sought_pages`, at least as many.

    `short_group` is the number of the group that did not, if one did not.
    """

    pages: int
    sought_pages: int
    short_group: int | None


def find_boundary(groups: Sequence[Needs], has: Callable[[int, int], bool], limit_pages: int) -> Boundary:
    """The longest boundary of at most `limit_pages`; `has` tells whether a group has a page, both by number.

    Groups that need all pages are scanned from the start, then the others backwards from where those end: a page that
    is lacking there rules out all boundaries that need it, and the next one to try is just before it.
    """
    runs = {}
    for number, group in enumerate(groups):
        if group.is_linked:
            pages = 0
            while pages < limit_pages and has(number, pages):
                pages += 1
            runs[number] = pages
    boundary, sought_pages = min(runs.values(), default=limit_pages), max(runs.values(), default=0)
    short_group = min(runs, key=runs.__getitem__) if boundary < sought_pages else None
    windows = [(number, group) for number, group in enumerate(groups) if not group.is_linked]
    while boundary:
        for number, group in windows:
            first = group.first_needed(boundary)
            lacking = next((place for place in range(boundary - 1, first - 1, -1) if not has(number, place)), None)
            if lacking is not None:
                boundary, short_group = lacking, number
                break
        else:
            break
    return Boundary(boundary, max(boundary, sought_pages), short_group if boundary < sought_pages else None)
