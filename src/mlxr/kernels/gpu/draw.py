"""The launch that draws the next token of every row of logits, recorded or not.

What it draws by are rows of NUMBERS numbers: temperature, top_p, min_p, uniform, top_k (0: all). Its result holds the
ids of all rows, then the bits of their log-probabilities. Knows no requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxr.kernels.gpu.kernel import Kernel

NUMBERS = 8
THREADS = 512
DRAW = Kernel(
    "draw", Path(__file__).parents[1] / "sample", "draw.body", ("logits", "numbers", "sizes"), ("out",), ("draw.h",)
)


def launch_draw(mx: Any, launcher: Any, logits: Any, numbers: Any | None) -> Any:
    """Draw from logits (rows, vocabulary) by `numbers` (rows, NUMBERS), or take the largest; (2 * rows,) int32."""
    rows, vocabulary = logits.shape
    (out,) = launcher.launch(
        DRAW,
        [logits, launcher.numbers(0.0) if numbers is None else numbers, launcher.numbers(vocabulary, rows)],
        groups=(rows, 1, 1),
        threads=THREADS,
        outputs=[((2 * rows,), mx.int32)],
        constants={
            "RANDOM": int(numbers is not None),
            "LOWEST": 16 if logits.dtype == mx.bfloat16 else 0,
            "WIDE": 1 if vocabulary % 8 else 8,
        },
        types={"X": logits.dtype},
    )
    return out


def split_drawn(values: npt.NDArray[np.int32], rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and log-probabilities of the first `rows` rows."""
    start = len(values) // 2
    return values[:rows], values[start : start + rows].view(np.float32)
