"""Kills servers that share a store of pages on disk at random moments: no answer may ever differ.

    python bench/kills.py                       # 50 kills
    python bench/kills.py --kills 5 --seed 3

One server that is never killed gives the answers to a fixed list of conversations. Then others answer them in random
order to six clients at a time and are killed (SIGKILL) after a random time, each with the store that the one before
left. Now and then pages on disk are damaged in between, two servers share the store, and the store lies on a disk that
is full (a small tmpfs, if this user may mount one). Afterwards no worker process may be left, and the last server must
find pages of earlier ones. Ends with exit code 1 if an answer differs or a process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from http_client import Connection, Refused
from server_process import ServerProcess, start_own

CONVERSATIONS = 24
CLIENTS = 6
ANSWER_TOKENS = 24
WORKER = "mlxr.templates.worker"
WORKER_END_S = 10.0  # a worker that renders notices only afterwards that its server is gone
FULL_DISK = "3m"


def make_messages(index: int) -> list[dict[str, str]]:
    """Conversation number `index`; neighbours begin alike, so that they share pages."""
    text = f"Read this. {index // 4} " + "import os\n" * (30 + 9 * (index % 4))
    return [{"role": "user", "content": text}]


async def ask(port: int, index: int) -> str:
    """The greedy answer to a conversation."""
    connection = Connection("127.0.0.1", port)
    body = {"messages": make_messages(index), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        reply, _ = await connection.post("/v1/chat/completions", body)
        return str(reply["choices"][0]["message"]["content"])
    finally:
        connection.close()


async def answer_all(ports: Sequence[int], draw: random.Random, expected: dict[int, str], found: Counter[str]) -> None:
    """Ask for ever; count right and different answers. The clients of a killed server end."""

    async def client(port: int, turns: random.Random) -> None:
        while True:
            index = turns.randrange(CONVERSATIONS)
            try:
                answer = await ask(port, index)
            except Refused as refusal:
                found[f"refused {str(refusal)[:3]}"] += 1
                continue
            except (OSError, asyncio.IncompleteReadError, ValueError):
                return
            is_right = answer == expected[index]
            found["right" if is_right else "different"] += 1
            if not is_right:
                print(f"conversation {index}: {answer!r} instead of {expected[index]!r}", file=sys.stderr)

    await asyncio.gather(*(client(port, random.Random(draw.random())) for port in ports for _ in range(CLIENTS)))


def damage(store: Path, draw: random.Random) -> int:
    """Change, cut or empty some pages on disk; returns their number."""
    pages = sorted(store.rglob("*.page"))
    chosen = draw.sample(pages, min(len(pages), 5))
    for page in chosen:
        data = bytearray(page.read_bytes())
        match draw.randrange(3):
            case 0 if data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            case 1:
                del data[draw.randrange(len(data) + 1) :]
            case _:
                data.clear()
        page.write_bytes(data)
    return len(chosen)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path | None]:
    """Yield a folder on a disk of three megabytes, None if none can be mounted."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK}", "none", str(folder)], capture_output=True
    )
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def list_workers(parents: Sequence[int]) -> set[Path]:
    """The folders in /proc of the processes that render templates for these servers."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents and is_worker(folder):
                found.add(folder)
    return found


def is_worker(folder: Path) -> bool:
    """Return True if the process with this folder in /proc renders templates."""
    try:
        return WORKER.encode() in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def run(chosen: argparse.Namespace, folder: Path) -> list[str]:
    """Kill so many servers; returns the faults."""
    draw, workers = random.Random(chosen.seed), set[Path]()
    common = ("--arena-bytes", "24M", "--page-size", "16")
    with start_own(folder, "demo", *common) as first:
        expected = {index: asyncio.run(ask(first.port, index)) for index in range(CONVERSATIONS)}
    found, events = Counter[str](), Counter[str]()
    store = folder / "pages"
    with full_disk(folder / "full") as small:
        for kill in range(chosen.kills):
            flags, count = (*common, "--store-bytes", "64M", "--store-folder", str(store)), 1
            if kill % 5 == 4:
                events["damaged pages"] += damage(store, draw)
            if kill % 7 == 6:
                count, events["two servers"] = 2, events["two servers"] + 1
            if kill % 9 == 8 and small is not None:
                flags, events["full disk"] = (*flags[:-1], str(small)), events["full disk"] + 1
            servers = [start_own(folder, "demo", *flags) for _ in range(count)]
            workers |= asyncio.run(kill_in_the_middle(servers, draw, expected, found))
        last = start_own(folder, "demo", *common, "--store-bytes", "64M", "--store-folder", str(store))
        with last:
            same = [asyncio.run(ask(last.port, index)) == expected[index] for index in range(CONVERSATIONS)]
            found["right"] += sum(same)
            found["different"] += len(same) - sum(same)
            hits = read_hit_tokens(last)
    print(f"{chosen.kills} kills: {dict(found)}, {dict(events)}; the last server found {hits} tokens on disk")
    wrong = [f"{found['different']} answers differ"] if found["different"] else []
    if not hits:
        wrong.append("the last server found nothing on disk")
    end_s = time.monotonic() + WORKER_END_S
    while any(map(is_worker, workers)) and time.monotonic() < end_s:
        time.sleep(0.2)
    left = sum(map(is_worker, workers))
    print(f"{len(workers)} worker processes lost their server, {left} are left")
    return [*wrong, *([f"{left} worker processes are left"] if left else [])]


async def kill_in_the_middle(
    servers: Sequence[ServerProcess], draw: random.Random, expected: dict[int, str], found: Counter[str]
) -> set[Path]:
    """Let clients ask, and kill the servers after a random time; returns their workers' folders in /proc."""
    workers = set[Path]()
    asking = asyncio.create_task(answer_all([server.port for server in servers], draw, expected, found))
    for server in servers:
        await asyncio.sleep(draw.uniform(0.05, 1.5))
        workers |= list_workers([server.process_id])
        os.kill(server.process_id, signal.SIGKILL)
    await asking
    for server in servers:
        server.__exit__(None, None, None)
    return workers


def read_hit_tokens(server: ServerProcess) -> int:
    """The tokens of prompts whose pages came from disk."""
    lines = server.read("/metrics").splitlines()
    rows = [line for line in lines if line.startswith("mlxr_prefix_tokens_total") and 'where="disk"' in line]
    return int(sum(float(row.rsplit(" ", 1)[1]) for row in rows))


def main() -> int:
    """Run the kills that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = run(chosen, Path(folder))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
