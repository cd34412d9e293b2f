"""Pictures on a GPU: towers, rows over embeddings, three axes, rows behind the first layers, and steps that are
recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE

from mlxr.core.errors import DeviceError
from mlxr.engine.pictures import Encoder
from mlxr.engine.request import EngineRequest
from mlxr.formats import open_gguf, open_safetensors
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import CompiledStep, RecordedStep
from mlxr.loading import load
from mlxr.model_files.files import read_contents
from mlxr.model_files.tower import TowerFile, take_folder_tower, take_gguf_tower
from mlxr.models import Decoder

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from hearing_models import read_hearing
from test_vision import ask, finish, make_engine, place, run
from vision_models import CASES, read_golden, write_chat_folder, write_folder, write_mmproj

QUICK = ("gemma3", "pixtral", "qwen25vl")  # means of squares; a gate and axes; windows
LEAST_COSINE = 0.9999


def open_tower(folder: Path, case: str) -> TowerFile:
    """The tower of a case, written to the folder."""
    golden = read_golden(case)
    write_folder(folder, golden)
    opened = open_safetensors(folder)
    tower = take_folder_tower(opened, golden.preprocessor, read_contents(opened).config)
    assert tower is not None
    return tower


def find_cosine(found: Any, expected: Any) -> float:
    """Return the cosine of the row that is farthest from the right one."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / lengths).min())


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param(sorted({*CASES} - {*QUICK}), marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_rows_are_those_of_the_reference(gpu: Context, cases: list[str], tmp_path: Path) -> None:
    """All pictures are encoded in one batch; at each pause the text's own types are back."""
    for case in cases:
        tower, pixels = open_tower(tmp_path / case, case), read_golden(case).pixels
        gpu.gpu.activations, pauses = gpu.gpu.mx.bfloat16, 0
        encoding = tower.load(gpu).encode(*pixels)
        try:
            while next(encoding) is None:
                pauses += 1
                assert gpu.gpu.activations == gpu.gpu.mx.bfloat16
        except StopIteration as done:
            rows = done.value
        assert pauses > tower.spec.layers
        assert find_cosine(rows, read_golden(case).rows) > LEAST_COSINE, case


def test_towers_of_16_bits_are_multiplied_in_these(
    gpu: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu.gpu, "narrow", True)
    contents = read_contents(open_safetensors(open_tower(tmp_path, "qwen3vl").path))
    with open_gguf(write_mmproj(tmp_path / "mmproj.gguf", "qwen3vl", matrices="f16")) as file:
        tower, pixels = take_gguf_tower(file, contents.config), read_golden("qwen3vl").pixels
        gpu.ledger.reset()
        found, expected = (finish(tower.load(ctx).encode(*pixels)) for ctx in (gpu, REFERENCE))
    assert 1 - 1e-9 > find_cosine(found, expected) > LEAST_COSINE
    assert {"matmul f16"} <= {kernel.variant for kernel in gpu.ledger.snapshot().dispatches}


def test_what_a_gpu_cannot_compute_the_processor_does(
    gpu: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    golden, frames = read_hearing("conformer")
    loaded = load(write_chat_folder(tmp_path, golden), ctx=gpu)
    assert loaded.tower is not None
    encode, heard = loaded.open_tower(), loaded.tower.load_ear(REFERENCE)
    assert find_cosine(finish(encode(frames)), finish(heard.encode(frames))) > LEAST_COSINE
    assert "its ear runs on the processor: the steps that hear are those of processors alone" in caplog.text
    finish(encode(*golden.pixels))
    assert "tower" not in caplog.text

    def refuse(tower: TowerFile, ctx: Context) -> Any:
        if ctx.gpu is not None:
            raise DeviceError("tensor x has a type without a GPU kernel")
        return load_tower(tower, ctx)

    load_tower = TowerFile.load
    monkeypatch.setattr(TowerFile, "load", refuse)
    finish(loaded.open_tower()(*golden.pixels))
    assert "its tower runs on the processor: tensor x has a type without a GPU kernel" in caplog.text
    loaded.close()


def answer(ctx: Context, folder: Path, case: str) -> list[list[Any]]:
    """A question about two pictures, and a text beside it: tokens and log-probabilities of both answers."""
    golden, opened = read_golden(case), open_safetensors(folder)
    contents = read_contents(opened)
    tower = take_folder_tower(opened, golden.preprocessor, contents.config)
    assert tower is not None
    model = Decoder(ctx, contents.config, contents.tensors)
    config = contents.config
    encoder = Encoder(tower.load(ctx).encode, turns=config.turns_pictures, is_whole=config.sees_whole_pictures)
    engine = make_engine(model, encoder, 16)
    params = {"temperature": 0, "max_tokens": 4}
    shown = ask(golden, place(golden), **params)
    text = EngineRequest(golden.tokens[:9], shown.params)
    events = run(engine, shown, text)
    return [[(one.token_id, one.logprob) for one in events[index] if one.token_id is not None] for index in range(2)]


@pytest.mark.parametrize("case", ["qwen3vl", "qwen35", "gemma3"])
def test_answers_are_those_of_the_reference(gpu: Context, case: str, tmp_path: Path) -> None:
    write_folder(tmp_path, read_golden(case))
    within = 2e-2 if gpu.gpu.narrow else 1e-3  # products of 16 bits
    for found, expected in zip(answer(gpu, tmp_path, case), answer(REFERENCE, tmp_path, case), strict=True):
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in expected], abs=within)
    step = gpu.gpu.steps._current
    assert step is not None
    assert isinstance(step.step, RecordedStep | CompiledStep)
