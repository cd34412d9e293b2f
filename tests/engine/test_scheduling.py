"""The scheduler: order of arrival, budgets, chunks, and nobody left out."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import FakeModel, answer_of, expect_greedy, make_engine, run_all

from mlxr.core.types import SamplingParams
from mlxr.engine.engine import MOST_OWED_S
from mlxr.engine.request import EngineRequest
from mlxr.engine.scheduler import Pages, Promises, Scheduler
from mlxr.engine.sequence import Sequence
from mlxr.kernels.ragged import RaggedBatch


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def query_tokens(batch: RaggedBatch) -> list[int]:
    """Tokens of each sequence in the batch."""
    return [int(tokens) for tokens in np.diff(batch.query_starts)]


def test_long_prompt_is_cut_in_chunks() -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=16, prefill_chunk_tokens=6)
    sequence_id = engine.submit(EngineRequest(range(20), params(3)))
    assert answer_of(run_all(engine), sequence_id) == expect_greedy(range(20), 3)
    assert [query_tokens(batch) for batch in model.batches] == [[6], [6], [6], [2], [1], [1]]
    assert [len(batch.output_rows) for batch in model.batches] == [0, 0, 0, 1, 1, 1]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=10, prefill_chunk_tokens=8)
    for start in range(3):
        engine.submit(EngineRequest(range(start, start + 12), params(1)))
    run_all(engine)
    # The oldest gets its whole chunk, the next what is left, and so on.
    assert [query_tokens(batch) for batch in model.batches] == [[8, 2], [4, 6], [4, 6], [6]]


def test_decoding_goes_on_while_a_long_prompt_arrives() -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=8, prefill_chunk_tokens=8)
    talking = [engine.submit(EngineRequest([index], params(30))) for index in range(3)]
    engine.step()
    late = engine.submit(EngineRequest(range(40), params(2)))
    for _ in range(8):
        events = engine.step()
        assert [event.sequence_id for event in events][:3] == talking
        assert query_tokens(model.batches[-1]) == [1, 1, 1, 5]
    assert [event.sequence_id for event in events] == [*talking, late]
    run_all(engine)


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("prefill_chunk_tokens", [1, 5, 64])
def test_no_step_is_larger_than_its_budget(max_batch_tokens: int, prefill_chunk_tokens: int) -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=max_batch_tokens, prefill_chunk_tokens=prefill_chunk_tokens, pages=99)
    for length in (1, 9, 30, 2, 17):
        engine.submit(EngineRequest([length, *range(length - 1)], params(length)))
    run_all(engine)
    assert max(batch.tokens for batch in model.batches) <= max_batch_tokens
    assert max(max(query_tokens(batch)) for batch in model.batches) <= prefill_chunk_tokens
    stats = engine.stats()
    assert stats.steps == len(model.batches)
    assert stats.prefill_tokens == 59
    assert stats.decode_tokens == 59 - 5  # the first token of an answer comes out of its prompt's last chunk


def test_max_sequences_run_at_a_time() -> None:
    model = FakeModel()
    engine = make_engine(model, max_sequences=3)
    for _ in range(10):
        engine.submit(EngineRequest([1, 2], params(4)))
    assert (engine.stats().waiting_sequences, engine.stats().running_sequences) == (10, 0)
    engine.step()
    assert (engine.stats().waiting_sequences, engine.stats().running_sequences) == (7, 3)
    run_all(engine)
    assert max(batch.sequences for batch in model.batches) == 3


def test_every_running_sequence_fits_in_a_step() -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=2, max_sequences=8)
    for _ in range(5):
        engine.submit(EngineRequest([1, 2, 3], params(4)))
    engine.step()
    assert (engine.stats().waiting_sequences, engine.stats().running_sequences) == (3, 2)
    run_all(engine)
    assert max(batch.sequences for batch in model.batches) == 2


def test_first_come_first_served() -> None:
    engine = make_engine(max_sequences=2)
    ids = [engine.submit(EngineRequest([index], params(3))) for index in range(7)]
    finished = [event.sequence_id for event in run_all(engine) if event.finish_reason]
    assert finished == ids


def test_requests_wait_for_pages() -> None:
    # 8 pages of 4: every request needs one at once and soon a second, so four run and the others wait.
    engine = make_engine(pages=8)
    ids = [engine.submit(EngineRequest([index, index, index], params(10))) for index in range(6)]
    events = engine.step()
    assert engine.stats().running_sequences == 4
    events += run_all(engine)
    for index, sequence_id in enumerate(ids):
        assert answer_of(events, sequence_id) == expect_greedy([index] * 3, 10)
    assert engine.stats().peak_pages <= 8


def test_large_request_is_not_overtaken() -> None:
    engine = make_engine(pages=8)
    first = engine.submit(EngineRequest([1], params(13)))  # 4 pages
    large = engine.submit(EngineRequest(range(2, 31), params(4)))  # 8 pages: waits for the first
    small = engine.submit(EngineRequest([3], params(2)))  # would fit at once, but came later
    finished = [event.sequence_id for event in run_all(engine) if event.finish_reason]
    assert finished == [first, large, small]


def test_lack_of_pages_never_fails_a_step() -> None:
    engine = make_engine(pages=10, max_sequences=8)
    for index in range(12):
        engine.submit(EngineRequest(range(index % 7 + 1), params(index % 5 * 4 + 1)))
    events = run_all(engine)
    assert {event.error for event in events} == {None}
    assert engine.stats().failed_steps == 0


def test_pages_grow_with_the_answer() -> None:
    engine = make_engine(page_size=4)
    engine.submit(EngineRequest([1, 2, 3], params(10)))
    used = []
    while engine.has_work:
        engine.step()
        used.append(engine.stats().used_pages)
    assert used == [1, 1, 2, 2, 2, 2, 3, 3, 3, 0]


def test_promises_are_those_of_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are admitted or preempted while others are admitted count as if all were counted anew."""
    promised: list[Pages] = []
    open_if_fits = Scheduler._open_if_fits

    def check(scheduler: Scheduler, candidate: Sequence, pages: Pages) -> bool:
        assert pages == Promises(scheduler._budget, scheduler.running).pages
        promised.append(pages)
        return open_if_fits(scheduler, candidate, pages)

    monkeypatch.setattr(Scheduler, "_open_if_fits", check)
    chance, engine = np.random.RandomState(3), make_engine(pages=24)
    for _ in range(400):
        if chance.rand() < 0.5:
            prompt = chance.randint(0, 50, chance.randint(1, 30)).tolist()
            engine.submit(
                EngineRequest(prompt, params(int(chance.randint(1, 12))), priority=int(chance.randint(-3, 4)))
            )
        engine.step()
        engine.check()
    run_all(engine)
    assert len(promised) > 300
    assert len(set(promised)) > 10
    assert engine.stats().preemptions > 5


def test_prompts_wait_for_one_step_that_was_started() -> None:
    """A step that runs ahead is used, whatever was submitted meanwhile; random requests, and books that stay right."""
    generator = np.random.default_rng(5)
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=16, prefill_chunk_tokens=8, max_sequences=6)
    asked: dict[int, tuple[range, int]] = {}
    events, held, waits = [], 0, 0
    for _ in range(300):
        if len(asked) < 40 and generator.random() < 0.3:
            start, length, wanted = (int(number) for number in generator.integers(1, 20, 3))
            asked[engine.submit(EngineRequest(range(start, start + length), params(wanted)))] = (
                range(start, start + length),
                wanted,
            )
        decoding = [row for row in engine._scheduler.running if row.is_decoding]
        engine._ahead = decoding if not waits and generator.random() < 0.7 else []
        is_held = bool(engine._ahead)
        batches = len(model.batches)
        events += engine.step()
        engine.check()
        if is_held and len(model.batches) > batches:
            assert query_tokens(model.batches[-1]) == [1] * len(decoding)
        prompts = [row for row in engine._scheduler.running if not row.is_decoding]
        held += is_held and bool(prompts)
        waits = is_held and bool(prompts)
        assert not (waits and engine._goes_on([]))  # so the step after it is theirs
    events += run_all(engine)
    assert held > 5
    for request_id, (prompt, wanted) in asked.items():
        assert answer_of(events, request_id) == expect_greedy(prompt, wanted)


def test_a_step_that_was_started_for_others_holds_nobody_up() -> None:
    model = FakeModel()
    engine = make_engine(model)
    first = [engine.submit(EngineRequest([index], params(9))) for index in range(2)]
    engine.step()
    decoding = [*engine._scheduler.running]
    engine.cancel(first[0])
    engine.submit(EngineRequest(range(5), params(3)))
    engine._ahead = decoding
    engine.step()
    assert query_tokens(model.batches[-1]) == [1, 5]
    run_all(engine)


@pytest.mark.parametrize(("least", "expected"), [(1, [4, 4]), (6, [6, 6]), (99, [9, 3])])
def test_clients_share_a_step_down_to_the_least_part(least: int, expected: list[int]) -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=12, prefill_chunk_tokens=8)
    engine._scheduler._prefill_chunk_tokens, engine._scheduler._least_part_tokens = 9, least
    for number, client in enumerate(("one", "other")):  # prompts that begin alike would wait for one another
        engine.submit(EngineRequest(range(number, number + 20), params(1), client=client))
    engine.step()
    assert query_tokens(model.batches[0]) == expected
    run_all(engine)


def test_prompts_that_come_one_by_one_are_gathered() -> None:
    """After a step with prompts, answers have some steps to themselves; every prompt gets its turn, unchanged."""
    generator = np.random.default_rng(11)
    model, clock = FakeModel(), iter(range(10**6))
    engine = make_engine(model, max_batch_tokens=24, prefill_chunk_tokens=8, max_sequences=8, clock=lambda: next(clock))
    engine._answers_share = 3.0
    asked: dict[int, tuple[range, int]] = {}
    events, held, together = [], 0, 0
    for _ in range(400):
        if len(asked) < 60 and generator.random() < 0.25:
            start, length, wanted = (int(number) for number in generator.integers(1, 20, 3))
            prompt = range(start, start + length)
            asked[engine.submit(EngineRequest(prompt, params(wanted)))] = prompt, wanted
        owed, batches = engine._owed_s, len(model.batches)
        events += engine.step()
        engine.check()
        prompts = [row for row in engine._scheduler.running if not row.is_decoding]
        if len(model.batches) > batches and owed > 0 and prompts and max(query_tokens(model.batches[-1])) == 1:
            held += 1
        together += len(model.batches) > batches and sum(tokens > 1 for tokens in query_tokens(model.batches[-1])) > 1
    events += run_all(engine)
    assert held > 5
    assert together > 5
    for request_id, (prompt, wanted) in asked.items():
        assert answer_of(events, request_id) == expect_greedy(prompt, wanted)


def test_a_step_that_took_very_long_is_owed_for_as_a_long_one() -> None:
    engine = make_engine(FakeModel())
    engine._answers_share = 1.0
    engine._count_owed(0.05, is_decoding=False)
    assert engine._owed_s == 0.05
    engine._count_owed(30.0, is_decoding=False)
    assert engine._owed_s == MOST_OWED_S
    engine._count_owed(MOST_OWED_S, is_decoding=True)
    assert engine._owed_s == 0.0


@pytest.mark.parametrize(("begun", "tokens", "waits"), [(False, 6, True), (True, 6, False), (False, 30, False)])
def test_prompts_wait_only_while_they_are_few_and_have_not_begun(begun: bool, tokens: int, waits: bool) -> None:
    model = FakeModel()
    engine = make_engine(model, max_batch_tokens=16, prefill_chunk_tokens=4)
    engine.submit(EngineRequest([1], params(20)))
    engine.step()
    engine.submit(EngineRequest(range(2, 2 + tokens), params(2)))
    if begun:
        engine.step()
    chunks = engine._scheduler.schedule(gathers=True)
    assert (len(chunks) == 1) == waits
    assert len(engine._scheduler.schedule()) == 2
    run_all(engine)
