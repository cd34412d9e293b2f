"""A process that is killed at any moment leaves a store whose pages are right, to the bit, or not served.

A child answers prompts over and over, in an arena and a store that are both too small, so that it writes, removes and
reads back all the time; it is killed without warning, and its successor proves every page and every state it finds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import pytest
from amounts import choose_amount
from cache_world import FULL, PAGE_SIZE, STATE, World

from mlxr.core.stats import StoreDrop

KILLS = choose_amount(30)
MAX_BYTES = 400_000
PROMPTS = 50


def make_world(folder: Path) -> World:
    """Pages of some 4 KiB, so that writing one takes a moment, and states."""
    return World(pages=24, page_size=PAGE_SIZE, folder=folder, max_bytes=MAX_BYTES, layers=[FULL, STATE] * 64)


def make_prompts(seed: int) -> list[list[int]]:
    """The same prompts for all seeds, in another order."""
    rng = random.Random(1)
    prompts = [
        [index % 12] * (2 * PAGE_SIZE) + [rng.randrange(2) for _ in range(rng.randrange(2, 6 * PAGE_SIZE))]
        for index in range(PROMPTS)
    ]
    random.Random(seed).shuffle(prompts)
    return prompts


def serve_for_ever(folder: Path, seed: int) -> None:
    """Serve prompts until killed, as the child process; each page that is read back is checked, too."""
    world = make_world(folder)
    print("serving", os.getpid(), flush=True)
    for prompt in cycle(make_prompts(seed)):
        world.serve(prompt)


def start_children(folder: Path) -> None:
    """For each seed on stdin fork a child and report how the one before ended. Forking saves starting Python."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            serve_for_ever(folder, int(line))
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.mark.slow
def test_thirty_kills(tmp_path: Path) -> None:
    rng = random.Random(17)
    half_written = disk_hit_tokens = 0
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        for kill in range(KILLS):
            print(kill, file=starter.stdin, flush=True)
            word, pid = starter.stdout.readline().split()
            assert word == "serving"
            time.sleep(rng.random() * 0.2)
            os.kill(int(pid), signal.SIGKILL)  # it is there: a child that ended waits to be asked for below
            assert starter.stdout.readline() == f"ended {-signal.SIGKILL}\n", "it ended by itself: a wrong answer"
            world = make_world(tmp_path)
            for prompt in make_prompts(kill):
                world.serve(prompt)
            world.cache.close()
            drops = world.store_stats.drops
            assert [drops[cause] for cause in (StoreDrop.DAMAGED, StoreDrop.FOREIGN, StoreDrop.VERSION)] == [0, 0, 0]
            half_written += drops[StoreDrop.HALF_WRITTEN]
            disk_hit_tokens += world.cache.stats().disk_hit_tokens
            assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= MAX_BYTES
        starter.stdin.close()
    assert disk_hit_tokens > 0
    print(f"{half_written} pages were half-written, {disk_hit_tokens} tokens came from disk")


if __name__ == "__main__":
    start_children(Path(sys.argv[1]))
