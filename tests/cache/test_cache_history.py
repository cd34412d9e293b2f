"""Random histories of the whole cache, disk and restarts included, with all books proved after every step.

Sequences over a tiny vocabulary begin, grow, fork, fail halfway and end in an arena that is always too small, while
pages come and go from disk, are damaged there, and processes end and start. Whatever happens, every table reads exactly
its own tokens, every page is accounted for, and at the end nobody holds any.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from amounts import choose_amount
from cache_world import FULL, STATE, World, page_files
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxr.cache.group import Snapshot
from mlxr.cache.page_table import SequenceTable
from mlxr.cache.shapes import CacheShape, LayerCache, StateShape
from mlxr.core.errors import OutOfPages
from mlxr.core.stats import StoreDrop

PICK = st.integers(0, 999)  # an index into what there is, if anything: no draw may depend on how fast the disk is
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
HISTORIES = settings(
    max_examples=choose_amount(200),
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # to study a failure add Phase.shrink, which takes minutes
)


class CacheHistory(RuleBasedStateMachine):
    """`alive` is each table with the tokens of its sequence; the table holds the first of them."""

    layers: tuple[LayerCache, ...] = (FULL,)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.alive: list[tuple[SequenceTable, list[int]]] = []
        self.world: World | None = None
        self.harmed: set[str] = set()  # names of files that were damaged on disk

    @initialize(
        pages=st.integers(4, 14),
        page_size=st.sampled_from([1, 2, 3]),
        max_bytes=st.sampled_from([0, 400, 2000, 10**6]),
        sharing=st.sampled_from([True, True, True, False]),
    )
    def start(self, pages: int, page_size: int, max_bytes: int, sharing: bool) -> None:
        self.pages, self.page_size, self.max_bytes, self.sharing = pages, page_size, max_bytes, sharing
        self.world = self.make_world()

    def make_world(self) -> World:
        folder = self.folder if self.max_bytes and self.sharing else None
        return World(
            pages=self.pages,
            page_size=self.page_size,
            max_bytes=self.max_bytes,
            folder=folder,
            sharing=self.sharing,
            layers=self.layers,
        )

    @property
    def now(self) -> World:
        assert self.world is not None
        return self.world

    def pick_table(self, pick: int) -> tuple[SequenceTable, list[int]]:
        """Pick a living table, with its tokens; begin a first one if there is none."""
        if not self.alive:
            self.begin([pick % 2] * (pick % 8 + 1))
        return self.alive[pick % len(self.alive)]

    @rule(tokens=TOKENS, answer=TOKENS)
    def serve(self, tokens: list[int], answer: list[int]) -> None:
        """Serve a whole request in one go, if it finds room."""
        self.begin(tokens)
        self.compute(*self.alive[-1], answer, finishes=True)
        self.now.cache.release(self.alive.pop()[0])

    @rule(tokens=TOKENS)
    def begin(self, tokens: list[int]) -> None:
        table = self.now.open(tokens)
        assert table.length_tokens < len(tokens)
        self.alive.append((table, tokens))

    @rule(
        pick=PICK,
        more=TOKENS,
        finishes=st.sampled_from([True, True, True, False]),
        snapshot=st.sampled_from(list(Snapshot)),
    )
    def grow(self, pick: int, more: list[int], finishes: bool, snapshot: Snapshot) -> None:
        """Compute the pending tokens, and more; or take the pages and fail before anything is written."""
        self.compute(*self.pick_table(pick), more, finishes, snapshot)

    def compute(
        self,
        table: SequenceTable,
        tokens: list[int],
        more: list[int],
        finishes: bool,
        snapshot: Snapshot = Snapshot.LASTING,
    ) -> None:
        wanted = [*tokens, *more]
        before = [list(own.pages) for own in table.groups], self.now.cache.available_pages
        try:
            self.now.prepare(table, len(wanted) - table.length_tokens)
        except OutOfPages:
            assert before == ([own.pages for own in table.groups], self.now.cache.available_pages)
            assert any(
                own.missing_pages(len(wanted) - table.length_tokens) > group.available_pages
                for own, group in zip(table.groups, self.now.groups, strict=True)
            )
            return
        if finishes:
            tokens[:] = wanted
            self.now.fill(table, tokens, len(tokens), snapshot)
        else:
            for states in self.now.state_pools:  # a step may have written before it failed
                assert table.states is not None
                states[table.states.spare] = -1

    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        table, tokens = self.pick_table(pick)
        self.alive.append((self.now.cache.fork(table), tokens[: table.length_tokens]))

    @rule(pick=PICK, fork=st.booleans())
    def fill_while_forked(self, pick: int, fork: bool) -> None:
        """Fork a sequence after its pages were taken and before they are written."""
        table, tokens = self.pick_table(pick)
        wanted = [*tokens[: table.length_tokens], 1]
        try:
            self.now.prepare(table, 1)
        except OutOfPages:
            return
        if fork:
            self.alive.append((self.now.cache.fork(table), tokens[: table.length_tokens]))
        if table.keys is not None:
            table.keys = table.keys.fork(table.full_pages)  # as a sequence that goes on with other tokens
        tokens[:] = wanted
        self.now.fill(table, tokens, len(tokens))

    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        table, _ = self.pick_table(pick)
        self.alive.pop(pick % len(self.alive))
        self.now.cache.release(table)
        assert not table.holds_pages

    @rule()
    def wait_for_disk(self) -> None:
        """Wait until every full page is stored, also of sequences that still grow, but no trailing snapshot.

        A page may be missing if there was no room for it, or if it was damaged: the store removes it when it notices.
        """
        self.now.flush()
        store, dropped = self.now.store, self.now.cache.stats().store
        if store is not None and dropped is not None and not dropped.drops[StoreDrop.ROOM] and dropped.writable:
            for table, _ in self.alive:
                assert table.keys is not None
                for number, (group, own) in enumerate(zip(self.now.groups, table.groups, strict=True)):
                    names = [table.keys.chain[place + 1] for place, _ in group.list_lasting(own, 0)]
                    missing = [name for name in names if not store.contains((number, name))]
                    files = {f"{name.hex()}{f'-{number}' if number else ''}.page" for name in missing}
                    assert files <= self.harmed, "a full page is not stored"

    @rule(waits=st.booleans())
    def restart(self, waits: bool) -> None:
        """End the process, in order or in haste; the next one finds an empty arena, and the disk."""
        self.now.cache.close(60.0 if waits else 0.0)
        self.alive = []
        self.world = self.make_world()

    @rule(pick=PICK, cut=st.booleans())
    def harm_disk(self, pick: int, cut: bool) -> None:
        """Change a bit of some stored page, or cut off its end."""
        self.now.flush()
        files = [path for path in page_files(self.folder) if path.stat().st_size]
        if not files:
            return
        path = files[pick % len(files)]
        content = bytearray(path.read_bytes())
        place = pick % len(content)
        content[place] ^= 1
        path.write_bytes(content[:place] if cut else content)
        self.harmed.add(path.name)

    @invariant()
    def everything_is_right(self) -> None:
        if self.world is None:
            return
        self.now.cache.check([table for table, _ in self.alive])
        for table, tokens in self.alive:
            self.now.read(table, tokens)
        for group, available_pages in zip(self.now.cache.stats().groups, self.now.cache.available_pages, strict=True):
            assert group.free_pages + group.held_pages + group.cached_pages == group.pages == self.pages
            assert available_pages == group.free_pages + group.cached_pages

    def teardown(self) -> None:
        if self.world is not None:
            for table, _ in self.alive:
                self.now.cache.release(table)
            self.now.cache.check([])
            assert set(self.now.cache.available_pages) == {self.pages}
            self.now.cache.close(60.0)
            assert sum(path.stat().st_size for path in page_files(self.folder)) <= self.max_bytes
        shutil.rmtree(self.folder)


class WindowHistory(CacheHistory):
    """Every layer has the same window, so only the last pages are needed."""

    layers = (CacheShape(1, 2, window=4),)


class MixedHistory(CacheHistory):
    """One group keeps everything and one a window, as in most families with windows."""

    layers = (CacheShape(1, 2, window=3), FULL)


class ManyGroupsHistory(CacheHistory):
    """Two groups that keep everything, in pages of different bytes, and two windows, one of the token itself."""

    layers = (FULL, CacheShape(1, 2, window=6), CacheShape(2, 1), CacheShape(1, 4, window=1), FULL)


class StateHistory(CacheHistory):
    """Recurrent layers beside one that keeps everything."""

    layers = (STATE, FULL, StateShape(2))


class StatesAloneHistory(CacheHistory):
    """Nothing but states."""

    layers = (STATE,)


class AllKindsHistory(CacheHistory):
    """Pages for good, pages of a window, and states."""

    layers = (CacheShape(1, 2, window=5), STATE, FULL)


TestCacheHistory = CacheHistory.TestCase
TestWindowHistory = pytest.mark.slow(WindowHistory.TestCase)
TestMixedHistory = MixedHistory.TestCase
TestManyGroupsHistory = pytest.mark.slow(ManyGroupsHistory.TestCase)
TestStateHistory = StateHistory.TestCase
TestStatesAloneHistory = StatesAloneHistory.TestCase
TestAllKindsHistory = AllKindsHistory.TestCase
for case in (TestCacheHistory, TestWindowHistory, TestMixedHistory, TestManyGroupsHistory):
    case.settings = HISTORIES
for case in (TestStateHistory, TestStatesAloneHistory, TestAllKindsHistory):
    case.settings = settings(HISTORIES, max_examples=choose_amount(100))
del case
