"""Thousands of random steps: replicas come and go, reports are lost, doubled and out of order; each step is checked.

The test keeps the truth beside the router: each replica's pages and the number of its next report. At the end each
replica sends all of its pages if it is asked to, and then the router must know exactly the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from mlxr.cluster.router import Load, NoReplica, PageDelta, Router

PAGE = 16
NAMES = [f"replica-{number}" for number in range(12)]


@dataclass
class Replica:
    pages: set[bytes] = field(default_factory=set)
    sequence: int = 0
    late: list[PageDelta] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.router = Router(PAGE, clock=lambda: self.now_s, seed=seed)
        self.replicas: dict[str, Replica] = {}
        texts = [[self.random.randbytes(32) for _ in range(12)] for _ in range(6)]
        self.texts = texts + [text[:6] + [self.random.randbytes(32) for _ in range(6)] for text in texts]

    def come_or_go(self) -> None:
        name = self.random.choice(NAMES)
        if name in self.replicas and self.random.random() < 0.6:
            del self.replicas[name]
            self.router.remove(name)
        else:
            self.replicas[name] = Replica()
            self.router.add(name)

    def report(self, lose: bool = True) -> None:
        if not self.replicas:
            return
        name = self.random.choice(list(self.replicas))
        replica = self.replicas[name]
        text = self.random.choice(self.texts)
        added = set(text[: self.random.randrange(13)]) - replica.pages
        gone = self.random.choice(self.texts)[self.random.randrange(12) :]
        dropped = (set(gone) & replica.pages) - added
        replica.pages = (replica.pages | added) - dropped
        whole = self.random.random() < (0.8 if self.router.wants_whole(name) else 0.05)
        self.send(name, PageDelta(replica.sequence, *self.lists(replica, added, dropped, whole), whole), lose)
        replica.sequence += 1

    def lists(self, replica: Replica, added: set[bytes], dropped: set[bytes], whole: bool) -> tuple[list[bytes], ...]:
        return (list(replica.pages), []) if whole else ([key[:8] for key in added], list(dropped))

    def send(self, name: str, delta: PageDelta, lose: bool) -> None:
        fate = self.random.random() if lose else 1.0
        late = self.replicas[name].late
        if fate < 0.1:
            return
        if fate < 0.2:
            late.append(delta)
            return
        self.router.note_pages(name, delta)
        if fate < 0.3:
            self.router.note_pages(name, delta)
        if late and self.random.random() < 0.3:
            self.router.note_pages(name, late.pop(self.random.randrange(len(late))))

    def load(self) -> None:
        name = self.random.choice(NAMES)
        rate = self.random.choice([0.0, 500.0, 5000.0])
        self.router.note_load(name, Load(self.random.randrange(3000), self.random.randrange(9), rate, 0.02))

    def choose(self) -> None:
        keys = self.random.choice(self.texts)[: self.random.randrange(13)]
        tokens = len(keys) * PAGE + self.random.randrange(1, PAGE)
        without = self.random.sample(NAMES, self.random.randrange(3))
        allowed = self.replicas.keys() - set(without)
        if not allowed:
            with pytest.raises(NoReplica):
                self.router.choose(keys, tokens, without)
            return
        choice = self.router.choose(keys, tokens, without)
        assert choice.replica in allowed
        assert 0 <= choice.cached_tokens < tokens

    def step(self) -> None:
        self.now_s += self.random.random()
        actions = [self.come_or_go, self.report, self.load, self.choose]
        self.random.choices(actions, weights=[1, 8, 4, 8])[0]()
        self.router.check()

    def settle(self) -> None:
        """Let all expectations run out, and all replicas report without loss, with all their pages if asked to."""
        self.now_s += 10_000.0
        for name, replica in self.replicas.items():
            self.router.note_load(name, Load(0, 0, 1000.0, 0.0))
            self.router.note_pages(name, PageDelta(replica.sequence, []))
            if self.router.wants_whole(name):
                self.router.note_pages(name, PageDelta(replica.sequence + 1, list(replica.pages), whole=True))
            assert not self.router.wants_whole(name)

    def prove(self) -> None:
        """Check that the router knows the replicas that hold each page of each text, and how many pages there are."""
        table = self.router._table
        for text in self.texts:
            for pages in range(1, len(text) + 1):
                holders = {name for name, replica in self.replicas.items() if text[pages - 1] in replica.pages}
                found = table.find([text[pages - 1]], len(NAMES))
                assert set(found) == holders
        assert len(table) == len(set().union(*(replica.pages for replica in self.replicas.values())))


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_leave_the_truth(seed: int) -> None:
    world = World(seed)
    for number in range(3000):
        world.step()
        if number % 1000 == 999:
            world.settle()
            world.router.check()
            world.prove()
            for replica in world.replicas.values():
                replica.sequence += 2
