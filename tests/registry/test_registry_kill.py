"""A process that is killed at any moment leaves a catalogue that opens again and lists whole models only.

A child pulls, uploads, adds, copies, derives and removes all the time and is killed without warning; its successor
checks every listed model to the last byte, and goes on with what it finds.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_hub import Behaviour, FakeHub
from paper_models import inspect_paper, make_model, paper_registry

from mlxr.core.errors import HubError, NotFound, RegistryError
from mlxr.registry import Changes, Registry
from mlxr.registry.pull import pull

KILLS = 40
MOST_KILLS = 200  # a slow machine needs more until one hits a pull
NAMES = 4
MODELS = 16  # more than names, so that models come and go
MODEL_BYTES = 400_000


def work_for_ever(folder: Path, endpoint: str, seed: int) -> None:
    """Change the registry at random until killed, as the child process."""
    registry, rng = paper_registry(folder), random.Random(seed)
    print("working", os.getpid(), flush=True)
    while True:
        number, other, model = rng.randrange(NAMES), rng.randrange(NAMES), rng.randrange(MODELS)
        try:
            match rng.randrange(6):
                case 0 | 1:
                    pull(
                        registry,
                        f"hf.co/a/m{model}",
                        endpoint=endpoint,
                        name=f"m{number}",
                        retry_delay_s=0.0,
                        replaces=True,
                    )
                case 2:
                    data = make_model(100 + model, MODEL_BYTES)
                    digest = hashlib.sha256(data).hexdigest()
                    registry.blobs.write(digest, (data[at : at + 50_000] for at in range(0, len(data), 50_000)))
                    registry.add(f"m{number}", {"m.gguf": digest}, replaces=True)
                case 3:
                    registry.copy(f"m{number}", f"m{other}", replaces=True)
                case 4:
                    changes = Changes(system=str(seed))
                    registry.derive(f"m{other}", registry.get(f"m{number}"), changes, replaces=True)
                case 5:
                    registry.remove(f"m{number}")
        except NotFound:  # of a model that is not there at the moment
            pass


def start_children(folder: Path, endpoint: str) -> None:
    """For each seed on stdin fork a child and report how the one before ended. Forking saves starting Python."""
    pull(paper_registry(folder), "hf.co/a/m0", endpoint=endpoint, name="m0")  # imports what the children would
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            work_for_ever(folder, endpoint, int(line))
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def check_models(registry: Registry) -> int:
    """Check that every listed model is whole; return their number."""
    records = registry.list()
    for record in records:
        assert record.problem is None
        facts = inspect_paper(registry.get(record.name).path)
        for file, path in zip(record.files, facts.files, strict=True):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    return len(records)


@pytest.mark.slow
def test_forty_kills(tmp_path: Path) -> None:
    rng, folder = random.Random(11), tmp_path / "store"
    listed = half_pulls = leftovers = 0
    with FakeHub() as hub:
        for number in range(MODELS):
            split = {f"m-0000{part}-of-00002.gguf": make_model(20 * part + number, MODEL_BYTES) for part in (1, 2)}
            one = {"m-Q4_K_M.gguf": make_model(number, MODEL_BYTES)}
            repository = hub.add(f"a/m{number}", split if number % 2 else one)
            repository.behaviour = {name: Behaviour(drop_after=150_000) for name in repository.files}
        with subprocess.Popen(
            [sys.executable, __file__, str(folder), hub.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(sys.path), "HF_HUB_DISABLE_TELEMETRY": "1"},
        ) as starter:
            assert starter.stdin is not None
            assert starter.stdout is not None
            for kill in range(MOST_KILLS):
                if kill >= KILLS and half_pulls and leftovers:
                    break
                print(kill, file=starter.stdin, flush=True)
                word, pid = starter.stdout.readline().split()
                assert word == "working"
                time.sleep(rng.random() * 0.15)
                os.kill(int(pid), signal.SIGKILL)
                assert starter.stdout.readline() == f"ended {-signal.SIGKILL}\n", "it ended by itself"
                registry = paper_registry(folder)
                listed += check_models(registry)
                used = {file.sha256 for record in registry.list() for file in record.files}
                half_pulls += len(list(registry.downloads.glob("*"))) if registry.downloads.exists() else 0
                leftovers += len({digest for digest, _ in registry.blobs.digests()} - used)
            starter.stdin.close()
    assert listed > 0, "models survive"
    assert half_pulls > 0, "some kills hit a pull"
    assert leftovers > 0, "some kills came between files and rows"
    registry.sweep(min_age_s=0)
    left = {digest for digest, _ in registry.blobs.digests()}
    assert left == {file.sha256 for record in registry.list() for file in record.files}
    check_models(registry)


if __name__ == "__main__":
    try:
        start_children(Path(sys.argv[1]), sys.argv[2])
    except (HubError, RegistryError) as error:
        sys.exit(f"{error}")
