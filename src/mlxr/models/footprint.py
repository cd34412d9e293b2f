"""What a model's file says of its weights before any of them is read: bytes in all, and for one token; its experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxr.kernels.tensor import TensorSource
from mlxr.models.components.layer import TABLE
from mlxr.models.model import Model
from mlxr.models.step_work import ExpertsWork


@dataclass(frozen=True, slots=True)
class ExpertsSummary:
    """The experts of a model: `layers` layers have `experts`, of which each token uses `used`.

    All tokens go through `shared_features` features more in each such layer, if these are not 0.
    """

    layers: int
    experts: int
    used: int
    features: int
    shared_features: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of all tensors of a file, of its experts, and of those that one token reads: not the rows of tables, nor
    the experts that it is not sent to. The `draft_bytes` of a layer that drafts are none of these."""

    total_bytes: int
    expert_bytes: int
    active_bytes: int
    experts: ExpertsSummary | None
    draft_bytes: int = 0


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
    """Count the tensors of a file, which are by canonical name, besides those of a layer that drafts."""
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
    return Footprint(total_bytes, sum(sizes), active_bytes, summarise_experts(model), draft_bytes)
