"""llama.cpp built with CUDA in a comparison, with the interface of `Ours`: its own tool on a GGUF file.

The file has the shape and the types of the case and random weights; it is written once into the folder for temporary
files. Every measurement is a process that loads the file, so its memory is not told.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from gpu_comparison.cases import LLAMA_CPP, NAMES, Case
from synthetic import SHAPES, write_model

TOOL = "llama-batched-bench"
CHUNK_TOKENS = 2048
SPARE_TOKENS = 64  # of a sequence's context
TIMEOUT_S = 300


class LlamaCpp:
    """One model's file; `folder` has the tool."""

    name, note = LLAMA_CPP, ""

    def __init__(self, folder: str, case: Case) -> None:
        self._tool = Path(folder) / TOOL
        if not self._tool.is_file():
            raise FileNotFoundError(f"{self._tool} is not there: give the folder with llama.cpp's tools")
        self._model = Path(tempfile.gettempdir()) / f"{case.shape}-{case.type_name}.gguf"
        if not self._model.exists():
            scratch = self._model.with_suffix(".part")
            write_model(scratch, SHAPES[NAMES[case.shape]], case.type_name, 0, lambda *_: None)
            scratch.replace(self._model)

    def start(self, case: Case, steps: int) -> None:  # noqa: ARG002 -- each measurement makes its own room
        """Begin a case."""
        self._case = case

    def decode(self, steps: int) -> list[float]:
        """Seconds of a step, the mean of so many."""
        told = self._run(self._case.context, steps, self._case.batch)
        return [float(told["t_tg"]) / steps]

    def prefill(self) -> float:
        """Seconds from a prompt to its first token."""
        return float(self._run(self._case.context, 1, 1)["t_pp"])

    def measure_bytes(self) -> dict[str, int]:
        """The file's bytes, under the same keys as `Ours.measure_bytes`."""
        return {"weight_bytes": self._model.stat().st_size, "cache_bytes": 0, "arena_bytes": 0, "peak_bytes": 0}

    def stop(self) -> None:
        """Do nothing: no process is left."""

    def _run(self, prompt_tokens: int, generated_tokens: int, batch: int) -> dict[str, Any]:
        """Run the tool for one combination and parse its line of JSON."""
        numbers = {
            "-c": batch * (prompt_tokens + generated_tokens + SPARE_TOKENS),
            "-b": CHUNK_TOKENS,
            "-ub": CHUNK_TOKENS,
            "-ngl": 999,
            "-npp": prompt_tokens,
            "-ntg": generated_tokens,
            "-npl": batch,
        }
        options = [text for name, number in numbers.items() for text in (name, str(number))]
        command = [str(self._tool), "-m", str(self._model), "-fa", "on", "--output-format", "jsonl", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"n_kv_max"')]
        if done.returncode or not lines:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise RuntimeError(f"{TOOL} ended with {done.returncode}: {last[:160]}")
        told: dict[str, Any] = json.loads(lines[-1])
        return told
