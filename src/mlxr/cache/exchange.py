"""Pages that go from one process to another: what is lacking here, what can be lent, what was brought.

A page is computed from the tokens before it alone, so whoever has the same model can use it. One side says which names
it looks for and what it has of them (`seek`); the other side finds the longest boundary at which all of its groups have
what it takes to go on, and holds the pages that the asker lacks while they are read (`lend`). States and the ends of
windows belong to their boundary: they are lent together with the pages before it, or nothing is. What arrives is put
into the inbox, where look-ups find it beside what is in memory and on disk. Knows no network.

All methods are for the thread of the engine, but for `export` from an arena on the host and the inbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.cache.group import CacheGroup
from mlxr.cache.inbox import Inbox
from mlxr.cache.prefix import find_boundary
from mlxr.cache.store import PageName, PageStore, name_groups
from mlxr.kernels.tensor import ByteArray

Here = Sequence[Sequence[bool]]  # for each group and each name, whether the page is there


@dataclass(frozen=True, slots=True)
class Lack:
    """Of some names, `pages` can be gone on after already; `here` is what each group has."""

    pages: int
    here: Here


@dataclass(frozen=True, slots=True)
class LentPage:
    """A page that may be read for a while: number `page` of its group's arena, or None where it is on disk."""

    name: PageName
    page: int | None


@dataclass(eq=False, slots=True)
class Loan:
    """Pages to lend, from which a text goes on after `boundary`; `held` are each group's pages kept meanwhile."""

    boundary: int
    pages: list[LentPage]
    held: list[list[int]]


class Exchange:
    """See the module. `models` are what the pages of each group belong to, `page_bytes` what one of each takes."""

    def __init__(self, groups: Sequence[CacheGroup], model: bytes, store: PageStore | None, inbox: Inbox) -> None:
        self._groups, self._store, self.inbox = tuple(groups), store, inbox
        self.models = name_groups(model, len(groups))
        self.page_bytes = tuple(group.arena.page_bytes for group in groups)
        self.page_size = groups[0].arena.page_size
        self._loans: list[Loan] = []

    @property
    def is_on_host(self) -> bool:
        """Whether any thread may `export`."""
        return self._groups[0].arena.is_on_host

    @property
    def linked_bytes(self) -> int:
        """Bytes that each further page of a text takes."""
        sizes = zip(self._groups, self.page_bytes, strict=True)
        return sum(size_bytes for group, size_bytes in sizes if group.is_linked)

    @property
    def boundary_bytes(self) -> int:
        """Bytes that it takes at most, besides, to go on from a boundary: a state, and the ends of windows."""
        far = 2**20  # a boundary behind all windows
        sizes = zip(self._groups, self.page_bytes, strict=True)
        return sum((far - group.first_needed(far)) * size_bytes for group, size_bytes in sizes if not group.is_linked)

    def seek(self, names: Sequence[bytes]) -> Lack:
        """Look up the pages `names` of a text: which of them each group has here, and up to where it can go on."""
        here = [
            [self._has(group, name) or self.inbox.contains((group.number, name)) for name in names]
            for group in self._groups
        ]
        return Lack(find_boundary(self._groups, lambda group, place: here[group][place], len(names)).pages, here)

    def lend(self, names: Sequence[bytes], lack: Lack, max_bytes: int) -> Loan:
        """Hold what one who lacks that much needs to get further, at most `max_bytes` of it; empty if nothing helps.

        The loan must be given back.
        """
        loan = Loan(0, [], [[] for _ in self._groups])
        limit = len(names)

        def has(group: int, place: int) -> bool:
            return self._has(self._groups[group], names[place])

        while limit > lack.pages:
            boundary = find_boundary(self._groups, has, limit).pages
            places = self._list_lacking(boundary, lack) if boundary > lack.pages else []
            excess_bytes = sum(self.page_bytes[group] for group, _ in places) - max_bytes
            if excess_bytes <= 0:
                loan.boundary = boundary if places else 0
                self._hold(loan, names, places)
                break
            limit = boundary - max(1, -(-excess_bytes // self.linked_bytes)) if self.linked_bytes else 0
        self._loans.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Nobody reads the pages of a loan any more."""
        self._loans.remove(loan)
        for group, pages in zip(self._groups, loan.held, strict=True):
            group.drop_holds(pages)

    def export(self, lent: LentPage, target: ByteArray) -> bool:
        """Copy the bytes of a page that is lent to `target`; False if it is on disk no longer."""
        if lent.page is None:
            return self._store is not None and self._store.read_into(lent.name, target)
        self._groups[lent.name[0]].arena.export_page(lent.page, target)
        return True

    def list_lent(self) -> list[list[list[int]]]:
        """For each group the pages that each loan holds."""
        return [[loan.held[group.number] for loan in self._loans] for group in self._groups]

    def _has(self, group: CacheGroup, name: bytes) -> bool:
        stored = self._store is not None and self._store.contains((group.number, name))
        return stored or group.index.get(name) is not None

    def _list_lacking(self, boundary: int, lack: Lack) -> list[tuple[int, int]]:
        """Group and place of what is needed to go on after `boundary` pages and not there, pages in order last.

        So that of a model with pages alone whatever arrives is of use, however much of it that is.
        """
        return [
            (group.number, place)
            for group in sorted(self._groups, key=lambda group: group.is_linked)
            for place in range(group.first_needed(boundary), boundary)
            if not lack.here[group.number][place]
        ]

    def _hold(self, loan: Loan, names: Sequence[bytes], places: Sequence[tuple[int, int]]) -> None:
        """Hold the pages in memory. Where pages are linked, all before them are held as well, as tables do."""
        for number, place in places:
            entry = self._groups[number].index.get(names[place])
            loan.pages.append(LentPage((number, names[place]), None if entry is None else entry.page))
        for group, held in zip(self._groups, loan.held, strict=True):
            wanted = {lent.page for lent in loan.pages if lent.name[0] == group.number and lent.page is not None}
            if wanted and group.is_linked:
                entries = map(group.index.get, names[: loan.boundary])
                wanted |= {entry.page for entry in entries if entry is not None}
            held.extend(sorted(wanted))
            group.pager.retain(held)
