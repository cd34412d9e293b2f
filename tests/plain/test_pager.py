"""Pages are never lost and never used twice: random histories of the pager and of page tables, checked at each step."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxr.cache.page_table import PageCopy, Pager, PageTable
from mlxr.core.errors import OutOfPages

RANDOM_HISTORIES = settings(max_examples=60, stateful_step_count=100, deadline=None, derandomize=True)


class PagerHistory(RuleBasedStateMachine):
    """Holders take, share and give back pages; the books must say the same as the holders' own lists."""

    @initialize(pages=st.integers(1, 24))
    def start(self, pages: int) -> None:
        self.pager = Pager(pages, page_size=4)
        self.holders: list[list[int]] = []

    @rule(pages=st.integers(0, 10))
    def allocate(self, pages: int) -> None:
        free = self.pager.spare_pages
        if pages > free:
            with pytest.raises(OutOfPages, match=f"{pages} cache pages .* has {free}"):
                self.pager.allocate(pages)
        else:
            self.holders.append(self.pager.allocate(pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        part = pages[: data.draw(st.integers(0, len(pages)))]
        self.pager.retain(part)
        self.holders.append(list(part))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        keep = data.draw(st.integers(0, len(self.holders[index])))
        self.pager.release(self.holders[index][keep:])
        self.holders[index] = self.holders[index][:keep]

    @rule(pages=st.integers(0, 24))
    def limit(self, pages: int) -> None:
        self.pager.limit_pages = pages

    @rule(pages=st.integers(0, 4))
    def take_ahead(self, pages: int) -> None:
        written, spare = self.pager.written_pages, self.pager.spare_pages
        taken = self.pager.take_ahead(pages)
        assert self.pager.written_pages == written + len(taken) <= max(written, self.pager.limit_pages)
        assert self.pager.spare_pages == spare
        assert len(taken) <= pages
        if taken:
            assert self.pager.allocate(len(taken)) == taken
            self.pager.release(taken)
        if pages <= spare:
            assert not self.pager.take_ahead(pages)

    @rule()
    def give_back_memory(self) -> None:
        given = self.pager.give_back()
        assert given == sorted(given)
        assert self.pager.written_pages == self.pager.used_pages

    @precondition(lambda self: self.pager.free_pages)
    @rule(data=st.data())
    def misuse_free_page(self, data: st.DataObject) -> None:
        used = {page for pages in self.holders for page in pages}
        page = data.draw(st.sampled_from([page for page in range(self.pager.pages) if page not in used]))
        with pytest.raises(ValueError, match=f"page {page}"):
            self.pager.release([*used, page])
        with pytest.raises(ValueError, match=f"page {page}"):
            self.pager.retain([*used, page])

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "pager"):
            self.pager.check(self.holders)
            assert self.pager.used_pages == len({page for pages in self.holders for page in pages})
            assert self.pager.used_pages + self.pager.free_pages == self.pager.pages
            assert self.pager.used_pages <= self.pager.written_pages <= self.pager.pages

    def teardown(self) -> None:
        if hasattr(self, "pager"):
            for pages in self.holders:
                self.pager.release(pages)
            assert self.pager.free_pages == self.pager.pages


class PageTableHistory(RuleBasedStateMachine):
    """Sequences write, fork and end. Each must read back what it wrote, whatever the others do.

    `memory` stands for the arena: the last value written in each slot.
    """

    @initialize(pages=st.integers(8, 40), page_size=st.sampled_from([4, 7, 1, 32]))
    def start(self, pages: int, page_size: int) -> None:
        self.pager = Pager(pages, page_size)
        self.memory = [[-1] * page_size for _ in range(pages)]
        self.tables: list[tuple[PageTable, list[int]]] = [(PageTable(self.pager), [])]
        self.clock = 0

    def do_copies(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            assert self.pager.count(copy.target) == 1
            self.memory[copy.target] = list(self.memory[copy.source])

    @rule(data=st.data(), tokens=st.integers(1, 6))
    def write(self, data: st.DataObject, tokens: int) -> None:
        self.attempt(data.draw(st.sampled_from(self.tables)), tokens, times=1, finishes=True)

    @rule(data=st.data(), tokens=st.integers(0, 6), finishes=st.booleans())
    def repeat_write(self, data: st.DataObject, tokens: int, finishes: bool) -> None:
        self.attempt(data.draw(st.sampled_from(self.tables)), tokens, times=2, finishes=finishes)

    def attempt(self, pair: tuple[PageTable, list[int]], tokens: int, *, times: int, finishes: bool) -> None:
        table, content = pair
        before = (list(table.pages), self.pager.free_pages)
        try:
            for _ in range(times):  # the second time must find everything done
                self.do_copies(table.prepare(tokens))
        except OutOfPages:
            assert before == (table.pages, self.pager.free_pages)
            return
        for position in range(table.length_tokens, table.length_tokens + tokens):
            self.clock += 1
            page = table.pages[position // table.page_size]
            assert self.pager.count(page) == 1, "a write into a shared page"
            self.memory[page][position % table.page_size] = self.clock
            if finishes:
                content.append(self.clock)
        if finishes:
            table.commit(tokens)

    @precondition(lambda self: len(self.tables) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, content = data.draw(st.sampled_from(self.tables))
        used = self.pager.used_pages
        self.tables.append((table.fork(), list(content)))
        assert self.pager.used_pages == used

    @precondition(lambda self: len(self.tables) > 4 or self.pager.free_pages < 2)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.tables[index][0].release()
        assert self.tables[index][0].pages == []
        self.tables[index] = (self.tables[index][0], [])

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "pager"):
            return
        self.pager.check(table.pages for table, _ in self.tables)
        for table, content in self.tables:
            assert table.length_tokens == len(content)
            slots = [divmod(position, table.page_size) for position in range(len(content))]
            assert [self.memory[table.pages[index]][offset] for index, offset in slots] == content

    def teardown(self) -> None:
        if hasattr(self, "pager"):
            for table, _ in self.tables:
                table.release()
            assert self.pager.free_pages == self.pager.pages


TestPagerHistory = PagerHistory.TestCase
TestPagerHistory.settings = RANDOM_HISTORIES
TestPageTableHistory = pytest.mark.slow(PageTableHistory.TestCase)
TestPageTableHistory.settings = RANDOM_HISTORIES


def lose_page(pager: Pager) -> None:
    pager._fresh.pop()


def free_held_page(pager: Pager) -> None:
    pager._free.append(0)


def free_twice(pager: Pager) -> None:
    pager._free.append(pager._fresh[0])


def miscount(pager: Pager) -> None:
    pager._counts[0] += 1


def invent_page(pager: Pager) -> None:
    pager._free.append(99)


def forget_peak(pager: Pager) -> None:
    pager.peak_pages = 0


@pytest.mark.parametrize("damage", [lose_page, free_held_page, free_twice, miscount, invent_page, forget_peak])
def test_check_finds_damage(damage: Callable[[Pager], None]) -> None:
    pager = Pager(4, 32)
    held = pager.allocate(1)
    assert held == [0]
    pager.check([held])
    damage(pager)
    with pytest.raises(AssertionError):
        pager.check([held])


def test_check_compares_with_holders() -> None:
    pager = Pager(4, 32)
    held = pager.allocate(2)
    with pytest.raises(AssertionError, match="page 1 counts 1 holders, 0 hold it"):
        pager.check([held[:1]])
    with pytest.raises(AssertionError, match=r"\[7\] do not exist"):
        pager.check([held, [7]])


@pytest.mark.parametrize("page", [-1, 4])
def test_unknown_pages_are_refused(page: int) -> None:
    pager = Pager(4, 32)
    for action in (pager.release, pager.retain):
        with pytest.raises(ValueError, match=f"page {page} does not exist, there are 4"):
            action([page])


@pytest.mark.parametrize(("pages", "page_size"), [(0, 32), (4, 0)])
def test_empty_pager_is_refused(pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        Pager(pages, page_size)


def test_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 pages"):
        Pager(4, 32).allocate(-1)


def test_peak_is_kept() -> None:
    pager = Pager(4, 32)
    pager.release(pager.allocate(3))
    pager.allocate(1)
    assert (pager.used_pages, pager.peak_pages) == (1, 3)


def test_page_copied_only_while_shared() -> None:
    pager = Pager(4, page_size=4)
    first = PageTable(pager)
    first.prepare(6)
    first.commit(6)
    second = first.fork()
    assert second.pages == first.pages
    assert second.prepare(1) == [PageCopy(source=first.pages[1], target=second.pages[1])]
    assert first.pages[0] == second.pages[0]
    assert first.prepare(1) == []  # the last holder writes in place
    assert pager.used_pages == 3


def test_full_pages_need_no_copy() -> None:
    pager = Pager(4, page_size=4)
    first = PageTable(pager)
    first.prepare(8)
    first.commit(8)
    second = first.fork()
    assert second.prepare(1) == []
    assert pager.used_pages == 3


def test_fork_does_not_share_prepared_room() -> None:
    pager = Pager(4, page_size=4)
    first = PageTable(pager)
    first.prepare(5)
    first.commit(2)
    assert first.fork().pages == first.pages[:1]


def test_commit_needs_room() -> None:
    table = PageTable(Pager(4, page_size=4))
    table.prepare(4)
    with pytest.raises(ValueError, match="5 tokens after 0 do not fit in 1 pages"):
        table.commit(5)


def test_written_pages_go_out_first_and_within_the_limit() -> None:
    pager = Pager(8, page_size=4)
    pager.limit_pages = 3
    first = pager.allocate(2)
    pager.release(first)
    assert (pager.written_pages, pager.spare_pages, pager.free_pages) == (2, 3, 8)
    assert sorted(pager.allocate(3)) == [0, 1, 2]
    with pytest.raises(OutOfPages, match=r"1 cache pages .* has 0"):
        pager.allocate(1)
    pager.release([1])
    assert pager.give_back() == [1]
    assert (pager.written_pages, pager.spare_pages) == (2, 1)
    assert pager.allocate(1) == [1]
