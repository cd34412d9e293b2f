"""Ears and texts with sounds against `transformers`, and equal bits however the work is divided."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hearing_models import GOLDENS, PLACE, SAMPLES, draw_sound, name_gguf_tensors, read_hearing, write_hearing_folder
from test_vision import PLACE as PICTURE
from test_vision import finish, list_bits, make_engine, run, see
from vision_models import Golden, write_mmproj

from mlxr.core.errors import ModelError
from mlxr.core.types import SamplingParams
from mlxr.engine.pictures import Encoder, Picture, Pictures, Placed
from mlxr.engine.request import EngineRequest
from mlxr.formats import TensorToWrite, open_gguf, open_safetensors, write_gguf
from mlxr.kernels.context import ISAS, Context, load_native
from mlxr.model_files.files import read_contents
from mlxr.model_files.tower import TowerFile, take_folder_tower, take_gguf_tower
from mlxr.models import Decoder
from mlxr.models.hearing import Ear, EarSpec
from mlxr.models.tower import NormRows
from mlxr.pictures import sounds

CASES = sorted(path.stem for path in GOLDENS.glob("*.json"))


@cache
def get_golden(case: str) -> tuple[Golden, Any]:
    return read_hearing(case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hearing")
    for case in CASES:
        write_hearing_folder(root / case, case)
    return root


def open_model(folder: Path, device: str = "cpu", **options: Any) -> tuple[Decoder, TowerFile]:
    opened = open_safetensors(folder)
    contents = read_contents(opened)
    tower = take_folder_tower(opened, get_golden(folder.name)[0].preprocessor, contents.config)
    assert tower is not None
    assert tower.ear is not None, tower.deaf
    options = options or ({"threads": 2} if device == "cpu" else {})
    return Decoder(Context(device, **options), contents.config, contents.tensors), tower


def take_spec(file: TowerFile) -> EarSpec:
    assert file.ear is not None
    return file.ear[1]


def listen(model: Decoder, file: TowerFile, ear: Ear | None = None) -> Encoder:
    """Return an encoder of pictures and sounds for a model."""
    tower, heard = file.load(model.ctx), ear or file.load_ear(model.ctx)

    def encode(pixels: Any) -> Any:
        return heard.encode(pixels) if pixels.dtype == np.float32 else tower.encode(pixels)

    config = model.config
    return Encoder(encode, turns=config.turns_pictures, is_whole=config.sees_whole_pictures, nbytes=1)


def place(golden: Golden, frames: Any, file: TowerFile) -> Pictures:
    """The picture and the sound where their places are."""
    seen = Picture(golden.pixels[0], file.spec.find_grid(golden.pixels[0]), b"tower")
    heard = Picture(frames, (take_spec(file).count_rows(frames), 1), b"tower")
    places = golden.tokens.index(PICTURE), golden.tokens.index(PLACE)
    return Pictures((Placed(seen, places[0]), Placed(heard, places[1])), len(golden.tokens))


def expect(golden: Golden) -> Any:
    logits = golden.logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(golden.tokens) - 1), golden.tokens[1:]]


def score(model: Decoder, file: TowerFile, case: str, encoder: Encoder) -> Any:
    golden, frames = get_golden(case)
    params = SamplingParams(max_tokens=1, logprobs=0)
    request = EngineRequest(golden.tokens, params, pictures=place(golden, frames, file), scores_prompt=True)
    events = run(make_engine(model, encoder), request)[0]
    return np.array([info.chosen.logprob for info in events[0].prompt[1:]])


@pytest.mark.parametrize("case", CASES)
def test_frames_rows_and_answers_are_those_of_transformers(folders: Path, case: str) -> None:
    golden, frames = get_golden(case)
    for device in ("reference", "cpu"):
        model, file = open_model(folders / case, device)
        cut = sounds.cut(draw_sound(SAMPLES[case]), dict(take_spec(file).rule))
        assert [piece.shape for piece in cut] == [frames.shape]
        assert np.abs(cut[0] - frames).max() < 1e-5
        rows = finish(file.load_ear(model.ctx).encode(frames))
        assert rows.shape == golden.rows.shape
        assert np.abs(rows - golden.rows).max() < 1e-5
        assert np.abs(score(model, file, case, listen(model, file)) - expect(golden)).max() < 1e-4


def list_changes(spec: EarSpec) -> list[EarSpec]:
    """List ears that differ in one number each, with tensors of the same shapes."""
    changed = []
    for name in ("window", "cap"):
        if hasattr(spec.layers[0], name):
            other = replace(spec.layers[0], **{name: getattr(spec.layers[0], name) * 0.5 // 1 or 1})  # type: ignore[type-var]
            changed.append(replace(spec, layers=(replace(other, window=int(other.window)), *spec.layers[1:])))  # type: ignore[attr-defined,type-var]
    for at, step in enumerate(spec.end):
        if isinstance(step, NormRows):
            changed.append(replace(spec, end=(*spec.end[:at], replace(step, eps=0.3), *spec.end[at + 1 :])))
    return changed


@pytest.mark.parametrize("case", CASES)
def test_a_changed_number_is_heard(folders: Path, case: str) -> None:
    golden, frames = get_golden(case)
    model, file = open_model(folders / case, "reference")
    assert file.ear is not None
    family, spec = file.ear
    for changed in list_changes(spec):
        ear = Ear(model.ctx, changed, family.name_folder(file.tensors))
        assert np.abs(finish(ear.encode(frames)) - golden.rows).max() > 1e-4, changed
    if not model.config.sees_whole_pictures:
        return
    encoder = listen(model, file)
    whole = Picture.is_sound
    try:
        Picture.is_sound = property(lambda self: False)  # type: ignore[method-assign,assignment]
        assert np.abs(score(model, file, case, encoder) - expect(golden)).max() > 1e-4  # no sound is seen as a whole
    finally:
        Picture.is_sound = whole  # type: ignore[method-assign]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same_however_the_work_is_divided(folders: Path, case: str) -> None:
    golden, frames = get_golden(case)
    model, file = open_model(folders / case)
    request = EngineRequest(
        golden.tokens, SamplingParams(max_tokens=6, logprobs=2), pictures=place(golden, frames, file)
    )
    alone = list_bits(run(make_engine(model, listen(model, file)), request)[0])
    assert len(alone) == 6
    for chunk in (5, 16):
        engine = make_engine(model, listen(model, file), chunk)
        text = EngineRequest(golden.tokens[:9] * 3, SamplingParams(max_tokens=9, logprobs=2))
        found = run(engine, request, text, request)
        assert list_bits(found[0]) == list_bits(found[2]) == alone
        again = run(engine, request)[0]
        assert list_bits(again) == alone
        assert again[-1].usage.cached_tokens >= 64
    rows = finish(file.load_ear(model.ctx).encode(frames))
    for isa in [one for one in ISAS if one in load_native().available_isas()]:
        ctx = Context("cpu", threads=1, isa=isa)
        assert np.array_equal(finish(file.load_ear(ctx).encode(frames)), rows)
    assert see(model, file.load(model.ctx)).is_whole == model.config.sees_whole_pictures


@pytest.mark.parametrize("case", CASES)
def test_a_file_beside_a_model_has_the_same_ear(folders: Path, case: str, tmp_path: Path) -> None:
    golden, frames = get_golden(case)
    model, file = open_model(folders / case)
    path = write_mmproj(tmp_path / "eyes.gguf", {"conformer": "gemma4e", "plain": "gemma4unified"}[case])
    eyes = open_gguf(path)
    metadata, tensors = name_gguf_tensors(golden)
    named = {name: tensor.to_float32().reshape(tensor.shape) for name, tensor in eyes.tensors.items()} | tensors

    def take(**changes: Any) -> TowerFile:
        written = [TensorToWrite.from_array(name, "f32", np.ascontiguousarray(one)) for name, one in named.items()]
        write_gguf(tmp_path / "mmproj.gguf", {**eyes.metadata, **metadata, **changes}, written)
        return take_gguf_tower(open_gguf(tmp_path / "mmproj.gguf"), model.config)

    beside = take()
    assert beside.ear is not None, beside.deaf
    assert beside.ear == file.ear
    assert np.array_equal(
        finish(beside.load_ear(model.ctx).encode(frames)), finish(file.load_ear(model.ctx).encode(frames))
    )
    beside.close()
    for changes, reason in (
        ({"clip.audio.projector_type": "ultravox"}, "clip.audio.projector_type is 'ultravox', which does not run yet"),
        ({"clip.audio.projection_dim": 64}, "the rows of its ear are 64 wide, those of the model 48"),
    ):
        other = take(**changes)
        assert other.ear is None
        assert reason in other.deaf
        other.close()
    if case == "conformer":
        del named["a.blk.1.attn_k.weight"]
        with closing(take()) as broken, pytest.raises(ModelError, match=r"blk\.1\.attn_k\.weight is missing"):
            broken.load_ear(model.ctx)
    eyes.close()
