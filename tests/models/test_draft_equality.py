"""Text with drafts equals text without, byte for byte, whatever drafts, whatever is asked and whatever else runs.

Random requests go to tiny models with all parts that users run: files, tokenizer, chat template, grammars, stop
strings, adapters. They come at random to an engine with a small cache that drafts as much as there is room for; they
lose their pages, are cancelled and asked again. Each answer must equal the one that is given alone, without drafts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import amounts
import pytest
from amounts import choose_amount
from following_models import make_draft, make_eagle_head, make_target
from oracle import draft_eagerly
from safetensors.numpy import load_file
from stepped_session import SteppedSession, SteppedStream
from test_adapters import write_peft
from test_draft_head_text import poison_free_pages

from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.core.types import DraftOptions, Event, Grammar, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.speculative.drafters import Lookup, PredictedLookup
from mlxr.loading import LoadedModel
from mlxr.service.adapters import Adapters
from mlxr.service.opening import build_engine, open_model
from mlxr.service.requests import ChatRequest, TextRequest
from mlxr.service.streams import Completion, fold_events

TARGETS = ("qwen35", "glm4moe")  # with recurrent layers, and without
DRAFTERS = ("ngram", "draft model", "mtp", "eagle")
REQUESTS = 300 // len(TARGETS)  # to each of them, for each source of drafts
MOST_TOKENS = 24  # of one answer
EACH = 25  # requests to one engine
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps for a while in the warm sun of the garden "
PROPERTIES = '{"fox": {"type": "string", "maxLength": 9}, "dogs": {"type": "integer", "maximum": 99}}'
SCHEMA = f'{{"type": "object", "properties": {PROPERTIES}, "required": ["dogs"], "additionalProperties": false}}'
GRAMMARS = (Grammar("json_schema", SCHEMA), Grammar("json_object"), Grammar("regex", "(fox|dog)( and (fox|dog)){2,9}"))
ADAPTERS = ("one", "two")
UPDATED = ("model.layers.0.mlp.", "model.layers.1.self_attn.")  # the weights that adapters update
Request = TextRequest | ChatRequest
Answer = list[tuple[Any, ...]]  # for each of its choices, all that must be equal


@dataclass(frozen=True)
class Made:
    """A model that answers, its adapters, and a name for each source of drafts."""

    path: Path
    drafts: dict[str, str]
    requests: list[Request]
    predictions: list[list[int]]  # of the requests; empty for none
    expected: list[Answer]

    @property
    def longest(self) -> int:
        """Tokens that the longest prompt and its answer may have."""
        return max(prompt for answer in self.expected for *_, prompt in answer) + MOST_TOKENS

    def open(self, drafter: str) -> tuple[LoadedModel, Adapters]:
        """Open the model with a source of drafts."""
        loaded = open_model(self.path, make_settings(self.drafts[drafter]), needs_draft=True)
        return loaded, load_adapters(loaded, self.path)


def make_settings(draft: str, **settings: Any) -> Settings:
    return Settings(device="cpu", threads=2, kv_type="f32", draft=draft, **{"arena_bytes": 2**23, **settings})


def load_adapters(loaded: LoadedModel, path: Path) -> Adapters:
    adapters = Adapters(loaded.load_adapter, 2**24)
    for name in ADAPTERS:
        adapters.load(path / name, name)
    return adapters


def draw_params(chance: random.Random, tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=tokens,
        temperature=chance.choice([0.0, 0.0, 0.5, 1.0]),
        top_k=chance.choice([0, 0, 20]),
        top_p=chance.choice([1.0, 1.0, 0.9]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.3]),
        presence_penalty=chance.choice([0.0, 0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
        logit_bias={chance.randrange(4, 300): chance.uniform(-5, 5)} if chance.random() < 0.3 else {},
        stop=chance.choice([(), (), ("e",), (" the", "\n", "qu")]),
        seed=chance.getrandbits(60),
        logprobs=chance.choice([None, 0, 2]),
        n=chance.choice([1, 1, 1, 3]),
    )


def draw_request(chance: random.Random) -> Request:
    """A conversation or a text, often one that begins or repeats itself as others do."""
    grammar = chance.choice([None, None, *GRAMMARS])
    params = draw_params(chance, chance.choice([1, 5, 12, 20]) if grammar is None else chance.choice([12, MOST_TOKENS]))
    adapter, most = chance.choice([None, None, *ADAPTERS]), chance.choice([None, None, None, 2])
    start = chance.choice([0, 0, 16, chance.randrange(40)])
    text = TEXT[start : start + chance.choice([5, 40, 70])] * chance.choice([1, 1, 2])
    if chance.random() < 0.5:
        return TextRequest(text, params, grammar=grammar, adapter=adapter, drafts=DraftOptions(most))
    talk = [{"role": "user", "content": text}]
    return ChatRequest(talk, params, grammar=grammar, adapter=adapter, drafts=DraftOptions(most))


def predict(chance: random.Random, answer: Answer) -> list[int]:
    """Return the right answer, with changes in some places, for half of the requests."""
    if chance.random() < 0.5:
        return []
    expected = [token_id for token_id in answer[0][1] if chance.random() < 0.9]
    expected.insert(chance.randrange(len(expected) + 1), chance.randrange(300))
    return expected


def describe(completion: Completion) -> Answer:
    """Return all that must be equal: everything but the source of tokens and the times."""
    return [
        (one.text, one.token_ids, one.finish_reason, one.tokens, one.stop, one.error, one.usage.prompt_tokens)
        for one in completion.choices
    ]


def answer_alone(path: Path, requests: list[Request]) -> list[Answer]:
    """Answer one after the other, without drafts, on one thread, with a cache that keeps nothing."""
    settings = make_settings("off", kv_cache="simple")
    with open_model(path, settings) as loaded:
        session = SteppedSession(loaded, build_engine(loaded, settings), load_adapters(loaded, path))
        with closing(session):
            return [describe(fold_events(session.start(request))) for request in requests]


@pytest.fixture(scope="module", params=TARGETS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, case = tmp_path_factory.mktemp("models"), str(request.param)
    path, chance = make_target(folder / case, case), random.Random(case)
    drafts = {"ngram": "ngram", "mtp": "mtp", "draft model": str(make_draft(folder / "draft"))}
    drafts["eagle"] = str(make_eagle_head(folder / "eagle", path))
    weights = load_file(path / "model.safetensors")
    for number, name in enumerate(ADAPTERS, 1):
        own = {key: values for key, values in weights.items() if key.startswith(UPDATED)}
        write_peft(path / name, own, number)
    requests = [draw_request(chance) for _ in range(choose_amount(REQUESTS))]
    expected = answer_alone(path, requests)
    return Made(path, drafts, requests, [predict(chance, answer) for answer in expected], expected)


class Schedule:
    """Requests that come to one session at random; `counts` counts what happened to them."""

    def __init__(
        self, chance: random.Random, made: Made, numbers: list[int], engine: Engine, session: SteppedSession
    ) -> None:
        self._chance, self._made, self._engine, self._session = chance, made, engine, session
        self._waiting, self._given_up = list(numbers), set[int]()
        # The stream of every second request is closed after so many events, and the request is asked again.
        self._closes_after = {number: chance.randint(2, 12) for number in numbers[::2]}
        self._open: dict[int, tuple[SteppedStream, list[Event]]] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Run until all are answered."""
        chance, scheduler = self._chance, self._engine._scheduler
        while self._waiting or self._open:
            if self._waiting and (not self._open or (len(self._open) < 8 and chance.random() < 0.3)):
                number = self._waiting.pop(0)
                self._open[number] = (
                    self._session.start(self._made.requests[number], self._made.predictions[number]),
                    [],
                )
            self._go_on(chance.choice(list(self._open)))
            if scheduler.running and chance.random() < 0.02:
                scheduler.preempt(chance.choice(scheduler.running))
                self.counts["preemptions by chance"] += 1
            if chance.random() < 0.1:
                self._engine.check()
                poison_free_pages(self._engine.cache)
        stats = self._engine.stats()
        assert stats.used_pages == 0
        self.counts["preemptions"] += stats.preemptions
        self.counts["accepted"] += stats.accepted_tokens
        self.counts["rejected"] += stats.drafted_tokens - stats.accepted_tokens

    def _go_on(self, number: int) -> None:
        stream, events = self._open[number]
        if len(events) == self._closes_after.get(number):
            stream.close()
            del self._open[number], self._closes_after[number]
            self._waiting.insert(0, number)  # asked soon, so that some of its pages are still there
            self._given_up.add(number)
            return
        event = next(stream, None)
        if event is not None:
            events.append(event)
            return
        del self._open[number]
        completion = fold_events(events)
        assert describe(completion) == self._made.expected[number]
        self.counts.update(choice.finish_reason.name for choice in completion.choices)
        if number in self._given_up:
            self.counts["found again"] += completion.usage.cached_tokens > 0


def open_small(loaded: LoadedModel, settings: Settings, tokens: int) -> Engine:
    """Open an engine whose cache is hardly larger than one answer of so many tokens needs, its prompt included."""
    for arena_bytes in range(50_000, 2**24, 50_000):
        with suppress(SettingError):  # not even one page
            engine = build_engine(loaded, replace(settings, arena_bytes=arena_bytes))
            if engine.room_tokens >= min(tokens, engine.context_tokens):
                return engine
            engine.close()
    raise AssertionError("no cache is large enough")


def open_sessions(chance: random.Random, made: Made, drafter: str) -> Iterator[tuple[Engine, SteppedSession]]:
    """Open engines of one model, one after the other; each has a small cache of another form."""
    loaded, adapters = made.open(drafter)
    with loaded:
        while True:
            settings = make_settings(
                made.drafts[drafter],
                page_size=chance.choice([4, 16]),
                max_sequences=12,
                prefill_chunk_tokens=chance.choice([7, 64]),
            )
            engine = open_small(loaded, settings, made.longest + chance.choice([0, 0, 40]))
            draft_eagerly(engine, chance.choice([1, 3, 6, 15]))
            with closing(SteppedSession(loaded, engine, adapters)) as session:
                yield engine, session


@pytest.mark.sampled(4)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_with_drafts_is_text_without(made: Made, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that could make it differ must have happened. Models and heads guess alone, or beside the text itself."""
    chance, counts = random.Random(drafter), Counter[str]()
    numbers = list(range(len(made.requests)))
    chance.shuffle(numbers)
    sessions = open_sessions(chance, made, drafter)
    for place, start in enumerate(range(0, len(numbers), EACH)):
        engine, session = next(sessions)
        schedule = Schedule(chance, made, numbers[start : start + EACH], engine, session)
        with monkeypatch.context() as patch:
            if drafter != "ngram" and place % 2 == 0:
                for source in (Lookup, PredictedLookup):
                    patch.setattr(source, "propose", lambda *_: [])
            schedule.run()
        counts += schedule.counts
        if place % 2 == 0:
            counts["accepted of its own"] += schedule.counts["accepted"]
        assert engine._planner is not None
        assert (engine._planner.model is None) == (drafter == "ngram"), "what drafts failed"
    sessions.close()
    happened = ("accepted of its own", "rejected", "preemptions", "found again", "STOP", "LENGTH")
    assert min(counts[name] for name in happened) > 0, counts
    if amounts.is_exhaustive:
        assert counts["preemptions"] > counts["preemptions by chance"], "the cache was never too small"
