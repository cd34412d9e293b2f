"""Conversations that grow, on a cluster that routes by prefixes and on the same one that routes at random.

    python lab/bench/cluster_conversations.py  # 50 conversations of 10 turns, 3 replicas, the demo
    python lab/bench/cluster_conversations.py --model FILE --arena-bytes 448M --answer 4 [--routing random]
    python lab/bench/cluster_conversations.py --shape middle --arena-bytes 448M  # a model of random weights

Each conversation has a beginning of its own, and each turn sends all of it again with the last answer and a new
question; turns of all conversations take turns. The tokens are random. The demo computes prompts so fast that most of
the time to its first token is not theirs; `middle` is a model with seven times the weights. Cacheable are the full
pages of a turn's prompt that were computed for the turn before. Both sides ask `mlxr cluster serve`, and nothing but
its `--routing` differs. A cache of `--arena-bytes` may hold a share of the conversations or all of them; with random
routing each replica meets all of them. Ends with exit code 1 when less than 95 % of the cacheable tokens are found with
prefix routing, or when the median time to the first token, from the second turn on, is not at least three times as
long with random routing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster_process import ClusterProcess
from http_client import Connection
from mlxr.cluster.router import Routing
from synthetic import Shape, make_bpe_vocabulary, show_progress, write_model

IDS = range(300, 8000)  # of the demo's vocabulary
PAGE = 32
SHAPES = {"middle": Shape(16, 896, 14, 2, 2432, 8192, 4096, make_bpe_vocabulary)}
MIN_HITS, MIN_FASTER = 0.95, 3.0
MEDIAN, MEAN = "later turns, median (ms)", "later turns, mean (ms)"
Figures = dict[str, float]


@dataclass
class Turn:
    """What one request found. `first_s` is the time to its first token."""

    number: int
    prompt_tokens: int
    cacheable_tokens: int
    cached_tokens: int
    first_s: float


@dataclass
class Conversation:
    """Token ids so far, and how many of them an engine has computed."""

    draw: random.Random
    ids: list[int] = field(default_factory=list)
    computed: int = 0

    def add(self, count: int) -> None:
        """Append random tokens."""
        self.ids += self.draw.choices(IDS, k=count)


async def take_turn(connection: Connection, talk: Conversation, number: int, chosen: argparse.Namespace) -> Turn:
    """Ask the next question; the answer becomes part of the conversation."""
    talk.add(chosen.question if number else chosen.beginning)
    body = {"prompt": talk.ids, "n_predict": chosen.answer, "temperature": 0, "ignore_eos": True, "stream": True}
    start_s, first_s, cached, answer = time.perf_counter(), 0.0, 0, list[int]()
    async for event in connection.stream("/completion", body | {"return_tokens": True}):
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        if event["tokens"] and not answer:
            first_s = time.perf_counter() - start_s
        answer += event["tokens"]
        cached = event.get("tokens_cached", 0) if event["stop"] else cached
    assert len(answer) == chosen.answer, f"{len(answer)} tokens instead of {chosen.answer}"
    turn = Turn(number, len(talk.ids), talk.computed // PAGE * PAGE, cached, first_s)
    talk.ids += answer
    talk.computed = len(talk.ids) - 1  # the last token is told and not computed
    return turn


async def talk_all(port: int, chosen: argparse.Namespace) -> list[Turn]:
    """All conversations, turn by turn, so many at a time."""
    talks = [Conversation(random.Random(f"{chosen.seed} {number}")) for number in range(chosen.conversations)]
    draw, turns = random.Random(chosen.seed), list[Turn]()
    for number in range(chosen.turns):
        due = list(range(chosen.conversations))
        draw.shuffle(due)

        async def work(waiting: list[int], number: int = number) -> None:
            connection = Connection("127.0.0.1", port)
            while waiting:
                turns.append(await take_turn(connection, talks[waiting.pop()], number, chosen))
            connection.close()

        await asyncio.gather(*(work(due) for _ in range(chosen.at_once)))
    return turns


def summarise(turns: Sequence[Turn], seconds: float) -> Figures:
    """The figures of one way of routing."""
    later_s = sorted(turn.first_s for turn in turns if turn.number)
    return {
        "turns": len(turns),
        "prompt tokens": sum(turn.prompt_tokens for turn in turns),
        "cacheable": sum(turn.cacheable_tokens for turn in turns),
        "found": sum(turn.cached_tokens for turn in turns),
        "hits": sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.cacheable_tokens for turn in turns)),
        "first turns, median (ms)": 1000 * statistics.median(turn.first_s for turn in turns if not turn.number),
        MEDIAN: 1000 * statistics.median(later_s),
        MEAN: 1000 * statistics.fmean(later_s),
        "later turns, p99 (ms)": 1000 * later_s[len(later_s) * 99 // 100],
        "whole run (s)": seconds,
    }


def measure(routing: str, chosen: argparse.Namespace) -> Figures:
    """The figures of one way of routing, each on a cluster of its own."""
    flags = ["--threads", "1", "--arena-bytes", chosen.arena_bytes, "--page-size", str(PAGE), "--routing", routing]
    with (
        tempfile.TemporaryDirectory() as name,
        ClusterProcess(Path(name), chosen.model, chosen.replicas, flags) as cluster,
    ):
        start_s = time.monotonic()
        turns = asyncio.run(talk_all(cluster.port, chosen))
        return summarise(turns, time.monotonic() - start_s)


def show(sides: Mapping[str, Figures]) -> None:
    """Print a column for each way of routing."""
    print(f"{'':28}{''.join(f'{name:>12}' for name in sides)}")
    for name in next(iter(sides.values())):
        row = [f"{side[name]:12.1%}" if name == "hits" else f"{side[name]:12.4g}" for side in sides.values()]
        print(f"{name:28}{''.join(row)}")


def judge(sides: Mapping[str, Figures]) -> list[str]:
    """Print how the first tokens compare; list the bounds that are missed, as far as they were measured."""
    missed = []
    if "prefix" in sides and sides["prefix"]["hits"] < MIN_HITS:
        missed.append(f"only {sides['prefix']['hits']:.1%} of the cacheable tokens were found")
    if set(sides) == set(Routing):
        faster = {which: sides["random"][which] / sides["prefix"][which] for which in (MEDIAN, MEAN)}
        for which, ratio in faster.items():
            print(f"{which.replace(' (ms)', ', times'):28}{ratio:12.2f}")
        if faster[MEDIAN] < MIN_FASTER:
            missed.append(f"the first token came only {faster[MEDIAN]:.2f} times as fast")
    return missed


def main() -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a name or a file")
    parser.add_argument("--shape", choices=SHAPES, help="instead of --model, one of random weights")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--beginning", type=int, default=1024, metavar="TOKENS", help="of the first prompt")
    parser.add_argument("--question", type=int, default=64, metavar="TOKENS", help="of each further turn")
    parser.add_argument("--answer", type=int, default=24, metavar="TOKENS")
    parser.add_argument("--at-once", type=int, default=2, help="turns under way at a time")
    parser.add_argument("--arena-bytes", default="256M", help="cache of each replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routing", nargs="+", choices=list(Routing), default=list(Routing))
    parser.add_argument("--json", type=Path, help="figures, to which those of each further run are added")
    chosen = parser.parse_args()
    sides: dict[str, Figures] = {}
    if chosen.json and chosen.json.exists():
        sides = json.loads(chosen.json.read_text())
    with tempfile.TemporaryDirectory() as folder:
        if chosen.shape:
            chosen.model = str(Path(folder) / f"{chosen.shape}.gguf")
            write_model(Path(chosen.model), SHAPES[chosen.shape], "q8_0", 0, show_progress)
        for routing in chosen.routing:
            sides[str(routing)] = measure(routing, chosen)
            if chosen.json:
                chosen.json.write_text(json.dumps(sides, indent=2) + "\n")
    show(sides)
    missed = judge(sides)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
