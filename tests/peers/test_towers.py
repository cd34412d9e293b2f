"""Towers of every kind against llama.cpp's libmtmd: the rows of pictures that need no other size, and the loss of each
token of the text around them, in random files as its converter writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

try:
    from mtmd_rows import MARK, Eyes
except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
    pytest.skip(f"llama.cpp has no libmtmd: {error}", allow_module_level=True)
from llama_losses import open_llama

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("models", "shared")]
from test_vision import finish, make_engine, run, see  # noqa: E402 -- needs the path above
from vision_models import draw_picture, write_chat_folder, write_mmproj  # noqa: E402

from mlxr.cli.main import main  # noqa: E402
from mlxr.core.types import SamplingParams  # noqa: E402
from mlxr.engine.pictures import Picture, Pictures, Placed  # noqa: E402
from mlxr.engine.request import EngineRequest  # noqa: E402
from mlxr.formats import open_safetensors  # noqa: E402
from mlxr.kernels.context import Context  # noqa: E402
from mlxr.model_files.files import read_contents  # noqa: E402
from mlxr.model_files.tower import find_tower  # noqa: E402
from mlxr.models import Decoder  # noqa: E402

TEXT = f"the quick brown fox {MARK} jumps over the lazy dog, and the quick brown fox again"
LEAST_TOKENS = 0.01, 1e-3  # of a loss, and of the largest number of a row
# The rows and columns that a picture becomes; None: those of its square, as the only ones.
CASES: dict[str, tuple[int, int] | None] = {
    "gemma3": None,
    "gemma4": (8, 10),
    "gemma4e": (8, 10),
    "gemma4unified": (8, 10),
    "glm4v": (4, 5),
    "glmocr": (4, 5),
    "internvl": None,
    "lfm2vl": (9, 10),
    "mistral3": (2, 3),
    "pixtral": (3, 4),
    "qwen25vl": (4, 6),
    "qwen2vl": (4, 6),
    "qwen35": (4, 6),
    "qwen3vl": (4, 6),
    "smolvlm": None,
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_rows_and_losses_are_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / case, case)
    model_path = tmp_path / "model.gguf"
    assert main(["convert", str(folder), str(model_path), "--type", "f32"]) == 0
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", case)
    opened = open_safetensors(folder)
    contents = read_contents(opened)
    ctx = Context("cpu", threads=2)
    model = Decoder(ctx, contents.config, contents.tensors)
    file, reason = find_tower(model_path, opened, contents.config, mmproj)
    assert file is not None, reason
    spec, tower = file.spec, file.load(ctx)
    sides = CASES[case]
    height, width = (spec.patch * spec.side,) * 2 if sides is None else (side * spec.factor for side in sides)
    pixels = draw_picture(height, width)
    llama = open_llama(model_path, 1024, n_threads=2)
    eyes = Eyes(mmproj, llama)
    words, theirs = eyes.read(TEXT, [pixels])
    rows = [part for part in words if not isinstance(part, list)]
    ours = finish(tower.encode(pixels))
    assert [one.shape for one in rows] == [ours.shape]
    assert np.abs(rows[0] - ours).max() < LEAST_TOKENS[1] * np.abs(ours).max()
    tokens = list[int]()
    placed = list[Placed]()
    for part in words:
        if isinstance(part, list):
            tokens += part
        else:
            placed.append(Placed(Picture(pixels, spec.find_grid(pixels), b"tower"), len(tokens)))
            tokens += [0] * len(part)
    request = EngineRequest(
        tokens,
        SamplingParams(max_tokens=1, logprobs=0),
        pictures=Pictures(tuple(placed), len(tokens)),
        scores_prompt=True,
    )
    events: Any = run(make_engine(model, see(model, tower)), request)[0]
    start, stop = placed[0].start, placed[0].stop
    losses = [-info.chosen.logprob for info in events[0].prompt[1:]]
    kept = losses[: start - 1] + losses[stop - 1 :]
    assert len(kept) == len(theirs)
    assert np.abs(np.array(kept) - theirs).max() < LEAST_TOKENS[0]
    eyes.close()
