"""One request gets the right tokens, the right end, the right counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_model import VOCABULARY, answer_of, expect_greedy, fake_logits, finish_of, generate, make_engine, run_all

from mlxr.core.types import FinishReason, SamplingParams, Usage
from mlxr.engine.request import EngineRequest
from mlxr.engine.sampler import Sampler, TokenHistory, draw_uniform

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
GREEDY = SamplingParams(max_tokens=20)
RANDOM = SamplingParams(max_tokens=20, temperature=1.0, seed=7)


def test_greedy_tokens_and_counts() -> None:
    engine = make_engine()
    sequence_id = engine.submit(EngineRequest(PROMPT, GREEDY))
    events = run_all(engine)
    assert answer_of(events, sequence_id) == expect_greedy(PROMPT, 20)
    assert [event.usage for event in events] == [Usage(len(PROMPT), count) for count in range(1, 21)]
    assert finish_of(events, sequence_id) is FinishReason.LENGTH
    assert {(event.logprob, event.top) for event in events} == {(None, ())}
    assert not engine.step()


def test_end_token_ends_the_answer() -> None:
    tokens = expect_greedy(PROMPT, 20)
    end = next(index for index in range(5, 20) if tokens[index] not in tokens[:index])
    engine = make_engine(eos_ids=[tokens[end]])
    sequence_id = engine.submit(EngineRequest(PROMPT, GREEDY))
    events = run_all(engine)
    assert answer_of(events, sequence_id) == tokens[: end + 1]
    assert finish_of(events, sequence_id) is FinishReason.STOP
    assert generate(PROMPT, replace(GREEDY, ignore_eos=True), make_engine(eos_ids=[tokens[end]])) == tokens


def test_stop_token_ends_the_answer_even_without_eos() -> None:
    tokens = expect_greedy(PROMPT, 20)
    params = replace(GREEDY, stop_token_ids=frozenset({tokens[3]}), ignore_eos=True)
    engine = make_engine(eos_ids=[tokens[0]])
    sequence_id = engine.submit(EngineRequest(PROMPT, params))
    events = run_all(engine)
    assert answer_of(events, sequence_id) == tokens[: tokens.index(tokens[3]) + 1]
    assert finish_of(events, sequence_id) is FinishReason.STOP


def test_stop_token_in_the_prompt_does_not_end_anything() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=frozenset(range(VOCABULARY)) - set(expect_greedy(PROMPT, 3)))
    assert generate(PROMPT, params) == expect_greedy(PROMPT, 3)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_context_ends_the_answer(max_tokens: int | None) -> None:
    engine = make_engine(context_tokens=32)
    sequence_id = engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=max_tokens)))
    events = run_all(engine)
    assert answer_of(events, sequence_id) == expect_greedy(PROMPT, 32 - len(PROMPT))
    assert finish_of(events, sequence_id) is FinishReason.LENGTH


def test_without_max_tokens_the_arena_ends_the_answer() -> None:
    # 5 pages of 4 positions; the last token of the answer needs none.
    assert generate(PROMPT, SamplingParams(max_tokens=None), make_engine(pages=5)) == expect_greedy(
        PROMPT, 21 - len(PROMPT)
    )


def test_last_page_is_used_to_the_end() -> None:
    engine = make_engine(pages=3)
    assert generate(PROMPT, SamplingParams(max_tokens=2), engine) == expect_greedy(PROMPT, 2)
    assert engine.stats().peak_pages == 3


def test_logprobs() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=5, logprobs=3)))
    history = list(PROMPT)
    for event in run_all(engine):
        logits = fake_logits(history).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs)[:3]
        assert [top.token_id for top in event.top] == best.tolist()
        assert [top.logprob for top in event.top] == pytest.approx(logprobs[best].tolist())
        assert event.token_id is not None
        assert event.logprob == pytest.approx(logprobs[event.token_id])
        history.append(event.token_id)
    assert len(history) == len(PROMPT) + 5


def test_logprobs_without_alternatives() -> None:
    engine = make_engine()
    engine.submit(EngineRequest(PROMPT, SamplingParams(max_tokens=2, logprobs=0)))
    events = run_all(engine)
    assert all(event.logprob is not None and event.top == () for event in events)


def test_seed_decides_the_answer() -> None:
    answers = {seed: generate(PROMPT, replace(RANDOM, seed=seed)) for seed in range(5)}
    assert answers == {seed: generate(PROMPT, replace(RANDOM, seed=seed)) for seed in range(5)}
    assert len({tuple(answer) for answer in answers.values()}) == 5
    assert all(answer != expect_greedy(PROMPT, 20) for answer in answers.values())


def test_seed_is_drawn_when_not_given() -> None:
    assert len({Sampler(SamplingParams(), PROMPT).seed for _ in range(10)}) == 10
    assert len({tuple(generate(PROMPT, replace(RANDOM, seed=None))) for _ in range(4)}) == 4


def philox_first_word(key: int, counter: int) -> int:
    """First output word of Philox-4x64-10, from the paper; NumPy counts up before it computes a block."""
    words, keys, mask = [counter + 1, 0, 0, 0], [key, 0], 2**64 - 1
    for _ in range(10):
        high_0, low_0 = divmod(words[0] * 0xD2E7470EE14C6C93, 2**64)
        high_1, low_1 = divmod(words[2] * 0xCA5A826395121157, 2**64)
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
def test_uniform_stream_is_fixed(seed: int) -> None:
    # A change here would change every seeded answer ever given.
    expected = [(philox_first_word(seed, index) >> 11) / 2**53 for index in range(20)]
    assert [draw_uniform(seed, index) for index in range(20)] == expected


def test_uniform_stream_is_even() -> None:
    numbers = np.array([draw_uniform(2**64 - 1, index) for index in range(4000)])
    assert 0 <= numbers.min() < numbers.max() < 1
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(400, abs=100)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.06


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_narrow_sampling_is_greedy(narrow: dict[str, float]) -> None:
    assert generate(PROMPT, replace(RANDOM, **narrow)) == expect_greedy(PROMPT, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}])
def test_sampling_rules_reach_the_operator(rule: dict[str, float]) -> None:
    history = list(PROMPT)
    for token_id in generate(PROMPT, replace(RANDOM, **rule)):  # type: ignore[arg-type]
        weights = np.sort(np.exp(fake_logits(history).astype(np.float64)))[::-1]
        kept = {
            "top_k": 3,
            "top_p": int(np.argmax(np.cumsum(weights) >= 0.6 * weights.sum())) + 1,
            "min_p": int((weights >= 0.4 * weights[0]).sum()),
        }[next(iter(rule))]
        assert token_id in np.argsort(-fake_logits(history))[:kept]
        history.append(token_id)


def test_temperature_flattens() -> None:
    answers = [generate(PROMPT, replace(RANDOM, temperature=temperature)) for temperature in (0.01, 100.0)]
    assert answers[0] == expect_greedy(PROMPT, 20)
    assert answers[1] != answers[0]


def test_logit_bias_forces_and_forbids() -> None:
    assert generate(PROMPT, SamplingParams(max_tokens=4, logit_bias={11: 100.0})) == [11] * 4
    best = expect_greedy(PROMPT, 1)[0]
    second = int(np.argsort(-fake_logits(PROMPT))[1])
    assert generate(PROMPT, SamplingParams(max_tokens=1, logit_bias={best: -100.0})) == [second]


def penalise(history: list[int], answer: list[int], params: SamplingParams) -> int:
    """The greedy choice, from the definition of the penalties."""
    logits = fake_logits(history + answer).astype(np.float64)
    for token_id in set(history + answer):
        value = logits[token_id]
        logits[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id in set(answer):
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(token_id)
    return int(np.argmax(logits))


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}]
)
def test_penalties(penalty: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=60, **penalty)  # type: ignore[arg-type]
    prompt = list(range(0, VOCABULARY, 3))
    answer = generate(prompt, params)
    assert answer != expect_greedy(prompt, 60)
    assert answer == [penalise(prompt, answer[:index], params) for index in range(60)]


@pytest.mark.parametrize("window", [None, 1, 2, 7, 64, 1000])
def test_history_keeps_distinct_tokens_and_counts(window: int | None) -> None:
    prompt, generator = [9] * 70 + [7, 7, 3], np.random.default_rng(0)
    history = TokenHistory(prompt, window)
    tokens = [(token_id, 0) for token_id in prompt]
    for token_id in generator.integers(0, 100 if window is None or window > 9 else 3, 500).tolist():
        history.add(token_id)
        tokens.append((token_id, 1))
        recent = tokens if window is None else tokens[-window:]
        counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
        assert len(counts) == len(history.ids)
        assert counts == {seen: sum(count for other, count in recent if other == seen) for seen, _ in recent}
    assert history.ids.flags.c_contiguous
    assert history.counts.flags.c_contiguous


def test_repeat_last_n_bounds_what_the_penalties_see() -> None:
    prompt, rules = list(range(0, VOCABULARY, 3)), {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    whole, window, none = (
        generate(prompt, SamplingParams(max_tokens=40, repeat_last_n=last, **rules))  # type: ignore[arg-type]
        for last in (-1, 8, 0)
    )
    assert none == expect_greedy(prompt, 40)
    assert whole == generate(prompt, SamplingParams(max_tokens=40, repeat_last_n=10**6, **rules))  # type: ignore[arg-type]
    assert len({tuple(whole), tuple(window), tuple(none)}) == 3
