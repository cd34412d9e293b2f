"""Policies that choose a node for a request in `cluster_sim.py`: the router of mlxr, and others for comparison."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from random import Random

from cluster_nodes import Machine, Node
from cluster_traces import PAGE_TOKENS, Request
from mlxr.cluster.prefix_table import PageDelta, PrefixTable
from mlxr.cluster.router import Load, RandomRouter, Rates, Router, first_token_s

KEY_TAIL = bytes(24)  # pads keys to the 32 bytes that the router expects
DELTA_HEAD_BYTES = 32  # of a report of pages: name, number, lengths


Placed = tuple[int, int | None]


class Policy:
    """Chooses a node by its number. `note_change` is called after any event in a node."""

    reports = False

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        del seed
        self.nodes = nodes

    def choose(self, request: Request, now_s: float) -> Placed:
        """The number of the node for `request`, and of the one that it fetches pages from, or None."""
        raise NotImplementedError

    def note_change(self, node: int, now_s: float) -> None:
        """Note an event in the node."""

    def note_computed(self, request: Request, now_s: float) -> None:
        """Note that the first token of a request has come."""

    def note_ended(self, request: Request, now_s: float) -> None:
        """Note that the answer to a request has ended."""


class RandomNode(Policy):
    """A random node, as with `mlxr cluster serve --routing random`."""

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        super().__init__(nodes, seed)
        self._router = RandomRouter(PAGE_TOKENS, seed=seed)
        self._numbers = {node.name: number for number, node in enumerate(nodes)}
        for node in nodes:
            self._router.add(node.name)

    def choose(self, request: Request, now_s: float) -> Placed:  # noqa: ARG002
        """A random node."""
        return self._numbers[self._router.choose((), request.tokens).replica], None


class RoundRobin(Policy):
    """One node after another."""

    place = -1

    def choose(self, request: Request, now_s: float) -> Placed:  # noqa: ARG002
        """The next one."""
        self.place = (self.place + 1) % len(self.nodes)
        return self.place, None


class Sticky(Policy):
    """The same node for all requests of a session."""

    def choose(self, request: Request, now_s: float) -> Placed:  # noqa: ARG002
        """The random node of the session."""
        return Random(request.session).randrange(len(self.nodes)), None


class Oracle(Policy):
    """The same cost as the router's, over all nodes, with every cache and queue known exactly and at once."""

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        super().__init__(nodes, seed)
        self._table = PrefixTable(seed)
        self._numbers = {node.name: number for number, node in enumerate(nodes)}
        for node in nodes:
            self._table.add(node.name)
        machine = nodes[0].machine
        self._rates = Rates(machine.prefill_tokens_per_s, machine.step_s, machine.chunk_tokens)
        self._fetching = self._rates.plan_fetches(machine.link)
        self._ready_s = array("d", [0.0] * len(nodes))  # the time when each would begin one more prompt
        self._order = list(range(len(nodes)))

    def note_change(self, node: int, now_s: float) -> None:
        """Bring the table, and the time when the node is ready, up to date."""
        changed = self.nodes[node]
        delta = changed.report_pages()
        if delta is not None:
            self._table.apply(changed.name, delta)
        load = changed.load(now_s, knows_all=True)
        self._ready_s[node] = now_s + load.waiting_tokens * self._rates.token_s(load) + self._tie(node)

    def _tie(self, node: int) -> float:
        return 1e-9 * self.nodes[node].computed_tokens

    def _cost(self, node: int, request: Request, pages: int, now_s: float, fetched: int = 0) -> float:
        load = self.nodes[node].load(now_s, knows_all=True)
        compute = max(1, request.tokens - (pages + fetched) * PAGE_TOKENS)
        step_s = self._rates.decode_step_s(load)
        fetch_s = self._fetching.seconds(fetched) if fetched else 0.0
        seconds = first_token_s(load.waiting_tokens, compute, self._rates.token_s(load), step_s, fetch_s)
        return seconds + self._tie(node)

    def choose(self, request: Request, now_s: float) -> Placed:
        """The node with the lowest cost of all that hold a prefix, and of the one that is ready first.

        Each may fetch what the node with the longest prefix has.
        """
        found = self._table.find(request.keys[: request.pages], len(self.nodes))
        pages = {self._numbers[name]: count for name, count in found.items()}
        peer, most = max(pages.items(), key=lambda item: item[1], default=(None, 0))
        first = self._ready_s.index(min(self._ready_s))
        pages.setdefault(first, 0)
        offers = [(self._cost(node, request, pages[node], now_s), node, None) for node in pages]
        for node, count in pages.items():
            more = min(most - count, self._fetching.most_pages)
            if more:
                offers.append((self._cost(node, request, count, now_s, more), node, peer))
        _, node, source = min(offers, key=lambda offer: offer[0])
        return node, source


class Routed(Policy):
    """The router of mlxr, which gets the nodes' reports with a delay. The router's own time is measured."""

    reports = True

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        super().__init__(nodes, seed)
        machine: Machine = nodes[0].machine
        rates = Rates(machine.prefill_tokens_per_s, machine.step_s, machine.chunk_tokens)
        self._now_s = 0.0
        self._router = Router(PAGE_TOKENS, rates, clock=lambda: self._now_s, seed=seed)
        self._numbers = {node.name: number for number, node in enumerate(nodes)}
        for node in nodes:
            self._router.add(node.name)
        self._sent: dict[int, int] = {}  # request to the number of its choice
        self.choice_s = array("d")
        self.report_s = self.notice_s = 0.0
        self.delta_bytes = 0
        self.reasons: dict[str, int] = {}

    def choose(self, request: Request, now_s: float) -> Placed:
        """The router's choice."""
        self._now_s = now_s
        keys = [key + KEY_TAIL for key in request.keys[: request.pages]]
        start_s = time.perf_counter()
        choice = self._router.choose(keys, request.tokens)
        self.choice_s.append(time.perf_counter() - start_s)
        self._sent[id(request)] = choice.number
        self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + 1
        return self._numbers[choice.replica], None if choice.peer is None else self._numbers[choice.peer]

    def note_computed(self, request: Request, now_s: float) -> None:
        """Tell the router that the prompt is no longer work."""
        self._now_s = now_s
        number = self._sent[id(request)]
        start_s = time.perf_counter()
        self._router.settle(number)
        self.notice_s += time.perf_counter() - start_s

    def note_ended(self, request: Request, now_s: float) -> None:
        """Tell the router that the answer is no longer work."""
        self._now_s = now_s
        number = self._sent.pop(id(request))
        start_s = time.perf_counter()
        self._router.end(number)
        self.notice_s += time.perf_counter() - start_s

    def take_report(self, node: int, load: Load, delta: PageDelta | None, now_s: float) -> None:
        """Give the router a report that arrives."""
        self._now_s = now_s
        name = self.nodes[node].name
        start_s = time.perf_counter()
        self._router.note_load(name, load)
        if delta is not None:
            self._router.note_pages(name, delta)
        self.report_s += time.perf_counter() - start_s
        if delta is not None:
            self.delta_bytes += DELTA_HEAD_BYTES + 8 * (len(delta.added) + len(delta.dropped))


POLICIES: dict[str, type[Policy]] = {
    "mlxr": Routed,
    "random": RandomNode,
    "round-robin": RoundRobin,
    "sticky": Sticky,
    "oracle": Oracle,
}
