"""A few rows times blocks, or floats of 16 bits, without matrix units: a launch that reads each block once, in f32.

A SIMD-group makes two or four outputs for all rows at a time. Knows no deferred results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel
from mlxr.kernels.linear.expand import BLOCK_HEADERS
from mlxr.kernels.linear.extras import Extras
from mlxr.kernels.linear.parts import TYPE_NAMES
from mlxr.kernels.linear.wide import can_spread, multiply_wide

ROWS = Kernel(
    "linear_rows",
    Path(__file__).parent,
    "rows.body",
    ("x", "a", "b", "bias", "norm", "residual", "numbers", "sizes"),
    ("out",),
    (*BLOCK_HEADERS, "rows.h", "gate.h"),
    type_names=TYPE_NAMES,
)
SIMD_GROUPS = 8  # each brings one of the eight quads of every run into their shared memory
MANY_OUTPUTS = 4096
TOKENS = (1, 2, 4, 8)  # rows of x that a variant of the kernel takes
MOST_TOKENS = {"metal": 4}  # where a threadgroup has 32 KiB, and a thread 128 registers


def limit_tokens(gpu: Any) -> int:
    """Rows of x that a launch takes at a time, at most; it walks over further ones."""
    return MOST_TOKENS.get(gpu.device, TOKENS[-1])


def choose_rows(gpu: Any, tokens: int, outputs: int) -> int:
    """Outputs that a SIMD-group makes at a time: even, since a gate takes two."""
    return 4 if tokens >= 4 and outputs >= MANY_OUTPUTS and gpu.device not in MOST_TOKENS else 2


def multiply_rows(gpu: Any, x: Any, weights: list[tuple[int, int, Any]], extras: Extras, kind: Any) -> Any:
    """As `multiply_tiles`, each row of which may wait for its norm; blocks are read again for `limit_tokens` rows each.

    Few outputs in 32 bits go to `wide.py`.
    """
    (tokens, columns), first, second = x.shape, weights[0], weights[-1]
    if can_spread(weights, columns, extras):
        return multiply_wide(gpu, x, weights[0], extras, kind)
    rows = first[1], (second[1] if len(weights) == 2 else 0)
    width = next(width for width in TOKENS if width >= min(tokens, limit_tokens(gpu)))
    per_group = choose_rows(gpu, width, sum(rows))
    made = rows[0] // 2 if extras.gate else sum(rows)
    step = SIMD_GROUPS * (per_group // 2 if extras.gate else per_group)
    groups = -(-made // step) if extras.gate else sum(-(-count // step) for count in rows)
    (out,) = gpu.launcher.launch(
        ROWS,
        [
            x,
            first[2],
            second[2],
            *extras.list_inputs(gpu),
            gpu.launcher.numbers(columns, tokens, *rows),
        ],
        groups=(groups, -(-tokens // width), 1),
        threads=32 * SIMD_GROUPS,
        outputs=[((tokens, made), kind)],
        constants={
            "TYPE_A": first[0],
            "TYPE_B": second[0],
            "ROWS": per_group,
            "T": width,
            **extras.constants,
        },
        types={"X": x.dtype, "Y": kind},
    )
    return out
