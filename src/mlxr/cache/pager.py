"""Which pages of the arena are free, and how many holders each of the others has.

Integers only: a page is a number from 0 to pages - 1. What lies in a page, which sequence holds it and how large it
is in bytes are not known here. Pages go out by `allocate` with one holder, gain holders by `retain`, lose them by
`release`, and are free again when the last one lets go; unless somebody asked to `keep` what lies in the page: then it
stays cached, without holders, until it is retained again or dropped. So a page is free, held or cached.

A page is written from the time when it first goes out until it is given back to the system. Pages that were written
before go out first, so the arena takes no more memory than was needed at one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mlxr.core.errors import OutOfPages
from mlxr.core.live import Holder


class Pager:
    """Free list and reference counts of `pages` pages with `page_size` token positions each.

    At most `limit_pages` are written at one time; where more are already, none besides. While somebody watches,
    `touched` collects the pages whose holders may have changed; otherwise it is None.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pager needs at least one page of one token, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self.limit_pages = pages
        self.peak_pages = 0
        self.cached_pages = 0
        self.touched: set[int] | None = None
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
        """Pages that `tokens` token positions fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def count(self, page: int) -> int:
        """Return how many hold `page`."""
        return self._counts[self._known(page)]

    def is_kept(self, page: int) -> bool:
        """Whether the contents of `page` are kept: nobody may write into it any more."""
        return self._kept[self._known(page)]

    def find_holder(self, page: int) -> Holder:
        """Tell who holds `page`, if anybody."""
        count = self._counts[page]
        if count:
            return Holder.PRIVATE if count == 1 else Holder.SHARED
        return Holder.CACHED if self._kept[page] else Holder.FREE

    def list_holders(self) -> bytearray:
        """`find_holder` of every page, as fast as Python has it."""
        cached = Holder.CACHED.value
        return bytearray(
            (cached if kept else 0) if not count else 1 if count == 1 else 2
            for count, kept in zip(self._counts, self._kept, strict=True)
        )

    def is_own(self, page: int) -> bool:
        """Whether the one who holds `page` may write into it: nobody else does, and its contents are not kept."""
        return self._counts[self._known(page)] <= 1 and not self._kept[page]

    def allocate(self, pages: int) -> list[int]:
        """Take `pages` free pages, each with one holder. All or none: raises OutOfPages when fewer are free."""
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
        """One more holder for each of `pages`; all must be held or cached, and nothing changes if one is not."""
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
        """One holder less for each of `pages`; those without any become cached if they are kept, free otherwise.

        Nothing changes if one has too few holders.
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
        """Keep the contents of `page` no longer; it becomes free if it is cached."""
        if not self._kept[self._known(page)]:
            raise ValueError(f"page {page} is not kept and cannot be dropped")
        self._kept[page] = False
        if self._counts[page] == 0:
            self.cached_pages -= 1
            self._free.append(page)
        self._note([page])

    def give_back(self) -> list[int]:
        """Count the free pages as not written any more; returns those that were, ascending."""
        pages, self._free = sorted(self._free), []
        self._fresh = sorted([*self._fresh, *pages], reverse=True)
        return pages

    def _note(self, pages: Iterable[int]) -> None:
        if self.touched is not None:
            self.touched.update(pages)

    def _leave(self, page: int) -> None:
        """The last holder of `page` has gone."""
        if self._kept[page]:
            self.cached_pages += 1
        else:
            self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Prove the books: every page is either free, once, or held, or cached. Raises AssertionError naming the page.

        With `holders` (the page lists of everybody who holds pages), every count must equal what they hold.
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
