"""The size of a model, and the bytes and multiply-adds of a step: plain numbers that its speed is compared with.

`measure_footprint` reads them off a file before any tensor is read: bytes in all, and for one token; its experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlxr.core.frozen import frozen
from mlxr.kernels.moe import expect_experts
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components.layer import TABLE
from mlxr.models.model import Model


@frozen
class AttentionWork:
    """Attention in the layers of one group of the cache.

    A token takes `pair_macs` multiply-adds for each position that it sees; with a `window` these are the last ones.
    """

    pair_macs: int
    window: int | None

    def count(self, start: int, tokens: int) -> tuple[int, int]:
        """Return pairs of a token and a position that it sees, and positions, for `tokens` tokens from position `start`
        on.

        A position that several of them see counts once.
        """
        stop, window = start + tokens, self.window
        if window is None:
            return tokens * (start + stop + 1) // 2, stop
        grown = min(max(start, window), stop)  # from here on all tokens see as many positions
        pairs = (grown - start) * (start + grown + 1) // 2 + (stop - grown) * window
        return pairs, stop - max(0, start - window + 1)


@frozen
class ExpertsWork:
    """Experts of all layers that are alike: a token uses `used` of `experts` in a layer; `nbytes` is the size of
    all."""

    experts: int
    used: int
    nbytes: int

    def count_bytes(self, tokens: int) -> float:
        """Return the bytes of the experts that `tokens` tokens are sent to in a step, if all are equally likely."""
        return self.nbytes * expect_experts(self.experts, self.used, tokens) / self.experts


@frozen
class StepWork:
    """The bytes read and the multiply-adds of a step: `weight_bytes` in each step, of `experts` those that its tokens
    are sent to; multiply-adds for each token, each output row, and in attention."""

    weight_bytes: int
    token_macs: int
    output_macs: int
    attention: tuple[AttentionWork, ...]
    experts: tuple[ExpertsWork, ...] = ()

    def count_weight_bytes(self, tokens: int) -> int:
        """Return the bytes of weights that a step of `tokens` tokens reads, without rows of tables of embeddings."""
        return self.weight_bytes + round(sum(work.count_bytes(tokens) for work in self.experts))


@frozen
class ExpertsSummary:
    """The experts of a model: `layers` layers have `experts`, of which each token uses `used`.

    If `shared_features` is not 0, all tokens go through so many features more in each such layer.
    """

    layers: int
    experts: int
    used: int
    features: int
    shared_features: int


@frozen
class Footprint:
    """Bytes of all tensors of a file, of its experts, and of those that one token reads: without the rows of tables and
    the experts that it is not sent to. The `draft_bytes` of a layer that drafts are not included.

    `parameters` counts the numbers of all tensors; `rotated` tensors have rows that are rotated in blocks.
    """

    total_bytes: int
    expert_bytes: int
    active_bytes: int
    experts: ExpertsSummary | None
    draft_bytes: int = 0
    parameters: int = 0
    rotated: int = 0
    rotated_block: int = 0

    @property
    def bits_per_weight(self) -> float:
        """The average bits of a number in the tensors."""
        return 8 * self.total_bytes / self.parameters


def summarise_experts(model: Model) -> ExpertsSummary | None:
    """Return the experts that a model has; None for one without."""
    mixtures = [spec.experts for spec in model.layers if spec.experts is not None]
    if not mixtures:
        return None
    first = mixtures[0]
    return ExpertsSummary(len(mixtures), first.count, first.rule.used, first.features, first.shared_features)


def list_expert_bytes(model: Model, tensors: Mapping[str, TensorSource]) -> list[int]:
    """Return the bytes of the experts of each layer in a file, 0 for one without; tensors are by canonical name."""
    sizes = []
    for index, spec in enumerate(model.layers):
        names = () if spec.experts is None else spec.experts.shapes(1)
        stacks = [f"blk.{index}.{name}_exps.{end}" for name in names for end in ("weight", "bias")]
        sizes.append(sum(tensors[name].nbytes for name in stacks if name in tensors))
    return sizes


def measure_footprint(model: Model, tensors: Mapping[str, TensorSource], draft_bytes: int = 0) -> Footprint:
    """Count the tensors of a file, by canonical name, without those of a layer that drafts."""
    tables = {TABLE} if model.is_tied else {TABLE, "token_embd.weight"}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    table_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name in tables)
    sizes = list_expert_bytes(model, tensors)
    used_bytes = sum(
        ExpertsWork(spec.experts.count, spec.experts.rule.used, nbytes).count_bytes(1)
        for spec, nbytes in zip(model.layers, sizes, strict=True)
        if spec.experts is not None
    )
    active_bytes = total_bytes - table_bytes - sum(sizes) + round(used_bytes)
    rotated = model.rotated
    return Footprint(
        total_bytes,
        sum(sizes),
        active_bytes,
        summarise_experts(model),
        draft_bytes,
        sum(math.prod(tensor.shape) for tensor in tensors.values()),
        0 if rotated is None else len(rotated.names) + rotated.has_table,
        0 if rotated is None else rotated.block,
    )
