"""Many streamed answers through the server, and the same load through `mlxr bench`: what the server costs.

    python lab/bench/server_streams.py  # 8B Q4_K_M (made when missing), 64 of 500 + 200
    python lab/bench/server_streams.py --model demo --streams 16 --prompt-tokens 100 --answer-tokens 50

`mlxr bench` runs first and ends, then `mlxr serve` starts as installed. All streams begin at the same moment, with
random prompts that never come twice; a first round does not count. Both rates are answer tokens by the time from the
first prompt's beginning to the last answer's end: of `mlxr bench`, of its prompts and its decoding together. Ends with
exit code 1 when the server's median rate is less than --bound of the other. The times to the first text are those of
all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from http_client import Connection
from mlxr.core.errors import MlxrError
from mlxr.loading import find_model, open_source
from server_process import SOURCE, ServerProcess, start_own
from synthetic import RECIPES, SHAPES, show_progress, write_model

FOLDER = Path(tempfile.gettempdir()) / "mlxr-bench"
LOWEST_TOKEN = 300  # below are bytes and control tokens


@dataclass(frozen=True)
class Load:
    """So many streams at once, each with so many tokens of prompt and of answer."""

    streams: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def made_tokens(self) -> int:
        """Tokens of all answers."""
        return self.streams * self.answer_tokens


@dataclass(frozen=True)
class Round:
    """Answer tokens in a second, and the seconds until the first text of each stream."""

    tokens_per_s: float
    first_s: tuple[float, ...]


def measure_bench(model: str, load: Load, repeat: int, flags: list[str]) -> dict[str, Any]:
    """What `mlxr bench` says of that load, and its rate of answer tokens over prompts and decoding."""
    sizes = {"--prompt-tokens": load.prompt_tokens, "--generate-tokens": load.answer_tokens, "--batch": load.streams}
    words = [word for name, size in sizes.items() for word in (name, str(size))]
    command = [sys.executable, "-m", "mlxr", "bench", model, *words, "--repeat", str(repeat), "--json", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    )
    if done.returncode:
        raise MlxrError(f"mlxr bench: {done.stderr.strip()[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    prefill, decode = (told[f"{phase}_tokens_per_s"]["median"] for phase in ("prefill", "decode"))
    seconds = load.streams * load.prompt_tokens / prefill + load.made_tokens / decode
    return {
        "tokens_per_s": load.made_tokens / seconds,
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": decode,
        "device": told["device"],
    }


def draw_prompts(load: Load, vocab_size: int, draw: random.Random) -> list[list[int]]:
    """A prompt for each stream; they share nothing."""
    return [[draw.randrange(LOWEST_TOKEN, vocab_size) for _ in range(load.prompt_tokens)] for _ in range(load.streams)]


async def run_round(server: ServerProcess, load: Load, prompts: list[list[int]]) -> Round:
    """All streams at once, to their ends."""
    first_s: list[float] = []
    start_s = time.perf_counter()

    async def live(prompt: list[int]) -> None:
        connection = Connection("127.0.0.1", server.port)
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": load.answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s, counted = math.nan, 0
        async for event in connection.stream("/v1/completions", body):
            if "error" in event:
                raise MlxrError(f"the server: {event['error']}")
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
            if math.isnan(began_s) and any(choice["text"] for choice in event["choices"]):
                began_s = time.perf_counter() - start_s
        connection.close()
        if counted != load.answer_tokens:
            raise MlxrError(f"an answer has {counted} of {load.answer_tokens} tokens")
        first_s.append(began_s)

    await asyncio.gather(*map(live, prompts))
    return Round(load.made_tokens / (time.perf_counter() - start_s), tuple(first_s))


def measure_server(model: str, load: Load, vocab_size: int, repeat: int, flags: list[str]) -> dict[str, Any]:
    """`repeat` rounds after one that does not count."""
    draw = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory() as folder, start_own(Path(folder), model, *flags) as server:
        rounds = [asyncio.run(run_round(server, load, draw_prompts(load, vocab_size, draw))) for _ in range(repeat + 1)]
    first_s = sorted(second for each in rounds[1:] for second in each.first_s if not math.isnan(second))
    return {
        "tokens_per_s": statistics.median(each.tokens_per_s for each in rounds[1:]),
        "rounds": [each.tokens_per_s for each in rounds[1:]],
        "first_round": rounds[0].tokens_per_s,
        "first_text_s": {str(percent): find_percentile(first_s, percent) for percent in (50, 95, 99, 100)},
    }


def find_percentile(ordered: list[float], percent: int) -> float:
    """The smallest of the values that so many percent do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def find_file(chosen: argparse.Namespace) -> str:
    """The model that was named, or the synthetic one, made when missing."""
    if chosen.model:
        return str(chosen.model)
    path = FOLDER / f"{chosen.shape}-{chosen.type}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, SHAPES[chosen.shape], chosen.type, 0, show_progress)
    return str(path)


def read_vocab_size(model: str) -> int:
    """How many tokens a model knows."""
    source = open_source(find_model(model))
    source.file.close()
    return source.config.vocab_size


def main() -> int:
    """Measure what the command line asks for; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a file, folder or name instead of a synthetic model")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--type", choices=[recipe.name for recipe in RECIPES], default="q4_k_m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bound", type=float, default=0.85)
    parser.add_argument("--device", help="default: that of the commands")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    load = Load(chosen.streams, chosen.prompt_tokens, chosen.answer_tokens)
    flags = ["--device", chosen.device] if chosen.device else []
    try:
        model = find_file(chosen)
        vocab_size = read_vocab_size(model)
        bench = measure_bench(model, load, chosen.rounds, flags)
        served = measure_server(model, load, vocab_size, chosen.rounds, flags)
    except MlxrError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ratio = served["tokens_per_s"] / bench["tokens_per_s"]
    first_s, rounds = served["first_text_s"], ", ".join(f"{rate:,.1f}" for rate in served["rounds"])
    print(f"{load.streams} streams of {load.prompt_tokens} + {load.answer_tokens} tokens, {model}, {bench['device']}")
    print(
        f"  mlxr bench {bench['tokens_per_s']:10,.1f} tokens/s (prompts {bench['prefill_tokens_per_s']:,.1f}, decoding "
        f"{bench['decode_tokens_per_s']:,.1f})"
    )
    print(f"  mlxr serve {served['tokens_per_s']:10,.1f} tokens/s ({rounds}; the first {served['first_round']:,.1f})")
    print("  first text after " + ", ".join(f"{first_s[name]:.3f} s (p{name})" for name in ("50", "95", "99", "100")))
    print(f"  ratio {ratio:.3f}, wanted {chosen.bound}")
    if chosen.json:
        figures = {"load": asdict(load), "model": model, "bench": bench, "server": served, "ratio": ratio}
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if ratio >= chosen.bound else 1


if __name__ == "__main__":
    raise SystemExit(main())
