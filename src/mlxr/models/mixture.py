"""What GGUF's metadata say of mixtures of experts.

How a family spells it and what it leaves unsaid is its `MixtureRow`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from mlxr.kernels.activate import Activation
from mlxr.kernels.moe import RoutingRule, Scoring
from mlxr.models import limits
from mlxr.models.components import Experts
from mlxr.models.fields import Fields

MixtureLayers = tuple[bool, ...] | None
_NONE: tuple[None, None] = (None, None)
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}  # by GGUF's number
SCORING_NUMBERS: dict[Scoring, int] = {scoring: number for number, scoring in _SCORINGS.items()}
Shared = Literal["features", "count"]
_RULE_KEYS = ("expert_group_count", "expert_group_used_count", "expert_weights_norm", "expert_weights_scale")


@dataclass(frozen=True, slots=True)
class MixtureRow:
    """How a family routes, and what its experts have; for what is not told here see `Experts`."""

    scoring: Scoring = "softmax"
    jitter_key: str | None = None  # of files whose experts are chosen by sparsemixer; others mean `scoring`
    renormalises: bool = False  # where files do not say so, by the sum plus `floor`
    floor: float = 0.0
    optional: bool = False  # a model may have no experts
    activation: Activation | None = None  # of the experts, where it is not the model's
    shared: Shared | None = None  # how files state the block that all tokens go through, if there is one
    shared_gate: bool = False
    bias: bool = False  # of the router, too
    choice_bias: bool = False
    expert_scales: bool = False
    gated: bool = True  # of what an expert activates half is a gate


def _make_mixture(
    row: MixtureRow, experts: int, features: int, shared: int, activation: Activation, rule: RoutingRule
) -> Experts:
    return Experts(
        experts,
        features,
        row.activation or activation,
        rule,
        gated=row.gated,
        bias=row.bias,
        router_bias=row.bias,
        choice_bias=row.choice_bias,
        expert_scales=row.expert_scales,
        shared_features=shared * features if row.shared == "count" else shared,
        shared_gate=row.shared_gate and shared > 0,
    )


def read_gguf_mixture(
    fields: Fields,
    own: Fields,
    row: MixtureRow | None,
    tensors: Container[str],
    layers: int,
    activation: Activation,
) -> tuple[Experts, MixtureLayers] | tuple[None, None]:
    """Return the mixture that GGUF's metadata state, and the layers that have it: those with a router, unless a key of
    our own says so."""
    count = fields.integer("expert_count", 0, limits.MAX_STATED, default=0)
    if row is None or (row.optional and not count):
        fields.refuse_unless(("expert_count", "expert_used_count"), (0,), "mixture of experts is not supported there")
        return _NONE
    stated = {name: own if own.get(name) is not None else fields for name in _RULE_KEYS}
    groups = stated["expert_group_count"].integer("expert_group_count", 0, limits.MAX_STATED, default=1) or 1
    used_groups = stated["expert_group_used_count"].integer(
        "expert_group_used_count", 0, limits.MAX_STATED, default=groups
    )
    is_sparse = row.jitter_key is not None and fields.get(row.jitter_key) is not None
    rule = RoutingRule(
        fields.integer("expert_used_count", 1, limits.MAX_STATED),
        "sparsemixer" if is_sparse else _read_scoring(fields, row),
        renormalises=stated["expert_weights_norm"].flag("expert_weights_norm", row.renormalises),
        floor=row.floor,
        scale=stated["expert_weights_scale"].number("expert_weights_scale", 0.0, limits.MAX_SCALE, default=1.0) or 1.0,
        groups=groups,
        groups_used=used_groups or groups,
        jitter=fields.number(row.jitter_key, 0.0, 1.0) if is_sparse and row.jitter_key else 0.0,
    )
    has_width = fields.get("expert_feed_forward_length") is not None
    width = fields.integer("expert_feed_forward_length" if has_width else "feed_forward_length", 1, limits.MAX_WIDTH)
    shared = _read_gguf_shared(fields, row)
    routers = tuple(f"blk.{index}.ffn_gate_inp.weight" in tensors for index in range(layers))
    flags = own.flags("expert_layers", layers) or routers
    return _make_mixture(row, count, width, shared, activation, rule), None if all(flags) else flags


def _read_gguf_shared(fields: Fields, row: MixtureRow) -> int:
    if row.shared is None:
        return 0
    if row.shared == "count":
        return fields.integer("expert_shared_count", 0, limits.MAX_WIDTH, default=0)
    key = "expert_shared_feed_forward_length"
    if row.shared_gate and fields.get(key) is None:  # old files of Qwen2 MoE
        key = "feed_forward_length"
    return fields.integer(key, 0, limits.MAX_WIDTH, default=0)


def _read_scoring(fields: Fields, row: MixtureRow) -> Scoring:
    number = fields.integer("expert_gating_func", 0, 1 << 16, default=0)  # 0 says nothing
    if number and number not in _SCORINGS:
        fields.refuse("expert_gating_func", "1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)")
    return _SCORINGS.get(number, row.scoring)
