"""What a model's file says of its weights before any of them is read: bytes in all, and for one token; its experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxr.kernels.tensor import TensorSource
from mlxr.models.config import ModelConfig
from mlxr.models.layer import TABLE, name_experts
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
    the experts that it is not sent to."""

    total_bytes: int
    expert_bytes: int
    active_bytes: int
    experts: ExpertsSummary | None


def summarise_experts(config: ModelConfig) -> ExpertsSummary | None:
    """The experts that a model has; None for one without."""
    mixtures = [spec.mixture for spec in config.layer_specs if spec.mixture is not None]
    if not mixtures:
        return None
    first = mixtures[0]
    return ExpertsSummary(len(mixtures), first.experts, first.rule.used, first.features, first.shared_features)


def measure_footprint(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> Footprint:
    """Count the tensors of a file, which are by canonical name."""
    expert_bytes = active_bytes = 0.0
    tables = {TABLE} if config.tied_embeddings else {TABLE, "token_embd.weight"}
    rest = {name: tensor.nbytes for name, tensor in tensors.items()}
    total_bytes = sum(rest.values())
    for index, spec in enumerate(config.layer_specs):
        mixture = spec.mixture
        if mixture is None:
            continue
        stacks = [f"blk.{index}.{name}_exps.{end}" for name in name_experts(mixture, 1) for end in ("weight", "bias")]
        nbytes = sum(rest.pop(name, 0) for name in stacks)
        expert_bytes += nbytes
        active_bytes += ExpertsWork(mixture.experts, mixture.rule.used, nbytes).count_bytes(1)
    active_bytes += sum(nbytes for name, nbytes in rest.items() if name not in tables)
    return Footprint(total_bytes, round(expert_bytes), round(active_bytes), summarise_experts(config))
