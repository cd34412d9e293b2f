"""Measures page sizes from 8 to 128 tokens, and how much credit a page gets for having been found.

    python lab/bench/pages.py speed MODEL                  # a file or a name; --rounds 5 --tokens 64 --threads 2
    python lab/bench/pages.py hits                         # needs no model: traces over the cache's books alone

`speed` gives tokens per second of a prompt and of four answers for each page size, in turns, the shortest run of each,
with the bytes held at most. `hits` plays conversations with shared system prompts and a flood of long texts in between,
for each page size and each credit, over a group that keeps everything and over one with a window; it gives the share of
the tokens that were found.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator

from mlxr import LLM, SamplingParams
from mlxr.cache import group
from mlxr.cache.arena import Arena
from mlxr.cache.group import CacheGroup
from mlxr.cache.kv_cache import KVCache
from mlxr.kernels.context import Context

PAGE_SIZES = (8, 16, 32, 64, 128)
CREDITS = (0, 1, 3, 10)
ARENA_TOKENS = 32 * 1024
WINDOW = 512
ANSWERS = 4
ARENA_BYTES = 512 * 2**20


def measure_speed(model: str, rounds: int, tokens: int, threads: int | None) -> None:
    """Print a line for each page size."""
    best = {size: [float("inf"), float("inf"), 0.0] for size in PAGE_SIZES}
    llms = {size: LLM(model, threads=threads, page_size=size, arena_bytes=ARENA_BYTES) for size in PAGE_SIZES}
    prompt = "def add(a, b):\n    return a + b\n\n" * 60
    try:
        for number in range(rounds):
            for size, llm in llms.items():
                prompt_s = time_answers(llm, [f"# round {number}\n{prompt}"], 1)  # that nobody has asked before
                answers_s = time_answers(llm, [f"# {index}\n" for index in range(ANSWERS)], tokens)
                best[size][0] = min(best[size][0], prompt_s)
                best[size][1] = min(best[size][1], answers_s)
                best[size][2] = llm.stats().engine.peak_bytes
    finally:
        for llm in llms.values():
            llm.close()
    for size, (prompt_s, answers_s, peak_bytes) in best.items():
        rate = ANSWERS * tokens / answers_s
        print(f"{size:4} tokens: prompt {prompt_s * 1e3:8.1f} ms, answers {rate:7.1f} tokens/s, {peak_bytes:12} bytes")


def time_answers(llm: LLM, prompts: list[str], tokens: int) -> float:
    """Seconds until all answers have so many tokens."""
    start_s = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - start_s


def measure_hits() -> None:
    """Print the share of tokens found for each page size and credit."""
    default = group.MAX_REUSE_CREDIT
    for window in (None, WINDOW):
        for credit in CREDITS:
            group.MAX_REUSE_CREDIT = credit
            shares = [f"{play_trace(size, window):6.1%}" for size in PAGE_SIZES]
            name = "full" if window is None else f"window {window}"
            mark = " (default)" if credit == default else ""
            print(f"{name:10} credit {credit:2}: {'  '.join(shares)}{mark}")
    group.MAX_REUSE_CREDIT = default
    print(f"{'page sizes':21} {'  '.join(f'{size:6}' for size in PAGE_SIZES)}")


def play_trace(page_size: int, window: int | None) -> float:
    """The share of prompt tokens that were found."""
    arena = Arena(Context("reference"), 1, ARENA_TOKENS // page_size, 1, page_size, 1, window=window)
    cache = KVCache([CacheGroup(arena)], fingerprint=b"bench")
    for tokens in list_requests(random.Random(1)):
        table = cache.open_table(tokens, cache.start_keys(), limit_tokens=len(tokens) - 1)
        while table.length_tokens < len(tokens):
            count = min(512, len(tokens) - table.length_tokens)
            cache.prepare(table, count)
            cache.commit(table, tokens, count)
        cache.release(table)
    stats = cache.stats()
    return stats.hit_tokens / (stats.hit_tokens + stats.missed_tokens)


def list_requests(chance: random.Random) -> Iterator[list[int]]:
    """Conversations that go on, begun with one of four system prompts; between them long texts that come once."""
    systems = [[chance.randrange(50_000) for _ in range(900)] for _ in range(4)]
    talks = [list(chance.choice(systems)) for _ in range(12)]
    for _ in range(400):
        if chance.random() < 0.2:
            yield [chance.randrange(50_000) for _ in range(chance.randrange(2_000, 12_000))]
        number = chance.randrange(len(talks))
        talks[number] += [chance.randrange(50_000) for _ in range(chance.randrange(30, 400))]
        if len(talks[number]) > 6_000:
            talks[number] = [*chance.choice(systems), chance.randrange(50_000)]
        yield talks[number]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "hits"])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    if chosen.what == "hits":
        measure_hits()
    else:
        measure_speed(chosen.model, chosen.rounds, chosen.tokens, chosen.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
