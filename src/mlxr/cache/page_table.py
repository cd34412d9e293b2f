"""The pages of one sequence, in order: position p lies in page p // page_size of the table.

Integers only. A table is filled in two moves: `prepare` makes room for the next positions, `commit` counts them once
their keys and values are really written, so that a step that failed halfway can be repeated or dropped. `fork` shares
the pages; a page that is shared, or whose contents are kept, is copied when one of its holders is about to write into
it, and `prepare` tells which. `keys` belong to the prefix index: they name the full pages, and may know more pages than
are written. `opened_ns` belongs to the store, for which all pages of a table count as used at that time while it grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxr.cache.pager import Pager
from mlxr.cache.prefix import PageKeys


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The contents of page `source` must be copied to page `target` before anything else is written."""

    source: int
    target: int


class PageTable:
    """Page ids of one sequence; `length_tokens` positions of them are written."""

    __slots__ = ("_pager", "keys", "length_tokens", "opened_ns", "pages")

    def __init__(self, pager: Pager, keys: PageKeys | None = None) -> None:
        self._pager = pager
        self.keys = keys  # None without an index
        self.pages: list[int] = []
        self.length_tokens = 0
        self.opened_ns = 0

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        return self._pager.page_size

    @property
    def full_pages(self) -> int:
        """Pages that are written to their ends."""
        return self.length_tokens // self._pager.page_size

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

    def fork(self) -> PageTable:
        """A table with the same written positions, on the same pages."""
        twin = PageTable(self._pager, None if self.keys is None else self.keys.fork(self.full_pages))
        twin.pages = self.pages[: self._pager.pages_for(self.length_tokens)]
        twin.length_tokens, twin.opened_ns = self.length_tokens, self.opened_ns
        self._pager.retain(twin.pages)
        return twin

    def release(self) -> None:
        """Give all pages back; the table is empty afterwards and may be filled again."""
        self._pager.release(self.pages)
        self.pages = []
        self.length_tokens = 0
