"""Files of towers that lie in places where it matters: each is refused by an error of ours, or encodes a picture."""

from __future__ import annotations

from pathlib import Path

import amounts
import numpy as np
import pytest
from test_mutated_models import File, change_number, change_value
from test_vision import finish, open_model
from vision_models import read_golden, write_folder, write_mmproj

from mlxr.core.errors import MlxrError
from mlxr.formats import TensorSource, open_gguf
from mlxr.kernels.context import Context
from mlxr.model_files.tower import take_gguf_tower
from mlxr.models import Model

FILES, LARGEST = 200, 256


def mutate(whole: File, random: np.random.Generator) -> File:
    """Change or leave out up to three values of the metadata, and perhaps reshape or drop a tensor."""
    metadata, tensors = dict(whole.metadata), list(whole.tensors)
    keys = [key for key in metadata if key.startswith("clip.")]
    for key in map(str, random.choice(keys, int(random.integers(4)), replace=False)):
        metadata[key] = change_value(random, metadata[key])
        if random.random() < 0.1:
            del metadata[key]
    place = int(random.integers(len(tensors)))
    if random.random() < 0.1:
        del tensors[place]
    elif random.random() < 0.2:
        one = tensors[place]
        shape = tuple(min(LARGEST, change_number(random, size)) for size in one.shape)
        data = np.zeros(int(np.prod(shape)), np.float32).view(np.uint8)
        tensors[place] = TensorSource(one.name, "f32", shape, data)
    return File(metadata, tensors)


def encode(path: Path, model: Model, ctx: Context) -> str:
    """Encode a small picture with a file's tower; return the error, or "" if the picture became rows."""
    try:
        with open_gguf(path) as file, np.errstate(all="ignore"):
            tower = take_gguf_tower(file, model)
            factor = tower.spec.factor
            rows = finish(tower.load(ctx).encode(np.zeros((2 * factor, factor, 3), np.uint8)))
            assert rows.shape == (2, tower.spec.row_numbers)
    except MlxrError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3vl", "gemma4e", "internvl"])
def test_mutated_towers_see_or_are_refused(tmp_path: Path, case: str) -> None:
    write_folder(tmp_path / case, read_golden(case))
    model = open_model(tmp_path / case)[0].config
    ctx = Context("cpu", threads=1)
    with open_gguf(write_mmproj(tmp_path / "whole.gguf", case)) as file:
        whole = File(dict(file.metadata), [*file.tensors.values()])
        found = []
        for seed in range(FILES if amounts.is_exhaustive else 50):
            random = np.random.default_rng(seed)
            path = tmp_path / "mmproj.gguf"
            path.write_bytes(mutate(whole, random).pack(random))
            found.append(encode(path, model, ctx))
    assert 0 < found.count("") < len(found)
    assert not [reason for reason in found if reason and len(reason) < 20]
