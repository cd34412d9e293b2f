# ruff: noqa: E501 (one template to a line)
"""Templates run where they can be stopped: one that overruns ends with its process, and no other waits for it."""

from __future__ import annotations

import enum
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from mlxr.core.errors import NoTemplateWorker, TemplateError
from mlxr.templates.budget import MAX_RENDER_S
from mlxr.templates.workers import MAX_WORKERS_PER_TEMPLATE, TemplateWorkers

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SHARED = "{% set ns=namespace(x=['a'],y=['a']) %}{% for i in range(40) %}{% set ns.x=[ns.x,ns.x] %}{% set ns.y=[ns.y,ns.y] %}{% endfor %}"
ENDLESS = SHARED + "{{ ns.x == ns.y }}"


@pytest.fixture(scope="module")
def workers() -> Iterator[TemplateWorkers]:
    made = TemplateWorkers(processor_s=1)
    yield made
    made.stop()


def render(workers: TemplateWorkers, source: str, **variables: object) -> str:
    return workers.render(source, "test", variables, NOW)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS, "processor time"),
        (SHARED + "{{ [ns.x] | select('equalto', ns.y) | list }}", "processor time"),
        ("{{ ('a'*8000000).rfind('ab'+'a'*1000000) }}", "processor time"),
        ("{{ (['A'*1000000]*2500)|sort }}", "memory|on the way"),
        ("{{ strftime_now('%250d'*600000) }}", "processor time|memory|makes a value"),
        ("{{ ('a'*4000000)|wordwrap(1) }}", "processor time|memory|makes a value"),
        ("{% set x = 'a'*9999999 %}{{ [x,x,x,x,x,x,x,x,x,x,x,x,x,x,x]|map('upper')|map('lower')|list|length }}", "memory|on the way"),
    ],
    ids=["equal", "select", "rfind", "sort", "strftime", "wordwrap", "upper"],
)  # fmt: skip
@pytest.mark.slow
def test_overruns_end_with_the_process(workers: TemplateWorkers, source: str, reason: str) -> None:
    beats: list[float] = []
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.01):
            beats.append(time.monotonic())

    watching = threading.Thread(target=beat)
    watching.start()
    try:
        with pytest.raises(TemplateError, match=rf"^chat template test.*({reason}).*it was stopped"):
            render(workers, source)
    finally:
        is_over.set()
        watching.join()
    assert max((after - before for before, after in itertools.pairwise(beats)), default=0.0) < 1.0
    assert render(workers, "{{ x }}", x=1) == "1"


def test_a_hostile_template_leaves_workers_for_others(workers: TemplateWorkers) -> None:
    render(workers, "ok")
    with ThreadPoolExecutor(3 * MAX_WORKERS_PER_TEMPLATE) as pool:
        bombs = [pool.submit(render, workers, ENDLESS) for _ in range(2 * MAX_WORKERS_PER_TEMPLATE)]
        while len(workers._busy) < MAX_WORKERS_PER_TEMPLATE:
            time.sleep(0.01)
        assert render(workers, "still {{ here }}", here="here") == "still here"
        assert not any(bomb.done() for bomb in bombs)
        while not all(bomb.done() for bomb in bombs):
            workers.cut_short()
            time.sleep(0.02)
        for bomb in bombs:
            assert isinstance(bomb.exception(), TemplateError)


def test_stopping_ends_what_is_on_its_way() -> None:
    own = TemplateWorkers()
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(render, own, ENDLESS)
        while not own._busy:
            time.sleep(0.01)
        start_s = time.monotonic()
        own.stop()
        with pytest.raises(TemplateError, match="it was stopped"):
            bomb.result()
        assert time.monotonic() - start_s < 2.0
    assert render(own, "{{ x }}", x="again") == "again"
    own.stop()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateWorkers]:
    """Workers of one test, which check often for a stop."""
    monkeypatch.setattr("mlxr.templates.workers.LOOK_S", 0.02)
    made = TemplateWorkers()
    yield made
    made.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_was_ended_or_stopped_while_idle_is_replaced(
    own: TemplateWorkers, number: signal.Signals
) -> None:
    assert render(own, "one") == "one"
    end_worker(own._idle[0], number)
    start_s = time.monotonic()
    assert render(own, "two") == "two"
    assert time.monotonic() - start_s < MAX_RENDER_S / 2
    assert render(own, "{{ x }}", x="x" * 10_000_000) == "x" * 10_000_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("size", [1, 5_000_000])
def test_a_worker_that_is_lost_with_its_work_leaves_it_to_another(
    own: TemplateWorkers, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, size: int
) -> None:
    assert render(own, "one") == "one"
    worker = own._idle[0]
    end_worker(worker, number)
    find_loss, looks = worker.find_loss, iter([None])
    monkeypatch.setattr(worker, "find_loss", lambda: next(looks, None) or find_loss() if own._busy else None)
    assert render(own, "{{ x }}", x="x" * size) == "x" * size
    assert own.find_variables("{{ y }}") == {"y"}


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "was ended by signal 9"), (signal.SIGSTOP, "was stopped by a signal")]
)
def test_what_is_lost_twice_is_nobodys_fault(own: TemplateWorkers, number: signal.Signals, reason: str) -> None:
    render(own, "one")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(render, own, ENDLESS)
        while not waiting.done():
            for worker in list(own._busy):
                worker._process.send_signal(number)
            time.sleep(0.01)
        with pytest.raises(NoTemplateWorker, match=f"chat template test: its process {reason}, and so did another"):
            waiting.result()
    assert render(own, "three") == "three"


def test_what_is_not_known_of_a_template_is_not_kept(own: TemplateWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> NoReturn:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr("mlxr.templates.workers.subprocess.Popen", fail)
        with pytest.raises(NoTemplateWorker, match="no process can be started"):
            own.find_variables("{{ x }}")
    assert own.find_variables("{{ x }}") == {"x"}


def end_worker(worker: Any, number: signal.Signals) -> None:
    """Send a signal to a worker's process, and wait until it has taken effect."""
    process = worker._process
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)


def test_what_variables_may_be(workers: TemplateWorkers) -> None:
    class Role(enum.StrEnum):
        USER = "user"

    given = {"role": Role.USER, "tuple": (1, 2), "odd": "\ud800", "map": MappingProxyType({"a": [None, True, 1.5]})}
    source = "{{ role }}|{{ tuple[1] }}|{{ odd }}|{{ map.a }}|{{ strftime_now('%Y') }}"
    assert render(workers, source, **given) == "user|2|\ud800|[None, True, 1.5]|2026"
    with pytest.raises(TemplateError, match="cannot get a value of type object"):
        render(workers, source, role=object())
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        render(workers, source, role=deep)


def test_variables_of_a_template(workers: TemplateWorkers) -> None:
    assert workers.find_variables("{% set a = b %}{{ a }}{{ c }}") == {"b", "c"}
    assert workers.find_variables("{% if %}") == frozenset()
    assert workers.find_variables("x" * (1 << 21)) == frozenset()


def test_a_fork_has_workers_of_its_own(workers: TemplateWorkers) -> None:
    render(workers, "warm")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            workers.forget()
            os.write(writer, render(workers, "child").encode())
            workers.stop()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "child"
    os.waitpid(child, 0)
    assert render(workers, "parent") == "parent"
