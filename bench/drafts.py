"""How much faster answers come with drafts, by what is asked, and that drafts change no token.

    python bench/drafts.py [--model NAME] [--threads 2] [--batches 1,4,16] [--tokens 200] [--kinds edit,question,free]

Each kind of work is answered in turns without and with drafts by the same weights on the same threads: edits write a
file of code again with a name changed, questions ask about code, free texts go on from a few words at temperature 1. A
batch is so many prompts of one kind at once. The median of the speeds of all turns counts. Exit code 1 when any token
differs.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence

from mlxr import LLM, SamplingParams

FILE_LINES = 60
SUBJECTS = ("binary search", "a queue", "threads", "a hash table", "recursion", "sorting", "a regular expression")
SUBJECTS += ("a decorator", "an iterator", "JSON", "a socket", "a lock", "caching", "unit tests", "floats", "closures")


def read_code(place: int) -> str:
    """Some lines of the standard library."""
    lines = inspect.getsource(textwrap).splitlines()
    start = 20 + 7 * place
    return "\n".join(lines[start : start + FILE_LINES])


def ask(kind: str, place: int) -> str:
    """The prompt of one answer."""
    if kind == "edit":
        code = read_code(place)
        return f"# Old version:\n{code}\n\n# New version, with the name `width` changed to `columns`:\n"
    subject = SUBJECTS[place % len(SUBJECTS)]
    if kind == "question":
        return f"Question: How does {subject} work in Python, and when should I use it?\nAnswer:"
    return f"Once upon a time there was a programmer who dreamed of {subject}. "


def measure(llm: LLM, prompts: Sequence[str], kind: str, tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """The answers, and tokens a second of all together once the prompts are in the cache."""
    temperature = 1.0 if kind == "free" else 0.0
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=7, ignore_eos=True)
    llm.generate(prompts, SamplingParams(max_tokens=1))
    start = time.perf_counter()
    answers = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    return [answer.token_ids for answer in answers], len(prompts) * tokens / seconds


def main() -> int:
    """Measure in turns, print a line for each kind of work and batch, and fail if any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kinds", default="edit,question,free")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    same = True
    with (
        LLM(args.model, threads=args.threads, draft="off", context_tokens=2048) as plain,
        LLM(args.model, threads=args.threads, context_tokens=2048) as drafting,
    ):
        for kind in args.kinds.split(","):
            for batch in map(int, args.batches.split(",")):
                prompts = [ask(kind, place) for place in range(batch)]
                speeds: dict[LLM, list[float]] = {plain: [], drafting: []}
                answers = {}
                before = drafting.stats().engine
                for _ in range(args.turns):
                    for llm, found in speeds.items():
                        answers[llm], speed = measure(llm, prompts, kind, args.tokens)
                        found.append(speed)
                after = drafting.stats().engine
                same = same and answers[plain] == answers[drafting]
                slow, fast = (statistics.median(found) for found in speeds.values())
                drafted = after.drafted_tokens - before.drafted_tokens
                accepted = after.accepted_tokens - before.accepted_tokens
                verdict = "same" if answers[plain] == answers[drafting] else "OTHER"
                print(
                    f"{kind:9} batch {batch:2}: {slow:7.1f} tokens/s without, {fast:7.1f} with: "
                    f"{fast / slow:.2f} times; {drafted} drafted, {accepted} accepted; {verdict} tokens",
                    flush=True,
                )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
