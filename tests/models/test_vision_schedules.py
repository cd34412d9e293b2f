"""Equal bits with pictures, whatever else runs: random schedules of each kind of mask, which are causal ones by three
axes (of attention alone, with rows for later layers, and of a hybrid) and by one (with a picture's rows in several
places, and with layers that share their cache), and those that see all of a picture, in all layers or with a window.

Chunks, batch mates, preemption, prefixes that end inside a picture, restarts from disk, rows that were given up and
made again, pictures that are encoded together, drafts, forks, threads and instruction sets. Each answer must be the one
that is given alone.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import amounts
import pytest
from amounts import choose_schedules
from engines import open_engine
from oracle import draft_by_oracle, draft_eagerly
from test_schedules import Answer, collect, make_params, poison_free_pages
from vision_models import draw_picture, read_golden, write_folder

from mlxr.cache.shapes import form_groups
from mlxr.core.model_settings import ModelSettings
from mlxr.engine.engine import Engine
from mlxr.engine.pictures import STEP_S, Encoder, Encoding, Picture, Pictures, Placed
from mlxr.engine.request import EngineRequest
from mlxr.engine.scheduler import Scheduler
from mlxr.engine.speculative.planner import DraftSource
from mlxr.formats import open_safetensors
from mlxr.kernels.context import ISAS, Context, load_native
from mlxr.model_files.files import read_contents
from mlxr.model_files.tower import take_folder_tower
from mlxr.models import Decoder
from mlxr.models.tower import Tower

PLACE, BREAK, LONGEST = 120, 121, 200
SIZES = (4, 6), (3, 2), (2, 7)  # of the pictures, which so have 24, 6 and 14 rows
KINDS = "qwen3vl", "qwen35", "gemma3", "gemma4", "gemma4e", "mistral3"
SCHEDULES, THOROUGH_SCHEDULES, DAILY_SCHEDULES = 200, 4, 2  # of each case
Asked = tuple[tuple[int, ...], tuple[int, ...], int, int]  # tokens, pictures, tokens of an answer, answers


@cache
def build(case: str, threads: int = 2, isa: str | None = None) -> tuple[Decoder, Tower]:
    ctx, golden = Context("cpu", threads=threads, isa=isa), read_golden(case)
    with TemporaryDirectory() as folder:
        write_folder(Path(folder), golden)
        opened = open_safetensors(Path(folder))
        contents = read_contents(opened)
        tower = take_folder_tower(opened, golden.preprocessor, contents.config)
        assert tower is not None
        return Decoder(ctx, contents.config, contents.tensors), tower.load(ctx)


@cache
def make_picture(case: str, number: int) -> Picture:
    """Return one of three pictures; some towers see all of them in one size."""
    spec = build(case)[1].spec
    sides = SIZES[number] if spec.positions != "own" else (spec.side // spec.merge,) * 2
    height, width = (side * spec.factor for side in sides)
    pixels = draw_picture(height, width, number)
    return Picture(pixels, spec.find_grid(pixels), b"tower")


def see(model: Decoder, tower: Tower, happened: Counter[str], **options: Any) -> Encoder:
    """Return an encoder of pictures for a model, which counts how often several were encoded at once."""

    def encode(*pixels: Any) -> Encoding:
        happened["together"] += len(pixels) > 1
        return tower.encode(*pixels)

    config = model.config
    return Encoder(encode, turns=config.turns_pictures, is_whole=config.sees_whole_pictures, **options)


def write_prompt(case: str, parts: list[list[int] | int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of texts and of the pictures with these numbers, and the latter."""
    tokens: list[int] = []
    for part in parts:
        tokens += [token for line in cut(case, part) for token in line] if isinstance(part, int) else part
    return tuple(tokens), tuple(part for part in parts if isinstance(part, int))


def cut(case: str, number: int) -> list[list[int]]:
    """The tokens of a picture, line by line where a token of a text ends each, else all together."""
    rows, columns = make_picture(case, number).grid
    if build(case)[1].spec.words.row_break:
        return [[*[PLACE] * columns, BREAK]] * rows
    return [[PLACE] * (rows * columns)]


def make_request(case: str, asked: Asked) -> EngineRequest:
    tokens, numbers, most, n = asked
    placed, at = [], 0
    for number in numbers:
        first = 0
        for count in (line.count(PLACE) for line in cut(case, number)):
            placed.append(Placed(make_picture(case, number), tokens.index(PLACE, at), first, count))
            at, first = placed[-1].stop, first + count
    shown = Pictures(tuple(placed), len(tokens)) if placed else None
    return EngineRequest(tokens, make_params(most, n), pictures=shown)


@cache
def answer_alone(case: str, kv_type: str, asked: Asked) -> dict[int, Answer]:
    """Answer with an engine that keeps all positions, in one page for each sequence."""
    model, tower = build(case)
    options: dict[str, Any] = {"kv_cache": "simple", "kv_type": kv_type, "pages": 4, "draft": "off"}
    options |= {"max_sequences": 4, "encoder": see(model, tower, Counter())}
    with closing(open_engine(model, model.ctx, **options)) as engine:
        engine.submit(make_request(case, asked))
        events = []
        while engine.has_work:
            events += engine.step()
        return collect(events)


def draw_prompt(chance: random.Random, case: str, text: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a beginning that many prompts share: texts, then pictures with texts between and behind them."""
    parts: list[list[int] | int] = [text[: chance.choice([1, 5, 37])]]
    for number in range(chance.choice([0, 1, 1, 2, 2])):
        parts += [chance.choice([number, number, 2]), text[: chance.choice([0, 1, 9])]]
    return write_prompt(case, [*parts, [chance.randrange(PLACE) for _ in range(chance.choice([1, 2, 40]))]])


def watch_openings(engine: Engine, happened: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count prompts whose first part the cache has, and those of which it ends inside a picture."""
    original = Scheduler._open_table

    def open_table(self: Scheduler, sequence: Any) -> Any:
        table, shown = original(self, sequence), sequence.request.pictures
        if shown is not None and table.length_tokens:
            happened["cached"] += 1
            happened["inside a picture"] += any(one.start < table.length_tokens < one.stop for one in shown.placed)
            happened["as far as a picture"] += any(one.stop <= table.length_tokens for one in shown.placed)
        return table

    monkeypatch.setattr(Scheduler, "_open_table", open_table)


def run_schedule(
    chance: random.Random, case: str, folder: Path | None, happened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask at random times, cut, share, preempt and restart at random, and compare with the answers given alone."""
    tiers = [isa for isa in ISAS if isa in load_native().available_isas()]
    model, tower = build(case, chance.choice([1, 2]), chance.choice(tiers))
    kv_type, page_size = chance.choice(["bf16", "f32", "f16"]), chance.choice([1, 5, 16, 32])
    chunk_tokens, together = chance.choice([3, 40, 200]), chance.choice([0, 40])
    kept_bytes = chance.choice([1, 1 << 20])
    shapes = form_groups(model.config.cache_layers).paged
    longest_chunk = max(chunk_tokens, *(make_picture(case, number).tokens for number in range(len(SIZES))))
    least_pages = max((shape.count_peak(LONGEST, longest_chunk, page_size) for shape in shapes), default=1)
    pages = least_pages * chance.choice([1, 1, 2, 4]) + chance.choice([0, 1, 3])
    text = [chance.randrange(PLACE) for _ in range(40)]
    kind = chance.choice(["none", "oracle", "model"])
    vocabulary = model.config.vocab_size
    drafter = build("qwen3vl")[0] if kind == "model" and vocabulary == build("qwen3vl")[0].config.vocab_size else None
    texts: list[list[int]] = []
    for start in range(1 if folder is None else 2):
        times = itertools.accumulate(chance.choice([0.1, 0.6, 2.0]) * STEP_S for _ in itertools.count())
        encoder = see(model, tower, happened, nbytes=kept_bytes, together=together, clock=times.__next__)
        settings = ModelSettings(
            kv_type=kv_type,
            page_size=page_size,
            max_sequences=4,
            max_batch_tokens=max(8, chunk_tokens),
            prefill_chunk_tokens=chunk_tokens,
            draft="off" if kind == "none" else "auto",
            draft_tokens=3,
            **({} if folder is None else {"store_folder": str(folder), "store_bytes": 1 << 22}),
        )
        engine = Engine(
            model,
            model.ctx,
            settings,
            eos_ids=(),
            pages=pages,
            fingerprint=b"tiny",
            encoder=encoder,
            draft=None if drafter is None else DraftSource(drafter, b"who drafts"),
        )
        if kind == "oracle":
            draft_by_oracle(engine, texts)
        elif drafter is not None:
            draft_eagerly(engine, 3)
        watch_openings(engine, happened, monkeypatch)
        with closing(engine):
            ask(chance, engine, case, kv_type, text, texts, happened)
        store = engine.cache.read_store()
        monkeypatch.undo()
        happened["encoded again"] += encoder.encoded > len(SIZES)
        happened["preempted"] += engine._scheduler.preemptions
        happened["drafted"] += engine._work.accepted_tokens
        happened["with a model"] += drafter is not None
        happened["read after a restart"] += start > 0 and store is not None and store.read_pages > 0


def ask(
    chance: random.Random,
    engine: Engine,
    case: str,
    kv_type: str,
    text: list[int],
    texts: list[list[int]],
    happened: Counter[str],
) -> None:
    """Ask at random times until all is answered, and compare the answers."""
    asked: dict[int, Asked] = {}
    events: dict[int, list[Any]] = {}
    for step in range(3000):
        if step < 24 and chance.random() < 0.25:
            prompt, shown = draw_prompt(chance, case, text)
            one = prompt, shown, chance.choice([1, 9, 20]), chance.choice([1, 1, 2, 4])
            for answer in answer_alone(case, kv_type, one).values():
                texts.append([*prompt, *(token for token, _ in answer if token is not None)])
            asked[engine.submit(make_request(case, one))] = one
            happened["four answers"] += one[3] == 4 and bool(shown)
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
    for request, one in asked.items():
        assert collect(events[request]) == answer_alone(case, kv_type, one)
    happened["answers about pictures"] += sum(bool(one[1]) for one in asked.values())


@pytest.mark.sampled(1)
@pytest.mark.timeout(3000 if amounts.is_exhaustive else 300)
@pytest.mark.parametrize("case", KINDS)
def test_no_schedule_with_pictures_changes_a_bit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = Counter[str]()
    for seed in range(max(choose_schedules(SCHEDULES), THOROUGH_SCHEDULES if amounts.is_thorough else DAILY_SCHEDULES)):
        folder = tmp_path / str(seed) if seed % 4 == 0 else None
        run_schedule(random.Random(seed), case, folder, happened, monkeypatch)
    print(case, dict(happened))
    if amounts.is_exhaustive and not amounts.family_schedules:
        kinds = {"preempted", "cached", "inside a picture", "encoded again", "drafted", "four answers"}
        kinds |= {"read after a restart", "together", "answers about pictures"}
        assert not kinds - {kind for kind, times in happened.items() if times}
