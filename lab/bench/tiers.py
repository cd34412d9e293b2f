"""Prompts and texts by instruction sets of this machine, in turns: tokens a second, and how they compare.

    PYTHONPATH=bench python lab/bench/tiers.py --isas avx512 amx --types q8_0 q4_k_m q4_0 q6_k f16 --rounds 9
    PYTHONPATH=bench python lab/bench/tiers.py --isas avx512 amx --encoders minilm-l6 bge-base --rounds 9

Models have random weights; they are those of `bench/compare.py` and `bench/embed.py`, made where they are missing. Of
each side the best round counts, beside others the one that they disturbed least.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from compare import MODELS, Progress, find_model
from embed import draw_texts, prepare
from mlxr import LLM
from mlxr.core.settings import Settings
from mlxr.service.measures import Load, measure_speed
from mlxr.service.opening import open_model


def open_prompt(path: Path, isa: str, given: argparse.Namespace, stack: ExitStack) -> Callable[[], float]:
    """Tokens a second of one prompt."""
    settings = Settings(device="cpu", isa=isa, threads=given.threads)
    loaded = stack.enter_context(open_model(path, settings))
    load = Load(given.tokens, 1, 1)
    return lambda: measure_speed(loaded, settings, load, repeat=1).prefill_tokens_per_s[0]


def open_texts(path: Path, isa: str, given: argparse.Namespace, stack: ExitStack) -> Callable[[], float]:
    """Tokens a second of some texts."""
    llm = stack.enter_context(LLM(path, device="cpu", isa=isa, threads=given.threads))
    texts, tokens = draw_texts(path.parent.name, given.texts)

    def run() -> float:
        start = time.perf_counter()
        llm.embed(texts)
        return tokens / (time.perf_counter() - start)

    return run


def compare(name: str, sides: Mapping[str, Callable[[], float]], rounds: int) -> None:
    """Print a line."""
    best = dict.fromkeys(sides, 0.0)
    for _ in range(rounds):
        for isa, run in sides.items():
            best[isa] = max(best[isa], run())
    first, *_, last = best.values()
    rates = ", ".join(f"{isa} {rate:,.0f}" for isa, rate in best.items())
    print(f"{name}: {rates} tokens/s; {last / first:.2f} times", flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--isas", nargs="+", default=["avx512", "amx"])
    parser.add_argument("--types", nargs="*", default=[])
    parser.add_argument("--encoders", nargs="*", default=[])
    parser.add_argument("--way", default="q8_0", help="type of the encoders' weights")
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    for type_name in given.types:
        path = find_model(MODELS, given.shape, type_name, Progress(60))
        with ExitStack() as stack:
            sides = {isa: open_prompt(path, isa, given, stack) for isa in given.isas}
            compare(f"{given.shape} {type_name}, {given.tokens} tokens", sides, given.rounds)
    for shape in given.encoders:
        prepare(MODELS / shape, shape, sys.executable)
        with ExitStack() as stack:
            sides = {isa: open_texts(MODELS / shape / f"{given.way}.gguf", isa, given, stack) for isa in given.isas}
            compare(f"{shape} {given.way}", sides, given.rounds)


if __name__ == "__main__":
    main()
