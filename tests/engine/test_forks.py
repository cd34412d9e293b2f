"""Sequences that share pages through the runner: each continues with its own history, and untouched pages stay one."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import FULL, FakeConfig, FakeModel, answer_of, expect_greedy, fake_logits, make_engine, run_all

from mlxr.cache.arena import ModelArena
from mlxr.cache.kv_cache import KVCache
from mlxr.cache.page_table import Pager, PageTable, SequenceTable
from mlxr.cache.shapes import CacheShape, form_groups
from mlxr.core.types import SamplingParams
from mlxr.engine.memory_plan import ArenaPlan
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import BatchPart, Runner, build_batch
from mlxr.kernels.context import Context

WINDOW = CacheShape(2, 4, window=3)


@pytest.mark.parametrize("layers", [(FULL, FULL), (WINDOW, FULL)], ids=["one group", "two groups"])
@pytest.mark.parametrize(("prompt_tokens", "copied_pages"), [(6, 2), (7, 2), (8, 0), (9, 2)])
def test_forks_continue_apart(prompt_tokens: int, copied_pages: int, layers: tuple[CacheShape, ...]) -> None:
    ctx = Context("reference")
    formed = form_groups(layers)
    plan = ArenaPlan(formed, 4, None, pages=(16,) * len(formed.shapes), page_bytes=())
    arena, groups = plan.allocate(ctx)
    cache, pager = KVCache(groups, fingerprint=b"fake", store=None), groups[-1].pager
    runner = Runner(FakeModel(FakeConfig(layers)), arena, cache)
    prompt = list(range(prompt_tokens))
    tables = [cache.open_table(prompt, cache.start_keys(), limit_tokens=prompt_tokens)]
    runner.reserve(tables[0], prompt_tokens)
    runner.forward([BatchPart(tables[0], prompt, 1)])
    cache.commit(tables[0], prompt, prompt_tokens)
    tables += [cache.fork(tables[0]), cache.fork(tables[0])]
    assert pager.used_pages == pager.pages_for(prompt_tokens)
    histories = [list(prompt) for _ in tables]
    for step in range(6):
        parts = [BatchPart(table, [10 * index + step], 1) for index, table in enumerate(tables)]
        for part in parts:
            runner.reserve(part.table, 1)
        logits = runner.forward(parts).logits
        for table, history, part, row in zip(tables, histories, parts, logits, strict=True):
            history += part.token_ids
            cache.commit(table, history, 1)
            assert np.array_equal(row, fake_logits(history))
        cache.check(tables)
    assert ctx.ledger.snapshot().copied_bytes == copied_pages * sum(one.page_bytes for one in arena.arenas)
    full = prompt_tokens // 4
    own = [table.groups[-1].pages for table in tables]
    assert own[0][:full] == own[1][:full] == own[2][:full]


def test_interrupted_copy_leaves_no_page_that_was_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.submit(EngineRequest([1, 2, 3, 4, 5], SamplingParams(max_tokens=6, n=2)))
    events = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(ModelArena, "copy_pages", lambda self, copies: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    events += run_all(engine)
    for index in (0, 1):
        own = [event for event in events if event.index == index]
        assert answer_of(own, 1) == expect_greedy([1, 2, 3, 4, 5], 6)


def test_batch_arrays() -> None:
    pager = Pager(16, page_size=4)
    pager.allocate(3)
    first, second = PageTable(pager), PageTable(pager)
    first.prepare(6)
    first.commit(6)
    parts = [BatchPart(SequenceTable([first]), [30, 31, 32], 2), BatchPart(SequenceTable([second]), [40], 0)]
    for part in parts:
        part.table.groups[0].prepare(len(part.token_ids))
    batch = build_batch(parts)
    a, b, c = first.pages
    assert batch.token_ids.tolist() == [30, 31, 32, 40]
    assert batch.positions.tolist() == [6, 7, 8, 0]
    assert batch.slots.tolist() == [4 * b + 2, 4 * b + 3, 4 * c, 4 * second.pages[0]]
    assert batch.query_starts.tolist() == [0, 3, 4]
    assert batch.context_lengths.tolist() == [9, 1]
    assert batch.page_table.tolist() == [[a, b, c], [second.pages[0], -1, -1]]
    assert batch.output_rows.tolist() == [1, 2]
    assert batch.others == ()


@pytest.mark.parametrize("tokens", [1, 2], ids=["one token", "two tokens"])
def test_every_group_has_its_own_slots_and_table(tokens: int) -> None:
    pagers = [Pager(8, page_size=4), Pager(8, page_size=4)]
    pagers[1].allocate(5)
    table = SequenceTable([PageTable(pager) for pager in pagers])
    for own in table.groups:
        own.prepare(7 + tokens)
        own.commit(7)
    pagers[1].release(table.groups[1].slide(1))
    batch = build_batch([BatchPart(table, [9] * tokens, tokens)])
    full, window = (own.pages for own in table.groups)
    assert batch.of_group(0).page_table.tolist() == [full]
    assert batch.of_group(1).page_table.tolist() == [window]
    assert window[0] == -1
    places = [(1, 3), (2, 0)][:tokens]
    assert batch.slots.tolist() == [full[page] * 4 + offset for page, offset in places]
    assert batch.of_group(1).slots.tolist() == [window[page] * 4 + offset for page, offset in places]
    assert batch.of_group(1).token_ids is batch.token_ids
