"""How evenly tokens were sent to experts, out of the counts of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.kernels.moe import ExpertsUse


@dataclass(frozen=True, slots=True)
class Routing:
    """What layers with experts have done, all together, since the model was loaded.

    `rows` are pairs of a token and an expert, in `layer_steps` calls of layers. `experts` had rows in these, counted in
    each call, and of them `file_reads` were read from the file. `evenness` is the entropy of a layer's rows over its
    experts, divided by that of even rows, so 1 where all have as many and 0 where one has all; `busiest` the rows of
    its busiest expert, divided by the mean of its experts. Both are means over the layers that had rows, 0 without any.
    """

    rows: int
    layer_steps: int
    experts: int
    file_reads: int
    evenness: float
    busiest: float


def sum_up(uses: Sequence[ExpertsUse | None]) -> Routing | None:
    """Return the counts of all layers as one; None where there are none."""
    counted = [use for use in uses if use is not None]
    if not counted:
        return None
    filled = [use.rows for use in counted if any(use.rows)]
    layers = max(len(filled), 1)
    return Routing(
        rows=sum(map(sum, filled)),
        layer_steps=sum(use.steps for use in counted),
        experts=sum(use.groups for use in counted),
        file_reads=sum(use.reads for use in counted),
        evenness=sum(map(measure_evenness, filled)) / layers,
        busiest=sum(max(rows) * len(rows) / sum(rows) for rows in filled) / layers,
    )


def measure_evenness(rows: Sequence[int]) -> float:
    """Return the entropy of these counts, of which some are not 0, as a part of the largest that it can be."""
    total = sum(rows)
    entropy = -sum(count / total * math.log(count / total) for count in rows if count)
    return entropy / math.log(len(rows)) if len(rows) > 1 else 1.0
