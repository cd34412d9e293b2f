"""Pictures on a GPU: rows over embeddings, three axes, rows behind the first layers, and steps that are recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import REFERENCE

from mlxr.engine.pictures import Encoder
from mlxr.engine.request import EngineRequest
from mlxr.formats import open_safetensors
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.graph import CompiledStep, RecordedStep
from mlxr.model_files.files import read_contents
from mlxr.model_files.tower import take_folder_tower
from mlxr.models import Decoder

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from test_vision import ask, make_engine, place, run
from vision_models import read_golden, write_folder


def answer(ctx: Context, folder: Path, case: str) -> list[list[Any]]:
    """A question about two pictures, and a text beside it: tokens and log-probabilities of both answers."""
    golden, opened = read_golden(case), open_safetensors(folder)
    contents = read_contents(opened)
    tower = take_folder_tower(opened, golden.preprocessor, contents.config)
    assert tower is not None
    model = Decoder(ctx, contents.config, contents.tensors)
    engine = make_engine(model, Encoder(tower.load(REFERENCE).encode), 16)
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
