"""Perplexity of the demo model against llama.cpp: the same files, and each engine's own quantisation of one source."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from llama_losses import compute_losses, list_windows, open_llama

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "src" / "mlxr" / "assets" / "demo.gguf"
HELD_OUT = ROOT / "tests" / "real" / "held_out.txt"
CONTEXT_TOKENS = 512
SCORED_WINDOWS = 8


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out text of a little over SCORED_WINDOWS windows."""
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text(HELD_OUT.read_text()[: SCORED_WINDOWS * CONTEXT_TOKENS * 3])
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in each type, all made from one F16 source with our own converter."""
    folder = tmp_path_factory.mktemp("models")
    converted = {}
    for kind in ("f16", "q8_0", "q4_k_m", "q6_k"):
        source = DEMO if kind == "f16" else converted["f16"]
        converted[kind] = folder / f"{kind}.gguf"
        mlxr("convert", str(source), str(converted[kind]), "--type", kind)
    return converted


def mlxr(*arguments: str) -> str:
    command = [sys.executable, "-m", "mlxr", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def our_perplexity(model: Path, text: Path, device: str = "cpu") -> float:
    options = ["--context", str(CONTEXT_TOKENS), "--device", device, "--json"]
    return float(json.loads(mlxr("perplexity", str(model), str(text), *options))["perplexity"])


def llama_perplexity(model: Path, text: Path) -> float:
    """The same windows as `mlxr perplexity`."""
    llama = open_llama(model, CONTEXT_TOKENS)
    tokens = llama.tokenize(text.read_bytes(), add_bos=False, special=False)
    losses = [compute_losses(llama, window) for window in list_windows(llama, tokens, CONTEXT_TOKENS)]
    llama.close()
    return math.exp(np.concatenate(losses).mean())


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m", "q6_k"])
def test_same_file_same_perplexity(kind: str, files: dict[str, Path], text: Path) -> None:
    ours, theirs = our_perplexity(files[kind], text), llama_perplexity(files[kind], text)
    print(f"{kind}: ours {ours:.4f}, llama.cpp {theirs:.4f}, {100 * (ours / theirs - 1):+.3f} %")
    assert abs(ours / theirs - 1) < 0.005


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m", "q6_k"])
def test_native_kernels_lose_nothing_against_the_reference(kind: str, files: dict[str, Path], text: Path) -> None:
    native, reference = our_perplexity(files[kind], text), our_perplexity(files[kind], text, "reference")
    print(f"{kind}: cpu {native:.4f}, reference {reference:.4f}, {100 * (native / reference - 1):+.3f} %")
    assert native / reference - 1 < 0.003


@pytest.mark.parametrize(
    ("kind", "file_type"),
    [("q4_k_m", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M), ("q6_k", llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K)],
)
def test_our_quantiser_is_as_good_as_theirs(
    kind: str, file_type: int, files: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = file_type
    status = llama_cpp.llama_model_quantize(str(files["f16"]).encode(), str(theirs).encode(), ctypes.byref(options))
    assert status == 0
    ours_loss, their_loss = our_perplexity(files[kind], text), our_perplexity(theirs, text)
    print(f"{kind}: our quantiser {ours_loss:.4f}, llama.cpp's {their_loss:.4f}")
    assert ours_loss / their_loss - 1 < 0.01
