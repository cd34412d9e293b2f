"""Measures the speed-up of answers by drafts, for kinds of requests, and checks that drafts change no token.

    python bench/drafts.py [--model NAME] [--draft auto] [--threads 2] [--batches 1,4,16] [--tokens 200]
        [--kinds chat,edit,question,free] [--lines 150] [--peer-python PYTHON]

One engine answers each kind of work in turns without and with drafts, as two engines with the same weights differ by up
to a tenth, depending on where these lie in memory: chats ask about functions of Python's library, in ChatML, until the
answer ends; edits write a file of code again with a name changed; questions ask about code; free texts continue a few
words at temperature 1. A batch is so many prompts of one kind at once. The median of the ratios of all turns counts;
its error is shown, too: the deviation of the ratios divided by the root of the turns. Exit code 1 if any token differs.

With an interpreter that has llama_cpp, batches of one are also measured there, likewise without and with drafts: by its
lookup in the prompt for `ngram`, else by the likeliest tokens of the same draft model.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from comparison.child import Child
from mlxr import LLM, DraftOptions, SamplingParams
from mlxr.loading import find_draft, find_model

PEER_CONTEXT = 4096
PEER_TOKENS = 8  # that llama.cpp drafts at a time
FUNCTIONS = ("os.path.join", "json.dumps", "re.sub", "shutil.copy", "functools.reduce", "itertools.chain", "math.sqrt")
FUNCTIONS += ("random.choice", "time.sleep", "textwrap.wrap", "glob.glob", "bisect.insort", "copy.deepcopy")
FUNCTIONS += ("heapq.heappush", "string.capwords", "statistics.median")
SUBJECTS = ("binary search", "a queue", "threads", "a hash table", "recursion", "sorting", "a regular expression")
SUBJECTS += ("a decorator", "an iterator", "JSON", "a socket", "a lock", "caching", "unit tests", "floats", "closures")


def read_code(place: int, count: int) -> str:
    """Return so many lines of the standard library."""
    lines = inspect.getsource(textwrap).splitlines()
    start = 20 + 7 * place
    return "\n".join(lines[start : start + count])


def ask(kind: str, place: int, lines: int = 150) -> str:
    """The prompt of one answer."""
    if kind == "chat":
        question = f"What does {FUNCTIONS[place % len(FUNCTIONS)]} do?"
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    if kind == "edit":
        code = read_code(place, lines)
        return f"# Old version:\n{code}\n\n# New version, with the name `width` changed to `columns`:\n"
    subject = SUBJECTS[place % len(SUBJECTS)]
    if kind == "question":
        return f"Question: How does {subject} work in Python, and when should I use it?\nAnswer:"
    return f"Once upon a time there was a programmer who dreamed of {subject}. "


def measure(
    llm: LLM, prompts: Sequence[str], kind: str, tokens: int, draft_tokens: int | None
) -> tuple[list[tuple[int, ...]], float]:
    """Return the answers, and the seconds that they took with the prompts in the cache."""
    temperature, ignore_eos = 1.0 if kind == "free" else 0.0, kind != "chat"
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=7, ignore_eos=ignore_eos)
    llm.generate(prompts, SamplingParams(max_tokens=1), drafts=DraftOptions(0))
    start = time.perf_counter()
    answers = [answer.token_ids for answer in llm.generate(prompts, params, drafts=DraftOptions(draft_tokens))]
    return answers, time.perf_counter() - start


def measure_both(llm: LLM, kind: str, batch: int, args: argparse.Namespace) -> tuple[str, bool]:
    """Measure one kind of work in one batch; returns a line about it, and True if all tokens were the same."""
    # answers to one chat at a time are short: several of them, one after another, are one measurement
    turns = range(8 if kind == "chat" else 1)
    rounds = [[ask(kind, place + turn * batch, args.lines) for place in range(batch)] for turn in turns]
    speeds: dict[int | None, list[float]] = {0: [], None: []}
    answers: dict[int | None, list[tuple[int, ...]]] = {}
    before = llm.stats().engine
    for turn in range(args.turns):
        for most in sorted(speeds, key=lambda most: (most == 0) == turn % 2):
            measured = [measure(llm, prompts, kind, args.tokens, most) for prompts in rounds]
            answers[most] = [tokens for part, _ in measured for tokens in part]
            speeds[most].append(sum(map(len, answers[most])) / sum(seconds for _, seconds in measured))
    after = llm.stats().engine
    slow, fast = (statistics.median(found) for found in speeds.values())
    gains = [drafting / plain for plain, drafting in zip(*speeds.values(), strict=True)]
    error = statistics.pstdev(gains) / len(gains) ** 0.5
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    is_same = answers[0] == answers[None]
    return (
        f"{kind:9} batch {batch:2}: {slow:7.1f} tokens/s without, {fast:7.1f} with: {statistics.median(gains):.2f} "
        f"times (+-{error:.3f}); {drafted} drafted, {accepted} accepted; {'same' if is_same else 'OTHER'} tokens"
    ), is_same


def measure_peer(args: argparse.Namespace, llm: LLM, kinds: Sequence[str]) -> None:
    """Measure llama.cpp's speed-up by drafts, in answers as long as ours, one prompt at a time."""
    own_draft = find_draft(find_model(args.model)) if args.draft == "auto" else args.draft
    draft = "ngram" if own_draft in (None, "ngram") else str(find_model(str(own_draft)))
    options = {
        "model": str(find_model(args.model)),
        "threads": args.threads,
        "context_tokens": min(PEER_CONTEXT, llm.context_tokens),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("llama.cpp", args.peer_python.absolute(), "comparison.talk", Path(folder) / "plain.log") as plain,
        Child("llama.cpp", args.peer_python.absolute(), "comparison.talk", Path(folder) / "drafts.log") as drafting,
    ):
        plain.ask("open", options)
        drafting.ask("open", {**options, "draft": draft, "draft_tokens": PEER_TOKENS})
        for kind in kinds:
            prompt = llm.tokenize(ask(kind, 0, args.lines))
            tokens = 24 if kind == "chat" else args.tokens
            speeds: dict[Child, list[float]] = {plain: [], drafting: []}
            for _ in range(args.turns):
                for child, found in speeds.items():
                    reply = child.ask("complete", {"prompt": prompt, "tokens": tokens})
                    found.append((len(reply["tokens"]) - 1) / (reply["seconds"] - reply["first_ms"] / 1e3))
            slow, fast = (statistics.median(found) for found in speeds.values())
            gain = f"{fast / slow:.2f} times"
            print(f"{kind:9} llama.cpp: {slow:7.1f} tokens/s without, {fast:7.1f} with: {gain}", flush=True)


def main() -> int:
    """Measure in turns, print a line for each kind of work and batch, and fail if any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kinds", default="chat,edit,question,free")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lines", type=int, default=150, help="of the file that edits are asked for")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has llama_cpp")
    args = parser.parse_args()
    same, kinds = True, args.kinds.split(",")
    with LLM(args.model, draft=args.draft, threads=args.threads, arena_percent=20) as llm:
        for kind in kinds:
            for batch in map(int, args.batches.split(",")):
                line, is_same = measure_both(llm, kind, batch, args)
                print(line, flush=True)
                same = same and is_same
        if args.peer_python is not None:
            measure_peer(args, llm, [kind for kind in kinds if kind != "free"])
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
