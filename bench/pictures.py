"""Measures a model that sees: its time to answer later turns about pictures, and the cost of hostile pictures.

    python bench/pictures.py turns [--model FILE] [--mmproj FILE] [--tiny] [--json FILE]     # on an idle machine
    python bench/pictures.py hostile [--pictures 500] [--model FILE] [--mmproj FILE] [--json FILE]

`turns` has ten turns about two pictures with a real `mlxr serve` that keeps pages on disk: the time to the first token
of each, the same last prompt after a restart, and on a fresh server. Exit code 1 unless the first token comes ten times
sooner than there, also after the restart, no more than 5 % of the known tokens are computed again, and nothing is
encoded again. Without a model it writes one of the sizes of Qwen3.5 0.8B with random weights, 0.7 GB; `--tiny` takes
the tests' instead, whose times do not count, as its prompts take no longer than the start of a process.

`hostile` sends the pictures of `hostile_pictures.py` while another client reads streamed answers. Exit code 1 if the
99th percentile of the time between its tokens grows by more than 100 ms, memory by more than 200 MiB, or a picture gets
neither an answer nor a refusal with a reason. Without a model it takes the tiny one of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from attack import AT_ONCE, MAX_DELAY_S, MAX_GROWTH_BYTES, SETTLE_S, Watcher, read_resident_bytes
from hostile_pictures import make_picture
from http_client import Connection, Refused
from server_process import ServerProcess, start_own

TESTS = Path(__file__).resolve().parents[1] / "tests"
TURNS, MAX_SHARE, LEAST_GAIN = 10, 0.05, 10.0
TEMPLATE = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
QUESTION = "What is the difference between the two, and which of them would you rather have on your wall, and why?"


def make_photo(seed: int, side: int) -> str:
    """A picture as a data: URL."""
    target = io.BytesIO()
    small = Image.frombytes("RGB", (8, 8), random.Random(seed).randbytes(192))
    small.resize((side, side), Image.Resampling.BICUBIC).save(target, "PNG")
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()


def show(url: str) -> dict[str, Any]:
    """A picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


async def ask(server: ServerProcess, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer, the milliseconds until its first token, and the counts of its prompt."""
    connection, start_s, first_s, text, usage = Connection("127.0.0.1", server.port), time.perf_counter(), 0.0, "", {}
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 16, "temperature": 0}
    async for event in connection.stream("/v1/chat/completions", {"messages": messages, **options}):
        first_s = first_s or time.perf_counter() - start_s
        usage = event.get("usage") or usage
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    connection.close()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"text": text, "first_ms": first_s * 1e3, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def count_encoded(server: ServerProcess) -> int:
    """The number of pictures that the server's models have encoded."""
    lines = [line for line in server.read("/metrics").splitlines() if 'what="encoded_pictures"' in line]
    return sum(int(float(line.split()[-1])) for line in lines)


def run_turns(folder: Path, model: str, flags: list[str], given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run the case; returns the figures, and True if all bounds hold."""
    store = ["--store-folder", str(folder / "store"), "--store-bytes", str(4 << 30)]
    pictures = [show(make_photo(seed, given.side)) for seed in range(2)]
    messages: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with start_own(folder, model, *flags, *store) as server:
        for turn in range(TURNS):
            shown = pictures if turn == 0 else []
            messages.append({"role": "user", "content": [*shown, {"type": "text", "text": f"{turn}. {QUESTION}"}]})
            rows.append(asyncio.run(ask(server, messages)))
            last, messages = list(messages), [*messages, {"role": "assistant", "content": rows[-1]["text"]}]
        encoded = count_encoded(server)
    with start_own(folder, model, *flags, *store) as server:
        again = asyncio.run(ask(server, last))
        encoded_again = count_encoded(server)
    with start_own(folder, model, *flags, "--store-bytes", "0") as server:
        cold = asyncio.run(ask(server, last))
    known = sum(row["prompt_tokens"] for row in rows[:-1])
    lost = sum(
        before["prompt_tokens"] - min(after["cached_tokens"], before["prompt_tokens"])
        for before, after in itertools.pairwise(rows)
    )
    figures = {
        "turns": [{name: row[name] for name in row if name != "text"} for row in rows],
        "again_share": lost / known,
        "again_share_restarted": max(0, rows[-2]["prompt_tokens"] - again["cached_tokens"]) / rows[-2]["prompt_tokens"],
        "encoded": encoded,
        "encoded_after_restart": encoded_again,
        "cold_first_ms": cold["first_ms"],
        "gain": cold["first_ms"] / rows[-1]["first_ms"],
        "gain_restarted": cold["first_ms"] / again["first_ms"],
    }
    gain = min(figures["gain"], figures["gain_restarted"])
    holds = encoded == 2 and encoded_again == 0 and (given.tiny or gain >= LEAST_GAIN)
    shares = figures["again_share"], figures["again_share_restarted"]
    return figures, holds and max(shares) <= MAX_SHARE


def run_hostile(folder: Path, model: str, flags: list[str], given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run the case; returns the figures, and True if all bounds hold."""
    statuses: Counter[str] = Counter()
    unnamed: list[int] = []

    async def send(server: ServerProcess, index: int, room: asyncio.Semaphore) -> None:
        async with room:
            kind, data = await asyncio.to_thread(make_picture, index)
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            message = {"role": "user", "content": [show(url), {"type": "text", "text": "?"}]}
            connection = Connection("127.0.0.1", server.port)
            try:
                await connection.post("/v1/chat/completions", {"messages": [message], "max_tokens": 2})
                statuses[f"{kind}: answered"] += 1
            except Refused as error:
                text = str(error)
                statuses[f"{kind}: {text[:3]}"] += 1
                if not text.startswith("4"):
                    unnamed.append(index)
            finally:
                connection.close()

    async def send_all(server: ServerProcess) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(send(server, index, room) for index in range(given.pictures)))

    with start_own(folder, model, *flags) as server:
        with Watcher(server.port) as alone:
            time.sleep(given.seconds)
        start_bytes = read_resident_bytes(server)
        with Watcher(server.port) as watcher:
            asyncio.run(send_all(server))
        time.sleep(SETTLE_S)
        growth_bytes = read_resident_bytes(server) - start_bytes
    figures = {
        "alone_p99_ms": alone.p99_s * 1e3,
        "p99_ms": watcher.p99_s * 1e3,
        "growth_mib": growth_bytes / 2**20,
        "unnamed": unnamed,
        "statuses": dict(sorted(statuses.items())),
    }
    is_quick = watcher.p99_s <= alone.p99_s + MAX_DELAY_S
    return figures, is_quick and growth_bytes <= MAX_GROWTH_BYTES and not unnamed


def write_tiny(folder: Path) -> Path:
    """The tiny model of the tests, of Qwen3.5's kind."""
    sys.path[:0] = [str(TESTS / name) for name in ("models", "shared")]
    from vision_models import write_chat_folder

    return write_chat_folder(folder / "eyes", "qwen35", context_tokens=8192)


def write_large(folder: Path) -> Path:
    """A model of Qwen3.5 0.8B's sizes and its tower's, with random weights."""
    from synthetic import SHAPES, make_bpe_vocabulary, write_model
    from towers import QWEN35_SMALL, write_tower

    def make_vocabulary(size: int) -> dict[str, object]:
        made: dict[str, Any] = make_bpe_vocabulary(size)
        reserved = made["tokenizer.ggml.tokens"].index("<|reserved_special_token_0|>")
        made["tokenizer.ggml.tokens"][reserved : reserved + 3] = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
        return made | {"tokenizer.chat_template": TEMPLATE}

    shape = replace(SHAPES["qwen3.5-0.8b"], vocabulary=make_vocabulary, context_length=8192)
    write_model(path := folder / "eyes.gguf", shape, "q4_k_m", 0, lambda *_: None)
    write_tower(folder / "mmproj-f16.gguf", QWEN35_SMALL, shape.hidden, "f16")
    return path


def main() -> int:
    """Measure and print; returns exit code 1 unless the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["turns", "hostile"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tiny", action="store_true", help="take the tiny model of the tests for `turns`, too")
    parser.add_argument("--mmproj", type=Path)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--side", type=int, default=512, help="of the pictures of `turns`, in pixels")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the other client is alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxr-pictures-") as name:
        folder = Path(name)
        is_tiny = given.tiny or given.what == "hostile"
        model = given.model or (write_tiny if is_tiny else write_large)(folder)
        flags = ["--mmproj", str(given.mmproj)] if given.mmproj else []
        run = run_turns if given.what == "turns" else run_hostile
        figures, holds = run(folder, str(model), flags, given)
    text = json.dumps(figures, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
