"""The router of a cluster in a simulation: the same code, with replicas and requests that are made up.

    python bench/cluster_sim.py --nodes 1000 --trace chat agents rag mix --policy mlxr random oracle [--json FILE]

Events are requests, prompts that are computed, answers that end, reports, and first tokens and ends that reach the
front. Rates of a node are measured ones (`--machine`, see MACHINES) or options. `--load` is the part of the cluster's
time that prompts would take if every page that was ever computed were cached everywhere; the column `ideal` has the hit
rate of that. The oracle uses the router's cost, over all nodes and with exact knowledge; its own time does not count.
In the first `--warm-up` part of the time requests become more frequent, caches fill, and nothing is counted.

Spread is the most tokens that a node computed, divided by the mean. `chance` is the spread if each of the same pieces
of work went to a random node: few pieces per node are uneven without balancing. If the router chooses so, a node
fetches pages from another one first, over links that carry one fetch at a time (`--link-bytes-per-s`, 0 for none);
tokens of such pages count as hits. Router times are measured with the clock while the simulation runs, on one core: a
choice, and the reports, first tokens and ends that come between two choices.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_nodes import Machine, Node
from cluster_policies import POLICIES, Policy, Routed
from cluster_traces import PAGE_TOKENS, TRACES, Request, make_trace, spread

LINK_BYTES_PER_S = 350e6  # measured by lab/bench/cluster_pages.py, with both ends on two cores
# As measured: TinyLlama 1.1B Q4_K_M on two cores, prefill of 1,024 tokens and batches of 1 and 16
# (bench/results/cpu/zen5), and Llama 3 8B BF16 on an H200, prefill of 2,048, batches of 32 and 128 (lab).
MACHINES = {
    "cpu-1b": Machine(
        prefill_tokens_per_s=526.0,
        step_s=0.0133,
        sequence_s=0.00113,
        chunk_tokens=256,
        max_sequences=32,
        cache_pages=4096,
        page_bytes=32 * 22_528,
        link_bytes_per_s=LINK_BYTES_PER_S,
    ),
    "h200-8b": Machine(
        prefill_tokens_per_s=41_927.0,
        step_s=0.0040,
        sequence_s=0.0000082,
        chunk_tokens=2048,
        max_sequences=256,
        cache_pages=16_384,
        page_bytes=32 * 131_072,
        link_bytes_per_s=LINK_BYTES_PER_S,
    ),
}
MAX_ROUTER_US, MAX_DELTA_BYTES_PER_S, MAX_SPREAD, MAX_HITS_MISSED = 200.0, 1e6, 1.3, 0.05
ARRIVAL, PROMPT, ANSWER, REPORT, REPORTED, FETCHED, FIRST_TOKEN, ENDED = range(8)


class Simulation:
    """One policy and one trace."""

    def __init__(
        self, policy: type[Policy], trace: Sequence[Request], given: argparse.Namespace, from_s: float
    ) -> None:
        self.nodes = [Node(f"node-{number}", given.machine) for number in range(given.nodes)]
        self.policy = policy(self.nodes, given.seed)
        self.trace, self.from_s, self.end_s = trace, from_s, trace[-1].at_s
        self._report_s, self._delay_s = given.report_s, given.delay_ms / 1000
        self.tells_work = isinstance(self.policy, Routed)
        self._events: list[tuple[float, int, int, int, Any]] = []
        self._count = 0
        self.waits_s: list[float] = []
        self.hit_tokens = self.prompt_tokens = 0
        self.busy_s = 0.0
        self.computed = [0] * given.nodes
        self.pieces: list[int] = []  # tokens of each prompt that were computed
        self.fetches = self.fetched_bytes = 0
        self._random = random.Random(given.seed)

    def put(self, at_s: float, what: int, node: int, data: Any = None) -> None:
        """Schedule an event."""
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, what, node, data))

    def run(self) -> None:
        """Run all requests to their first tokens."""
        if isinstance(self.policy, Routed):
            for number in range(len(self.nodes)):
                self.put(self._report_s * number / len(self.nodes), REPORT, number)
        arrivals = iter(self.trace)
        request = next(arrivals, None)
        while self._events or request is not None:
            if request is not None and (not self._events or request.at_s <= self._events[0][0]):
                self._arrive(request)
                request = next(arrivals, None)
                continue
            now_s, _, what, number, data = heapq.heappop(self._events)
            self._happen(now_s, what, number, data)

    def _arrive(self, request: Request) -> None:
        number, peer = self.policy.choose(request, request.at_s)
        if peer is not None:
            node = self.nodes[number]
            until_s, pages = node.fetch(request, self.nodes[peer], request.at_s)
            node.coming_tokens += max(1, request.tokens - pages * PAGE_TOKENS)
            self.put(until_s, FETCHED, number, (request, pages))
            self.policy.note_change(number, request.at_s)
            return
        self.nodes[number].take(request)
        self._go_on(number, request.at_s)

    def _happen(self, now_s: float, what: int, number: int, data: Any) -> None:
        node = self.nodes[number]
        if what == REPORT:
            self.put(now_s + self._delay_s, REPORTED, number, (node.load(now_s), node.report_pages()))
            if now_s < self.end_s:
                self.put(now_s + self._report_s, REPORT, number)
        elif what == REPORTED:
            assert isinstance(self.policy, Routed)
            self.policy.take_report(number, *data, now_s)
        elif what == FIRST_TOKEN:
            self.policy.note_computed(data, now_s)
        elif what == ENDED:
            self.policy.note_ended(data, now_s)
        elif what == FETCHED:
            request, pages = data
            node.coming_tokens -= max(1, request.tokens - pages * PAGE_TOKENS)
            had = node.cache.count(request.keys, request.pages)
            if request.at_s >= self.from_s and pages > had:
                self.fetches += 1
                self.fetched_bytes += (pages - had) * node.machine.page_bytes
            node.cache.use(request.keys[:pages])
            node.take(request)
            self._go_on(number, now_s)
        elif what == PROMPT:
            request, until_s = node.finish_prompt(now_s)
            if request.at_s >= self.from_s:
                self.waits_s.append(now_s - request.at_s)
            self.put(until_s, ANSWER, number, request)
            if self.tells_work:
                self.put(now_s + self._delay_s, FIRST_TOKEN, number, request)
                self.put(until_s + self._delay_s, ENDED, number, request)
            self._go_on(number, now_s)
        else:
            node.finish_answer(data)
            self._go_on(number, now_s)

    def _go_on(self, number: int, now_s: float) -> None:
        node = self.nodes[number]
        compute = node.begin(now_s)
        if compute is not None:
            self.put(node.until_s, PROMPT, number)
            request = node.under_way
            assert request is not None
            if request.at_s >= self.from_s:
                self.prompt_tokens += request.tokens
                self.hit_tokens += request.tokens - compute
                self.computed[number] += compute
                self.pieces.append(compute)
                self.busy_s += node.until_s - now_s
        self.policy.note_change(number, now_s)

    def _draw_spread(self) -> float:
        """The spread of the same pieces of work on random nodes, the median of a few draws."""
        spreads = []
        for _ in range(5):
            computed = [0] * len(self.nodes)
            for tokens in self.pieces:
                computed[self._random.randrange(len(computed))] += tokens
            spreads.append(max(computed) / statistics.fmean(computed))
        return statistics.median(spreads)

    def figures(self) -> dict[str, Any]:
        """The figures of the run."""
        counted_s = self.end_s - self.from_s
        quantiles = statistics.quantiles(self.waits_s, n=100)
        figures = {
            "hit_rate": self.hit_tokens / self.prompt_tokens,
            "p50_s": quantiles[49],
            "p99_s": quantiles[98],
            "spread": max(self.computed) / statistics.fmean(self.computed),
            "chance": self._draw_spread(),
            "pieces_per_node": len(self.pieces) / len(self.nodes),
            "fetches_per_request": self.fetches / len(self.pieces),
            "fetched_bytes_per_s": self.fetched_bytes / counted_s / len(self.nodes),
            "busy": self.busy_s / counted_s / len(self.nodes),
        }
        if isinstance(self.policy, Routed):
            choices = sorted(self.policy.choice_s)
            figures |= {
                "choice_us": 1e6 * statistics.fmean(choices),
                "choice_p99_us": 1e6 * choices[int(0.99 * len(choices))],
                "reports_us": 1e6 * self.policy.report_s / len(choices),
                "notices_us": 1e6 * self.policy.notice_s / len(choices),
                "delta_bytes_per_s": self.policy.delta_bytes / self.end_s / len(self.nodes),
                "reasons": self.policy.reasons,
            }
        return figures


def measure_ideal(trace: Sequence[Request], machine: Machine, from_s: float) -> tuple[float, float]:
    """The hit rate and the mean seconds of a prompt, from `from_s` on, with one cache that holds everything."""
    known: set[bytes] = set()
    prompt = hit = 0
    seconds = 0.0
    count = 0
    for request in trace:
        pages = request.pages
        while pages and request.keys[pages - 1] not in known:
            pages -= 1
        cached = min(request.tokens - 1, pages * PAGE_TOKENS)
        known.update(request.keys[pages:])
        if request.at_s >= from_s:
            count += 1
            prompt += request.tokens
            hit += cached
            seconds += machine.prompt_s(request.tokens - cached, 1)
    return hit / prompt, seconds / count


def measure_trace(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run all policies with one trace; returns their figures."""
    requests = given.requests * given.nodes
    drawn = make_trace(name, given.seed, given.nodes, requests, given.think_s)
    _, prompt_s = measure_ideal(drawn, given.machine, 0.0)
    trace = spread(drawn, given.seed, given.load * given.nodes / prompt_s, given.warm_up)
    duration_s = trace[-1].at_s
    from_s = given.warm_up * duration_s
    gc.collect()
    gc.freeze()
    policies = {}
    for policy in given.policy:
        start_s = time.perf_counter()
        simulation = Simulation(POLICIES[policy], trace, given, from_s)
        simulation.run()
        policies[policy] = simulation.figures() | {"took_s": time.perf_counter() - start_s}
    gc.unfreeze()
    return {
        "trace": name,
        "nodes": given.nodes,
        "requests": len(trace),
        "duration_s": duration_s,
        "mean_prompt_tokens": statistics.fmean(request.tokens for request in trace),
        "ideal_hit_rate": measure_ideal(trace, given.machine, from_s)[0],
        "policies": policies,
    }


def find_misses(result: dict[str, Any]) -> list[str]:
    """List the bounds that the router misses."""
    policies = result["policies"]
    if "mlxr" not in policies:
        return []
    ours = policies["mlxr"]
    checked = {
        "router": (ours["choice_us"] + ours["reports_us"] + ours["notices_us"], MAX_ROUTER_US),
        "deltas": (ours["delta_bytes_per_s"], MAX_DELTA_BYTES_PER_S),
        "spread": (ours["spread"], MAX_SPREAD),
    }
    if "oracle" in policies:
        checked["hits"] = (policies["oracle"]["hit_rate"] - ours["hit_rate"], MAX_HITS_MISSED)
    return [f"{name} {value:.3g} (at most {bound:g})" for name, (value, bound) in checked.items() if value > bound]


def print_result(result: dict[str, Any]) -> None:
    """Print the table of one trace."""
    print(
        f"\n{result['trace']}: {result['nodes']} nodes, {result['requests']:,} requests "
        f"in {result['duration_s']:.0f} s, {result['mean_prompt_tokens']:,.0f} prompt tokens on average, "
        f"ideal hit rate {result['ideal_hit_rate']:.1%}\n"
    )
    print(
        "| policy | hit rate | first token p50 | p99 | spread | chance | busy | fetches, per node "
        "| choice (p99) + reports + notices | deltas per node |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, row in result["policies"].items():
        router = deltas = ""
        fetches = f"{row['fetches_per_request']:.1%}, {row['fetched_bytes_per_s'] / 1e6:.1f} MB/s"
        if "choice_us" in row:
            told = f"{row['reports_us']:.0f} + {row['notices_us']:.0f} µs"
            router = f"{row['choice_us']:.0f} ({row['choice_p99_us']:.0f}) + {told}"
            deltas = f"{row['delta_bytes_per_s'] / 1000:.2f} kB/s"
        print(
            f"| {name} | {row['hit_rate']:.1%} | {row['p50_s']:.3f} s | {row['p99_s']:.3f} s | {row['spread']:.2f} "
            f"| {row['chance']:.2f} | {row['busy']:.0%} | {fetches} | {router} | {deltas} |",
            flush=True,
        )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; `machine` becomes a Machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--machine", choices=MACHINES, default="cpu-1b")
    for name in ("prefill-tokens-per-s", "step-s", "sequence-s", "link-bytes-per-s", "fetch-timeout-s"):
        parser.add_argument(f"--{name}", type=float, help="instead of the machine's")
    for name in ("chunk-tokens", "max-sequences", "cache-pages", "page-bytes", "fetch-bytes"):
        parser.add_argument(f"--{name}", type=int, help="instead of the machine's")
    parser.add_argument("--requests", type=int, default=100, help="per node")
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--think-s", type=float, default=15.0)
    parser.add_argument("--warm-up", type=float, default=0.4)
    parser.add_argument("--report-s", type=float, default=0.5, help="time between two reports of a node")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="until a report, a first token or an end arrives")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args(arguments)
    fields = Machine.__dataclass_fields__
    own = {name: getattr(given, name) for name in fields if getattr(given, name) is not None}
    given.machine = replace(MACHINES[given.machine], **own)
    for name in ("nodes", "requests", "load", "report_s"):
        if not getattr(given, name) > 0 or math.isinf(getattr(given, name)):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run the simulation; returns exit code 1 if the router misses a bound."""
    given = parse_arguments(arguments)
    results = []
    for name in given.trace:
        results.append(measure_trace(name, given))
        print_result(results[-1])
    misses = [f"{result['trace']}: {miss}" for result in results for miss in find_misses(result)]
    print("\n" + ("missed: " + "; ".join(misses) if misses else "all bounds kept"))
    if given.json is not None:
        given.json.write_text(json.dumps({"results": results, "missed": misses}, indent=2) + "\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
