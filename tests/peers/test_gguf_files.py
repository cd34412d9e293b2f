"""Families that are known only from GGUF files, against llama.cpp: `gguf` writes the files, and llama.cpp quantises
them.

`python tests/peers/test_gguf_files.py [NAME ...]` keeps the logits of tiny models in tests/models/gguf_goldens/.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("models", "peers", "shared")]
from gguf_models import GOLDENS, MODELS, Arrays, Sizes, make, make_tokens  # noqa: E402 -- needs the path above
from llama_losses import loss_of, open_llama  # noqa: E402
from tiny_models import TinyRun  # noqa: E402

from mlxr.formats import open_gguf  # noqa: E402
from mlxr.kernels.context import Context  # noqa: E402
from mlxr.model_files.files import read_contents  # noqa: E402
from mlxr.models import Decoder  # noqa: E402

SIZES = Sizes(hidden=256, ffn=512, head_dim=64, vocabulary=512, experts=4)
COUNT, SLICES = 288, 8
BOUNDS = {"f16": 0.005, "q4_k_m": 0.025}  # as parts of the mean loss, of the slice that differs most
IN_F32 = ("ffn_gate_inp.weight",)


def quantise_fours(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float]:
    """Rows of blocks of NVFP4 (ggml-common.h), and the factor of all their scales."""
    codes, levels = np.arange(127), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
    factor = float(np.abs(values).max()) / (6 * 448)
    groups = values.reshape(-1, 16) / factor
    scales = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(groups).max(axis=1) / 6)
    steps = np.maximum(table[scales], 1e-9)[:, None]
    numbers = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(groups) / steps) | np.where(groups < 0, 8, 0)
    packed = numbers[:, :8] | numbers[:, 8:] << 4
    blocks = np.concatenate([scales.reshape(-1, 4), packed.reshape(-1, 32)], axis=1).astype(np.uint8)
    return blocks.reshape(len(values), -1), factor


def write(
    path: Path, name: str, metadata: Mapping[str, Any], arrays: Arrays, kind: type = np.float16, *, fours: bool = False
) -> None:
    """Write a file as `gguf` does; `fours` has NVFP4 layers, each weight with a factor, as in NVIDIA's checkpoints."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_tokenizer_model("no_vocab")
    for key, value in metadata.items():
        first = value[0] if isinstance(value, list) else value
        if isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif isinstance(first, bool):
            writer.add_bool(f"{name}.{key}", value)
        elif isinstance(first, str):
            writer.add_string(f"{name}.{key}", value)
        else:
            (writer.add_uint32 if isinstance(first, int) else writer.add_float32)(f"{name}.{key}", value)
    for key, values in arrays.items():
        if fours and key.startswith("blk.") and values.ndim == 2:
            blocks, factor = quantise_fours(values)
            writer.add_tensor(key, blocks, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            writer.add_tensor(f"{key.removesuffix('weight')}scale", np.array([factor], np.float32))
            continue
        stays = values.ndim == 1 or key.endswith(IN_F32)
        writer.add_tensor(key, values if stays else values.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, target: Path) -> None:
    """Have llama.cpp make a Q4_K_M of the file."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters) == 0


def run_llama(path: Path, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Logits of llama.cpp, with keys and values in f32."""
    kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llama = open_llama(path, 512, **kinds)
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens)], np.float64)
    llama.close()
    return logits


def run_ours(path: Path, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Logits of the CPU's kernels."""
    with open_gguf(path) as file:
        contents = read_contents(file)
        model = Decoder(Context("cpu", threads=2), contents.config, contents.tensors)
        return np.asarray(TinyRun(model, longest=512).run(np.array(tokens, np.int32)), np.float64)


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_a_file_of_gguf(name: str, tmp_path: Path) -> None:
    metadata, arrays = make(name, SIZES)
    tokens, files = make_tokens(name, SIZES, COUNT), {kind: tmp_path / f"{kind}.gguf" for kind in BOUNDS}
    write(files["f16"], name, metadata, arrays)
    quantise(files["f16"], files["q4_k_m"])
    for kind, bound in BOUNDS.items():
        theirs, ours = (loss_of(run(files[kind], tokens)[:-1], tokens[1:]) for run in (run_llama, run_ours))
        slices = np.abs([part.mean() for part in np.array_split(ours - theirs, SLICES)])
        worst = slices.max() / theirs.mean()
        print(f"{name} {kind}: mean loss {theirs.mean():.3f}, of which the worst slice differs by {worst:.5f}")
        assert worst < bound


def test_losses_of_a_file_in_nvfp4(tmp_path: Path) -> None:
    """As Qwen3, which has Maincoder's tensors: of Maincoder llama.cpp leaves out the factors of feed-forward blocks."""
    name, path = "maincoder", tmp_path / "nvfp4.gguf"
    metadata, arrays = make(name, SIZES)
    tokens = make_tokens(name, SIZES, COUNT)
    write(path, "qwen3", metadata, arrays, np.float32, fours=True)
    theirs, ours = (loss_of(run(path, tokens)[:-1], tokens[1:]) for run in (run_llama, run_ours))
    slices = np.abs([part.mean() for part in np.array_split(ours - theirs, SLICES)])
    print(
        f"nvfp4: mean loss {theirs.mean():.3f}, of which the worst slice differs by {slices.max() / theirs.mean():.5f}"
    )
    assert slices.max() / theirs.mean() < BOUNDS["f16"]


def keep_goldens(names: Sequence[str]) -> None:
    """Write the logits of llama.cpp for the tiny models."""
    for name in names:
        path = GOLDENS / f"{name}.gguf"
        write(path, name, *make(name), np.float32)
        np.save(GOLDENS / f"{name}.npy", run_llama(path, make_tokens(name)).astype(np.float32))
        path.unlink()


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    keep_goldens(sys.argv[1:] or list(MODELS))
