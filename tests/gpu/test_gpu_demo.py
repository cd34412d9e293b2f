"""The demo model served on every device: whatever the engine does with its requests, the answers stay the CPU's.

Greedy answers must be the CPU's token for token, probabilities within a tolerance. A few answers and schedules where
kernels are emulated, all of them on a GPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import amounts
import engines
import pytest
from gpu_cases import skip_unless_emulated

from mlxr import LLM, SamplingParams
from mlxr.cache.store import allocate_payload
from mlxr.cli.main import main
from mlxr.cluster.page_exchange import Exchange
from mlxr.core.settings import Settings
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.kernels.gpu.mlx import find_gpu
from mlxr.loading import LoadedModel, load
from mlxr.service.chat import Chat
from mlxr.service.measures import score_text
from mlxr.service.opening import build_engine, open_model
from mlxr.service.requests import ChatRequest
from mlxr.service.streams import fold_events

REAL = Path(__file__).parents[1] / "real"
FUNCTIONS = [row["name"] for row in json.loads((REAL / "questions.json").read_text())["functions"]]
QUESTIONS = [f"What does {name} do?" for name in FUNCTIONS]
PAGE_SIZE = 8
MAX_PERPLEXITY_DIFFERENCE = 0.002
MAX_LOGPROB_DIFFERENCE = 0.1  # the CPU rounds activations to 8 bits, a GPU to 16


@dataclass(frozen=True)
class Amount:
    """Amounts that a device can do in a test's time."""

    answers: int  # whole ones, through chat
    requests: int  # of the tests below
    tokens: int  # of each of their answers
    schedules: int
    scored_tokens: int


AMOUNTS = {
    "mlx-cpu": Amount(6, 5, 12, 4, 400) if amounts.is_exhaustive else Amount(3, 3, 8, 2, 200),
    "emulated": Amount(1, 3 if amounts.is_exhaustive else 2, 6, 1, 0),
}
ON_GPU = Amount(len(QUESTIONS), 16, 40, 20, 6000)
GPU = find_gpu()
DEVICES = ["emulated", *(["mlx-cpu"] if amounts.is_thorough else []), *([] if GPU is None else [GPU])]
Answers = dict[int, list[int]]  # by request


@dataclass(frozen=True)
class Demo:
    """The demo model on a device, and the requests to it."""

    loaded: LoadedModel
    amount: Amount

    @property
    def prompts(self) -> list[list[int]]:
        return [encode(question) for question in QUESTIONS[: self.amount.requests]]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.amount.tokens)

    def expect(self, prompts: Sequence[Sequence[int]]) -> Answers:
        """The CPU's answers, which do not depend on the batch."""
        return {number: list(answer_on_cpu(tuple(prompt), self.amount.tokens)) for number, prompt in enumerate(prompts)}

    def open_engine(self, **settings: object) -> Engine:
        options = {"pages": 256, "max_sequences": 8, "page_size": PAGE_SIZE, "context_tokens": 96} | settings
        return open_engine(self.loaded, **options)


def open_engine(loaded: LoadedModel, **settings: object) -> Engine:
    eos_ids, fingerprint = loaded.tokenizer.eos_ids, loaded.fingerprint
    return engines.open_engine(loaded.model, loaded.ctx, eos_ids=eos_ids, fingerprint=fingerprint, **settings)


@cache
def load_demo(device: str) -> LoadedModel:
    return load("demo", device=device)


@cache
def encode(question: str) -> list[int]:
    loaded = load_demo("cpu")
    assert loaded.chat_template is not None
    request = ChatRequest([{"role": "user", "content": question}], SamplingParams())
    return Chat(loaded.tokenizer, loaded.chat_template).encode(request).token_ids


@cache
def answer_on_cpu(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    with closing(open_engine(load_demo("cpu"), pages=8, max_sequences=1)) as engine:
        engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=tokens)))
        return tuple(event.token_id for event in finish(engine) if event.token_id is not None)


def finish(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert engine.stats().used_pages == 0
    return events


def collect(events: Sequence[TokenEvent], ids: Sequence[int]) -> Answers:
    """Tokens of the answers to requests `ids`, by their place in that list."""
    answers: Answers = {number: [] for number in range(len(ids))}
    for event in events:
        if event.token_id is not None and event.sequence_id in ids:
            answers[ids.index(event.sequence_id)].append(event.token_id)
    return answers


@pytest.fixture(params=DEVICES)
def demo(request: pytest.FixtureRequest) -> Demo:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    if request.param == "emulated":
        skip_unless_emulated()
    return Demo(load_demo(request.param), AMOUNTS.get(request.param, ON_GPU))


def ask(device: str, questions: Sequence[str]) -> tuple[list[str], set[str]]:
    """Return greedy answers, and the names of the implementations that made them."""
    with LLM("demo", device=device) as llm:
        params = SamplingParams(max_tokens=200)
        streams = [llm.stream_chat([{"role": "user", "content": question}], params) for question in questions]
        answers = [fold_events(stream).text for stream in streams]
        return answers, {row.implementation for row in llm.stats().dispatches}


def test_questions_are_answered_as_on_the_cpu(demo: Demo) -> None:
    questions = QUESTIONS[: demo.amount.answers]
    answers, implementations = ask(demo.loaded.ctx.device, questions)
    assert answers == ask("cpu", questions)[0]
    own = (
        {"mlx", "host"} if demo.loaded.ctx.device == "mlx-cpu" else {"gpu"}
    )  # products and attention of prompts are MLX's
    assert own <= implementations <= own | {"mlx"}


def test_perplexity_is_that_of_the_cpu(demo: Demo) -> None:
    if not demo.amount.scored_tokens:
        pytest.skip("a text takes minutes where kernels are emulated")

    def score(device: str) -> float:
        settings = Settings(device=device, max_sequences=1)
        with open_model("demo", settings) as loaded, closing(build_engine(loaded, settings)) as engine:
            ids = loaded.tokenizer.encode((REAL / "held_out.txt").read_text())[: demo.amount.scored_tokens]
            return score_text(engine, loaded.tokenizer, loaded.tokenizer.decode(ids), 512).perplexity

    assert score(demo.loaded.ctx.device) == pytest.approx(score("cpu"), rel=MAX_PERPLEXITY_DIFFERENCE)


def test_validation_finds_gpu_kernels_only(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    if demo.loaded.ctx.device == "emulated":
        pytest.skip("its prompts take long where kernels are emulated; the questions show what ran")
    assert main(["validate", "demo", "--device", demo.loaded.ctx.device, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    device = demo.loaded.ctx.device
    assert {row["implementation"] for row in report["dispatches"]} <= {"mlx", "host" if device == "mlx-cpu" else "gpu"}
    assert report["logits"]["agree"]
    assert report["sharing"]["answers_agree"]
    assert report["cache"]["gqa_saved_bytes"] > 0


@pytest.mark.smoke
@pytest.mark.slow
def test_decoding_copies_no_keys_and_values(demo: Demo) -> None:
    if demo.loaded.ctx.gpu.launcher is None:
        pytest.skip("MLX's own attention wants its keys in one place")
    engine = demo.open_engine()
    engine.submit(EngineRequest(demo.prompts[0], demo.params))
    engine.step()
    copied = demo.loaded.ctx.ledger.snapshot().copied_bytes
    finish(engine)
    assert demo.loaded.ctx.ledger.snapshot().copied_bytes == copied


def test_requests_come_and_go_in_one_batch(demo: Demo) -> None:
    """Prompts in chunks, a new one with every other step, and some that are cancelled."""
    engine = demo.open_engine(max_batch_tokens=24, prefill_chunk_tokens=10)
    ids, events = [], []
    for number, prompt in enumerate(demo.prompts):
        ids.append(engine.submit(EngineRequest(prompt, demo.params)))
        other = engine.submit(EngineRequest(prompt[:7], demo.params))
        events += engine.step() + engine.step()
        if number % 3 != 1:
            engine.cancel(other)
        engine.check()
    answers = collect(events + finish(engine), ids)
    assert answers == demo.expect(demo.prompts)
    assert engine.stats().steps < sum(len(tokens) for tokens in answers.values())


def test_prompts_that_begin_alike_share_pages(demo: Demo) -> None:
    engine, begun = demo.open_engine(context_tokens=160), demo.prompts[0] + demo.prompts[1]
    engine.submit(EngineRequest(begun, demo.params))
    finish(engine)
    alike = [begun + prompt for prompt in demo.prompts]
    ids = [engine.submit(EngineRequest(prompt, demo.params)) for prompt in alike]
    events = finish(engine)
    assert min(event.usage.cached_tokens for event in events) >= len(begun) // PAGE_SIZE * PAGE_SIZE
    assert collect(events, ids) == demo.expect(alike)


def test_answers_to_one_prompt_part_from_shared_pages(demo: Demo) -> None:
    engine = demo.open_engine()
    engine.submit(EngineRequest(demo.prompts[0], SamplingParams(max_tokens=demo.amount.tokens, n=3)))
    shared = 0
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
        shared = max(shared, engine.stats().shared_pages)
    (expected,) = demo.expect(demo.prompts[:1]).values()
    assert [[event.token_id for event in events if event.index == index] for index in range(3)] == [expected] * 3
    assert shared >= len(demo.prompts[0]) // PAGE_SIZE


def test_answers_that_lost_their_pages_go_on_as_they_were(demo: Demo) -> None:
    needed_pages = -(-(max(map(len, demo.prompts)) + demo.amount.tokens) // PAGE_SIZE)
    engine = demo.open_engine(pages=needed_pages + 1, context_tokens=needed_pages * PAGE_SIZE, prefix_sharing=False)
    ids = [engine.submit(EngineRequest(prompt, demo.params)) for prompt in demo.prompts]
    events = []
    while engine.has_work:
        events += engine.step()
        if len(engine._scheduler.running) > 1 or not engine.stats().preemptions:
            engine._scheduler.preempt(engine._scheduler.running[-1])
        engine.check()
    assert collect(events, ids) == demo.expect(demo.prompts)
    assert engine.stats().preemptions > 0
    assert engine.stats().recomputed_tokens > 0


def test_pages_come_back_from_disk(demo: Demo, tmp_path: Path) -> None:
    for starts in range(2):
        engine = demo.open_engine(store_folder=tmp_path, store_bytes=2**24)
        ids = [engine.submit(EngineRequest(prompt, demo.params)) for prompt in demo.prompts]
        answers = collect(finish(engine), ids)
        engine.close()
        assert answers == demo.expect(demo.prompts)
        assert (engine.stats().cache.disk_hit_tokens > 0) == bool(starts)


def test_pages_come_from_another_engine(demo: Demo) -> None:
    giver, taker = (demo.open_engine() for _ in range(2))
    there, here = (Exchange(engine.cache, 2**24) for engine in (giver, taker))
    prompts = demo.prompts[: max(1, demo.amount.requests // 3)]
    for prompt in prompts:
        giver.submit(EngineRequest(prompt, SamplingParams(max_tokens=1)))
    finish(giver)
    for prompt in prompts:
        names = taker.start_keys().cover(prompt, len(prompt) // PAGE_SIZE)
        loan, delivery = there.lend(names, here.seek(names), 2**24), here.inbox.open(2**20)
        for lent in loan.pages:
            payload = allocate_payload(there.page_bytes[lent.name[0]])
            assert there.export(lent, payload)
            assert delivery.put(lent.name, payload)
        delivery.settle()
        there.give_back(loan)
    ids = [taker.submit(EngineRequest(prompt, demo.params)) for prompt in prompts]
    assert collect(finish(taker), ids) == demo.expect(prompts)
    assert taker.stats().cache.peer_hit_tokens > 0


def test_probabilities_are_those_of_the_cpu(demo: Demo) -> None:
    params = SamplingParams(max_tokens=demo.amount.tokens, logprobs=2)
    found = {}
    for loaded in (demo.loaded, load_demo("cpu")):
        engine = open_engine(loaded, pages=64, max_sequences=8)
        for prompt in demo.prompts:
            engine.submit(EngineRequest(prompt, params))
        events = finish(engine)
        found[loaded.ctx.device] = {(event.sequence_id, event.usage.completion_tokens): event for event in events}
    ours, expected = found[demo.loaded.ctx.device], found["cpu"]
    assert ours.keys() == expected.keys()
    for place, event in ours.items():
        assert event.token_id == expected[place].token_id
        assert event.logprob == pytest.approx(expected[place].logprob, abs=MAX_LOGPROB_DIFFERENCE)


def test_rows_that_the_host_draws_stand_beside_others(demo: Demo) -> None:
    """The host applies penalties and biases, also while the device draws for other rows and runs ahead."""
    rules = [
        {},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {},
        {"logit_bias": {40: 4.0}},
    ]
    found = {}
    for loaded in (demo.loaded, load_demo("cpu")):
        engine = open_engine(loaded, pages=256, max_sequences=8)
        ids = []
        for number in range(max(3, demo.amount.requests)):
            params = replace(demo.params, **rules[number % len(rules)])  # type: ignore[arg-type]
            ids.append(engine.submit(EngineRequest(demo.prompts[number % demo.amount.requests], params)))
        found[loaded.ctx.device] = collect(finish(engine), ids)
    assert found[demo.loaded.ctx.device] == found["cpu"]


def schedule(demo: Demo, seed: int, folder: Path) -> Engine:
    """Submit and cancel requests and take away pages at random, and compare every answer; return the engine."""
    chance = random.Random(seed)
    needed_pages = -(-(max(map(len, demo.prompts)) + demo.amount.tokens) // PAGE_SIZE)
    engine = demo.open_engine(
        pages=needed_pages * chance.choice([1, 2, 8]),
        context_tokens=needed_pages * PAGE_SIZE,
        max_batch_tokens=chance.choice([16, 40, 512]),
        prefill_chunk_tokens=chance.choice([8, 24]),
        max_sequences=chance.choice([4, 8]),
        **({"store_folder": folder, "store_bytes": 2**24} if chance.random() < 0.5 else {}),
    )
    prompts = [chance.choice(demo.prompts) for _ in range(demo.amount.requests)]
    ids: list[int] = []
    events: list[TokenEvent] = []
    cancelled = set()
    while len(ids) < len(prompts) or engine.has_work:
        if len(ids) < len(prompts) and chance.random() < 0.4:
            ids.append(engine.submit(EngineRequest(prompts[len(ids)], demo.params, priority=chance.choice([0, 0, 2]))))
        if ids and chance.random() < 0.03:
            cancelled.add(len(ids) - 1)
            engine.cancel(ids[-1])
        if engine._scheduler.running and chance.random() < 0.1:
            engine._scheduler.preempt(chance.choice(engine._scheduler.running))
        events += engine.step()
        engine.check()
    assert engine.stats().used_pages == 0
    engine.close()
    answers, expected = collect(events, ids), demo.expect(prompts)
    for number in cancelled:
        expected[number] = expected[number][: len(answers[number])]
    assert answers == expected
    return engine


def test_load_never_changes_an_answer(demo: Demo, tmp_path: Path) -> None:
    stats = [schedule(demo, seed, tmp_path).stats() for seed in range(demo.amount.schedules)]
    if len(stats) > 2:  # the schedules are not harmless
        assert sum(one.preemptions for one in stats) > 0
        assert sum(one.recomputed_tokens for one in stats) > 0
        assert sum(one.cache.memory_hit_tokens for one in stats) > 0
        assert sum(one.cache.disk_hit_tokens for one in stats) > 0


@pytest.fixture(scope="module", autouse=True)
def _close_models() -> Iterator[None]:
    yield
    load_demo.cache_clear()
