"""Load never changes an answer: random schedules give each request the tokens and logprobs that it gets alone.

The schedules mix arrivals, chunk sizes, priorities, cancelled neighbours, several answers to one prompt, prompts that
begin alike, and arenas so small that running requests must give their pages back, with and without a store on disk.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from amounts import choose_amount
from fake_constraint import FakeConstraint
from fake_drafts import draft_eagerly, make_draft
from fake_model import FULL, STATE, VOCABULARY, FakeConfig, FakeModel, make_engine, run_all

from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it; `cancel_after` steps it is cancelled."""

    prompt: list[int]
    params: SamplingParams
    arrival_step: int
    priority: int
    cancel_after: int | None
    constraint: FakeConstraint | None


BREAKERS = ((3,), (5, 1))
Answers = dict[int, list[TokenEvent]]  # by index


def draw_rules(chance: random.Random) -> dict[str, Any]:
    """Further rules, for a half of the requests."""
    if chance.random() < 0.5:
        return {}
    return {
        "repeat_last_n": chance.choice([-1, 0, 6]),
        "top_n_sigma": chance.choice([0.0, 1.5]),
        "typical_p": chance.choice([1.0, 0.8]),
        "xtc_probability": chance.choice([0.0, 0.5]),
        "temperature_last": chance.random() < 0.5,
        "dynatemp_range": chance.choice([0.0, 0.4]),
        "mirostat": chance.choice([0, 0, 1, 2]),
        "mirostat_tau": 3.0,
        "min_tokens": chance.choice([0, 4]),
        "dry_multiplier": chance.choice([0.0, 0.8]),
        "dry_allowed_length": chance.choice([1, 2]),
        "dry_penalty_last_n": chance.choice([-1, 9]),
    }


def draw_request(chance: random.Random) -> Request:
    sampled = chance.random() < 0.6
    n = chance.choice([1, 1, 1, 2, 4])
    params = SamplingParams(
        max_tokens=chance.choice([1, 2, 5, 11, 24]),
        temperature=chance.choice([0.3, 1.0, 2.0]) if sampled else 0.0,
        top_k=chance.choice([0, 5, 20]),
        top_p=chance.choice([0.5, 0.9, 1.0]),
        min_p=chance.choice([0.0, 0.1]),
        repetition_penalty=chance.choice([1.0, 1.3]),
        presence_penalty=chance.choice([0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, 0.5]),
        seed=chance.getrandbits(64),
        stop_token_ids=frozenset(chance.sample(range(VOCABULARY), chance.choice([0, 2]))),
        logit_bias={chance.randrange(VOCABULARY): chance.uniform(-5, 5)},
        logprobs=chance.choice([None, 0, 2]),
        n=n,
        best_of=chance.choice([None, n, 4]),
        **draw_rules(chance),
    )
    # Half of the prompts begin alike, for as long as both go.
    start = chance.choice([0, 7])
    length = chance.choice([1, 3, 8, 21, 40])
    prompt = [(start + index * index) % VOCABULARY for index in range(length - 1)]
    if chance.random() < 0.5:
        prompt = [chance.randrange(VOCABULARY) for _ in prompt]
    cancel_after = chance.randrange(20) if chance.random() < 0.25 else None
    return Request(
        [*prompt, chance.randrange(VOCABULARY)],
        params,
        chance.randrange(12),
        chance.choice([-1, 0, 0, 3]),
        cancel_after,
        draw_constraint(chance),
    )


def draw_constraint(chance: random.Random) -> FakeConstraint | None:
    """A rule for a third of the requests, with an end that takes tokens back."""
    if chance.random() < 0.67:
        return None
    way = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randrange(7)))
    return FakeConstraint(chance.choice([1, 2, 3]), way=way, safe_every=chance.choice([1, 2, 5]))


def run_alone(request: Request) -> Answers:
    engine = make_engine(kv_cache="simple", pages=4, max_batch_tokens=128, prefill_chunk_tokens=128)
    engine.submit(
        EngineRequest(request.prompt, request.params, constraint=request.constraint, dry_breaker_ids=BREAKERS)
    )
    return sort_events(run_all(engine))


def sort_events(events: Iterable[TokenEvent]) -> Answers:
    answers: Answers = {}
    for event in events:
        answers.setdefault(event.index, []).append(event)
    return answers


def run_together(engine: Engine, requests: list[Request]) -> list[Answers]:
    """Submit and cancel each request in the steps it asks for; return the answers."""
    events: dict[int, list[TokenEvent]] = {}
    ids: dict[int, int] = {}
    step = 0
    while step < 40 or engine.has_work:
        for index, request in enumerate(requests):
            if request.arrival_step == step:
                ids[index] = engine.submit(
                    EngineRequest(
                        request.prompt,
                        request.params,
                        priority=request.priority,
                        constraint=request.constraint,
                        dry_breaker_ids=BREAKERS,
                    )
                )
                events[ids[index]] = []
            if request.cancel_after is not None and request.arrival_step + request.cancel_after == step:
                events[ids[index]] += engine.cancel(ids[index])
        for event in engine.step():
            events[event.sequence_id].append(event)
        engine.check()
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert engine.stats().used_pages == 0
    return [sort_events(events[ids[index]]) for index in range(len(requests))]


def without_load(event: TokenEvent) -> tuple[object, ...]:
    """Return the parts of an event that load must not change: all but its request's number and the cached tokens."""
    usage = (event.usage.prompt_tokens, event.usage.completion_tokens)
    withdrawn = tuple(map(without_load, event.withdrawn))
    return (event.token_id, event.logprob, event.top, event.finish_reason, usage, event.error, withdrawn)


def compare(answers: Answers, alone: Answers) -> None:
    assert answers.keys() == alone.keys()
    for index, events in answers.items():
        expected = [without_load(event) for event in alone[index]]
        if events[-1].finish_reason is FinishReason.CANCELLED:
            assert events.pop().token_id is None
            expected = expected[: len(events)]
        assert [without_load(event) for event in events] == expected


def draw_engine(chance: random.Random, store_folder: Path | None) -> Engine:
    page_size = chance.choice([1, 4, 7, 32])
    needed_pages = -(-64 // page_size)  # the longest request
    layers = chance.choice([(FULL, FULL), (FULL, FULL), (STATE, FULL), (STATE,)])
    engine = make_engine(
        FakeModel(FakeConfig(cache_layers=layers)),
        page_size=page_size,
        pages=needed_pages + chance.choice([0, 1, needed_pages, 8 * needed_pages]),
        max_batch_tokens=chance.choice([4, 5, 16, 64]),
        max_sequences=chance.choice([4, 5, 8]),
        prefill_chunk_tokens=chance.choice([1, 7, 32]),
        kv_cache="paged",
        prefix_sharing=store_folder is not None or chance.random() < 0.8,
        store_folder=store_folder,
        store_bytes=chance.choice([2**14, 2**22]),
        draft=make_draft(chance.random()) if chance.random() < 0.5 else None,
    )
    right, most_tokens = chance.random(), chance.choice([0, 1, 5, 15])
    return draft_eagerly(engine, right, most_tokens) if most_tokens else engine


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(choose_amount(100)))
def test_answers_are_those_given_alone(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    requests = [draw_request(chance) for _ in range(chance.randrange(3, 13))]
    engine = draw_engine(chance, tmp_path if seed % 4 == 0 else None)
    for request, answers in zip(requests, run_together(engine, requests), strict=True):
        if request.cancel_after is None or request.params.streams == request.params.n:
            compare(answers, run_alone(request))  # the ranks of half answers are not those of whole ones
    engine.close()


@pytest.mark.slow
def test_the_schedules_are_not_harmless(tmp_path: Path) -> None:
    """The schedules above really preempt, share, evict, store and restore."""
    preemptions = recomputed_tokens = memory_tokens = disk_tokens = evictions = 0
    for seed in range(0, 40, 4):
        chance = random.Random(seed)
        requests = [draw_request(chance) for _ in range(chance.randrange(3, 13))]
        engine = draw_engine(chance, tmp_path / str(seed))
        run_together(engine, requests)
        engine.cache.flush(10.0)  # how much reaches the disk in time must not decide
        run_together(engine, requests)
        stats = engine.stats()
        engine.close()
        preemptions += stats.preemptions
        recomputed_tokens += stats.recomputed_tokens
        memory_tokens += stats.cache.memory_hit_tokens
        disk_tokens += stats.cache.disk_hit_tokens
        evictions += sum(stats.cache.evictions.values())
    assert min(preemptions, recomputed_tokens, memory_tokens, disk_tokens, evictions) > 3
