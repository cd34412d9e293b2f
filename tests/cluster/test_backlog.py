"""Work that waits: every prompt's tokens leave once, in whatever order a replica's notices and reports come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxr.cluster.router import Backlog, Load, NoReplica, Router

LATE_S = 1.0  # at most, for prompts on their way to the replica and for its notices on their way back


def send_all(*tokens: int) -> Backlog:
    """Send prompts 0, 1, ... a second apart, with nothing in the cache."""
    backlog = Backlog()
    for number, count in enumerate(tokens):
        backlog.send(number, count, count, float(number))
    return backlog


def test_work_is_done_in_the_order_in_which_it_came() -> None:
    backlog = send_all(100, 200, 300)
    backlog.work(150)
    assert (backlog.tokens, len(backlog)) == (450, 2)
    backlog.settle(1, 3.0)
    assert (backlog.tokens, len(backlog)) == (300, 1)
    backlog.settle(0, 3.0)
    assert backlog.tokens == 300
    backlog.work(1000)
    backlog.settle(2, 3.0)
    assert (backlog.tokens, len(backlog), list(backlog)) == (0, 0, [0, 1, 2])
    backlog.check()


def test_a_report_is_shared_out_from_the_last_prompt_on() -> None:
    backlog = send_all(100, 200, 300)
    backlog.report(350, 0, since_s=5.0)
    assert backlog.tokens == 350
    backlog.settle(0, 6.0)
    assert backlog.tokens == 350
    backlog.settle(2, 6.0)
    assert backlog.tokens == 50
    backlog.settle(1, 6.0)
    assert backlog.tokens == 0
    backlog.check()


def test_what_no_prompt_explains_is_of_others_and_comes_first() -> None:
    backlog = send_all(100)
    backlog.report(500, 0, since_s=5.0)
    assert (backlog.tokens, backlog.others) == (500, 400)
    backlog.work(300)
    assert (backlog.tokens, backlog.others) == (200, 100)
    backlog.settle(0, 6.0)
    assert backlog.tokens == 100
    backlog.report(0, 0, since_s=7.0)
    assert backlog.tokens == 0
    backlog.check()


def test_a_prompt_that_a_report_may_not_know_is_kept_and_not_counted_twice() -> None:
    for waiting, expected in ((0, 300), (250, 300), (300, 300), (320, 320)):
        backlog = send_all(300)
        backlog.report(waiting, 0, since_s=-1.0)
        assert backlog.tokens == expected
        backlog.check()


def test_a_report_on_its_way_does_not_bring_back_what_is_settled() -> None:
    backlog = send_all(700, 100)
    backlog.settle(0, 2.0)
    backlog.report(400 + 100, 0, since_s=1.5)  # made while the first one was computed
    assert (backlog.tokens, backlog.others) == (100, 0)
    backlog.report(500, 0, since_s=2.5)
    assert (backlog.tokens, backlog.others) == (500, 400)
    backlog.check()


def test_tokens_that_are_not_found_in_the_cache_leave_with_their_prompt() -> None:
    backlog = Backlog()
    backlog.send(7, 20, 720, 0.0)
    backlog.report(720, 0, since_s=1.0)
    assert (backlog.tokens, backlog.others) == (720, 0)
    backlog.check()
    backlog.settle(7, 2.0)
    assert backlog.tokens == 0


def test_answers_that_have_ended_run_no_more_whatever_a_report_on_its_way_says() -> None:
    backlog = send_all(10, 10)
    backlog.report(0, 3, since_s=5.0)  # one of another router
    assert backlog.running == 3
    backlog.end(0, 6.0)
    assert backlog.running == 2
    backlog.report(0, 3, since_s=5.5)
    assert backlog.running == 2
    backlog.report(0, 3, since_s=6.5)
    assert backlog.running == 3
    backlog.end(1, 7.0)
    assert (backlog.running, backlog.tokens, list(backlog)) == (2, 0, [])
    backlog.report(0, 0, since_s=8.0)
    assert backlog.running == 0
    backlog.check()


@dataclass
class Sent:
    """A prompt's true state: it reaches the replica at `at_s`, and `left` tokens of work are left."""

    number: int
    tokens: int
    most: int
    at_s: float
    left: int


class Truth:
    """A replica that computes prompts one after another, and a front that hears of it late."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.backlog = Backlog()
        self.known: dict[int, Sent] = {}  # not settled
        self.arriving: deque[Sent] = deque()
        self.queue: deque[Sent] = deque()  # at the replica, with tokens left
        self.reports: deque[tuple[float, float, int, int]] = deque()  # when each comes and was made, and its numbers
        self.computed: deque[tuple[float, int]] = deque()  # notices of first tokens
        self.running: set[int] = set()  # requests at the replica
        self.live: set[int] = set()  # requests whose end the front has not heard of
        self.ended: deque[tuple[float, int]] = deque()  # notices of that
        self.count = 0

    def send(self) -> None:
        cached, tokens = self.random.choice([0, 0, 500]), self.random.randrange(1, 1000)
        arrives_s = max(self.now_s + self.random.random() * LATE_S, self.arriving[-1].at_s if self.arriving else 0.0)
        sent = Sent(self.count, tokens, tokens + cached, arrives_s, tokens)
        self.count += 1
        self.known[sent.number] = sent
        self.live.add(sent.number)
        self.arriving.append(sent)
        self.backlog.send(sent.number, sent.tokens, sent.most, self.now_s)

    def compute(self) -> None:
        tokens = self.random.randrange(1500)
        while tokens and self.queue:
            first = self.queue[0]
            done = min(tokens, first.left)
            first.left -= done
            tokens -= done
            if not first.left:
                self.queue.popleft()
                self.computed.append((self.now_s + self.random.random() * LATE_S, first.number))

    def cancel(self) -> None:
        """Let a client leave; the replica hears of it no later than of anything else."""
        number = self.random.choice(list(self.known) or [-1])
        if number >= 0 and self.known[number] not in self.arriving:
            sent = self.known.pop(number)
            self.backlog.end(number, self.now_s)
            self.live.remove(number)
            self.running.discard(number)
            if sent in self.queue:
                self.queue.remove(sent)

    def finish(self) -> None:
        """End an answer, some time after its prompt."""
        done = sorted(self.running - {sent.number for sent in self.queue})
        if done:
            number = self.random.choice(done)
            self.running.remove(number)
            first_s = max((at_s for at_s, other in self.computed if other == number), default=self.now_s)
            self.ended.append((max(first_s, self.now_s + self.random.random() * LATE_S), number))

    def report(self) -> None:
        """Make a report; prompts that have not begun count with their cached tokens."""
        waiting = sum(sent.left if sent.left < sent.tokens else sent.most for sent in self.queue)
        comes_s = max(self.now_s + self.random.random() * LATE_S, self.reports[-1][0] if self.reports else 0.0)
        self.reports.append((comes_s, self.now_s, waiting, len(self.running)))

    def pass_time(self) -> None:
        """Let all that is due happen."""
        self.now_s += self.random.random() * 0.4
        while self.arriving and self.arriving[0].at_s <= self.now_s:
            self.running.add(self.arriving[0].number)
            self.queue.append(self.arriving.popleft())
        for at_s, number in [*self.computed]:
            if at_s <= self.now_s:
                self.computed.remove((at_s, number))
                if self.known.pop(number, None) is not None:
                    self.backlog.settle(number, self.now_s)
        for at_s, number in [*self.ended]:
            if at_s <= self.now_s:
                self.ended.remove((at_s, number))
                if number in self.live:
                    self.live.remove(number)
                    self.backlog.end(number, self.now_s)
        while self.reports and self.reports[0][0] <= self.now_s:
            _, made_s, waiting, running = self.reports.popleft()
            self.backlog.report(waiting, running, made_s - LATE_S)

    def prove(self) -> None:
        """Check that the known tokens are at least those truly left, and at most those of all unsettled prompts."""
        self.backlog.check()
        assert set(self.backlog) == self.live
        assert {number for number in self.live if number in self.backlog} == set(self.known)
        assert self.backlog.others == 0
        assert self.backlog.running <= len(self.live)
        assert self.backlog.tokens <= sum(sent.most for sent in self.known.values())
        assert self.backlog.tokens >= sum(sent.left for sent in self.known.values())


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_steps_keep_the_backlog_between_what_is_left_and_what_was_sent(seed: int) -> None:
    truth = Truth(seed)
    steps = [truth.send, truth.compute, truth.cancel, truth.report, truth.finish]
    emptied = idle = 0
    for _ in range(5000):
        truth.pass_time()
        truth.random.choices(steps, weights=[4, 5, 1, 4, 5])[0]()
        truth.prove()
        emptied += not truth.known
        idle += not truth.live
    assert emptied > 50  # in which there was no work, as it must be
    assert idle > 20


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.integers(0, 12), st.integers(1, 40)),
        st.tuples(st.just("settle"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 3000)),
        st.tuples(st.just("die"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("come"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 3000), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=300)
def test_a_router_counts_each_request_until_it_ends_or_its_replica_dies(steps: list[tuple[str, int, int]]) -> None:
    now_s = 0.0
    router = Router(16, clock=lambda: now_s)
    sent: dict[int, str] = {}  # by number, where requests are that have not ended
    settled: set[int] = set()
    keys = [bytes([number]) * 32 for number in range(12)]
    for what, number, amount in steps:
        name = f"replica-{number}"
        if what == "choose":
            try:
                choice = router.choose(keys[:number], number * 16 + amount)
            except NoReplica:
                continue
            assert choice.number not in sent
            sent[choice.number] = choice.replica
            settled.discard(choice.number)  # as that was said too soon
        elif what == "settle":
            router.settle(number)
            settled.add(number)
        elif what == "end":
            router.end(number)
            sent.pop(number, None)
        elif what == "report":
            router.note_load(name, Load(amount, amount % 4, 1000.0, 0.01), age_s=number / 10)
        elif what in ("die", "come"):
            router.remove(name) if what == "die" else router.add(name)
            sent = {number: replica for number, replica in sent.items() if replica != name}
        else:
            now_s += number / 1000
        router.check()
        assert {number: replica.name for number, replica in router._sent.items()} == sent
        waiting = {number for number, replica in router._sent.items() if number in replica.backlog}
        assert waiting == sent.keys() - settled
    for number in list(sent):
        router.end(number)
        router.settle(number)
        router.end(number)
    router.check()
    assert not router._sent
    assert all(replica.backlog.tokens == replica.backlog.others for replica in router._order)
