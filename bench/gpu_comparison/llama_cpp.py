"""llama.cpp built with CUDA in a comparison, with the interface of `Ours`: its own tool on a GGUF file.

The file has the shape and the types of the case and random weights; it is written once into the folder for temporary
files. A process of the tool loads the file and measures all rounds, one more before them and one after: in the first it
is cold, its kernels are loaded and its memory grows; the last line may be lost, as the tool ends without flushing its
log. Its memory is not known.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_comparison.cases import LLAMA_CPP, NAMES, Case
from synthetic import SHAPES, write_model

TOOL = "llama-batched-bench"
CHUNK_TOKENS = 2048
SPARE_TOKENS = 64  # in a sequence's context
KEPT_ROUNDS = 5  # rounds of a process of the tool, without the first and the last
MIN_STEPS = 128  # of a round: the tool gives only its mean, in which the beginning must not count
TIMEOUT_S = 300


class LlamaCpp:
    """llama.cpp with the file of one model; `folder` has the tool."""

    name, note = LLAMA_CPP, ""
    warms_itself = True

    def __init__(self, folder: str, case: Case) -> None:
        self._tool = Path(folder) / TOOL
        if not self._tool.is_file():
            raise FileNotFoundError(f"{self._tool} is not there: give the folder with llama.cpp's tools")
        self._model = Path(tempfile.gettempdir()) / f"{case.shape}-{case.type_name}.gguf"
        if not self._model.exists():
            scratch = self._model.with_suffix(".part")
            write_model(scratch, SHAPES[NAMES[case.shape]], case.type_name, 0, lambda *_: None)
            scratch.replace(self._model)
        self._rounds: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def start(self, case: Case, steps: int) -> None:  # noqa: ARG002 -- the tool makes its own room
        """Begin a case."""
        self._case = case

    def decode(self, steps: int) -> list[float]:
        """The seconds of a step, the mean of so many or of `MIN_STEPS`."""
        steps = max(steps, MIN_STEPS)
        return [float(self._take(self._case.context, steps, self._case.batch)["t_tg"]) / steps]

    def prefill(self) -> float:
        """The seconds from prompts to their first tokens."""
        return float(self._take(self._case.context, 1, self._case.batch)["t_pp"])

    def measure_bytes(self) -> dict[str, int]:
        """The file's bytes, under the same keys as `Ours.measure_bytes`."""
        return {"weight_bytes": self._model.stat().st_size, "cache_bytes": 0, "arena_bytes": 0, "peak_bytes": 0}

    def stop(self) -> None:
        """Forget rounds that were not asked for; no process is left."""
        self._rounds.clear()

    def _take(self, *combination: int) -> dict[str, Any]:
        """Return the next round of a combination; runs the tool if none is left."""
        rounds = self._rounds.setdefault(combination, [])
        if not rounds:
            rounds += self._run(*combination)
        return rounds.pop(0)

    def _run(self, prompt_tokens: int, generated_tokens: int, batch: int) -> Sequence[dict[str, Any]]:
        """Run the tool for one combination; parses its lines of JSON except the first and the last."""
        numbers = {
            "-c": batch * (prompt_tokens + generated_tokens + SPARE_TOKENS),
            "-b": CHUNK_TOKENS,
            "-ub": CHUNK_TOKENS,
            "-ngl": 999,
            "-npp": ",".join([str(prompt_tokens)] * (1 + KEPT_ROUNDS + 1)),
            "-ntg": generated_tokens,
            "-npl": batch,
        }
        options = [text for name, number in numbers.items() for text in (name, str(number))]
        command = [str(self._tool), "-m", str(self._model), "-fa", "on", "--output-format", "jsonl", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"n_kv_max"')]
        if done.returncode or len(lines) < 1 + KEPT_ROUNDS:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise RuntimeError(
                f"{TOOL} ended with {done.returncode} after {len(lines)} of {1 + KEPT_ROUNDS + 1} rounds: {last[:160]}"
            )
        return [json.loads(line) for line in lines[1 : 1 + KEPT_ROUNDS]]
