"""Pages as integers: reference counts and free pages (`Pager`), and the pages of a sequence in order (tables).

`allocate` hands out pages with one holder each, `retain` adds a holder, `release` removes one. A page without holders
is free, unless `keep` was called for its contents: then it stays cached, without holders, until it is retained again or
dropped. A page is written from the time when it is first handed out until it is given back to the system. Pages that
were written before are handed out first, so the arena takes no more memory than needed.

In a table, position p lies in page p // page_size. A table is filled in two moves: `prepare` makes room for the next
positions, and `commit` counts them once their keys and values are really written. So a step that failed halfway can be
repeated or dropped. `fork` shares the pages. If a holder is about to write into a page that is shared, or whose
contents are kept, the page is copied first, and `prepare` returns that copy.

A `PageTable` has the pages of one group of layers. If positions see only a window, `slide` gives back the pages before
it; their places stay, and hold RELEASED. A `StateTable` has the slots of the recurrent layers: one with the state after
all written positions and, while a step is prepared, one that the step writes; `commit` exchanges them. A
`SequenceTable` has the tables of all groups, which grow together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from mlxr.cache.prefix import PageKeys, PrefixEntry
from mlxr.core.errors import OutOfPages
from mlxr.core.frozen import frozen
from mlxr.core.stats import Holder

MAX_NOTES = 1024  # evictions, and copies, that a group notes between two readings


class PageNotes:
    """The changes to the pages of one group since the last reading; exists only while somebody watches."""

    def __init__(self) -> None:
        self.touched: set[int] = set()  # pages whose holders, or whose place on the way to disk, may have changed
        self.evicted: deque[int] = deque(maxlen=MAX_NOTES)
        self.copied: deque[tuple[int, int]] = deque(maxlen=MAX_NOTES)  # copies on write: source and target


class Pager:
    """Free list and reference counts of `pages` pages with `page_size` token positions each.

    At most `limit_pages` are written at one time; if more are written already, no other page is. `notes` is None
    unless somebody watches.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pager needs at least one page of one token, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self.limit_pages = pages
        self.peak_pages = 0
        self.cached_pages = 0
        self.notes: PageNotes | None = None
        self._counts = [0] * pages
        self._kept = [False] * pages
        self._free: list[int] = []  # a stack of written pages: the one freed last is reused first, while it is warm
        self._fresh = list(range(pages - 1, -1, -1))  # pages that are not written, the lowest last

    @property
    def free_pages(self) -> int:
        """Pages without a holder and without contents that are kept."""
        return len(self._free) + len(self._fresh)

    @property
    def spare_pages(self) -> int:
        """Free pages that may go out within the limit."""
        return len(self._free) + max(0, min(len(self._fresh), self.limit_pages - self.written_pages))

    @property
    def written_pages(self) -> int:
        """Pages that take memory: held, cached, or free and written before."""
        return self.pages - len(self._fresh)

    @property
    def used_pages(self) -> int:
        """Pages with at least one holder."""
        return self.pages - self.free_pages - self.cached_pages

    @property
    def shared_pages(self) -> int:
        """Pages with at least two holders."""
        return sum(count > 1 for count in self._counts)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` positions take; the last page may be filled in part."""
        return -(-tokens // self.page_size)

    def count(self, page: int) -> int:
        """Return the number of holders of `page`."""
        return self._counts[self._known(page)]

    def is_kept(self, page: int) -> bool:
        """Return True if the contents of `page` are kept, so that nobody may write into it any more."""
        return self._kept[self._known(page)]

    def find_holder(self, page: int) -> Holder:
        """Return the kind of holder that `page` has."""
        count = self._counts[page]
        if count:
            return Holder.PRIVATE if count == 1 else Holder.SHARED
        return Holder.CACHED if self._kept[page] else Holder.FREE

    def list_holders(self) -> bytearray:
        """Return the code of `find_holder` for every page, in a form that is fast in Python."""
        cached = Holder.CACHED.value
        return bytearray(
            (cached if kept else 0) if not count else 1 if count == 1 else 2
            for count, kept in zip(self._counts, self._kept, strict=True)
        )

    def is_own(self, page: int) -> bool:
        """Return True if the holder of `page` may write into it: nobody else holds it, its contents are not kept."""
        return self._counts[self._known(page)] <= 1 and not self._kept[page]

    def allocate(self, pages: int) -> list[int]:
        """Take `pages` free pages, each with one holder. Raises OutOfPages, taking none, if fewer are free."""
        if pages < 0:
            raise ValueError(f"cannot allocate {pages} pages")
        if pages > self.spare_pages:
            raise OutOfPages(pages, self.spare_pages, self.page_size)
        taken = [(self._free or self._fresh).pop() for _ in range(pages)]
        for page in taken:
            self._counts[page] = 1
        self._note(taken)
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder to each of `pages`. Raises ValueError, with nothing changed, if one of them is free."""
        pages = list(pages)
        for page in pages:
            if self._counts[self._known(page)] == 0 and not self._kept[page]:
                raise ValueError(f"page {page} is free and cannot be retained")
        for page in pages:
            self.cached_pages -= self._counts[page] == 0
            self._counts[page] += 1
        self._note(pages)
        self.peak_pages = max(self.peak_pages, self.used_pages)

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each of `pages`; a page without any becomes cached if it is kept, otherwise free.

        Raises ValueError, with nothing changed, if a page has too few holders.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            if times > self._counts[self._known(page)]:
                raise ValueError(f"page {page} is released {times} times and has {self._counts[page]} holders")
        for page in pages:
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._leave(page)
        self._note(pages)

    def keep(self, page: int) -> None:
        """Keep the contents of a held page after its last holder has gone."""
        if self._counts[self._known(page)] == 0:
            raise ValueError(f"page {page} has no holder and cannot be kept")
        self._kept[page] = True
        self._note([page])

    def drop(self, page: int) -> None:
        """Stop keeping the contents of `page`; it becomes free if nobody holds it."""
        if not self._kept[self._known(page)]:
            raise ValueError(f"page {page} is not kept and cannot be dropped")
        self._kept[page] = False
        if self._counts[page] == 0:
            self.cached_pages -= 1
            self._free.append(page)
        self._note([page])

    def give_back(self) -> list[int]:
        """Count all free pages as not written any more; return those that were written, ascending."""
        pages, self._free = sorted(self._free), []
        self._fresh = sorted([*self._fresh, *pages], reverse=True)
        return pages

    def take_ahead(self, pages: int) -> list[int]:
        """Count so many pages as written that `pages` written ones are free, within the limit; return these.

        They are the next to be allocated, and who asks takes memory for them.
        """
        count = max(0, min(pages, self.spare_pages) - len(self._free))
        taken = [self._fresh.pop() for _ in range(count)]
        self._free += reversed(taken)
        return taken

    def _note(self, pages: Iterable[int]) -> None:
        if self.notes is not None:
            self.notes.touched.update(pages)

    def _leave(self, page: int) -> None:
        """Count `page` as cached or free, now that its last holder has gone."""
        if self._kept[page]:
            self.cached_pages += 1
        else:
            self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Check that every page is free once, or held, or cached. Raises AssertionError naming the page.

        With `holders` (the page lists of everybody who holds pages), every count must equal their number.
        """
        free = Counter([*self._free, *self._fresh])
        held = None if holders is None else Counter(page for pages in holders for page in pages)
        for page, count in enumerate(self._counts):
            if free[page] != (count == 0 and not self._kept[page]):
                kept = "kept, " if self._kept[page] else ""
                raise AssertionError(f"page {page} is {kept}has {count} holders and is {free[page]} times free")
            if held is not None and held[page] != count:
                raise AssertionError(f"page {page} counts {count} holders, {held[page]} hold it")
        strangers = (set(free) | set(held or ())) - set(range(self.pages))
        if strangers:
            raise AssertionError(f"pages {sorted(strangers)} do not exist")
        cached_pages = sum(kept and count == 0 for kept, count in zip(self._kept, self._counts, strict=True))
        if cached_pages != self.cached_pages:
            raise AssertionError(f"{cached_pages} pages are cached, the books say {self.cached_pages}")
        if self._fresh != sorted(self._fresh, reverse=True):
            raise AssertionError("pages that are not written are out of order")
        if not self.used_pages <= self.peak_pages <= self.pages:
            raise AssertionError(f"peak of {self.peak_pages} pages with {self.used_pages} of {self.pages} used")

    def _known(self, page: int) -> int:
        if not 0 <= page < self.pages:
            raise ValueError(f"page {page} does not exist, there are {self.pages}")
        return page


RELEASED = -1


@frozen
class PageCopy:
    """The contents of page `source` of a group must be copied to page `target` before anything else is written."""

    source: int
    target: int
    group: int = 0


class PageTable:
    """Page ids of one sequence in one group; `length_tokens` positions are written, pages before `first` released."""

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
        """Return the number of pages that the table holds."""
        return len(self.pages) - self.first

    def missing_pages(self, tokens: int) -> int:
        """Return the number of pages that `prepare` would allocate for `tokens` more positions, copies included."""
        missing = max(0, self._pager.pages_for(self.length_tokens + tokens) - len(self.pages))
        return missing + (tokens > 0 and self._shared_tail() is not None)

    def has_room(self, tokens: int) -> bool:
        """Return True if `prepare` would have nothing to do for `tokens` (at least 1) more positions."""
        pages, (index, offset) = self.pages, divmod(self.length_tokens, self._pager.page_size)
        if self.length_tokens + tokens > len(pages) * self._pager.page_size:
            return False
        return not offset or self._pager.is_own(pages[index])

    def prepare(self, tokens: int) -> list[PageCopy]:
        """Make room to write `tokens` more positions; return the copies to do first (see PageCopy).

        A second call does nothing. Raises OutOfPages, with nothing changed, if there are too few free pages.
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
        """Return the index of the half-written last page if this table must copy it before it writes; else None.

        No other page can be written again. The page may be half-written here, but full and so kept for a fork that
        went on writing into it.
        """
        index, offset = divmod(self.length_tokens, self.page_size)
        if not offset:
            return None
        return None if self._pager.is_own(self.pages[index]) else index

    def commit(self, tokens: int) -> list[int]:
        """Count `tokens` more positions as written; `prepare` must have made room. Returns no pages to release."""
        if self._pager.pages_for(self.length_tokens + tokens) > len(self.pages):
            raise ValueError(f"{tokens} tokens after {self.length_tokens} do not fit in {len(self.pages)} pages")
        self.length_tokens += tokens
        return []

    def take(self, pages: Mapping[int, int], first: int, boundary: int) -> None:
        """Begin with `boundary` cached pages: `pages` has those from place `first` on, by place."""
        self.pages = [pages.get(place, RELEASED) for place in range(boundary)]
        self.first, self.length_tokens = first, boundary * self.page_size

    def page_at(self, place: int) -> int:
        """Return the page at `place`."""
        return self.pages[place]

    def change_page(self, place: int, page: int) -> None:
        """Put another page with the same contents at `place`; the caller counts holders."""
        self.pages[place] = page

    def list_full(self, first: int) -> list[tuple[int, int]]:
        """Return the full pages that the table holds from place `first` on, as (place, page)."""
        places = range(max(first, self.first), self.length_tokens // self.page_size)
        return [(place, self.pages[place]) for place in places]

    def slide(self, first: int) -> list[int]:
        """Forget the pages before place `first`, all of them full; return those that the caller must release."""
        passed = self.pages[self.first : first]
        self.pages[self.first : first] = [RELEASED] * len(passed)
        self.first = max(self.first, first)
        return passed

    def fork(self) -> PageTable:
        """Return a table with the same written positions, on the same pages."""
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
    """The slots of one sequence: `state` has the state after `length_tokens` positions, `spare` is written next.

    Either is RELEASED if there is none: a sequence starts with a state of zeros, in no slot. A step never writes into
    the slot that it reads, so a state may be shared or kept. `trail` is the snapshot left at the last boundary; the
    table does not hold it.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self.length_tokens = 0
        self.state = self.spare = RELEASED
        self.trail: PrefixEntry | None = None

    @property
    def page_size(self) -> int:
        """Token positions in a page of the other groups; states may be kept at the ends of such pages."""
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
        """Return the number of slots that the table holds."""
        return len(self.pages)

    def missing_pages(self, tokens: int) -> int:
        """Return the number of slots that `prepare` would allocate for `tokens` more positions."""
        return int(tokens > 0 and self.spare == RELEASED)

    def has_room(self, _tokens: int) -> bool:
        """Return True if `prepare` would have nothing to do for `tokens` (at least 1) more positions."""
        return self.spare != RELEASED

    def prepare(self, tokens: int) -> list[PageCopy]:
        """Make sure that there is a slot for the state after `tokens` more positions; nothing is ever copied.

        A second call does nothing. Raises OutOfPages, with nothing changed, if no slot is free.
        """
        if self.missing_pages(tokens):
            (self.spare,) = self._pager.allocate(1)
        return []

    def commit(self, tokens: int) -> list[int]:
        """Count `tokens` more positions as written, in the slot that was prepared for them.

        If the slot of the previous state is this table's alone, it is written next; if not, it is returned, and the
        caller must release it.
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
        """Return the slot that the step after the next one will write; RELEASED if that is not known.

        It is the slot of the present state, if that is this table's alone and not at a boundary, where it could be
        kept.
        """
        is_lasting = self.state == RELEASED or not self.length_tokens % self.page_size
        return RELEASED if is_lasting or not self._pager.is_own(self.state) else self.state

    def take(self, pages: Mapping[int, int], _first: int, boundary: int) -> None:
        """Begin with the cached state after `boundary` pages: `pages` has its slot at the last place."""
        self.state = pages.get(boundary - 1, RELEASED)
        self.length_tokens = boundary * self.page_size

    def page_at(self, place: int) -> int:
        """Return the slot of the state after the page at `place`; RELEASED if the table has gone on from there."""
        return self.state if self.length_tokens == (place + 1) * self.page_size else RELEASED

    def change_page(self, _place: int, page: int) -> None:
        """Take another slot with the same state; the caller counts holders."""
        self.state = page

    def list_full(self, first: int) -> list[tuple[int, int]]:
        """Return the state as [(place, slot)] if it is a snapshot after page `first` or a later one; else nothing."""
        boundary, rest = divmod(self.length_tokens, self.page_size)
        is_snapshot = not rest and boundary > first and self._pager.is_kept(self.state)
        return [(boundary - 1, self.state)] if is_snapshot else []

    def fork(self) -> StateTable:
        """Return a table with the same state, which both read and neither writes; both share a trailing snapshot."""
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

    `keys` name the full pages in the prefix index, and may name more pages than are written; None without an index.
    `paged` are the tables of groups that have pages, `states` that of the recurrent layers. `sought_pages` is set if,
    when the table was opened, some group had more of the sequence's pages in the cache than all groups had in common:
    the number of pages up to there, else 0. The store counts pages as used at `opened_ns` while the table grows.
    """

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
        """True if any page is held."""
        return any(table.pages for table in self.groups)

    @property
    def held_pages(self) -> tuple[int, ...]:
        """The number of pages held in each group."""
        return tuple(table.count_held() for table in self.groups)

    def has_room(self, tokens: int) -> bool:
        """Return True if every group has room for `tokens` (at least 1) more positions."""
        return all(table.has_room(tokens) for table in self.groups)

    def fork(self) -> SequenceTable:
        """Return a table with the same written positions, on the same pages."""
        keys = None if self.keys is None else self.keys.fork(self.full_pages)
        twin = SequenceTable([table.fork() for table in self.groups], keys)
        twin.opened_ns, twin.sought_pages = self.opened_ns, self.sought_pages
        return twin
