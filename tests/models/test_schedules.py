"""Equal bits in every family and with windows of any kind, whatever else runs.

Random schedules on the native kernels: batches, chunks, cached prefixes, forks, preemptions, the store, several formats
of pages, threads and instruction sets. Each answer must be the one that is given alone. Pages that nobody holds are
filled with NaN after every step, so that a kernel which looks at one is noticed.
"""

from __future__ import annotations

import random
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from amounts import choose_amount, choose_schedules
from engines import open_engine
from gguf_models import MODELS
from model_fields import look
from oracle import draft_by_oracle
from random_model import make_weights
from tiny_models import CASES, Windows, build_file, build_hf, give_windows, make_hf_tensors, map_tensors, read_golden

from mlxr.cache.arena import Arena
from mlxr.cache.shapes import form_groups
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.kernels.context import ISAS, Context, load_native
from mlxr.models import Decoder, model_from_folder
from mlxr.models.footprint import list_expert_bytes
from mlxr.models.weights import arrange_tensors

UNIFORM: tuple[Windows, ...] = ((1, 1, 1), (20, 20, 20), (64, 64, 64))
MIXED: tuple[Windows, ...] = ((20, None, 20), (None, 1, 33), (64, 9, None))
CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 99,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LONGEST = 180  # tokens of a prompt and its answer
FAMILY_SCHEDULES = 5
Answer = list[tuple[int | None, float | None]]
OF_FILES = "file of "  # before the name of a model of gguf_models
# With attention that no golden has: layers that run twice, gates of heads, experts beside both blocks, latent vectors
# without a rank of queries, norms within blocks, and scores that become less with the distance.
FILES = ("nanbeige", "spark2_5", "arctic", "plm", "bitnet", "refact")
Kind = Windows | str  # the windows of the three layers of CONFIG, a case of the goldens, or a model of gguf_models


@cache
def build(
    kind: Kind, device: str = "cpu", threads: int = 2, isa: str | None = None, expert_percent: int | None = None
) -> Decoder:
    """Build a model; with `expert_percent` that share of the experts is in memory at a time, and the rest in a file."""
    ctx = Context("cpu", threads=threads, isa=isa) if device == "cpu" else Context("reference")
    if isinstance(kind, str) and kind.startswith(OF_FILES):
        return build_file(ctx, kind.removeprefix(OF_FILES))
    if isinstance(kind, str):
        fields, seed, _, _ = read_golden(kind)
        for key in {"max_position_embeddings", "max_seq_len"} & fields.keys():
            fields[key] = max(LONGEST, fields[key])
        if expert_percent is None:
            return build_hf(ctx, fields, seed)
        config = model_from_folder(fields)
        tensors = make_hf_tensors(make_weights(fields, seed), fields)
        with TemporaryDirectory() as folder:
            mapped = map_tensors(arrange_tensors(config, tensors), Path(folder) / "weights")
        expert_bytes = sum(list_expert_bytes(config, mapped)) * expert_percent // 100
        return Decoder(ctx, config, mapped, expert_bytes=expert_bytes)
    model = Decoder(ctx, model_from_folder(CONFIG), make_hf_tensors(make_weights(CONFIG, 7), CONFIG))
    give_windows(model, kind)
    return model


def make_engine(model: Decoder, **settings: Any) -> Engine:
    return open_engine(model, model.ctx, **{"max_sequences": 4, "fingerprint": b"tiny", **settings})


def collect(events: list[TokenEvent]) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    for event in events:
        answers.setdefault(event.index, []).append((event.token_id, event.logprob))
    return answers


@cache
def answer_alone(kind: Kind, kv_type: str, prompt: tuple[int, ...], tokens: int, n: int) -> dict[int, Answer]:
    """Answer with an engine that keeps all positions, in one page for each sequence."""
    with closing(make_engine(build(kind), kv_cache="simple", kv_type=kv_type, pages=4)) as engine:
        engine.submit(EngineRequest(prompt, make_params(tokens, n)))
        events = []
        while engine.has_work:
            events += engine.step()
        return collect(events)


def make_params(tokens: int, n: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=5, logprobs=0, n=n)


def poison_free_pages(engine: Engine) -> None:
    for group in engine.cache.groups:
        for page in group.pager._free:
            arena = group.arena
            for pool in (*arena.k_pools, *arena.v_pools) if isinstance(arena, Arena) else arena.states:
                pool[page].reshape(-1).view(np.uint8)[:] = 0xFF


def run_schedule(chance: random.Random, kind: Kind, folder: Path | None, **build_options: Any) -> None:
    """Ask at random times, cut, share and preempt at random, and compare each answer with the one given alone."""
    model = build(kind, **build_options)
    has_q8 = look(model.config, "head_dim") % 32 == 0 and all(layer.latent is None for layer in model.config.layers)
    kv_type = chance.choice(["bf16", "f32", "f16", *(["q8"] if has_q8 else [])])
    page_size, chunk_tokens = chance.choice([1, 5, 16, 32]), chance.choice([3, 40, 200])
    shapes = form_groups(model.config.cache_layers).paged
    peaks = [shape.count_peak(LONGEST, chunk_tokens, page_size) for shape in shapes]
    least_pages = max(peaks, default=-(-LONGEST // page_size))  # for one sequence
    vocabulary = model.config.vocab_size
    engine = make_engine(
        model,
        kv_type=kv_type,
        page_size=page_size,
        pages=least_pages * chance.choice([1, 1, 2, 4]) + chance.choice([0, 1, 3]),
        max_batch_tokens=max(8, chunk_tokens),
        prefill_chunk_tokens=chunk_tokens,
        **({"store_folder": folder, "store_bytes": 2**22} if folder else {}),
    )
    text = [chance.randrange(vocabulary) for _ in range(150)]
    asked: dict[int, tuple[tuple[int, ...], int, int]] = {}
    texts: list[list[int]] = []
    if chance.random() < 0.5:
        draft_by_oracle(engine, texts)
    events: dict[int, list[TokenEvent]] = {}
    with closing(engine):
        for step in range(2000):
            if step < 24 and chance.random() < 0.25:
                prompt = (*text[: chance.choice([5, 70, 140])], *(chance.randrange(vocabulary) for _ in range(2)))
                tokens, n = chance.choice([1, 9, 30]), chance.choice([1, 1, 2])
                alone = answer_alone(kind, kv_type, prompt, tokens, n).values()
                texts += [[*prompt, *(token for token, _ in answer if token is not None)] for answer in alone]
                asked[engine.submit(EngineRequest(prompt, make_params(tokens, n)))] = prompt, tokens, n
            for event in engine.step():
                events.setdefault(event.sequence_id, []).append(event)
            running = engine._scheduler.running
            if running and chance.random() < 0.05:
                engine._scheduler.preempt(chance.choice(running))
            engine.check()
            poison_free_pages(engine)
            if step >= 24 and not engine.has_work:
                break
        assert not engine.has_work
        assert engine.stats().used_pages == 0
    for request, (prompt, tokens, n) in asked.items():
        assert collect(events[request]) == answer_alone(kind, kv_type, prompt, tokens, n)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(choose_amount(200)))
@pytest.mark.parametrize("kinds", [UNIFORM, MIXED], ids=["one window", "several groups"])
def test_windows_change_no_bit(seed: int, kinds: tuple[Windows, ...], tmp_path: Path) -> None:
    chance = random.Random(seed)
    run_schedule(chance, chance.choice(kinds), tmp_path if seed % 4 == 0 else None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_no_schedule_changes_a_bit_of_a_family(case: str, tmp_path: Path) -> None:
    tiers = [isa for isa in ISAS if isa in load_native().available_isas()]
    first = CASES.index(case)
    for seed in range(first, first + choose_schedules(FAMILY_SCHEDULES)):  # each case has its own
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        run_schedule(
            chance, case, folder if seed % 4 == 0 else None, threads=chance.choice([1, 2]), isa=chance.choice(tiers)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_no_schedule_changes_a_bit_of_a_family_of_files(name: str, tmp_path: Path) -> None:
    first = list(MODELS).index(name)
    for seed in range(first, first + choose_schedules(FAMILY_SCHEDULES)):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        run_schedule(chance, OF_FILES + name, folder if seed % 4 == 0 else None, threads=chance.choice([1, 2]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["qwen2moe", "gpt-oss", "gemma4moe"])
@pytest.mark.parametrize("expert_percent", [15, 40, 80])
def test_experts_that_stay_in_their_file_change_no_bit(case: str, expert_percent: int) -> None:
    for seed in range(expert_percent, expert_percent + choose_schedules(FAMILY_SCHEDULES)):
        chance = random.Random(seed)
        run_schedule(chance, case, None, threads=chance.choice([1, 2]), expert_percent=expert_percent)
    model = build(case, threads=1, expert_percent=expert_percent)
    held, total = model.expert_memory
    assert 0 < held <= total * expert_percent // 100
    routing = build(case, expert_percent=expert_percent, threads=2).read_routing()
    assert routing is not None
    assert routing.layer_steps == 0 or routing.file_reads > 0


def test_the_schedules_give_pages_back() -> None:
    """At its end a long prompt holds no more than its window, and its end is found again."""
    model = build((20, 20, 20))
    with closing(make_engine(model, page_size=4, pages=64, kv_type="bf16", draft="off")) as engine:  # which takes pages
        for cached in (0, 120):
            request = engine.submit(EngineRequest([index % 90 for index in range(121)], make_params(30, 1)))
            events = [event for _ in range(10) for event in engine.step()]
            assert engine.stats().used_pages == 6  # ceil(19 / 4) + 1
            while engine.has_work:
                events += engine.step()
            assert events[-1].sequence_id == request
            assert events[-1].usage.cached_tokens == cached


def test_the_reference_agrees_where_pages_were_given_back() -> None:
    prompt = [index * 7 % 99 for index in range(100)]
    answers = []
    for device in ("cpu", "reference"):
        with closing(make_engine(build((20, None, 20), device), page_size=4, pages=64, kv_type="f32")) as engine:
            engine.submit(EngineRequest(prompt, SamplingParams(max_tokens=20, temperature=0.0)))
            events = []
            while engine.has_work:
                events += engine.step()
            answers.append([event.token_id for event in events])
    assert answers[0] == answers[1]
