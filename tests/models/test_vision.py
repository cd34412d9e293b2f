"""Towers and texts with pictures against `transformers`, and equal bits however the work is divided."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_models import CASES, Golden, read_golden, write_folder, write_mmproj

from mlxr.cache.prefix import PageKeys
from mlxr.core.errors import ModelError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import SamplingParams
from mlxr.engine.engine import Engine
from mlxr.engine.pictures import STEP_S, Encoder, Picture, Pictures, Placed
from mlxr.engine.request import EngineRequest
from mlxr.formats import GGUFFile, open_gguf, open_safetensors
from mlxr.kernels.context import Context
from mlxr.model_files.files import read_contents
from mlxr.model_files.tower import TowerFile, find_tower, take_folder_tower, take_gguf_tower
from mlxr.models import Decoder, Model
from mlxr.models.families import model_from_folder, read_folder_tower, read_gguf_tower
from mlxr.models.tower import Multiply, NormRows, Tower, TowerSpec

PLACE = 120


@cache
def get_golden(case: str) -> Golden:
    return read_golden(case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeing")
    for case in CASES:
        write_folder(root / case, get_golden(case))
    return root


def open_model(folder: Path, device: str = "cpu") -> tuple[Decoder, TowerFile]:
    opened = open_safetensors(folder)
    contents = read_contents(opened)
    tower = take_folder_tower(opened, get_golden(folder.name).preprocessor, contents.config)
    assert tower is not None
    return Decoder(Context(device, threads=2 if device == "cpu" else None), contents.config, contents.tensors), tower


def finish(encoding: Any) -> Any:
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            return done.value


def encode_all(tower: Tower, golden: Golden) -> Any:
    return np.concatenate([finish(tower.encode(pixels)) for pixels in golden.pixels])


def place(golden: Golden, name: bytes = b"tower", order: tuple[int, ...] | None = None) -> Pictures:
    """Place the pictures, or tiles of them, over the runs of places; each picture covers a part of a run or all of it.

    Pictures in another `order` go where there are places, as far as these reach.
    """
    found = read_folder_tower(golden.config, golden.preprocessor)
    assert found is not None
    seen = [Picture(pixels, found[1].find_grid(pixels), name) for pixels in golden.pixels]
    placed, first, at = list[Placed](), 0, 0
    for number in order or ():
        at = golden.tokens.index(PLACE, at)
        placed.append(Placed(seen[number], at))
        at = placed[-1].stop
    if order:
        return Pictures(tuple(placed), len(golden.tokens))
    waiting = seen
    for is_place, run in itertools.groupby(golden.tokens, lambda token: token == PLACE):
        count = len(list(run))
        while is_place and count:
            taken = min(count, waiting[0].tokens - first)
            placed.append(Placed(waiting[0], at, first, taken))
            at, first, count = at + taken, first + taken, count - taken
            if first == waiting[0].tokens:
                first, _ = 0, waiting.pop(0)
        at += count
    assert not waiting
    return Pictures(tuple(placed), at)


def see(model: Decoder, tower: Tower, **options: Any) -> Encoder:
    """Return an encoder of pictures for a model."""
    config = model.config
    return Encoder(tower.encode, turns=config.turns_pictures, is_whole=config.sees_whole_pictures, **options)


def make_engine(
    model: Decoder, encoder: Encoder, chunk: int = 512, pages: int | None = None, **settings: Any
) -> Engine:
    stated: dict[str, Any] = {"page_size": 8, "max_sequences": 8, "draft": "off", "kv_type": "f32"} | settings
    chosen = ModelSettings(prefill_chunk_tokens=chunk, max_batch_tokens=max(chunk, 8), **stated)
    options: dict[str, Any] = {"memory_bytes": 1 << 26, "encoder": encoder, "fingerprint": b"a model"}
    return Engine(model, model.ctx, chosen, eos_ids=(), pages=pages, **options)


def run(engine: Engine, *requests: EngineRequest) -> dict[int, list[Any]]:
    """Return the events of each request, by its index."""
    ids = [engine.submit(request) for request in requests]
    events: dict[int, list[Any]] = {place: [] for place in range(len(ids))}
    while engine.has_work:
        for event in engine.step():
            events[ids.index(event.sequence_id)].append(event)
        engine.check()
    return events


def score(model: Decoder, tower: Tower, golden: Golden) -> Any:
    """Log-probabilities of the tokens after the first."""
    params = SamplingParams(max_tokens=1, logprobs=0)
    request = EngineRequest(golden.tokens, params, pictures=place(golden), scores_prompt=True)
    events = run(make_engine(model, see(model, tower)), request)[0]
    return np.array([info.chosen.logprob for info in events[0].prompt[1:]])


def expect(golden: Golden) -> Any:
    logits = golden.logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(golden.tokens) - 1), golden.tokens[1:]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_rows_and_answers_are_those_of_transformers(folders: Path, case: str, device: str) -> None:
    golden, (model, file) = get_golden(case), open_model(folders / case, device)
    tower = file.load(model.ctx)
    assert np.abs(encode_all(tower, golden) - golden.rows).max() < 1e-5
    assert np.abs(score(model, tower, golden) - expect(golden)).max() < 1e-4


def list_changes(spec: TowerSpec) -> list[TowerSpec]:
    """List towers that differ in one number each, with tensors of the same shapes."""
    changed = [replace(spec, eps=1e-2)] * bool(spec.layers)
    changed += [replace(spec, mean=(0.4, 0.4, 0.5)), replace(spec, deviation=(0.5, 0.6, 0.6))]
    if spec.taps:
        changed.append(replace(spec, taps=(0, 2)))
    if spec.window:
        changed += [replace(spec, window=spec.window + 1), replace(spec, whole_layers=spec.whole_layers[1:])]
    if spec.norms_all:
        changed.append(replace(spec, norms_all=False))
    if spec.slope != 1:
        changed.append(replace(spec, slope=1.0))
    if spec.theta is not None:
        changed.append(replace(spec, theta=500.0))
    for at, step in enumerate(spec.end):
        others = [replace(step, eps=0.3)] if isinstance(step, NormRows) else []
        others += [replace(step, activation=None)] if isinstance(step, Multiply) and step.activation else []
        changed += [replace(spec, end=(*spec.end[:at], other, *spec.end[at + 1 :])) for other in others]
    return changed


@pytest.mark.parametrize("case", CASES)
def test_a_changed_number_is_seen(folders: Path, case: str) -> None:
    golden, (model, file) = get_golden(case), open_model(folders / case, "reference")
    right = score(model, file.load(model.ctx), golden)
    for spec in list_changes(file.spec):
        assert np.abs(score(model, replace(file, spec=spec).load(model.ctx), golden) - right).max() > 1e-4, spec
    if model.config.sees_whole_pictures:
        contents = read_contents(open_safetensors(folders / case))
        for change in (lambda _: False, lambda attention: attention.window is None):
            layers = tuple(
                replace(layer, mixer=replace(layer.attention, whole_pictures=change(layer.attention)))
                for layer in contents.config.layers
            )
            other = Decoder(model.ctx, replace(contents.config, layers=layers), contents.tensors)
            assert np.abs(score(other, file.load(model.ctx), golden) - right).max() > 1e-4
    if not model.config.turns_pictures:
        return
    first, *others = place(golden).placed
    turned = Picture(first.picture.pixels, first.picture.grid[::-1], b"")  # as many rows, in another grid
    moved = Pictures((Placed(turned, first.start), *others), len(golden.tokens))
    assert not np.array_equal(moved.find_axes(0, 70), place(golden).find_axes(0, 70))
    assert moved.find_axes(200, 3).tolist() == [[184 + step for step in range(3)]] * 3  # 26 tokens take 10 places
    rope = model.config.attention.rope if model.config.attention is not None else None
    assert rope is not None
    assert rope.sections is not None
    assert {*rope.pair_axes} == {0, 1, 2}
    assert replace(rope, shuffles=False).pair_axes == sorted(rope.pair_axes)


def ask(golden: Golden, pictures: Pictures | None = None, **params: Any) -> EngineRequest:
    given: dict[str, Any] = {"max_tokens": 6, "logprobs": 2} | params
    return EngineRequest(golden.tokens, SamplingParams(**given), pictures=pictures or place(golden))


def list_bits(events: list[Any]) -> list[tuple[int, int, float]]:
    return [(event.index, event.token_id, event.logprob) for event in events if event.token_id is not None]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same_however_the_work_is_divided(
    folders: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, (model, file) = get_golden(case), open_model(folders / case)
    tower = file.load(model.ctx)
    rows = encode_all(tower, golden)
    monkeypatch.setattr("mlxr.models.tower.PIECE_ROWS", 21)
    assert np.array_equal(encode_all(tower, golden), rows)
    monkeypatch.undo()
    assert np.array_equal(finish(tower.encode(*golden.pixels)), rows)
    alone = list_bits(run(make_engine(model, see(model, tower)), ask(golden))[0])
    text = EngineRequest(golden.tokens[:9] * 3, SamplingParams(max_tokens=9, logprobs=2))
    text_alone = list_bits(run(make_engine(model, see(model, tower)), text)[0])
    assert len(alone) == 6
    for chunk in (5, 16, 64):
        encoder = see(model, tower, nbytes=1)  # which keeps one picture
        engine = make_engine(model, encoder, chunk)
        other = place(golden, order=(1, 0)) if chunk == 64 else None
        found = run(engine, ask(golden), text, ask(golden, n=2, temperature=0.8, seed=3), *[ask(golden)] * bool(other))
        assert list_bits(found[0]) == alone
        assert list_bits(found[1]) == text_alone
        again = run(engine, ask(golden))[0]
        assert list_bits(again) == alone
        assert again[-1].usage.cached_tokens >= 32
    # pages for one sequence alone: others are preempted, and their pictures are encoded again
    tight = see(model, tower, nbytes=1)
    engine = make_engine(model, tight, 16, pages=len(golden.tokens) // 8 + 4)
    found = run(engine, *[ask(golden)] * 3)
    assert all(list_bits(events) == alone for events in found.values())


@pytest.mark.parametrize("case", CASES)
def test_prefixes_are_shared_and_no_picture_is_encoded_twice(folders: Path, case: str, tmp_path: Path) -> None:
    golden, (model, file) = get_golden(case), open_model(folders / case)
    tower = file.load(model.ctx)
    stored = {"store_folder": str(tmp_path), "store_bytes": 1 << 24}
    encoder = see(model, tower)
    engine = make_engine(model, encoder, **stored)
    first = run(engine, ask(golden))[0]
    longer = EngineRequest([*golden.tokens, *range(1, 8)], SamplingParams(max_tokens=4), pictures=place(golden))
    fresh = list_bits(run(make_engine(model, see(model, tower)), longer)[0])
    assert [token for _, token, _ in list_bits(run(engine, longer)[0])] == [token for _, token, _ in fresh]
    assert encoder.encoded == len({(one.shape, one.tobytes()) for one in golden.pixels})
    engine.close()
    later = see(model, tower)
    engine = make_engine(model, later, **stored)
    events = run(engine, longer)[0]
    assert [token for _, token, _ in list_bits(events)] == [token for _, token, _ in fresh]
    assert later.encoded == 0
    assert events[-1].usage.cached_tokens >= 64
    assert first[-1].usage.cached_tokens == 0
    # a prompt that leaves the first one inside the second picture's page finds the pages before it
    swapped = place(golden, order=(0, 0))
    assert run(engine, ask(golden, swapped))[0][-1].usage.cached_tokens <= max(40, swapped.placed[1].start)
    assert later.encoded <= 1
    engine.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_pictures_of_several_prompts_are_encoded_together(breaks: bool) -> None:
    """As many as fit are, those that are needed first; once one of them fails, each is encoded by itself."""
    begun: list[list[int]] = []

    def encode(*pictures: Any) -> Any:
        begun.append([int(pixels[0, 0, 0]) for pixels in pictures])
        yield
        if breaks and len(pictures) > 1:
            raise MemoryError
        return np.repeat(np.array(begun[-1], np.float32), 4)[:, None]

    seen = [Picture(np.full((2, 2, 3), shade, np.uint8), (2, 2), b"") for shade in range(5)]
    one, other = (
        Pictures(tuple(Placed(seen[number], 4 * at) for at, number in enumerate(numbers)), 4 * len(numbers))
        for numbers in ((0, 1, 2, 3), (4, 0))
    )
    encoder = Encoder(encode, together=12, nbytes=1 if breaks else 1 << 20)
    for _ in range(9):
        encoder.begin_step()
        tokens = [encoder.limit(pictures, start, 4) for pictures in (one, other) for start in range(0, 8, 4)]
        if encoder.is_wanted:
            assert encoder.waits_for(one) or encoder.waits_for(other)
            encoder.advance(is_alone=False)
    if breaks:
        assert begun[:2] == [[0, 1, 4], [0]]
        assert {len(numbers) for numbers in begun[1:]} == {1}
        return
    assert begun == [[0, 1, 4]]
    assert tokens == [4] * 4
    assert encoder.encoded == 3
    rows = encoder.place([type("Part", (), {"start_token": 0, "token_ids": [0] * 8, "pictures": other})()])[0]
    assert rows is not None
    assert rows.values.ravel().tolist() == [4] * 4 + [0] * 4


def test_names_of_pages_follow_what_is_seen() -> None:
    golden = get_golden(CASES[0])
    pixels = np.zeros((64, 96, 3), np.uint8)
    shapes = [(64, 96), (96, 64)]
    names = {
        Picture(pixels.reshape(*shape, 3), (shape[0] // 16, shape[1] // 16), tower).name
        for shape, tower in itertools.product(shapes, (b"one", b"two"))
    }
    assert len(names) == 4

    def name(extra: Callable[[int, int], bytes] | None) -> list[bytes]:
        return PageKeys(b"root", 8, extra).cover(golden.tokens, len(golden.tokens) // 8)

    plain, shown = name(None), name(place(golden).name_page)
    assert plain[0] == shown[0]  # a page of text, as without pictures
    assert not {*plain[1:]} & {*shown[1:]}
    for other in (place(golden, b"other"), place(golden, order=(0, 0))):
        assert name(other.name_page)[0] == plain[0]
        assert name(other.name_page)[-1] != shown[-1]


@pytest.mark.parametrize("case", CASES)
def test_a_file_beside_a_model_has_the_same_tower(folders: Path, case: str, tmp_path: Path) -> None:
    golden, (model, file) = get_golden(case), open_model(folders / case)
    other = next(one for one in CASES if one != case)
    write_mmproj(tmp_path / "mmproj-a-f16.gguf", other)  # of another model, and so passed over
    path = write_mmproj(tmp_path / "mmproj-b-bf16.gguf", case)
    beside = open_gguf(path)
    family, spec = read_gguf_tower(beside.metadata, beside.tensors)
    bounds = "least_pixels", "most_pixels", "tile", "most_tiles"  # those of all files of some families
    unstated = bounds if case in ("lfm2vl", "glm4v", "glmocr") else ()
    assert (family, replace(spec, **{key: getattr(file.spec, key) for key in unstated})) == (file.family, file.spec)
    found, reason = find_tower(tmp_path / "model.gguf", beside, model.config)
    assert found is not None, reason
    assert np.array_equal(encode_all(found.load(model.ctx), golden), encode_all(file.load(model.ctx), golden))
    assert found.fingerprint != file.fingerprint
    found.close()
    nothing = find_tower(folders / "model.gguf", beside, model.config)
    assert nothing[0] is None
    assert "no file mmproj*.gguf beside" in nothing[1]
    beside.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.projector_type": "ldp"}, "clip.projector_type is 'ldp', which does not run"),
        ({"clip.vision.patch_size": 0}, "clip.vision.patch_size"),
        ({"clip.vision.attention.head_count": 3}, "3 heads of 32 columns"),
        ({"clip.vision.block_count": 1 << 30}, "clip.vision.block_count"),
        ({"clip.vision.image_size": 0}, "clip.vision.image_size"),
        ({"clip.vision.image_std": [0.0, 1.0, 1.0]}, "clip.vision.image_std"),
        ({"clip.vision.projection_dim": 64}, "take the tower of the same model"),
        ({"clip.vision.image_size": 8 * 7}, "position_embd.weight has shape"),
    ],
)
def test_files_that_lie_are_refused_by_name(
    folders: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model: Model = open_model(folders / "qwen35")[0].config
    path = write_mmproj(tmp_path / "mmproj.gguf", "qwen35", **changes)

    def load(file: GGUFFile) -> Tower:
        return take_gguf_tower(file, model).load(Context("reference"))

    with open_gguf(path) as file, pytest.raises(ModelError, match=re.escape(message)):
        load(file)


def test_older_folders_state_text_and_tower_together() -> None:
    config = get_golden("qwen25vl").config
    rope = config["text_config"]["rope_parameters"]
    flat = config["text_config"] | {key: config[key] for key in ("architectures", "vision_config")}
    flat |= {"model_type": "qwen2_5_vl", "tie_word_embeddings": False, "rope_theta": rope["rope_theta"]}
    flat |= {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    assert model_from_folder(flat) == model_from_folder(config)
    bounds = {"min_pixels": 1024, "max_pixels": 6144, "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6]}
    assert read_folder_tower(flat, bounds) == read_folder_tower(config, get_golden("qwen25vl").preprocessor)


def test_a_tensor_of_another_shape_is_refused(folders: Path) -> None:
    model, file = open_model(folders / "qwen3vl", "reference")
    tensors = {name: tensor for name, tensor in file.tensors.items() if "blocks.1.attn.qkv" not in name}
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight is missing"):
        replace(file, tensors=tensors).load(model.ctx)
    assert "merge.fc1.weight" in file.family.name_folder(file.spec, file.tensors)


def test_an_encoding_that_fails_ends_its_answers_alone(folders: Path) -> None:
    golden, (model, _) = get_golden("qwen35"), open_model(folders / "qwen35", "reference")

    def fail(_: Any) -> Any:
        yield
        raise ValueError("broken")

    engine = make_engine(model, Encoder(fail))
    found = run(engine, ask(golden), EngineRequest([1, 2, 3], SamplingParams(max_tokens=3)))
    assert found[0][-1].error == "the picture could not be encoded: ValueError: broken"
    assert found[1][-1].error is None
    assert not engine.has_work


def test_a_picture_that_is_begun_is_finished_first() -> None:
    """This holds even if a request of higher priority comes before it, so that its work is not lost."""
    begun: list[int] = []

    def encode(pixels: Any) -> Any:
        begun.append(int(pixels[0, 0, 0]))
        yield
        yield
        return np.zeros((1, 1), np.float32)

    first, second = (
        Pictures((Placed(Picture(np.full((1, 1, 3), shade, np.uint8), (1, 1), b""), 0),), 1) for shade in (1, 2)
    )
    times = itertools.count()
    encoder = Encoder(encode, clock=lambda: next(times) * STEP_S / 2)
    for asking in ((first, second), (second, first), (second, first), (second, first)):
        encoder.begin_step()
        assert [encoder.limit(pictures, 0, 1) for pictures in asking].count(0) >= 1
        encoder.advance(is_alone=False)
    assert begun == [1, 2]
    encoder.begin_step()
    assert encoder.limit(first, 0, 1) == 1
