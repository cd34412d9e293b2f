"""The pages of one sequence, in order: position p lies in page p // page_size of the table.

Integers only. A table is filled in two moves: `prepare` makes room for the next positions, `commit` counts them once
their keys and values are really written, so that a step that failed halfway can be repeated or dropped. `fork` shares
the pages; a page that is shared, or whose contents are kept, is copied when one of its holders is about to write into
it, and `prepare` tells which.

A `PageTable` is that of one group of layers. Where positions see a window only, `slide` gives back the pages before it;
their places stay, and hold RELEASED. A `SequenceTable` has the tables of all groups, which grow together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.cache.pager import Pager
from mlxr.cache.prefix import PageKeys

RELEASED = -1


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The contents of page `source` of a group must be copied to page `target` before anything else is written."""

    source: int
    target: int
    group: int = 0


class PageTable:
    """Page ids of one sequence in one group; `length_tokens` positions are written, pages before `first` released."""

    __slots__ = ("_pager", "first", "length_tokens", "pages")

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.pages: list[int] = []
        self.first = 0
        self.length_tokens = 0

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        return self._pager.page_size

    @property
    def held_pages(self) -> list[int]:
        """The pages that the table holds, in order."""
        return self.pages[self.first :]

    def count_held(self) -> int:
        """How many pages the table holds."""
        return len(self.pages) - self.first

    def missing_pages(self, tokens: int) -> int:
        """Pages that `prepare` would allocate for `tokens` more positions, copies included."""
        missing = max(0, self._pager.pages_for(self.length_tokens + tokens) - len(self.pages))
        return missing + (tokens > 0 and self._shared_tail() is not None)

    def has_room(self, tokens: int) -> bool:
        """Whether `prepare` would have nothing to do for `tokens` more positions, of which there is one at least."""
        pages, (index, offset) = self.pages, divmod(self.length_tokens, self._pager.page_size)
        if self.length_tokens + tokens > len(pages) * self._pager.page_size:
            return False
        return not offset or self._pager.is_own(pages[index])

    def prepare(self, tokens: int) -> list[PageCopy]:
        """Make room to write `tokens` more positions; returns the copies to do first (see PageCopy).

        Asking twice is the same as asking once. Raises OutOfPages, with nothing changed, when pages are missing.
        """
        fresh = self._pager.allocate(self.missing_pages(tokens))
        shared = self._shared_tail() if tokens > 0 else None
        copies = []
        if shared is not None:
            copies.append(PageCopy(self.pages[shared], fresh.pop()))
            self._pager.release([copies[0].source])
            self.pages[shared] = copies[0].target
        self.pages.extend(fresh)
        return copies

    def _shared_tail(self) -> int | None:
        """Index of the half-written last page if it is not this table's alone; no other page can be written again.

        A page may be half-written here and full, hence kept, for a twin that went on writing into it.
        """
        index, offset = divmod(self.length_tokens, self.page_size)
        if not offset:
            return None
        return None if self._pager.is_own(self.pages[index]) else index

    def commit(self, tokens: int) -> None:
        """Count `tokens` more positions as written; `prepare` must have made room for them."""
        if self._pager.pages_for(self.length_tokens + tokens) > len(self.pages):
            raise ValueError(f"{tokens} tokens after {self.length_tokens} do not fit in {len(self.pages)} pages")
        self.length_tokens += tokens

    def slide(self, first: int) -> list[int]:
        """Forget the pages before number `first`, all of them full; returns those that are the caller's to release."""
        passed = self.pages[self.first : first]
        self.pages[self.first : first] = [RELEASED] * len(passed)
        self.first = max(self.first, first)
        return passed

    def fork(self) -> PageTable:
        """A table with the same written positions, on the same pages."""
        twin = PageTable(self._pager)
        twin.pages = self.pages[: self._pager.pages_for(self.length_tokens)]
        twin.length_tokens, twin.first = self.length_tokens, self.first
        self._pager.retain(twin.held_pages)
        return twin

    def release(self) -> None:
        """Give all pages back; the table is empty afterwards and may be filled again."""
        self._pager.release(self.held_pages)
        self.pages = []
        self.first = self.length_tokens = 0


class SequenceTable:
    """The tables of one sequence, one for each group, at least one; all have the same positions written.

    `keys` belong to the prefix index: they name the full pages, and may know more pages than are written; None without
    an index. `sought_pages` is how far some group knew the sequence when the table was opened, if that was further than
    all groups did. `opened_ns` belongs to the store: all pages of a table count as used then while it grows.
    """

    __slots__ = ("groups", "keys", "opened_ns", "sought_pages")

    def __init__(self, groups: Sequence[PageTable], keys: PageKeys | None = None) -> None:
        self.groups = tuple(groups)
        self.keys = keys
        self.opened_ns = 0
        self.sought_pages = 0

    @property
    def page_size(self) -> int:
        """Token positions in a page, the same in all groups."""
        return self.groups[0].page_size

    @property
    def length_tokens(self) -> int:
        """Positions that are written."""
        return self.groups[0].length_tokens

    @property
    def full_pages(self) -> int:
        """Pages that are written to their ends."""
        return self.length_tokens // self.page_size

    @property
    def holds_pages(self) -> bool:
        """Whether any page is held."""
        return any(table.pages for table in self.groups)

    @property
    def held_pages(self) -> tuple[int, ...]:
        """How many pages are held in each group."""
        return tuple(table.count_held() for table in self.groups)

    def has_room(self, tokens: int) -> bool:
        """Whether every group has room for `tokens` more positions, of which there is one at least."""
        return all(table.has_room(tokens) for table in self.groups)

    def commit(self, tokens: int) -> None:
        """Count `tokens` more positions as written in every group."""
        for table in self.groups:
            table.commit(tokens)

    def fork(self) -> SequenceTable:
        """A table with the same written positions, on the same pages."""
        keys = None if self.keys is None else self.keys.fork(self.full_pages)
        twin = SequenceTable([table.fork() for table in self.groups], keys)
        twin.opened_ns, twin.sought_pages = self.opened_ns, self.sought_pages
        return twin
