"""The engine as a state machine: whatever happens in whatever order, no page is lost or used twice, no answer is wrong.

Requests come and go, answers fork and end, pages are taken away, evicted, written to disk and read back, steps fail
and the engine starts again on the same store. All books are checked after every move, every token is compared with the
right one as soon as it appears, and at the end every page is back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from amounts import choose_amount
from fake_constraint import FakeConstraint, expect_constrained
from fake_drafts import draft_eagerly
from fake_model import FULL, STATE, VOCABULARY, FakeConfig, FakeModel, fake_logits, make_engine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxr.cache import kv_cache as kv_cache_module
from mlxr.cache.shapes import CacheShape, LayerCache, SharedWith
from mlxr.core.errors import InvalidRequest, QueueFull
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest, Pooling
from mlxr.engine.runner import Floats
from mlxr.engine.sequence import TokenEvent

PAGE_SIZE, MAX_TOKENS, MAX_WAITING = 4, 20, 6
EXAMPLES, MOVES = choose_amount(200), 100

# Prompts that begin alike for 0, 1 or many pages, and end anywhere within a page.
PROMPTS = st.builds(
    lambda stem, length, tail: tuple([(stem + index) % VOCABULARY for index in range(length)] + tail),
    stem=st.sampled_from([0, 20]),
    length=st.integers(0, 24),
    tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
)
TEMPERATURES = st.sampled_from([0.0, 1.0])


@functools.cache
def expect_answer(
    prompt: tuple[int, ...], temperature: float, seed: int, index: int, divisor: int | None
) -> tuple[tuple[int, float], ...]:
    """Tokens and logprobs of one answer, computed without an engine, a cache or a batch."""
    constraint = None if divisor is None else FakeConstraint(divisor)
    answer = expect_constrained(prompt, MAX_TOKENS, constraint, index, temperature=temperature, seed=seed)
    return tuple((result.token_id, result.logprob) for result in answer)


@functools.cache
def expect_embedding(text: tuple[int, ...], pooling: Pooling) -> Floats:
    states = [fake_logits(text[: end + 1]).astype(np.float64) for end in range(len(text))]
    return (functools.reduce(np.add, states) / len(text) if pooling == "mean" else states[-1]).astype(np.float32)


def write_at_once(engine: Engine) -> None:
    """Write a page to disk as soon as the cache offers or evicts it, so that no look depends on a thread's pace."""
    writer = engine.cache.writer
    if writer is None:
        return

    def then_flush(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            method(*arguments, **options)
            assert writer.flush(60.0)

        return call

    writer.offer = then_flush(writer.offer)  # type: ignore[method-assign]
    writer.evict = then_flush(writer.evict)  # type: ignore[method-assign]


class EngineMachine(RuleBasedStateMachine):
    """Random moves on a small engine, beside a plain record of the right answers."""

    layers: tuple[LayerCache, ...] = (FULL, FULL)

    @initialize(
        spare_pages=st.sampled_from([0, 1, 3, 20]),
        stores=st.booleans(),
        kv_cache=st.sampled_from(["paged", "paged", "paged", "simple"]),
        chunk_tokens=st.sampled_from([3, 8, 64]),
        drafts=st.sampled_from([None, (0.3, 2), (0.8, 6), (1.0, 15)]),
    )
    def begin(
        self, spare_pages: int, stores: bool, kv_cache: str, chunk_tokens: int, drafts: tuple[float, int] | None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp()) if stores and kv_cache == "paged" else None
        self.stamps = contextlib.ExitStack()  # pages in the store have the order of the moves, not of a real clock
        stamps = itertools.count(10**18, 10**6)
        self.stamps.enter_context(
            mock.patch.object(kv_cache_module, "time", SimpleNamespace(time_ns=lambda: next(stamps)))
        )
        self.now = 0.0
        self.fails = ""
        self.kv_cache, self.chunk_tokens, self.drafts = kv_cache, chunk_tokens, drafts
        self.pages = 4 + spare_pages if kv_cache == "simple" else 12 + spare_pages  # the longest request needs 12
        self.requests: dict[int, tuple[tuple[int, ...], SamplingParams, int | None]] = {}
        self.texts: dict[int, tuple[tuple[int, ...], Pooling]] = {}
        self.given: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self.growing: set[tuple[int, int]] = set()
        self.engine = self.open_engine()

    def open_engine(self) -> Engine:
        engine = make_engine(
            FakeModel(
                FakeConfig(self.layers),
                on_forward=lambda batch: self.fail_if_told("early"),
                on_written=lambda batch: self.fail_if_told("late"),
            ),
            pages=self.pages,
            page_size=PAGE_SIZE,
            max_batch_tokens=max(8, self.chunk_tokens),
            max_sequences=5,
            prefill_chunk_tokens=self.chunk_tokens,
            max_waiting=MAX_WAITING,
            kv_cache=self.kv_cache,
            store_folder=self.folder,
            store_bytes=2**15,
            drafts=self.drafts is not None,  # others depend on how long steps take, so no history would come again
            clock=lambda: self.now,
        )
        write_at_once(engine)
        return engine if self.drafts is None else draft_eagerly(engine, *self.drafts)

    def fail_if_told(self, moment: str) -> None:
        if self.fails == moment:
            raise RuntimeError("told to fail")

    @rule(
        prompt=PROMPTS,
        temperature=TEMPERATURES,
        tokens=st.integers(1, MAX_TOKENS),
        n=st.sampled_from([1, 1, 2, 4]),
        priority=st.sampled_from([0, 0, 5]),
        deadline_s=st.sampled_from([None, None, 30.0]),
        divisor=st.sampled_from([None, None, 2, 7]),
        uses_cache=st.sampled_from([True, True, False]),
        client=st.sampled_from([None, "a", "a", "b"]),
        boundaries=st.sets(st.integers(0, 30), max_size=3),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        temperature: float,
        tokens: int,
        n: int,
        priority: int,
        deadline_s: float | None,
        divisor: int | None,
        uses_cache: bool,
        client: str | None,
        boundaries: Collection[int] = (),
    ) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=len(prompt), n=n, logprobs=0)
        if self.engine.stats().waiting_sequences >= MAX_WAITING:
            with pytest.raises(QueueFull):
                self.engine.submit(EngineRequest(prompt, params))
            return
        request_id = self.engine.submit(
            EngineRequest(
                prompt,
                params,
                priority=priority,
                deadline_s=deadline_s,
                uses_cache=uses_cache,
                client=client,
                boundary_tokens=boundaries,
                constraint=None if divisor is None else FakeConstraint(divisor),
            )
        )
        self.requests[request_id] = prompt, params, divisor
        for index in range(n):
            self.given[request_id, index] = []
            self.growing.add((request_id, index))

    @rule(text=PROMPTS, pooling=st.sampled_from(["mean", "last"]), client=st.sampled_from([None, "a", "b"]))
    def embed(self, text: tuple[int, ...], pooling: Pooling, client: str | None) -> None:
        if self.engine.stats().waiting_sequences < MAX_WAITING:
            request_id = self.engine.submit(EngineRequest(text, pooling=pooling, client=client))
            self.texts[request_id] = text, pooling
            self.given[request_id, 0] = []
            self.growing.add((request_id, 0))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.1
            self.take(self.engine.step())

    @rule(steps=st.integers(5, 20))
    def step_on(self, steps: int) -> None:
        self.step(steps)

    @rule(often=st.integers(0, 2), moment=st.sampled_from(["early", "late"]))
    def fail_a_step(self, often: int, moment: str) -> None:
        if often:
            return
        self.fails = moment
        with contextlib.ExitStack() as quiet:
            quiet.callback(logging.disable, logging.NOTSET)
            logging.disable(logging.CRITICAL)
            self.take(self.engine.step())
        self.fails = ""

    @rule(choice=st.integers(0, 99), whole=st.booleans())
    def cancel(self, choice: int, whole: bool) -> None:
        if self.growing:
            request_id, index = sorted(self.growing)[choice % len(self.growing)]
            wanted = {key for key in self.growing if key[0] == request_id and (whole or key[1] == index)}
            events = self.engine.cancel(request_id, None if whole else index)
            assert {(event.sequence_id, event.index) for event in events} == wanted
            self.take(events)
            assert not wanted & self.growing

    @precondition(lambda self: self.engine.stats().running_sequences)
    @rule(choice=st.integers(0, 99))
    def preempt(self, choice: int) -> None:
        running = self.engine._scheduler.running
        self.engine._scheduler.preempt(running[choice % len(running)])

    @rule(text=PROMPTS)
    def score(self, text: tuple[int, ...]) -> None:
        with contextlib.suppress(InvalidRequest):  # a single token, or no pages
            assert len(self.engine.score(text)) == len(text) - 1

    @rule()
    def wait(self) -> None:
        self.now += 40
        self.take(self.engine.step())

    @rule(often=st.integers(0, 3))
    def restart(self, often: int) -> None:
        """Start a new engine that knows only what is on disk; rarely enough that other things happen, too."""
        if often:
            return self.step(5 * often)
        for request_id in {key[0] for key in self.growing}:
            self.take(self.engine.cancel(request_id))
        assert self.engine.stats().used_pages == 0
        self.engine.close()
        self.engine = self.open_engine()
        self.requests.clear()
        self.texts.clear()
        self.given.clear()
        return None

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            key = event.sequence_id, event.index
            assert key in self.growing
            if event.sequence_id in self.texts:
                self.take_text(event)
                continue
            prompt, params, divisor = self.requests[event.sequence_id]
            given = self.given[key]
            if event.token_id is not None:
                assert event.logprob is not None
                given.append((event.token_id, event.logprob))
                expected = expect_answer(prompt, params.temperature, len(prompt), event.index, divisor)
                assert given[-1] == expected[len(given) - 1]
            assert event.usage.completion_tokens == len(given)
            assert event.usage.cached_tokens < event.usage.prompt_tokens == len(prompt)
            if event.finish_reason is not None:
                self.growing.remove(key)
                assert (event.finish_reason is FinishReason.LENGTH) == (len(given) == params.max_tokens)

    def take_text(self, event: TokenEvent) -> None:
        text, pooling = self.texts[event.sequence_id]
        self.growing.remove((event.sequence_id, 0))
        assert (event.embedding is not None) == (event.finish_reason is FinishReason.STOP)
        if event.embedding is not None:
            assert np.array_equal(event.embedding, expect_embedding(text, pooling))

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            stats = self.engine.stats()
            for group in stats.cache.groups:
                assert group.held_pages + group.cached_pages + group.free_pages == group.pages
                assert group.pages <= self.pages or group.kv_heads is None
            if not self.growing:
                assert stats.used_pages == 0
                assert not self.engine.has_work

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            with self.stamps:
                self.end_all()
            if self.folder is not None:
                shutil.rmtree(self.folder)

    def end_all(self) -> None:
        """End every answer; every page must be back."""
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
            self.engine.check()
        assert not self.growing
        assert self.engine.stats().used_pages == 0
        self.engine.close()


class MixedEngineMachine(EngineMachine):
    """A model with a window in some of its layers; the window's pages run out first."""

    layers = (CacheShape(2, 4, window=6), FULL, SharedWith(0))


class ThreeGroupsEngineMachine(EngineMachine):
    """Two windows, one of them shorter than a page."""

    layers = (CacheShape(1, 8, window=9), CacheShape(2, 4, window=2), FULL, CacheShape(1, 8, window=9))


class StateEngineMachine(EngineMachine):
    """Recurrent layers beside one that keeps everything."""

    layers = (STATE, FULL, STATE)


class HybridEngineMachine(EngineMachine):
    """States and a window; no layer keeps everything."""

    layers = (CacheShape(2, 4, window=7), STATE)


test_engine_machine = EngineMachine.TestCase
test_engine_machine_with_a_window = pytest.mark.slow(MixedEngineMachine.TestCase)
test_engine_machine_with_two_windows = pytest.mark.slow(ThreeGroupsEngineMachine.TestCase)
test_engine_machine_with_states = pytest.mark.slow(StateEngineMachine.TestCase)
test_engine_machine_with_states_and_a_window = pytest.mark.slow(HybridEngineMachine.TestCase)
PAGED = (EngineMachine, MixedEngineMachine, ThreeGroupsEngineMachine)
for machine in (*PAGED, StateEngineMachine, HybridEngineMachine):
    machine.TestCase.settings = settings(
        max_examples=EXAMPLES if machine in PAGED else EXAMPLES // 2,
        stateful_step_count=MOVES,
        deadline=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),  # to study a failure add Phase.shrink, which takes minutes
        suppress_health_check=list(HealthCheck),
    )
