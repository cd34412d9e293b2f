"""The prefix index, which finds the cached pages that a new prompt can share.

A full page is named by a chained hash of all tokens up to its end, so equal names mean equal contents, to the bit, and
one look-up per page finds the longest run. Pages are integers here; the pager knows who holds them. Each group of
layers has an index of its own pages. All groups use the same keys, and `find_boundary` finds the longest prefix, in
whole pages, for which every group has what it needs. If a group needs all pages of a prefix, its index is `linked`: a
page is indexed only while the page before it is. If a window is enough, each page stands alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxr.core.frozen import frozen

KEY_BYTES = 32
MAX_CHANGES = 1 << 16


def hash_fields(*fields: bytes) -> bytes:
    """Return BLAKE2b-256 of `fields` and their lengths, so that different lists of fields hash different bytes."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


class PageKeys:
    """The keys of the full pages of one sequence. Each is computed once; they outlive the pages.

    `chain` has the key before the first page, then that of each page: key_i = BLAKE2b-256(key_(i-1) ‖ the page's tokens
    as little-endian int32). Tokens are only ever added to a sequence, so a key never changes. `extra(start, stop)` may
    return bytes that identify what the tokens in that range do not, such as images; they are hashed after the tokens,
    and such keys never equal keys without them.
    """

    def __init__(self, root: bytes, page_size: int, extra: Callable[[int, int], bytes] | None = None) -> None:
        self._page_size, self._extra = page_size, extra
        self.chain = [root]

    def cover(self, tokens: Sequence[int], pages: int) -> list[bytes]:
        """Return the keys of the first `pages` pages; `tokens` are the sequence's, and fill all these pages."""
        for page in range(len(self.chain) - 1, pages):
            ids = tokens[page * self._page_size : (page + 1) * self._page_size]
            packed = struct.pack(f"<{self._page_size}i", *ids)
            start = page * self._page_size
            more = b"" if self._extra is None else self._extra(start, start + self._page_size)
            person = b"mlxr-shown" if more else b""
            key = hashlib.blake2b(self.chain[-1] + packed + more, digest_size=KEY_BYTES, person=person)
            self.chain.append(key.digest())
        return self.chain[1 : pages + 1]

    def fork(self, pages: int) -> PageKeys:
        """Return the keys of a sequence that has the first `pages` pages in common and may then differ."""
        twin = PageKeys(self.chain[0], self._page_size, self._extra)
        twin.chain = self.chain[: pages + 1]
        return twin


@frozen
class NameChanges:
    """Keys of pages that were added and dropped between two readings; if `whole`, `added` are all keys there are."""

    added: list[bytes]
    dropped: list[bytes]
    whole: bool


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """An indexed page. `depth` counts the pages before it, `children` the indexed pages directly after it.

    `last_used` is the index's clock when the page was last taken or let go, `reuses` how often it was found. A page is
    `passed` if the last sequence to let go of it went on without it, since the page had left the window. `trails`
    counts the sequences for which this is a trailing snapshot, that is one to forget when all of them are a page
    further; it is 0 for any other entry.
    """

    key: bytes
    page: int
    parent: PrefixEntry | None
    depth: int
    children: int = 0
    last_used: int = 0
    reuses: int = 0
    passed: bool = False
    trails: int = 0


class PrefixIndex:
    """Entries by key and by page. The clock counts pages as they are added or found, not time.

    While somebody reads it, `changes` has the keys that were added (True) or removed (False) since it was emptied,
    without those that were both; otherwise it is None. It becomes None when it has more than MAX_CHANGES keys.
    """

    def __init__(self, *, linked: bool = True) -> None:
        self._linked = linked
        self._by_key: dict[bytes, PrefixEntry] = {}
        self._by_page: dict[int, PrefixEntry] = {}
        self.clock = 0
        self.changes: dict[bytes, bool] | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> PrefixEntry | None:
        """Return the entry named `key`, if there is one."""
        return self._by_key.get(key)

    def at(self, page: int) -> PrefixEntry | None:
        """Return the entry of `page`, if it is indexed."""
        return self._by_page.get(page)

    def add(self, key: bytes, parent_key: bytes, page: int, depth: int, *, is_brief: bool = False) -> PrefixEntry:
        """Index `page` as `key`, after `depth` pages, of which the last is named `parent_key`.

        The clock does not count a page that will be forgotten soon (`is_brief`).
        """
        if key in self._by_key or page in self._by_page:
            raise ValueError(f"page {page} or its key is indexed already")
        parent = self._by_key.get(parent_key) if self._linked else None
        self.clock += not is_brief
        entry = PrefixEntry(key, page, parent, depth, last_used=self.clock)
        self._by_key[key] = entry
        self._by_page[page] = entry
        if parent is not None:
            parent.children += 1
        self._note(key, is_there=True)
        return entry

    def reuse(self, entries: Sequence[PrefixEntry]) -> None:
        """Note that `entries` were found and taken."""
        self.clock += len(entries)
        for entry in entries:
            entry.last_used = self.clock
            entry.reuses += 1
            entry.passed, entry.trails = False, 0

    def let_go(self, entries: Iterable[PrefixEntry]) -> None:
        """Note that a holder of `entries` has just stopped using them."""
        self.clock += 1
        for entry in entries:
            entry.last_used = self.clock
            entry.passed = False

    def remove(self, entry: PrefixEntry) -> None:
        """Forget `entry`. Raises ValueError while pages after it are indexed."""
        if entry.children:
            raise ValueError(f"page {entry.page} is before {entry.children} other pages and cannot be forgotten")
        del self._by_key[entry.key], self._by_page[entry.page]
        if entry.parent is not None:
            entry.parent.children -= 1
        self._note(entry.key, is_there=False)

    def _note(self, key: bytes, *, is_there: bool) -> None:
        if self.changes is None:
            return
        if self.changes.get(key, is_there) is is_there:
            self.changes[key] = is_there
        else:
            del self.changes[key]
        if len(self.changes) > MAX_CHANGES:
            self.changes = None

    def check(self) -> None:
        """Check that keys, pages, parents and children agree; raises AssertionError."""
        children: dict[bytes, int] = {}
        for key, entry in self._by_key.items():
            if entry.key != key or self._by_page.get(entry.page) is not entry:
                raise AssertionError(f"page {entry.page} is not indexed under its own key")
            parent = entry.parent
            if parent is not None:
                if self._by_key.get(parent.key) is not parent:
                    raise AssertionError(f"page {entry.page} is indexed, page {parent.page} before it is not")
                children[parent.key] = children.get(parent.key, 0) + 1
            if self._linked and entry.depth != (0 if parent is None else parent.depth + 1):
                raise AssertionError(f"page {entry.page} says depth {entry.depth}")
            if not 0 <= entry.last_used <= self.clock:
                raise AssertionError(f"page {entry.page} was used at {entry.last_used}, it is {self.clock}")
        if len(self._by_page) != len(self._by_key):
            raise AssertionError(f"{len(self._by_page)} pages have {len(self._by_key)} keys")
        for entry in self._by_key.values():
            if entry.children != children.get(entry.key, 0):
                raise AssertionError(f"page {entry.page} counts {entry.children} pages that go on from it")


class Needs(Protocol):
    """The parts of a group that `find_boundary` reads; `CacheGroup` implements it."""

    @property
    def is_linked(self) -> bool:
        """True if a boundary needs all pages before it."""

    def first_needed(self, boundary: int) -> int:
        """Return the first of the pages before `boundary` that are needed to go on from there."""


@frozen
class Boundary:
    """A prefix of `pages` pages for which all groups have what they need; some group has it for `sought_pages`.

    `sought_pages` is at least `pages`; if it is more, `short_group` is the number of a group that lacks pages.
    """

    pages: int
    sought_pages: int
    short_group: int | None


def find_boundary(groups: Sequence[Needs], has: Callable[[int, int], bool], limit_pages: int) -> Boundary:
    """Return the longest boundary of at most `limit_pages`; `has(group, page)` is True if that group has that page.

    Groups that need all pages are scanned from the start, then the others backwards from the end of those. A page that
    is lacking there rules out all boundaries that need it, so the next boundary to try is just before it.
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
