"""Load never changes an answer of the real model: random schedules, compared to the bit with requests run alone.

What is varied: arrivals, batch and chunk sizes, page sizes, arenas too small for all, prefixes cached in memory and on
disk, answers that must give their pages back, neighbours that are cancelled, one and two threads, one to four answers
to a prompt, greedy and seeded sampling, with grammars and without. Alone means alone: a fresh engine with one plain run
of memory per answer, and masks that are computed in its own thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from amounts import choose_amount

from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import FinishReason, Grammar, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.loading import LoadedModel, load
from mlxr.service.grammar import GrammarCompiler, GrammarConstraint

SCHEDULES = 200
TOGETHER = 24  # the first ones, whose sums are looked at
CONTEXT_TOKENS = 64
TEXTS = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n",
    "import os\nimport sys\n\n\ndef write_lines(path, lines):\n    with open(path, 'w') as file:\n",
    "What does os.path.join do? It joins one or more path components intelligently.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)
GRAMMARS = (
    Grammar("regex", "[a-z]{2,9}( [0-9]+,)*"),
    Grammar("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3}'),
    Grammar("json_schema", '{"properties": {"parameters": {"type": "integer"}}, "required": ["parameters"]}'),
)
Answers = dict[int, list[TokenEvent]]  # by index


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None


@dataclass
class Demo:
    """The demo model on one and on two threads, requests to draw from, and their answers when alone.

    Compilers are by the threads of the model that they are for, 0 for none.
    """

    models: dict[int, LoadedModel]
    compilers: dict[int, GrammarCompiler]
    requests: list[Request]
    folder: Path
    alone: dict[int, Answers]

    def answer_alone(self, number: int) -> Answers:
        if number not in self.alone:
            request = self.requests[number]
            engine = self.open_engine(
                1, kv_cache="simple", pages=request.params.n, max_batch_tokens=CONTEXT_TOKENS, max_sequences=4
            )
            engine.submit(EngineRequest(request.prompt, request.params, constraint=self.constrain(request, 0)))
            events: list[TokenEvent] = []
            while engine.has_work:
                events += engine.step()
            self.alone[number] = sort_events(events)
        return self.alone[number]

    def constrain(self, request: Request, threads: int) -> GrammarConstraint | None:
        return None if request.grammar is None else self.compilers[threads].compile(request.grammar)

    def open_engine(
        self,
        threads: int,
        *,
        kv_cache: str,
        pages: int,
        max_batch_tokens: int,
        max_sequences: int,
        page_size: int = 32,
        prefill_chunk_tokens: int = 512,
        stores: bool = False,
    ) -> Engine:
        model = self.models[threads]
        return Engine(
            model.model,
            model.ctx,
            ModelSettings(
                context_tokens=CONTEXT_TOKENS,
                kv_cache=kv_cache,
                page_size=page_size,
                max_batch_tokens=max_batch_tokens,
                max_sequences=max_sequences,
                prefill_chunk_tokens=prefill_chunk_tokens,
                store_bytes=2**26 if stores else 0,
                store_folder=str(self.folder) if stores else None,
            ),
            eos_ids=model.tokenizer.eos_ids,
            fingerprint=b"the demo model",
            pages=pages,
        )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    models = {threads: load("demo", threads=threads) for threads in (1, 2)}
    chance = random.Random(0)
    texts = [models[1].tokenizer.encode(text) for text in TEXTS]
    known = models[1].tokenizer, models[1].tokenizer.eos_ids, models[1].config.vocab_size
    hosts = {0: None, 1: models[1].ctx, 2: models[2].ctx}
    compilers = {threads: GrammarCompiler(*known, host) for threads, host in hosts.items()}
    requests = [draw_request(chance, texts) for _ in range(60)]
    yield Demo(models, compilers, requests, tmp_path_factory.mktemp("store"), {})
    for model in models.values():
        model.close()


def draw_request(chance: random.Random, texts: list[list[int]]) -> Request:
    ids = chance.choice(texts)
    prompt = tuple(ids[: chance.choice([1, 5, 17, len(ids), len(ids)])])
    grammar = chance.choice([None, None, *GRAMMARS])
    params = SamplingParams(
        max_tokens=chance.choice([1, 4, 8, 12]),
        temperature=chance.choice([0.0, 1.0, 3.0]),
        top_k=chance.choice([0, 40]),
        top_p=chance.choice([0.9, 1.0]),
        repetition_penalty=chance.choice([1.0, 1.1]),
        seed=chance.getrandbits(64),
        logprobs=chance.choice([0, 3]),
        n=chance.choice([1, 1, 2, 3, 4]),
        ignore_eos=grammar is None and chance.random() < 0.5,
    )
    return Request(prompt, params, grammar)


def sort_events(events: Iterable[TokenEvent]) -> Answers:
    answers: Answers = {}
    for event in events:
        answers.setdefault(event.index, []).append(event)
    return answers


def without_load(event: TokenEvent) -> tuple[object, ...]:
    """Return the parts of an event that load must not change: all but its request's number and the cached tokens."""
    usage = (event.usage.prompt_tokens, event.usage.completion_tokens)
    return (event.token_id, event.logprob, event.top, event.finish_reason, usage, event.error)


def draw_engine(chance: random.Random, demo: Demo, threads: int) -> Engine:
    page_size = chance.choice([4, 8, 16, 32])
    needed_pages = CONTEXT_TOKENS // page_size
    return demo.open_engine(
        threads,
        kv_cache="paged",
        pages=needed_pages + chance.choice([0, 1, needed_pages, 6 * needed_pages]),
        page_size=page_size,
        max_batch_tokens=chance.choice([16, 40, 512]),
        max_sequences=chance.choice([4, 6, 8]),
        prefill_chunk_tokens=chance.choice([8, 24, 512]),
        stores=chance.random() < 0.4,
    )


def run_schedule(seed: int, demo: Demo) -> Engine:
    """Submit, cancel and preempt at random, and compare every answer; return the engine."""
    chance = random.Random(seed)
    threads = chance.choice([1, 2])
    engine = draw_engine(chance, demo, threads)
    arrivals = sorted((chance.randrange(10), chance.randrange(len(demo.requests))) for _ in range(chance.randint(3, 6)))
    numbers: dict[int, int] = {}
    events: list[TokenEvent] = []
    for step in range(2000):
        while arrivals and arrivals[0][0] <= step:
            number = arrivals.pop(0)[1]
            request = demo.requests[number]
            priority, constraint = chance.choice([0, 0, 2]), demo.constrain(request, threads)
            request_id = engine.submit(
                EngineRequest(request.prompt, request.params, priority=priority, constraint=constraint)
            )
            numbers[request_id] = number
        if numbers and chance.random() < 0.05:
            events += engine.cancel(chance.choice(list(numbers)))
        running = engine._scheduler.running
        if running and chance.random() < 0.1:
            engine._scheduler.preempt(chance.choice(running))
        events += engine.step()
        engine.check()
        if not arrivals and not engine.has_work:
            break
    assert engine.stats().used_pages == 0
    for request_id, number in numbers.items():
        compare(sort_events(event for event in events if event.sequence_id == request_id), demo.answer_alone(number))
    engine.close()
    return engine


def compare(answers: Answers, alone: Answers) -> None:
    assert answers.keys() == alone.keys()
    for index, events in answers.items():
        expected = [without_load(event) for event in alone[index]]
        if events[-1].finish_reason is FinishReason.CANCELLED:
            assert events.pop().token_id is None
            expected = expected[: len(events)]
        assert [without_load(event) for event in events] == expected


@pytest.mark.parametrize("seed", range(TOGETHER, choose_amount(SCHEDULES)))
def test_schedule_changes_no_bit(seed: int, demo: Demo) -> None:
    run_schedule(seed, demo)


@pytest.mark.slow
def test_the_schedules_are_not_harmless(demo: Demo) -> None:
    """The first schedules, which change no bit, preempt, compute again, share, read from disk and evict."""
    stats = [run_schedule(seed, demo).stats() for seed in range(TOGETHER)]
    assert sum(one.preemptions for one in stats) > 10
    assert sum(one.recomputed_tokens for one in stats) > 10
    assert sum(one.cache.memory_hit_tokens for one in stats) > 100
    assert sum(one.cache.disk_hit_tokens for one in stats) > 100
    assert sum(sum(one.cache.evictions.values()) for one in stats) > 10


def test_the_requests_are_not_all_alike(demo: Demo) -> None:
    texts = {
        tuple(event.token_id for event in answer)
        for number in range(len(demo.requests))
        for answer in demo.answer_alone(number).values()
    }
    assert len(texts) > 60
