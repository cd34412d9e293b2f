"""Surroundings for attacks on a server: a slow hub, a held catalogue, a small disk, few descriptors, many clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_client import Connection, Refused

BYTE_S = 2.0  # between two bytes of the slow hub
BODY_BYTES = 31 << 20
STORM_CLIENTS = 500
STORM_WAIT_S = 600.0


class SlowHub:
    """A hub on loopback that sends one byte of a head every two seconds, for ever; its address is `url`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._drip, args=(self._listener.accept()[0],), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 100_000:
                connection.sendall(bytes([byte]))
                time.sleep(BYTE_S)


@contextlib.contextmanager
def hold_catalogue(models: Path) -> Iterator[None]:
    """Hold the catalogue like another process."""
    with contextlib.closing(sqlite3.connect(models / "catalogue.db", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "64m") -> Iterator[bool]:
    """Mount a file system of that size at `folder`; yields False if this user may not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    is_there = shutil.which("mount") is not None and not subprocess.run(command, check=False).returncode
    try:
        yield is_there
    finally:
        if is_there:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def remount_read_only(folder: Path) -> None:
    """Make a small disk read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file that takes all the room there is."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    return path


def list_children(process_id: int) -> list[int]:
    """The child processes of a server, such as those for templates."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def harm_child(process_id: int, turn: int) -> None:
    """Kill or stop a child of the server, as the system might."""
    children = list_children(process_id)
    if children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(children[turn % len(children)], signal.SIGSTOP if turn % 2 else signal.SIGKILL)


def make_body(index: int) -> tuple[str, bytes]:
    """The path and the body of attempt number `index`: 31 MiB of lists, objects, numbers, texts or ids."""
    item, path, field = (
        (b"[]", "/v1/completions", b"x"),
        (b"{}", "/v1/chat/completions", b"x"),
        (b"1", "/v1/completions", b"x"),
        (b"12345", "/v1/completions", b"prompt"),
        (b"1234", "/detokenize", b"tokens"),
        (b'""', "/v1/messages", b"x"),
        (b'{"a":[1]}', "/api/chat", b"messages"),
        (b"7", "/api/generate", b"context"),
    )[index % 8]
    head = b'{"max_tokens":1,"' + field + b'":['
    return path, head + (item + b",") * (BODY_BYTES // (len(item) + 1)) + item + b"]}"


async def post_bytes(port: int, path: str, body: bytes) -> str:
    """Send a body unchanged; returns the status of the answer, as a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        reply = await reader.read(64)
        return reply.split(b" ")[1].decode() if b" " in reply else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.transport.abort()


async def run_storm(port: int, requests: int) -> tuple[Counter[str], list[float]]:
    """The statuses and the waits of so many requests by 500 clients, each of which sends its next one at once."""
    statuses, waits_s, left = Counter[str](), list[float](), iter(range(requests))

    async def ask(client: int) -> None:
        chance, connection = random.Random(client), Connection("127.0.0.1", port)
        for number in left:
            start_s = time.monotonic()
            try:
                async with asyncio.timeout(STORM_WAIT_S):
                    await connection.post(*make_request(chance, number))
                statuses["200"] += 1
            except Refused as refusal:
                statuses[str(refusal).partition(":")[0]] += 1
            except TimeoutError:
                statuses["none"] += 1
                connection.close()
            except (ConnectionError, asyncio.IncompleteReadError):
                statuses["closed"] += 1
            waits_s.append(time.monotonic() - start_s)
        connection.close()

    await asyncio.gather(*map(ask, range(STORM_CLIENTS)))
    return statuses, sorted(waits_s)


def make_request(chance: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A request of the storm: a question, several answers, JSON, a text to embed, ids, a long prompt."""
    messages = [{"role": "user", "content": f"Tell me of {number}."}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "storm", "schema": schema}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 16}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "n": 4}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 16, "response_format": form}),
        ("/v1/completions", {"prompt": f"# {number}\n" * 30, "max_tokens": 8}),
        ("/v1/embeddings", {"input": [f"text {number}", "another"]}),
        ("/tokenize", {"content": f"import os  # {number}\n" * 40, "with_pieces": True}),
    ]
    return chance.choice(kinds)
