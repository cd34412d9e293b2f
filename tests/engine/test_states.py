"""Models with recurrent layers: where states are kept and found again; no schedule or failure changes a state."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from amounts import choose_amount
from fake_model import (
    FULL,
    STATE,
    FakeConfig,
    FakeModel,
    answer_of,
    expect_greedy,
    finish_of,
    make_engine,
    run_all,
)
from live_look import Look

from mlxr.cache.shapes import CacheShape, LayerCache
from mlxr.core.types import FinishReason, SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import MAX_ASKED, Boundaries, Snapshot
from mlxr.kernels.ragged import RaggedBatch
from mlxr.models.footprint import AttentionWork, StepWork

HYBRID: tuple[LayerCache, ...] = (STATE, FULL, STATE)
KINDS: dict[str, tuple[LayerCache, ...]] = {
    "hybrid": HYBRID,
    "alone": (STATE,),
    "window": (CacheShape(2, 4, window=6), STATE, FULL),
}
PAGE = 4
WORK = StepWork(weight_bytes=1000, token_macs=10, output_macs=3, attention=(AttentionWork(1, None),))


def open_engine(layers: Sequence[LayerCache] = HYBRID, **options: object) -> Engine:
    return make_engine(FakeModel(FakeConfig(tuple(layers))), **options)  # type: ignore[arg-type]


def make_text(stem: int, tokens: int) -> list[int]:
    return [(stem + index * index) % 50 for index in range(tokens)]


def count_files(folder: Path) -> int:
    return len(list(folder.rglob("*-1.page")))


def list_snapshots(engine: Engine) -> list[int]:
    """List the positions of snapshots, in tokens, without those at regular distances."""
    places = sorted((entry.depth + 1) * PAGE for entry in engine.cache.groups[-1].index)
    return [place for place in places if place % engine._admission.spacing_tokens]


def serve(engine: Engine, prompt: list[int], boundaries: Sequence[int] = (), tokens: int = 3) -> int:
    """Serve one request, whose answer must be right; return how many of its tokens came from the cache."""
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=tokens), boundary_tokens=boundaries))
    events = run_all(engine)
    assert answer_of(events, request) == expect_greedy(prompt, tokens)
    return events[-1].usage.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [3, 16])
def test_a_prompt_goes_on_from_the_last_boundary_of_an_earlier_one(kind: str, chunk: int) -> None:
    for tokens in range(2, 30):
        engine = open_engine(KINDS[kind], prefill_chunk_tokens=chunk)
        prompt = make_text(1, tokens)
        assert serve(engine, prompt) == 0
        last = (tokens - 1) // PAGE * PAGE
        assert serve(engine, prompt) == last
        assert serve(engine, [*prompt, 7, 8, 9]) == tokens // PAGE * PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_cached_is_as_computed_at_every_boundary(kind: str) -> None:
    """Texts that leave the first one after 0, 1, 2 ... tokens, with a state at each of its boundaries."""
    first = make_text(3, 41)
    for shared in range(41):
        engine = open_engine(KINDS[kind], pages=128)
        assert serve(engine, first, range(PAGE, 41, PAGE), tokens=1) == 0
        assert engine.stats().cache.groups[-1].cached_pages == MAX_ASKED
        kept = [PAGE, *range(40 - (MAX_ASKED - 2) * PAGE, 41, PAGE)]
        found = serve(engine, [*first[:shared], 49, 48, 47])
        assert found == max((boundary for boundary in kept if boundary <= shared), default=0)


def test_a_boundary_between_messages_is_found_although_the_tail_is_rewritten() -> None:
    engine, system = open_engine(), make_text(5, 18)
    serve(engine, [*system, *make_text(9, 9)], [len(system)])
    assert serve(engine, [*system, *make_text(11, 7)]) == 16


def test_where_texts_part_there_is_a_state_for_the_third() -> None:
    engine, stem = open_engine(), make_text(2, 22)
    assert serve(engine, [*stem, 1, 2, 3, 4, 5, 6]) == 0
    assert serve(engine, [*stem, 9, 8, 7, 6, 5, 4]) == 0  # the keys and values are there, the state is not
    assert engine.stats().cache.short_tokens["state, 2 layers"] == 20
    assert serve(engine, [*stem, 3, 1, 4, 1, 5, 9]) == 20


@pytest.mark.parametrize("shared", [6, 8, 17, 22, 28])
def test_who_waits_for_a_prompt_that_begins_alike_goes_on_where_it_parts(shared: int) -> None:
    engine, stem = open_engine(prefill_chunk_tokens=16), make_text(2, shared)
    prompts = [[*stem, *make_text(7, 12)], [*stem, *make_text(12, 12)]]
    requests = [engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=4))) for prompt in prompts]
    events = run_all(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert answer_of(events, request) == expect_greedy(prompt, 4)
    usage = next(event.usage for event in events if event.sequence_id == requests[1])
    assert usage.cached_tokens == shared // PAGE * PAGE


def test_a_long_text_has_a_state_once_in_so_many_tokens() -> None:
    engine, text = open_engine(pages=128, prefill_chunk_tokens=8, max_batch_tokens=8), make_text(4, 100)
    spacing = engine._admission.spacing_tokens
    assert spacing == 36
    serve(engine, text)
    for shared in (35, 36, 70, 72, 95):
        twin = open_engine(pages=128, prefill_chunk_tokens=8, max_batch_tokens=8)
        serve(twin, text)
        assert serve(twin, [*text[:shared], 49, 49]) == shared // spacing * spacing


def test_snapshots_in_the_middle_of_a_text_go_first() -> None:
    engine = open_engine(pages=32, prefill_chunk_tokens=8, max_batch_tokens=8, max_sequences=1)
    texts = [make_text(stem, 50) for stem in range(4)]
    for text in texts:
        serve(engine, text)
    assert engine.stats().cache.evictions["grow"] > 0
    assert serve(engine, texts[-1]) == 48


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("tokens", [7, 8, 9])
def test_answers_to_one_prompt_go_on_from_one_state(n: int, tokens: int) -> None:
    engine, prompt = open_engine(), make_text(6, tokens)
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=n)))
    events = run_all(engine)
    alone = open_engine(kv_cache="simple", pages=8, max_batch_tokens=64)
    again = alone.submit(EngineRequest(prompt, SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=n)))
    expected = run_all(alone)
    for index in range(n):
        one = [event.token_id for event in events if event.index == index]
        assert one == [event.token_id for event in expected if event.index == index]
    assert request == again == 1
    assert events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("step", range(1, 9))
def test_a_preempted_answer_goes_on_from_its_last_state(step: int) -> None:
    engine, prompt = open_engine(prefill_chunk_tokens=8), make_text(6, 21)
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=8)))
    events = [event for _ in range(step) for event in engine.step()]
    (sequence,) = engine._scheduler.running
    written = sequence.table.length_tokens
    engine._scheduler.preempt(sequence)
    engine.check()
    events += run_all(engine)
    assert answer_of(events, request) == expect_greedy(prompt, 8)
    assert engine.stats().recomputed_tokens == written % PAGE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", range(1, 12))
def test_the_next_turn_goes_on_where_an_answer_ended(kind: str, tokens: int, tmp_path: Path) -> None:
    """It uses the state of the answer's last boundary, also after a restart."""
    engine, prompt = open_engine(KINDS[kind], store_folder=tmp_path), make_text(6, 21)
    serve(engine, prompt, tokens=tokens)
    last, written = (21 + tokens - 1) // PAGE * PAGE, [*prompt, *expect_greedy(prompt, tokens)[:-1]]
    assert list_snapshots(engine) == sorted({20, *([last] if last % engine._admission.spacing_tokens else [])})
    for _ in range(2):
        assert engine.cache.lookup(written, engine.cache.start_keys(), limit_tokens=len(written)) == last
        engine.close()
        engine = open_engine(KINDS[kind], store_folder=tmp_path)
    assert serve(engine, [*written, 7, 8, 9]) == last


def test_a_growing_answer_has_one_snapshot_behind_it_that_the_disk_does_not_see(tmp_path: Path) -> None:
    engine, prompt = open_engine(store_folder=tmp_path), make_text(6, 21)
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=40)))
    for _ in range(31):
        engine.step()
        engine.check()
        (sequence,) = engine._scheduler.running
        last = sequence.table.length_tokens // PAGE * PAGE
        assert list_snapshots(engine) == [place for place in sorted({20, last}) if 20 <= place <= last and place != 36]
    assert last == 48
    engine.cache.flush()
    assert count_files(tmp_path) == 2  # at the prompt's end, and at the place that has a snapshot once in 36 tokens
    engine.cancel(request)
    engine.check()
    engine.close()
    assert count_files(tmp_path) == 3


def test_a_snapshot_that_another_found_stays_when_its_answer_goes_on() -> None:
    engine, prompt = open_engine(), make_text(6, 21)
    engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=30)))
    while list_snapshots(engine) != [20, 28]:
        engine.step()
    other = engine.submit(
        EngineRequest([*prompt, *expect_greedy(prompt, 7), 49, 48, 47, 46, 45], SamplingParams(max_tokens=1))
    )
    events = run_all(engine)
    assert next(event for event in events if event.sequence_id == other).usage.cached_tokens == 28
    assert list_snapshots(engine) == [20, 28, 32, 48]


@pytest.mark.parametrize("ends", [9, 12, 14])
def test_answers_alike_leave_one_snapshot_and_each_may_end_first(ends: int) -> None:
    engine, prompt = open_engine(), make_text(6, 21)
    requests = [engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=tokens))) for tokens in (ends, 20)]
    while engine.has_work:
        engine.step()
        engine.check()
        assert len(list_snapshots(engine)) <= 3
    text = [*prompt, *expect_greedy(prompt, 20)]
    for limit in (21 + ends - 1, 40):
        assert engine.cache.lookup(text, engine.cache.start_keys(), limit_tokens=limit) == limit // PAGE * PAGE
    assert requests == [1, 2]


def test_a_long_answer_takes_the_slots_of_few_others() -> None:
    engine, prompt = open_engine(pages=64, max_sequences=1), make_text(6, 5)
    texts = [make_text(stem, 9) for stem in range(9, 19)]
    for text in texts:
        serve(engine, text, tokens=1)
    group = engine.stats().cache.groups[-1]
    kept = list_snapshots(engine).count(8)
    assert group.cached_pages == kept == group.pages - 1
    serve(engine, prompt, tokens=30)
    assert list_snapshots(engine).count(8) == kept - 3  # one slot was free, an answer takes four


@pytest.mark.parametrize("moment", ["early", "late"])
@pytest.mark.parametrize("failing", range(8))
def test_a_step_that_fails_leaves_the_state_as_it_was(failing: int, moment: str) -> None:
    steps = 0

    def fail(batch: RaggedBatch) -> None:
        nonlocal steps
        steps += 1
        if steps == failing + 1:
            raise RuntimeError("told to fail")

    hooks = {"on_forward" if moment == "early" else "on_written": fail}
    engine = make_engine(FakeModel(FakeConfig(HYBRID), **hooks), prefill_chunk_tokens=8)  # type: ignore[arg-type]
    prompt = make_text(8, 21)
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=8)))
    logging.disable(logging.CRITICAL)
    events = run_all(engine)
    logging.disable(logging.NOTSET)
    assert finish_of(events, request) is FinishReason.ERROR
    written = 8 * failing if failing < 3 else 20
    assert serve(engine, prompt, tokens=8) == written


def test_a_watcher_learns_why_a_hit_was_short() -> None:
    engine, prompt = open_engine(prefill_chunk_tokens=40), make_text(8, 40)
    serve(engine, prompt)
    look = Look(engine, WORK)
    assert [(pages.holds, pages.short_tokens) for pages in look.first.maps] == [("pages", 0), ("states", 0)]
    assert serve(engine, [*prompt[:30], 7, 7, 7]) == 0  # pages for 28 tokens, and the only snapshot stands after 36
    assert [group.short_tokens for group in look.read().groups] == [0, 28]


def test_a_cancelled_prompt_leaves_what_it_computed() -> None:
    engine, prompt = open_engine(prefill_chunk_tokens=10), make_text(8, 40)
    request = engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=8)))
    engine.step()
    engine.step()
    engine.cancel(request)
    engine.check()
    assert serve(engine, prompt) == 16  # two chunks of ten, each to the end of a page


def test_prompts_without_the_cache_leave_no_state() -> None:
    engine, prompt = open_engine(), make_text(8, 40)
    for options in ({"uses_cache": False}, {"scores_prompt": True}):
        engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=1), **options))  # type: ignore[arg-type]
        run_all(engine)
    assert len(engine.score(prompt)) == 39
    assert engine.stats().cached_pages == 0


def test_states_outlive_a_restart(tmp_path: Path) -> None:
    prompt = make_text(3, 38)
    engine = open_engine(store_folder=tmp_path)
    serve(engine, prompt, [14])
    engine.close()
    for tokens, found in ((38, 36), (20, 12)):
        engine = open_engine(store_folder=tmp_path)
        assert serve(engine, [*prompt[:tokens], 1, 2]) == found
        assert engine.stats().cache.disk_hit_tokens == found
        engine.close()


@pytest.mark.parametrize("part", ["state", "page"])
def test_a_boundary_counts_with_all_its_parts_or_not_at_all(part: str, tmp_path: Path) -> None:
    prompt = make_text(3, 38)
    engine = open_engine(store_folder=tmp_path)
    serve(engine, prompt, [14])
    engine.close()
    keys = engine.cache.start_keys().cover(prompt, 9)
    (harmed,) = tmp_path.rglob(f"{keys[8].hex()}{'-1' if part == 'state' else ''}.page")
    harmed.write_bytes(harmed.read_bytes()[:-1] + b"\xaa")
    engine = open_engine(store_folder=tmp_path)
    logging.disable(logging.CRITICAL)
    assert serve(engine, prompt) == 12  # at the last boundary that has both
    logging.disable(logging.NOTSET)
    assert engine.stats().cache.disk_hit_tokens == 12
    assert serve(engine, prompt) == 36


def draw_prompt(chance: random.Random) -> list[int]:
    stem, length = chance.choice([0, 7]), chance.choice([1, 3, 8, 21, 40])
    prompt = [(stem + index * index) % 50 for index in range(length)]
    return [*prompt[: chance.randrange(length) + 1], *[chance.randrange(50) for _ in range(chance.randrange(6))]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(choose_amount(200)))
def test_no_schedule_changes_a_state(seed: int, tmp_path: Path) -> None:
    """Chunks, neighbours (also cancelled, preempted and failing ones), forks, evictions, the disk and a restart."""
    chance, fails = random.Random(seed), False

    def fail(batch: RaggedBatch) -> None:
        if fails:
            raise RuntimeError("told to fail")

    def restart() -> Engine:
        return make_engine(
            FakeModel(FakeConfig(chance.choice(list(KINDS.values()))), on_written=fail),
            pages=chance.choice([16, 20, 64]),
            prefill_chunk_tokens=chance.choice([1, 5, 16]),
            max_batch_tokens=chance.choice([5, 16, 40]),
            max_sequences=chance.choice([2, 5]),
            store_folder=tmp_path if seed % 4 == 0 else None,
        )

    engine, prompts = restart(), dict[int, list[int]]()
    answers: dict[tuple[int, int], list[int]] = {}
    logging.disable(logging.CRITICAL)
    for _ in range(60):
        move = chance.random()
        if move < 0.3 and len(prompts) < 12:
            prompt = draw_prompt(chance)
            params = SamplingParams(max_tokens=chance.choice([1, 5, 12]), n=chance.choice([1, 1, 2]))
            boundaries = [chance.randrange(40) for _ in range(chance.randrange(3))]
            prompts[engine.submit(EngineRequest(prompt, params, boundary_tokens=boundaries))] = prompt
        elif move < 0.36 and prompts:
            engine.cancel(chance.choice(list(prompts)))
        elif move < 0.46 and engine._scheduler.running:
            engine._scheduler.preempt(chance.choice(engine._scheduler.running))
        elif move < 0.48:
            run_all(engine)
            engine.close()
            engine, prompts, answers = restart(), {}, {}
        fails = chance.random() < 0.05
        for event in engine.step():
            answer = answers.setdefault((event.sequence_id, event.index), [])
            if event.token_id is not None:
                answer.append(event.token_id)
                prompt = prompts[event.sequence_id]
                assert answer == expect_greedy(prompt, len(answer))
        engine.check()
    fails = False
    run_all(engine)
    engine.close()
    logging.disable(logging.NOTSET)


def test_boundaries_are_cut_and_judged() -> None:
    boundaries = Boundaries(4, 20, 31, [2, 9, 13, 40])
    assert [place for place in range(60) if boundaries.judge(place) is Snapshot.LASTING] == [8, 12, 28]
    assert [place for place in range(1, 60) if boundaries.judge(place) is Snapshot.PASSING] == [20, 40]
    cuts, start = [], 0
    while start < 31:
        start += boundaries.cut(start, min(9, 31 - start), 31 - start)
        cuts.append(start)
    assert cuts == [8, 12, 20, 28, 31]
    assert boundaries.cut(0, 3, 31) == 3  # less than a page, but no step without a token
    assert boundaries.add(19) == 16
    assert boundaries.cut(12, 9, 19) == 4


def test_of_many_messages_the_first_and_the_last_count() -> None:
    boundaries = Boundaries(4, 400, 201, range(0, 200, 4))
    kept = [place for place in range(0, 201, 4) if boundaries.judge(place) is Snapshot.LASTING]
    assert kept == [*range(172, 201, 4)]
