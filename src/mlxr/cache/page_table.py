"""The pages of one sequence, in order: position p lies in page p // page_size of the table.

Integers only. A table is filled in two moves: `prepare` makes room for the next positions, `commit` counts them once
their keys and values are really written, so that a step that failed halfway can be repeated or dropped. `fork` shares
the pages; a page that is shared, or whose contents are kept, is copied when one of its holders is about to write into
it, and `prepare` tells which.

A `PageTable` is that of one group of layers. Where positions see a window only, `slide` gives back the pages before it;
their places stay, and hold RELEASED. A `StateTable` is that of the recurrent layers: it holds the slot with the state
after all written positions, and while a step is prepared the slot that the step writes; `commit` exchanges them. A
`SequenceTable` has the tables of all groups, which grow together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxr.cache.pager import Pager
from mlxr.cache.prefix import PageKeys, PrefixEntry

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

    def commit(self, tokens: int) -> list[int]:
        """Count `tokens` more positions as written; `prepare` must have made room. Nothing is released by it."""
        if self._pager.pages_for(self.length_tokens + tokens) > len(self.pages):
            raise ValueError(f"{tokens} tokens after {self.length_tokens} do not fit in {len(self.pages)} pages")
        self.length_tokens += tokens
        return []

    def take(self, pages: Mapping[int, int], first: int, boundary: int) -> None:
        """Begin with what is cached of `boundary` pages: `pages` by their places, from `first` on."""
        self.pages = [pages.get(place, RELEASED) for place in range(boundary)]
        self.first, self.length_tokens = first, boundary * self.page_size

    def page_at(self, place: int) -> int:
        """The page in a place."""
        return self.pages[place]

    def change_page(self, place: int, page: int) -> None:
        """Hold another page with the same contents in a place; the caller counts holders."""
        self.pages[place] = page

    def list_full(self, first: int) -> list[tuple[int, int]]:
        """The full pages that the table holds from number `first` on, each with its place."""
        places = range(max(first, self.first), self.length_tokens // self.page_size)
        return [(place, self.pages[place]) for place in places]

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


class StateTable:
    """The slots of one sequence: `state` is that after `length_tokens` written positions, `spare` the next one to
    write.

    Either is RELEASED when there is none: at the start of a sequence the state is one of zeros, in no slot. A state
    that others hold as well, or whose contents are kept, is read as well as any other: a step writes elsewhere in any
    case. `trail` is the snapshot that was left at the last boundary; it is not held.
    """

    __slots__ = ("_pager", "length_tokens", "spare", "state", "trail")

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.length_tokens = 0
        self.state = self.spare = RELEASED
        self.trail: PrefixEntry | None = None

    @property
    def page_size(self) -> int:
        """Token positions in a page of the other groups, whose ends are the boundaries at which states may be kept."""
        return self._pager.page_size

    @property
    def pages(self) -> list[int]:
        """The slots that the table holds, the state first."""
        return [slot for slot in (self.state, self.spare) if slot != RELEASED]

    @property
    def held_pages(self) -> list[int]:
        """The slots that the table holds, the state first."""
        return self.pages

    def count_held(self) -> int:
        """How many slots the table holds."""
        return len(self.pages)

    def missing_pages(self, tokens: int) -> int:
        """Slots that `prepare` would allocate for `tokens` more positions."""
        return int(tokens > 0 and self.spare == RELEASED)

    def has_room(self, _tokens: int) -> bool:
        """Whether `prepare` would have nothing to do for `tokens` more positions, of which there is one at least."""
        return self.spare != RELEASED

    def prepare(self, tokens: int) -> list[PageCopy]:
        """Have a slot that the next `tokens` positions can be written to; nothing is ever copied.

        Asking twice is the same as asking once. Raises OutOfPages, with nothing changed, when no slot is free.
        """
        if self.missing_pages(tokens):
            (self.spare,) = self._pager.allocate(1)
        return []

    def commit(self, tokens: int) -> list[int]:
        """Count `tokens` more positions as written, in the slot that was prepared for them.

        The state before is the next slot to write if it is this table's alone; if not it is the caller's to release.
        """
        if tokens > 0 and self.spare == RELEASED:
            raise ValueError(f"{tokens} tokens after {self.length_tokens} have no slot for their state")
        self.length_tokens += tokens
        if tokens <= 0:
            return []
        before, self.state, self.spare = self.state, self.spare, RELEASED
        if before == RELEASED:
            return []
        if not self._pager.is_own(before):
            return [before]
        self.spare = before
        return []

    def find_next(self) -> int:
        """The slot that the step after the next one will write; RELEASED where that is not known.

        It is the one with the state now, if that is this table's alone, and nobody will go on from there even if the
        next step fails.
        """
        is_lasting = self.state == RELEASED or not self.length_tokens % self.page_size
        return RELEASED if is_lasting or not self._pager.is_own(self.state) else self.state

    def take(self, pages: Mapping[int, int], _first: int, boundary: int) -> None:
        """Begin with what is cached of `boundary` pages: the slot that `pages` has in the last place."""
        self.state = pages.get(boundary - 1, RELEASED)
        self.length_tokens = boundary * self.page_size

    def page_at(self, place: int) -> int:
        """The slot of the state after the page in a place; RELEASED if the table has gone on from there."""
        return self.state if self.length_tokens == (place + 1) * self.page_size else RELEASED

    def change_page(self, _place: int, page: int) -> None:
        """Hold another slot with the same state; the caller counts holders."""
        self.state = page

    def list_full(self, first: int) -> list[tuple[int, int]]:
        """The state, if it is a snapshot at the boundary after page number `first` or later, with its place."""
        boundary, rest = divmod(self.length_tokens, self.page_size)
        is_snapshot = not rest and boundary > first and self._pager.is_kept(self.state)
        return [(boundary - 1, self.state)] if is_snapshot else []

    def fork(self) -> StateTable:
        """A table with the same state, which both may read and neither writes; a trailing snapshot trails both."""
        twin = StateTable(self._pager)
        twin.state, twin.length_tokens = self.state, self.length_tokens
        if self.trail is not None and self.trail.trails:
            twin.trail = self.trail
            self.trail.trails += 1
        self._pager.retain([self.state] if self.state != RELEASED else [])
        return twin

    def release(self) -> None:
        """Give all slots back; the table is empty afterwards and may be filled again."""
        self._pager.release(self.pages)
        self.state = self.spare = RELEASED
        self.length_tokens, self.trail = 0, None


class SequenceTable:
    """The tables of one sequence, one for each group, at least one; all have the same positions written.

    `keys` belong to the prefix index: they name the full pages, and may know more pages than are written; None without
    an index. `paged` are the tables of groups that have pages, `states` that of the recurrent layers. `sought_pages` is
    how far some group knew the sequence when the table was opened, if that was further than all groups did. `opened_ns`
    belongs to the store: all pages of a table count as used then while it grows.
    """

    __slots__ = ("groups", "keys", "opened_ns", "paged", "sought_pages", "states")

    def __init__(self, groups: Sequence[PageTable | StateTable], keys: PageKeys | None = None) -> None:
        self.groups = tuple(groups)
        self.paged = tuple(table for table in groups if isinstance(table, PageTable))
        self.states = next((table for table in groups if isinstance(table, StateTable)), None)
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

    def fork(self) -> SequenceTable:
        """A table with the same written positions, on the same pages."""
        keys = None if self.keys is None else self.keys.fork(self.full_pages)
        twin = SequenceTable([table.fork() for table in self.groups], keys)
        twin.opened_ns, twin.sought_pages = self.opened_ns, self.sought_pages
        return twin
