"""Measures what each rule of sampling adds to a step of eight answers.

    python lab/bench/samplers.py MODEL                     # a file or a name; --rounds 7 --tokens 48 --threads 2

All cases run in turns on one engine; of each the shortest run counts, less the time of the prompts. The share is what a
step takes longer than with plain sampling at a temperature.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxr import LLM, SamplingParams

ANSWERS = 8
MAX_SHARE = 0.05
PLAIN = "temperature"
CASES: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "repeat_penalty": {"repetition_penalty": 1.1},
    "typical_p": {"typical_p": 0.9},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "min_p": {"min_p": 0.05},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "dry": {"dry_multiplier": 0.8},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "min_tokens": {"min_tokens": 1000},
}
QUESTION = "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n\n"


def time_answers(llm: LLM, rules: Mapping[str, Any], tokens: int) -> float:
    """Seconds until eight answers have so many tokens each."""
    params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True, **rules)
    start_s = time.perf_counter()
    llm.generate([f"# {number}\n{QUESTION}" for number in range(ANSWERS)], params)
    return time.perf_counter() - start_s


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    totals_s = dict.fromkeys(CASES, float("inf"))
    first_s = float("inf")  # of prompts and first tokens, which are the same in all cases
    with LLM(chosen.model, threads=chosen.threads) as llm:
        for rules in CASES.values():  # warm
            time_answers(llm, rules, 8)
        for _ in range(chosen.rounds):
            first_s = min(first_s, time_answers(llm, {}, 1))
            for name, rules in CASES.items():
                totals_s[name] = min(totals_s[name], time_answers(llm, rules, chosen.tokens))
    best_s = {name: (seconds - first_s) / (chosen.tokens - 1) for name, seconds in totals_s.items()}
    shares = {name: seconds / best_s[PLAIN] - 1 for name, seconds in best_s.items()}
    for name, seconds in best_s.items():
        print(f"{name:22} {seconds * 1000:7.2f} ms a step   {shares[name]:+6.1%}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"step_s": best_s, "shares": shares}, indent=2) + "\n")
    missed = [name for name, share in shares.items() if share > MAX_SHARE]
    for name in missed:
        print(f"MISSED: {name} adds {shares[name]:.1%} to a step", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
