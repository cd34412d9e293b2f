"""A server under attack, and the effect on another client.

    python bench/attack.py                            # all of it, some hours
    python bench/attack.py --only pulls writers       # these kinds alone
    python bench/attack.py --templates 20 --schemas 20 --tokenizers 20 --floods 8 --connections 20 --json FILE

One client reads a streamed answer over and over, first alone and then while others send what `hostile` makes: chat
templates that never end, schemas that no machine can compile, tokenizers that grow a text without bound, prompts of
megabytes, texts that cannot be embedded, requests that are never finished. Others pull from a hub that sends a byte
every two seconds, change a catalogue that another process holds, send bodies of 31 MiB of lists, objects, numbers and
ids, and ask for templates whose processes are killed or stopped. Compared are the 99th percentiles of the time between
two tokens, and the texts. Then 16 clients ask short questions, alone and beside one that sends long prompts, texts to
embed and the floods in a loop; compared are the 95th percentiles of the time to the first token. At the end memory must
have come back, no request may have been answered with an internal error, and SIGTERM must end the server soon after its
drain time in the middle of each kind of attack. Separate servers get a models folder that is full or read-only (only
root can make one), 64 descriptors, and a storm of 500 clients that comes twice, to see whether memory grows with it.
Ends with exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from attack_surroundings import (
    STORM_WAIT_S,
    SlowHub,
    fill,
    harm_child,
    hold_catalogue,
    make_body,
    post_bytes,
    remount_read_only,
    run_storm,
    small_disk,
)
from hostile import make_flood, make_schema, make_template, make_texts
from hostile_tokenizers import TEXT, make_config, make_tokenizer, make_weights
from http_client import Connection, Refused
from server_process import ServerProcess, start_own

AT_ONCE = 4
DRAIN_S = 5.0
MAX_DELAY_S = 0.1
MAX_GROWTH_BYTES = 200 * 2**20
MAX_SLOWDOWN = 3.0  # of a short question's first token beside a flood
SHORT_CLIENTS = 16
AFTER_DRAIN_S = 2.0  # for the last events, and to release the models
ANSWER_TOKENS = 48
PROMPTS = 16  # of the other client, each answered alone and beside others
SETTLE_S = 3.0  # until memory has been given back
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = (
    b"",
    b"POST /v1",
    HEAD,
    HEAD + b"Content-Length: 100\r\n\r\n{",
    HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffff\r\n",
)
MANY_AT_ONCE = {"connections": 50, "pulls": 16, "writers": 40}
MAX_LOG_BYTES = 1 << 16
MAX_LEAK_BYTES = 20 << 20
Attack = Callable[[int], Coroutine[Any, Any, str]]
CONFIG, WEIGHTS_DATA = make_config(), make_weights()
WEIGHTS = f"sha256:{hashlib.sha256(WEIGHTS_DATA).hexdigest()}"


def watch(port: int, is_reading: Event, is_over: Event, found: Queue[tuple[list[float], dict[int, str]]]) -> None:
    """Read answers until told to stop, in a process of its own; put the times between their tokens, and their texts by
    prompt, into `found`.

    The first token sets `is_reading`; everything from then on is measured, however short it is.
    """

    async def read() -> tuple[list[float], dict[int, str]]:
        gaps: list[float] = []
        texts: dict[int, str] = {}
        connection, turn = Connection("127.0.0.1", port), 0
        while not is_over.is_set():
            turn = (turn + 1) % PROMPTS
            text = ""
            body = {"prompt": f"import os  # {turn}\n", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
            last_s = time.perf_counter()
            async for event in connection.stream("/v1/completions", {**body, "temperature": 0}):
                text += event["choices"][0]["text"] if event.get("choices") else ""
                now_s = time.perf_counter()
                gaps.append(now_s - last_s)
                last_s = now_s
                is_reading.set()
            if texts.setdefault(turn, text) != text:
                texts[turn] = "it was not the same twice"
            await asyncio.sleep(0.02)
        connection.close()
        return gaps, texts

    found.put(asyncio.run(read()))


class Watcher:
    """The other client, running while the context lasts; afterwards `gaps_s` are its sorted times between two tokens.

    The context begins when its first token has come; that token's time is among them, so there is at least one.
    """

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._is_reading, self._is_over, self._found = context.Event(), context.Event(), context.Queue()
        self._process = context.Process(target=watch, args=(port, self._is_reading, self._is_over, self._found))
        self.gaps_s: list[float] = []
        self.texts: dict[int, str] = {}

    def __enter__(self) -> Watcher:
        self._process.start()
        if not self._is_reading.wait(timeout=60):
            self._process.kill()
            raise RuntimeError("the other client got no token within a minute")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        gaps_s, self.texts = self._found.get(timeout=60)
        self.gaps_s = sorted(gaps_s)
        self._process.join()

    @property
    def p99_s(self) -> float:
        """The 99th percentile of the gaps between two tokens, in seconds."""
        return self.gaps_s[int(len(self.gaps_s) * 0.99)]


async def post(port: int, path: str, body: dict[str, Any]) -> str:
    """Return the status of an answer, as a word."""
    connection = Connection("127.0.0.1", port)
    try:
        await connection.post(path, body)
        return "200"
    except json.JSONDecodeError:  # an answer without a body
        return "200"
    except Refused as refusal:
        return str(refusal).partition(":")[0]
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        connection.close()


def make_attacks(port: int, process_id: int = 0) -> dict[str, Attack]:
    """Return the attacks by kind: each makes attempt number `index` and returns the status that it got."""

    async def template(index: int) -> str:
        made = {"model": f"t{index}", "from": "demo", "template": make_template(index), "stream": False}
        status = await post(port, "/api/create", made)
        if status != "200":
            return status
        messages = [{"role": "user", "content": "Hi"}]
        chat = {"model": f"t{index}", "messages": messages, "stream": False, "options": {"num_predict": 4}}
        return await post(port, "/api/chat", {**chat, "keep_alive": 0})  # frees its memory at once

    async def schema(index: int) -> str:
        wanted = {"type": "json_schema", "json_schema": {"name": "hostile", "schema": make_schema(index)}}
        messages = [{"role": "user", "content": "Hi"}]
        return await post(
            port, "/v1/chat/completions", {"messages": messages, "response_format": wanted, "max_tokens": 16}
        )

    async def flood(index: int) -> str:
        return await post(port, *make_flood(index))

    async def text(index: int) -> str:
        return await post(port, *make_texts(index))

    async def connection(index: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALVES[index % len(HALVES)])
        try:
            async with asyncio.timeout(10):
                reply = await reader.read(64)
        except (TimeoutError, ConnectionError):
            return "open"
        finally:
            writer.transport.abort()
        return reply.split(b" ")[1].decode() if b" " in reply else "closed"

    async def tokenizer(index: int) -> str:
        name, data = f"k{index}", make_tokenizer(index)
        files = {"tokenizer.json": digest_of(data), "config.json": digest_of(CONFIG), "model.safetensors": WEIGHTS}
        await upload(port, data)
        status = await post(port, "/api/create", {"model": name, "files": files, "stream": False})
        if status != "200":
            return status
        options = {"num_predict": 2}
        wanted = {"model": name, "prompt": TEXT, "raw": True, "stream": False, "options": options, "keep_alive": 0}
        return await post(port, "/api/generate", wanted)

    async def pull(index: int) -> str:
        try:
            async with asyncio.timeout(10):
                return await post(port, "/api/pull", {"model": f"hf.co/a/b{index}", "stream": False})
        except TimeoutError:
            return "slow"

    async def write(index: int) -> str:
        return await post(port, "/api/copy", {"source": "held", "destination": f"copy{index}"})

    async def body(index: int) -> str:
        return await post_bytes(port, *make_body(index))

    async def harm(index: int) -> str:
        harm_child(process_id, index)
        messages = [{"role": "user", "content": f"Hi {index}"}]
        return await post(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 4})

    return {
        "templates": template,
        "schemas": schema,
        "tokenizers": tokenizer,
        "floods": flood,
        "texts": text,
        "connections": connection,
        "pulls": pull,
        "writers": write,
        "bodies": body,
        "workers": harm,
    }


def digest_of(data: bytes) -> str:
    """The name of a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def upload(port: int, data: bytes) -> None:
    """Store a blob on the server."""
    request = Request(f"http://127.0.0.1:{port}/api/blobs/{digest_of(data)}", data=data, method="POST")
    await asyncio.to_thread(lambda: urlopen(request, timeout=30).close())


async def ask_short(port: int, seconds: float) -> list[float]:
    """The sorted times to the first token of clients that ask short questions for so many seconds."""
    found: list[float] = []
    end_s = time.monotonic() + seconds

    async def ask(client: int) -> None:
        connection, turn = Connection("127.0.0.1", port), 0
        while time.monotonic() < end_s:
            turn += 1
            body = {"prompt": f"# {client} {turn}\nimport os\n", "max_tokens": 8, "ignore_eos": True, "stream": True}
            start_s, first_s = time.perf_counter(), 0.0
            async for _ in connection.stream("/v1/completions", body):
                first_s = first_s or time.perf_counter() - start_s
            found.append(first_s)
        connection.close()

    await asyncio.gather(*map(ask, range(SHORT_CLIENTS)))
    return sorted(found)


def flood_forever(port: int) -> None:
    """Send long prompts, texts to embed and the other floods in a loop, one of each at a time."""

    async def flood(kinds: Sequence[int]) -> None:
        connection, turn = Connection("127.0.0.1", port), 0
        while True:
            path, body = make_flood(kinds[turn % len(kinds)])
            turn += 1
            with contextlib.suppress(Refused, ConnectionError, asyncio.IncompleteReadError):
                await connection.post(path, body)

    async def flood_all() -> None:
        await asyncio.gather(*map(flood, ((4,), (5,), (0, 1, 2, 3, 6, 7))))

    asyncio.run(flood_all())


def ask_beside_flood(port: int, seconds: float) -> list[float]:
    """Return the times of `ask_short` while another process floods the server."""
    flood = multiprocessing.get_context("spawn").Process(target=flood_forever, args=(port,))
    flood.start()
    time.sleep(3.0)
    found = asyncio.run(ask_short(port, seconds))
    flood.kill()
    flood.join()
    return found


async def run_attack(attack: Attack, attempts: int, at_once: int) -> Counter[str]:
    """Make all attempts, `at_once` at a time; returns their statuses."""
    room, statuses = asyncio.Semaphore(at_once), Counter[str]()

    async def attempt(index: int) -> None:
        async with room:
            statuses[await attack(index)] += 1

    await asyncio.gather(*map(attempt, range(attempts)))
    return statuses


def read_resident_bytes(server: ServerProcess) -> int:
    """The resident memory of the server's process."""
    lines = server.read("/metrics").splitlines()
    return int(float(next(line for line in lines if line.startswith("mlxr_process_resident_bytes ")).split()[1]))


async def end_in_the_middle(server: ServerProcess, kinds: Sequence[str]) -> float:
    """Seconds from SIGTERM, while attacks of these kinds are under way, until the process has ended."""
    attacks = make_attacks(server.port)
    tasks = [asyncio.create_task(attacks[kind](index)) for index in range(6) for kind in kinds]
    await asyncio.sleep(1.0)
    start_s = time.monotonic()
    await asyncio.to_thread(server.__exit__, None, None, None)
    seconds = time.monotonic() - start_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seconds


def run(server: ServerProcess, models: Path, chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run the attacks; returns the figures and the bounds that were missed."""
    attacks = make_attacks(server.port, server.process_id)
    for data in (CONFIG, WEIGHTS_DATA):
        asyncio.run(upload(server.port, data))
    asyncio.run(post(server.port, "/api/create", {"model": "held", "from": "demo", "stream": False}))
    for warming in (4, 5):  # these fill the cache, whose memory is the server's from then on
        asyncio.run(post(server.port, *make_flood(warming)))
    with Watcher(server.port) as alone:
        time.sleep(chosen.seconds)
    start_bytes = read_resident_bytes(server)
    figures: dict[str, Any] = {"alone_p99_s": alone.p99_s, "start_bytes": start_bytes}
    missed: list[str] = []
    for kind in (kind for kind in attacks if kind in chosen.only):
        at_once = MANY_AT_ONCE.get(kind, AT_ONCE)
        start_s = time.monotonic()
        surroundings = hold_catalogue(models) if kind == "writers" else contextlib.nullcontext()
        with Watcher(server.port) as watcher, surroundings:
            statuses = asyncio.run(run_attack(attacks[kind], getattr(chosen, kind), at_once))
        time.sleep(SETTLE_S)
        row: dict[str, Any] = {"p99_s": watcher.p99_s, "max_s": watcher.gaps_s[-1]}
        row["statuses"] = dict(sorted(statuses.items()))
        grown_bytes = read_resident_bytes(server) - start_bytes
        figures[kind] = {**row, "seconds": time.monotonic() - start_s, "growth_bytes": grown_bytes}
        times = f"p99 {row['p99_s'] * 1000:.0f} ms, longest {row['max_s'] * 1000:.0f} ms"
        print(f"{kind}: {times}, {grown_bytes >> 20:+} MiB, {row['statuses']}", flush=True)
        if watcher.p99_s > alone.p99_s + MAX_DELAY_S:
            missed.append(f"{kind}: p99 {watcher.p99_s:.3f} s between two tokens, alone {alone.p99_s:.3f}")
        broken = [status for status in statuses if status.startswith("5") and status != "503"]
        if any(alone.texts.get(turn, text) != text for turn, text in watcher.texts.items()):
            missed.append(f"{kind}: the other client's answers are not what they were")
        if broken or statuses["open"]:
            missed.append(f"{kind}: {statuses}")
    figures["growth_bytes"] = read_resident_bytes(server) - start_bytes
    if figures["growth_bytes"] > MAX_GROWTH_BYTES:
        missed.append(f"memory grew by {figures['growth_bytes'] >> 20} MiB")
    if "short" not in chosen.only:
        return figures, missed
    alone_s = asyncio.run(ask_short(server.port, chosen.seconds))
    beside_s = ask_beside_flood(server.port, chosen.seconds)
    figures["short_p95_s"] = {"alone": p95(alone_s), "beside a flood": p95(beside_s)}
    print(f"short questions: p95 {p95(alone_s) * 1000:.0f} ms alone, {p95(beside_s) * 1000:.0f} ms beside a flood")
    if p95(beside_s) > MAX_SLOWDOWN * p95(alone_s):
        missed.append(f"short questions: {p95(beside_s) / p95(alone_s):.1f} times as long beside a flood")
    return figures, missed


def p95(times_s: list[float]) -> float:
    """The 95th percentile of times in order."""
    return times_s[int(len(times_s) * 0.95)]


def run_ends(start: Callable[[], ServerProcess], only: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """The seconds that SIGTERM took in the middle of each kind of attack, and the kinds that took too long."""
    took_s, missed = {}, []
    chosen = tuple(kind for kind in make_attacks(0) if kind in only)
    for kinds in (*((kind,) for kind in chosen), chosen):
        with start() as server:
            asyncio.run(upload(server.port, CONFIG))
            asyncio.run(upload(server.port, WEIGHTS_DATA))
            seconds = took_s["+".join(kinds)] = asyncio.run(end_in_the_middle(server, kinds))
        print(f"SIGTERM beside {', '.join(kinds)}: {seconds:.1f} s", flush=True)
        if seconds > DRAIN_S + AFTER_DRAIN_S:
            missed.append(f"SIGTERM beside {kinds} took {seconds:.1f} s, the drain time is {DRAIN_S:g} s")
    return took_s, missed


def run_disk(folder: Path, flags: Sequence[str], _: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The statuses with a models folder that is full, and then with one that is read-only."""
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with small_disk(folder / "models") as is_there:
        if not is_there:
            print("disk: skipped, as this user may not mount a file system")
            return {"skipped": True}, []
        with start_own(folder, "demo", *flags) as server:
            made = {"model": "mine", "from": "demo", "stream": False}
            assert asyncio.run(post(server.port, "/api/create", made)) == "200"
            filler = fill(folder / "models")
            figures["full"] = ask_around(server)
            filler.unlink()
            figures["free again"] = ask_around(server)
        remount_read_only(folder / "models")
        with start_own(folder, "demo", *flags) as server:
            figures["read-only"] = ask_around(server)
    for state, statuses in figures.items():
        print(f"disk {state}: {statuses}", flush=True)
        wanted = "200" if state == "free again" else "507"
        if any(status != ("200" if path != "/api/copy" else wanted) for path, status in statuses.items()):
            missed.append(f"disk {state}: {statuses}")
    return figures, missed


def ask_around(server: ServerProcess) -> dict[str, str]:
    """The statuses of a question to a loaded model, one to a model that has to be found, lists and a change."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    copied = {"source": "mine", "destination": f"copy{time.time_ns()}"}
    statuses = {"chat": asyncio.run(post(server.port, "/v1/chat/completions", chat))}
    for path, body in (("/v1/chat/completions", {**chat, "model": "mine"}), ("/api/show", {"model": "mine"})):
        statuses[path] = asyncio.run(post(server.port, path, body))
    for path in ("/api/tags", "/v1/models", "/metrics"):
        server.read(path)  # raises for any other status than 200
        statuses[path] = "200"
    return statuses | {"/api/copy": asyncio.run(post(server.port, "/api/copy", copied))}


def run_descriptors(folder: Path, flags: Sequence[str], _: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The bytes of the log, and the effect on another client, with more half-open connections than open files."""
    folder.mkdir()
    with start_own(folder, "demo", *flags, open_files=64) as server, Watcher(server.port) as watcher:
        statuses = asyncio.run(run_attack(make_attacks(server.port)["connections"], 360, 120))
        late = asyncio.run(post(server.port, "/v1/completions", {"prompt": "a", "max_tokens": 1}))
    log_bytes = (folder / "mlxr.log").stat().st_size
    figures = {"p99_s": watcher.p99_s, "statuses": dict(statuses), "late": late, "log_bytes": log_bytes}
    print(f"descriptors: {figures}", flush=True)
    is_right = late == "200" and log_bytes < MAX_LOG_BYTES
    return figures, [] if is_right else [f"descriptors: {figures}"]


def run_storms(folder: Path, flags: Sequence[str], chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The memory after each of two storms, and the longest wait; every request must get an answer."""
    folder.mkdir()
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with start_own(folder, "demo", *flags) as server:
        grown = [read_resident_bytes(server)]
        for turn in ("first", "second"):
            statuses, waits_s = asyncio.run(run_storm(server.port, chosen.storm))
            time.sleep(SETTLE_S)
            grown.append(read_resident_bytes(server))
            times = {"median_s": waits_s[len(waits_s) // 2], "longest_s": waits_s[-1]}
            figures[turn] = {"statuses": dict(statuses), "resident_bytes": grown[-1], **times}
            print(f"storm, {turn}: {figures[turn]}, {(grown[-1] - grown[-2]) >> 20:+} MiB", flush=True)
            if statuses["none"]:
                missed.append(f"storm: {statuses['none']} requests had no answer after {STORM_WAIT_S:g} s")
    if grown[2] - grown[1] > max(MAX_LEAK_BYTES, (grown[1] - grown[0]) // 4):
        missed.append(f"storm: memory went {[size >> 20 for size in grown]} MiB, so it grows with each")
    return figures, missed


ALONE = {"disk": run_disk, "descriptors": run_descriptors, "storm": run_storms}
KINDS = [*make_attacks(0), "short", "ends", *ALONE]


def main() -> int:
    """Run the attacks that the command line asks for; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=int, default=500)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--tokenizers", type=int, default=300)
    parser.add_argument("--floods", type=int, default=80)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--pulls", type=int, default=16)
    parser.add_argument("--writers", type=int, default=40)
    parser.add_argument("--bodies", type=int, default=32)
    parser.add_argument("--workers", type=int, default=60)
    parser.add_argument("--storm", type=int, default=3700, help="requests of the storm, which comes twice")
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=20.0, help="that the other client is alone first")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    flags = ("--pinned-models", "demo", "--arena-bytes", "128M", "--request-timeout-s", "3", "--drain-s", str(DRAIN_S))
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = (*flags, "--hub-url", SlowHub().url)
        if set(chosen.only) & {*make_attacks(0), "short"}:
            with start_own(folder, "demo", *shared) as server:
                figures, missed = run(server, folder / "models", chosen)
        if "ends" in chosen.only:
            kinds = [kind for kind in chosen.only if kind in make_attacks(0)] or list(make_attacks(0))
            figures["end_s"], late = run_ends(lambda: start_own(folder, "demo", *shared), kinds)
            missed += late
        for kind, attack in ALONE.items():
            if kind in chosen.only:
                figures[kind], late = attack(folder / kind, flags, chosen)
                missed += late
    text = json.dumps(figures, indent=2)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
