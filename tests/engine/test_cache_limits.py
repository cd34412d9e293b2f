"""A cache takes memory as it is used, within a limit that may change, and gives back unused memory."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from fake_model import FULL, STATE, FakeConfig, FakeModel, answer_of, expect_greedy, generate, make_engine, run_all

from mlxr.cache.shapes import CacheShape, LayerCache
from mlxr.core.memory import discard, populate, read_unit_bytes
from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest

SHORT = SamplingParams(max_tokens=4, temperature=0)


def count_written(engine: object) -> int:
    return sum(group.pager.written_pages for group in engine.cache.groups)  # type: ignore[attr-defined]


def test_a_cache_takes_memory_as_it_is_used() -> None:
    engine = make_engine(pages=64)
    memory = engine.measure_cache()
    assert (memory.in_use_bytes, memory.held_bytes) == (0, 0)
    assert memory.max_bytes == engine.stats().arena_bytes > 0
    generate(range(12), SHORT, engine)
    generate(range(12), SHORT, engine)
    assert count_written(engine) <= 5 < 64
    assert 0 < engine.measure_cache().in_use_bytes == engine.stats().cache_in_use_bytes <= memory.max_bytes


def test_a_smaller_limit_gives_back_what_nobody_holds_and_answers_stay_the_same() -> None:
    engine = make_engine(pages=64, context_tokens=16)
    for start in range(0, 40, 5):
        generate(range(start, start + 10), SHORT, engine)
    before = count_written(engine)
    engine.limit_cache(0)
    engine.check()
    assert count_written(engine) == 4 < before  # what one whole context needs
    assert sum(engine.stats().cache.evictions.values()) == before - 4 - 1  # one was free
    for start in range(0, 40, 5):
        assert generate(range(start, start + 10), SHORT, engine) == expect_greedy(range(start, start + 10), 4)
        assert count_written(engine) <= 4
    engine.limit_cache(engine.measure_cache().max_bytes)
    for start in range(0, 40, 5):
        generate(range(start, start + 10), SHORT, engine)
    assert count_written(engine) > 4
    engine.check()


KINDS = {
    "pages": (FULL, FULL),
    "window": (CacheShape(2, 4, window=6), FULL),
    "states": (STATE,),
    "all": (CacheShape(2, 4, window=9), STATE, FULL),
}


@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_limits_that_change_under_load_lose_no_answer(seed: int, layers: tuple[LayerCache, ...]) -> None:
    chance = random.Random(seed)
    engine = make_engine(FakeModel(FakeConfig(layers)), pages=40, context_tokens=32)
    wanted = {}
    events = []
    for _ in range(12):
        prompt = [chance.randrange(9) for _ in range(chance.randint(1, 20))]
        tokens = chance.randint(1, 12)
        wanted[engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=tokens, temperature=0)))] = expect_greedy(
            prompt, tokens
        )
        engine.limit_cache(chance.randint(0, engine.measure_cache().max_bytes))
        engine.check()
        events += engine.step()
    events += run_all(engine)
    assert {number: answer_of(events, number) for number in wanted} == wanted


def test_pages_that_are_given_back_keep_their_copies_on_disk(tmp_path: Path) -> None:
    engine = make_engine(pages=64, context_tokens=16, store_folder=tmp_path)
    generate(range(12), SHORT, engine)
    engine.cache.flush()
    engine.limit_cache(0)
    generate(range(20, 32), SHORT, engine)
    engine.limit_cache(0)
    generate(range(12), SHORT, engine)
    assert engine.stats().cache.disk_hit_tokens > 0
    engine.close()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what is resident")
def test_memory_that_is_given_back_is_free_and_reads_as_zeros() -> None:
    nbytes = 32 * read_unit_bytes() if read_unit_bytes() < 2**20 else 2**25
    array = np.zeros(nbytes, np.uint8)
    array[:] = 1
    before = _read_resident()
    discard(array.ctypes.data + 10, nbytes - 20)
    assert before - _read_resident() > nbytes // 2
    assert array[:10].all()
    assert not array[2**13 : -(2**13)].any()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what is resident")
def test_memory_that_is_taken_early_keeps_what_is_written() -> None:
    nbytes = 2**25
    array = np.zeros(nbytes, np.uint8)
    array[:10] = 7
    before = _read_resident()
    populate(array.ctypes.data + 5, nbytes - 5)
    if _read_resident() == before:
        pytest.skip("the system takes no memory early")  # Linux before 5.14
    assert _read_resident() - before > nbytes // 2
    assert (array[:11] == [7] * 10 + [0]).all()
    populate(0, 4096)  # nothing is there, and nothing happens


def _read_resident() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
