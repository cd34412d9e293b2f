"""Towers of every kind against llama.cpp's libmtmd: rows of pictures in sizes that both keep, and the loss of each
token of the text around them, in random files as its converter writes them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

try:
    from mtmd_rows import MARK, Eyes
except (ImportError, OSError, RuntimeError, FileNotFoundError) as error:
    pytest.skip(f"llama.cpp has no libmtmd: {error}", allow_module_level=True)
import llama_cpp
from llama_losses import open_llama

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("models", "shared")]
from test_vision import finish, make_engine, run, see  # noqa: E402 -- needs the path above
from vision_models import Golden, draw_picture, read_golden, write_chat_folder, write_mmproj  # noqa: E402

from mlxr.cli.main import main  # noqa: E402
from mlxr.core.types import SamplingParams  # noqa: E402
from mlxr.engine.pictures import Picture, Pictures, Placed  # noqa: E402
from mlxr.engine.request import EngineRequest  # noqa: E402
from mlxr.formats import TensorToWrite, open_gguf, open_safetensors, write_gguf  # noqa: E402
from mlxr.kernels.context import Context  # noqa: E402
from mlxr.kernels.tensor import read_numbers  # noqa: E402
from mlxr.model_files.files import read_contents  # noqa: E402
from mlxr.model_files.tower import find_tower  # noqa: E402
from mlxr.models import Decoder  # noqa: E402

TEXT = f"the quick brown fox {MARK} jumps over the lazy dog, and the quick brown fox again"
MOST_ROWS = 1e-3  # of the largest number
# The rows and columns that a picture becomes, or None for those of its square, and how far losses may be apart; None
# if llama.cpp's text goes on otherwise: it detects E2B by its width, and has rows of its own for breaks of lines.
# Rows differ by up to 9e-4 as libmtmd rounds pixels to f16, by 4e-7 where it does not. It cuts all of SmolVLM's.
CASES: dict[str, tuple[tuple[int, int] | None, float | None]] = {
    "gemma3": (None, 0.01),
    "gemma4": ((8, 10), 0.01),
    "gemma4e": ((8, 10), None),
    "gemma4unified": ((8, 10), 0.01),
    "glm4v": ((4, 5), 0.01),
    "glmocr": ((4, 5), 0.01),
    "internvl": (None, 0.01),
    "mistral3": ((3, 4), None),
    "pixtral": ((4, 5), None),
    "qwen25vl": ((9, 16), 0.01),
    "qwen2vl": ((4, 6), 0.01),
    "qwen35": ((4, 6), 0.01),
    "qwen3vl": ((4, 6), 0.01),
}


def change(case: str) -> Golden:
    """Return the tiny model as llama.cpp runs it. That takes only every sixth layer of Gemma 3 for one without a
    window, caps Gemma 4's logits, and has one size of windows for Qwen2.5-VL. In Qwen3-VL it leaves a pair unturned
    whose axis has no pairs left, which `transformers` turns by time: one of the two slowest in real models, but a quick
    one here.
    """
    golden = read_golden(case)
    text, tower = dict(golden.config["text_config"]), dict(golden.config["vision_config"])
    if case == "gemma3":
        text["layer_types"] = ["sliding_attention"] * text["num_hidden_layers"]
    elif case.startswith("gemma4"):
        text["final_logit_softcapping"] = 30.0
    elif case == "qwen3vl":
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [3, 3, 2]}
    elif case == "qwen25vl":
        tower["window_size"] = 112
    return replace(golden, config=golden.config | {"text_config": text, "vision_config": tower})


def roll_positions(path: Path, target: Path) -> Path:
    """Write a tower of InternVL as libmtmd reads it: its extra token has the last position, not the first."""
    with open_gguf(path) as file:
        numbers = {name: read_numbers(tensor) for name, tensor in file.tensors.items()}
        numbers["v.position_embd.weight"] = np.roll(numbers["v.position_embd.weight"], -1, axis=0)
        tensors = [TensorToWrite.from_array(name, "f32", np.ascontiguousarray(numbers[name])) for name in numbers]
        write_gguf(target, dict(file.metadata), tensors)
    return target


@pytest.mark.parametrize("case", sorted(CASES))
def test_rows_and_losses_are_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / case, golden := change(case))
    model_path = tmp_path / "model.gguf"
    assert main(["convert", str(folder), str(model_path), "--type", "f32"]) == 0
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", golden)
    opened = open_safetensors(folder)
    contents = read_contents(opened)
    ctx = Context("cpu", threads=2)
    model = Decoder(ctx, contents.config, contents.tensors)
    file, reason = find_tower(model_path, opened, contents.config, mmproj)
    assert file is not None, reason
    spec, tower = file.spec, file.load(ctx)
    sides, most_loss = CASES[case]
    height, width = (spec.patch * spec.side,) * 2 if sides is None else (side * spec.factor for side in sides)
    pixels = draw_picture(height, width)
    llama = open_llama(model_path, 1024, n_threads=2, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    eyes = Eyes(roll_positions(mmproj, tmp_path / "rolled.gguf") if case == "internvl" else mmproj, llama)
    words, theirs = eyes.read(TEXT, [pixels])
    ours = finish(tower.encode(pixels))
    rows = [part[np.abs(part).max(axis=1) > 0] for part in words if not isinstance(part, list)]  # without breaks
    assert min(np.abs(part - ours).max() for part in rows) < MOST_ROWS * np.abs(ours).max()
    if most_loss is None:
        return
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
    start, stop = placed[0].start, placed[0].stop
    events: Any = run(make_engine(model, see(model, tower)), request)[0]
    losses = [-info.chosen.logprob for info in events[0].prompt[1:]]
    kept = losses[: start - 1] + losses[stop:]  # without the token behind the picture
    assert len(kept) == len(theirs)
    assert np.abs(np.array(kept) - theirs).max() < most_loss
    eyes.close()
