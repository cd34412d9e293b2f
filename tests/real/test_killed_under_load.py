"""`kill -9` at random moments while the demo model answers with the store on: the files that are left are right.

A child process answers prompts in a loop and is killed. Then this process opens the same store and answers too: every
token and logprob equals the same request without sharing and store, in whatever state the files are.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from amounts import choose_amount

from mlxr import LLM, Completion, SamplingParams
from mlxr.core.stats import StoreDrop

KILLS = choose_amount(30)
THREADS = 1
TEXT = (Path(__file__).parent / "held_out.txt").read_text()
SMALL = {"threads": THREADS, "context_tokens": 1024, "max_sequences": 4, "page_size": 16}
SERIOUS = (StoreDrop.DAMAGED, StoreDrop.FOREIGN, StoreDrop.VERSION, StoreDrop.UNREADABLE, StoreDrop.UNWRITABLE)
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True, logprobs=1)
CHILD = """
import sys
from test_killed_under_load import PARAMS, draw_prompts, open_llm
print("open", flush=True)
round = int(sys.argv[2])
with open_llm(store_bytes="32M", store_folder=sys.argv[1]) as llm:
    while True:
        print("answering", flush=True)
        llm.generate(draw_prompts(round), PARAMS)
        round += 1
"""


def draw_prompts(number: int) -> list[str]:
    """Four prompts; every third round asks what an earlier one asked."""
    start = 400 * (number % 10 if number % 3 else 1)
    return [TEXT[start : start + 300 + 200 * index] for index in range(4)]


def open_llm(**settings: object) -> LLM:
    return LLM("demo", **{**SMALL, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[int, list[Completion]]]:
    with open_llm(kv_cache="simple") as llm:
        yield {number: llm.generate(draw_prompts(number), PARAMS) for number in range(10)}


def kill_under_load(folder: Path, number: int, delay_s: float) -> None:
    """Run the child until it answers, `delay_s` longer, and kill it."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(number)],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert [child.stdout.readline(), child.stdout.readline()] == ["open\n", "answering\n"]
        time.sleep(delay_s)
        assert child.poll() is None
        child.kill()


@pytest.mark.slow
def test_every_restart_serves_the_right_bits(tmp_path: Path, expected: dict[int, list[Completion]]) -> None:
    chance = random.Random(11)
    disk_tokens = 0
    for number in range(KILLS):
        kill_under_load(tmp_path, number, chance.uniform(0.0, 0.5))
        with open_llm(store_bytes="32M", store_folder=tmp_path) as llm:
            for asked in (number % 10, chance.randrange(10)):
                answers = llm.generate(draw_prompts(asked), PARAMS)
                assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected[asked]]
                assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected[asked]]
            cache = llm.stats().engine.cache
            disk_tokens += cache.disk_hit_tokens
            assert cache.store is not None
            assert not [cause for cause in SERIOUS if cache.store.drops.get(cause)]
    assert disk_tokens > 30 * KILLS
