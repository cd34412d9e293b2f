"""Streamed products that come right after one another, as one launch: the memory does not rest between them.

A launch that ends leaves the memory idle until the next one's first weights are asked for. Joined, threadgroups wait
for each other in between instead, with the next weights under way. Knows launches, no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxr.kernels.gpu.kernel import Kernel, Variant
from mlxr.kernels.gpu.recording import Launch

MAX_JOINED = 4
_OWN_ARRAYS = ("x", "weights", "bias", "norm", "residual", "numbers")
_OWN_CONSTANTS = ("ROWS", "INPUTS", "GROUPS", "SHARES", "NORM", "BIAS", "GATE", "RESIDUAL")
_COMMON_CONSTANTS = ("THREADS", "STAGES", "N", "SINGLE")
CHAIN = Kernel(
    "linear_floats_chain",
    Path(__file__).parent,
    "floats_chain.body",
    (*(f"{name}{i}" for i in range(MAX_JOINED) for name in _OWN_ARRAYS), "sizes", "turns"),
    tuple(f"out{i}" for i in range(MAX_JOINED)),
    ("gate.h", "floats.h"),
)


def join_products(launches: Sequence[Launch], turns: Any) -> list[Launch]:
    """Neighbouring launches of `floats.FLOATS`, as many as fit together as one.

    `turns` is the address of a word on the device, which is 0 before the first launch.
    """
    joined: list[Launch] = []
    run: list[Launch] = []
    for launch in launches:
        if run and (len(run) == MAX_JOINED or not _fit(run[0], launch)):
            joined.append(_join(run, turns))
            run = []
        run.append(launch)
    return [*joined, _join(run, turns)] if run else joined


def _fit(first: Launch, second: Launch) -> bool:
    ours, theirs = dict(first.variant.constants), dict(second.variant.constants)
    return first.groups == second.groups and all(ours[name] == theirs[name] for name in _COMMON_CONSTANTS)


def _join(run: list[Launch], turns: Any) -> Launch:
    if len(run) == 1:
        return run[0]
    each = [*run, *[run[0]] * (MAX_JOINED - len(run))]
    constants = {name: value for name, value in run[0].variant.constants if name in _COMMON_CONSTANTS}
    constants |= {"COUNT": len(run), "ALL_GROUPS": run[0].groups[0]}
    types: dict[str, str] = {}
    for index, launch in enumerate(each):
        own = dict(launch.variant.constants)
        constants |= {f"{name}{index}": own[name] for name in _OWN_CONSTANTS}
        types |= {f"{name}{index}": kind for name, kind in launch.variant.types}
    count = len(_OWN_ARRAYS)
    arrays = [array for launch in each for array in launch.arrays[:count]]
    kinds = [kind for launch in each for kind in launch.variant.input_types[:count]]
    variant = Variant.of(constants, types, [*kinds, "int32", "int32"], [each.variant.output_types[0] for each in each])
    return Launch(
        CHAIN,
        variant,
        (*arrays, run[0].arrays[count], turns, *(launch.arrays[-1] for launch in each)),
        run[0].groups,
        run[0].threads,
        max(launch.room_bytes for launch in run),
    )
