"""Decode speed by context length, batch and kind of cache: what batching brings, and what pages cost.

    python lab/bench/caches.py MODEL [--prompt-tokens 128 512 1024 1900] [--batch 1 8] [--json FILE]

For every context length and batch, `paged` and `simple` are measured in turns, so that a machine that changes its
speed changes it for both. `paged_share` is paged divided by simple: at 1 and above there is no reason for plain runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from mlxr.core.settings import resolve
from mlxr.loading import LoadedModel
from mlxr.service.measures import Load, measure_speed
from mlxr.service.opening import open_model

CACHES = ("paged", "simple")


def measure(loaded: LoadedModel, load: Load, given: argparse.Namespace) -> dict[str, Any]:
    """Medians over all rounds."""
    decode: dict[str, list[float]] = {cache: [] for cache in CACHES}
    prefill: dict[str, list[float]] = {cache: [] for cache in CACHES}
    for number in range(given.rounds):
        for cache in CACHES[:: 1 if number % 2 else -1]:
            settings = resolve({"threads": given.threads, "kv_cache": cache, "max_sequences": load.batch})
            speed = measure_speed(loaded, settings, load, repeat=1)
            decode[cache] += speed.decode_tokens_per_s
            prefill[cache] += speed.prefill_tokens_per_s
    medians = {cache: statistics.median(decode[cache]) for cache in CACHES}
    return {
        "prompt_tokens": load.prompt_tokens,
        "batch": load.batch,
        "decode_tokens_per_s": medians,
        "prefill_tokens_per_s": {cache: statistics.median(prefill[cache]) for cache in CACHES},
        "paged_share": medians["paged"] / medians["simple"],
        "paged_share_range": [
            min(a / b for a, b in zip(decode["paged"], decode["simple"], strict=True)),
            max(a / b for a, b in zip(decode["paged"], decode["simple"], strict=True)),
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one line for each context length and batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 1024, 1900])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--generate-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args(arguments)
    rows = []
    with open_model(given.model, resolve({"threads": given.threads})) as loaded:
        for prompt_tokens in given.prompt_tokens:
            for batch in given.batch:
                row = measure(loaded, Load(prompt_tokens, given.generate_tokens, batch), given)
                rows.append(row)
                paged, simple = (row["decode_tokens_per_s"][cache] for cache in CACHES)
                print(
                    f"{prompt_tokens} tokens × {batch}: paged {paged:.1f} tokens/s, simple {simple:.1f}, paged/simple "
                    f"{row['paged_share']:.3f} ({' to '.join(f'{share:.3f}' for share in row['paged_share_range'])})"
                )
    for prompt_tokens in given.prompt_tokens:
        rates = {
            row["batch"]: row["decode_tokens_per_s"]["paged"] for row in rows if row["prompt_tokens"] == prompt_tokens
        }
        if 1 in rates and len(rates) > 1:
            shares = ", ".join(f"batch {batch}: {rate / rates[1]:.2f} ×" for batch, rate in rates.items() if batch > 1)
            print(f"{prompt_tokens} tokens: all together against one alone, {shares}")
    if given.json is not None:
        given.json.write_text(json.dumps({"model": given.model, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
