"""The table of the pages that replicas hold: a dictionary from page keys to replicas, kept up to date by reports.

A page's key is the chained hash of all tokens up to its end (`cache/prefix.py`), so a replica that holds the last key
of a prefix holds the prefix. Keys are cut to 8 bytes here: some two of n pages have the same cut key with a probability
of n² / 2^65, that is 4 in 10^7 for four million pages. The only harm then is a request that finds less in the cache
than expected, because replicas look up their pages by the full key.

A page is known because its replica reported it, or it is expected because a request that computes it was sent there.
Expected pages that are not reported in time are forgotten. Reports are numbered. If one is missing, the table may be
wrong until the replica has sent a whole list; that costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from mlxr.core.frozen import frozen

KEY_BYTES = 8


@frozen
class PageDelta:
    """The changes in a replica's cache since the report before, or, if `whole`, all its pages (`added`).

    Reports of a replica are numbered from 0 on. A page that came and went in between, or went and came, is in neither.
    """

    sequence: int
    added: Sequence[bytes]
    dropped: Sequence[bytes] = ()
    whole: bool = False


@dataclass(slots=True)
class _Pages:
    """One replica's cut keys. `reported` and `expected` (key to the time when it is given up) share no key."""

    reported: set[bytes] = field(default_factory=set)
    expected: dict[bytes, float] = field(default_factory=dict)
    promises: deque[tuple[float, list[bytes]]] = field(default_factory=deque)  # expected keys, the earliest time first
    sequence: int = -1
    wants_whole: bool = False


class PrefixTable:
    """Replicas by the pages they hold. `seed` is for drawing some of many holders of a popular page."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._replicas: dict[str, _Pages] = {}
        self._holders: dict[bytes, str | list[str]] = {}  # most pages have one holder, which is kept without a list

    def __len__(self) -> int:
        """The number of different pages that are known."""
        return len(self._holders)

    def add(self, replica: str) -> None:
        """Add a replica without pages."""
        self._replicas[replica] = _Pages()

    def remove(self, replica: str) -> None:
        """Forget a replica and its pages. Costs a look-up per page."""
        pages = self._replicas.pop(replica)
        for key in (*pages.reported, *pages.expected):
            self._release(key, replica)

    def wants_whole(self, replica: str) -> bool:
        """Return True if a report is missing, so that the replica should send all its pages."""
        return self._replicas[replica].wants_whole

    def apply(self, replica: str, delta: PageDelta) -> None:
        """Take in a report. Old ones change nothing; one that comes after a gap still counts.

        A whole list is taken if it is newer or one is wanted. Number 0 means that the replica has begun anew. If this
        lets an old list through, the next report shows a gap again.
        """
        pages = self._replicas[replica]
        if delta.whole:
            if delta.sequence > pages.sequence or pages.wants_whole or delta.sequence == 0:
                self._replace(replica, pages, {key[:KEY_BYTES] for key in delta.added})
                pages.sequence, pages.wants_whole = delta.sequence, False
            return
        if delta.sequence <= pages.sequence:
            return
        if delta.sequence != pages.sequence + 1:
            pages.wants_whole = True
        pages.sequence = delta.sequence
        self._report(replica, pages, delta.added)
        for key in delta.dropped:
            cut = key[:KEY_BYTES]
            if cut in pages.reported:
                pages.reported.remove(cut)
                self._release(cut, replica)

    def expect(self, replica: str, keys: Iterable[bytes], until_s: float) -> None:
        """Note that a request was sent that will leave the pages `keys` there; they count until `until_s` at least."""
        pages = self._replicas[replica]
        if pages.promises:
            until_s = max(until_s, pages.promises[-1][0])
        promised = []
        for key in keys:
            cut = key[:KEY_BYTES]
            if cut in pages.reported:
                continue
            if cut not in pages.expected:
                self._hold(cut, replica)
            pages.expected[cut] = until_s
            promised.append(cut)
        if promised:
            pages.promises.append((until_s, promised))

    def expire(self, replica: str, now_s: float) -> None:
        """Forget the pages that were expected there before `now_s` and did not come."""
        pages = self._replicas[replica]
        while pages.promises and pages.promises[0][0] <= now_s:
            for key in pages.promises.popleft()[1]:
                if pages.expected.get(key, now_s + 1) <= now_s:
                    del pages.expected[key]
                    self._release(key, replica)

    def find(self, keys: Sequence[bytes], limit: int) -> dict[str, int]:
        """At most `limit` replicas that hold some of the pages `keys`, with how many; those that hold most come first.

        Costs a few look-ups, however many replicas there are: a replica that holds a page holds those before it, so
        each key's holders are among those of the key before, and a bisection finds the keys where they become more.
        """
        found: dict[str, int] = {}
        pages = len(keys)
        while pages:
            holders = self._holders.get(keys[pages - 1][:KEY_BYTES])
            if isinstance(holders, str):
                found.setdefault(holders, pages)
            elif holders is not None:
                for replica in self._draw(holders, limit):
                    found.setdefault(replica, pages)
            pages = self._find_more(keys, pages - 1, len(found)) if len(found) < limit else 0
        return found

    def _find_more(self, keys: Sequence[bytes], at_most: int, count: int) -> int:
        """The place (from 1) of the last of the first `at_most` keys that has more holders than `count`; 0 for none."""
        get, low, high = self._holders.get, 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            holders = get(keys[middle - 1][:KEY_BYTES])
            if holders is not None and (not count or (not isinstance(holders, str) and len(holders) > count)):
                low = middle
            else:
                high = middle - 1
        return low

    def count_pages(self, replica: str, keys: Sequence[bytes], at_most: int, *, is_reported: bool = False) -> int:
        """Count by bisection those of the first `at_most` pages that the replica holds (`is_reported`: reported)."""
        pages = self._replicas[replica]
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            cut = keys[middle - 1][:KEY_BYTES]
            if cut in pages.reported or (cut in pages.expected and not is_reported):
                low = middle
            else:
                high = middle - 1
        return low

    def check(self) -> None:
        """Check that holders and the replicas' own pages agree; raises AssertionError."""
        held: dict[bytes, list[str]] = {}
        for name, pages in self._replicas.items():
            if not pages.reported.isdisjoint(pages.expected):
                raise AssertionError(f"{name}: a page is both reported and expected")
            times = [until_s for until_s, _ in pages.promises]
            if times != sorted(times):
                raise AssertionError(f"{name}: promises are out of order")
            if not pages.expected.keys() <= {key for _, keys in pages.promises for key in keys}:
                raise AssertionError(f"{name}: a page is expected for ever")
            for key in (*pages.reported, *pages.expected):
                held.setdefault(key, []).append(name)
        for key, holders in self._holders.items():
            names = [holders] if isinstance(holders, str) else holders
            if sorted(names) != sorted(held.get(key, [])) or (len(names) == 1) != isinstance(holders, str):
                raise AssertionError(f"page {key.hex()} has holders {names}, {held.get(key)} hold it")
        if len(held) != len(self._holders):
            raise AssertionError(f"{len(held)} pages are held, {len(self._holders)} have holders")

    def _draw(self, holders: list[str], limit: int) -> list[str]:
        """All `holders`, or `limit` neighbours among them from a random place."""
        if len(holders) <= limit:
            return holders
        start = int(self._random.random() * len(holders))
        drawn = holders[start : start + limit]
        return drawn + holders[: limit - len(drawn)]

    def _report(self, replica: str, pages: _Pages, keys: Iterable[bytes]) -> None:
        for key in keys:
            cut = key[:KEY_BYTES]
            if cut in pages.reported:
                continue
            pages.reported.add(cut)
            if pages.expected.pop(cut, None) is None:
                self._hold(cut, replica)

    def _replace(self, replica: str, pages: _Pages, reported: set[bytes]) -> None:
        for key in pages.reported - reported:
            pages.reported.remove(key)
            self._release(key, replica)
        self._report(replica, pages, reported)

    def _hold(self, key: bytes, replica: str) -> None:
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = replica
        elif isinstance(holders, str):
            self._holders[key] = [holders, replica]
        else:
            holders.append(replica)

    def _release(self, key: bytes, replica: str) -> None:
        holders = self._holders[key]
        if isinstance(holders, str):
            del self._holders[key]
            return
        holders.remove(replica)
        if len(holders) == 1:
            self._holders[key] = holders[0]
