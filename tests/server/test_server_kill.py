"""`mlxr serve` is killed while it pulls, uploads, creates and deletes: the next one lists whole models only."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from pathlib import Path

import httpx
import ollama
import pytest
from running_server import spawn_server

from mlxr.core.settings import resolve
from mlxr.loading import ASSETS
from mlxr.service.catalogue import open_registry

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_hub import Behaviour, FakeHub

DRAFT = ASSETS / "demo-draft.gguf"
KILLS = 4
MOST_KILLS = 20  # until one of them hit something half done
REPOSITORIES = 3


def work(url: str, seed: int) -> None:
    """Change models until the server is gone."""
    rng = random.Random(seed)
    with ollama.Client(url) as api, contextlib.suppress(httpx.TransportError, ConnectionError):
        while True:
            name = f"m{rng.randrange(3)}"
            with contextlib.suppress(ollama.ResponseError):
                match rng.randrange(4):
                    case 0:
                        api.pull(f"hf.co/me/r{rng.randrange(REPOSITORIES)}")
                    case 1:
                        api.create(name, files={"draft.gguf": api.create_blob(DRAFT)}, system=str(seed))
                    case 2:
                        api.copy(rng.choice(["demo", "m0", "hf.co/me/r0"]), name)
                    case 3:
                        api.delete(rng.choice([name, f"hf.co/me/r{rng.randrange(REPOSITORIES)}"]))


@pytest.mark.slow
def test_kills(tmp_path: Path) -> None:
    rng, folder = random.Random(5), tmp_path / "models"
    registry = open_registry(resolve({"models_folder": folder}, {}))
    whole = DRAFT.read_bytes()
    listed = unfinished = 0
    with FakeHub() as hub:
        for number in range(REPOSITORIES):
            changed = whole[:-1] + bytes([number])
            repository = hub.add(f"me/r{number}", {"x.gguf": changed})
            repository.behaviour["x.gguf"] = Behaviour(drop_after=2_000_000)
        for kill in range(MOST_KILLS):
            if kill >= KILLS and listed and unfinished:
                break
            with spawn_server(models_folder=folder, hub_url=hub.url) as (process, url):
                workers = [threading.Thread(target=work, args=(url, 10 * kill + number)) for number in range(3)]
                for worker in workers:
                    worker.start()
                time.sleep(0.3 + rng.random())
                process.kill()
            for worker in workers:
                worker.join()
            for record in registry.list():
                assert record.problem is None
                assert len(record.path.read_bytes()) == record.size_bytes
                listed += not record.name.startswith("demo")
            unfinished += sum(1 for _ in registry.downloads.glob("*")) + sum(
                1 for _ in registry.blobs.folder.glob("inc*")
            )
    assert listed > 0, "some models survive"
    assert unfinished > 0, "some kills came in the middle"
    registry.sweep(min_age_s=0)
    left = {digest for digest, _ in registry.blobs.digests()}
    assert left == {file.sha256 for record in registry.list() if record.is_owned for file in record.files}
