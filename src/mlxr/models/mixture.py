"""What files say of mixtures of experts: out of `config.json` and out of GGUF's metadata, and back into the latter.

How a family spells it and what it leaves unsaid is its `MixtureRow`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import Activation
from mlxr.kernels.moe import RoutingRule, Scoring
from mlxr.models import limits
from mlxr.models.components import Experts
from mlxr.models.fields import Fields

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

MixtureLayers = tuple[bool, ...] | None
_NONE: tuple[None, None] = (None, None)
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}  # by GGUF's number
Shared = Literal["features", "count"]
SPARSE_USED, USUAL_JITTER = 2, 0.01  # of sparsemixer: experts of a token, and the jitter where none is stated


@dataclass(frozen=True, slots=True)
class MixtureRow:
    """How a family routes, what its experts have, and how its `config.json` spells the sizes.

    `renormalises` holds where `norm_topk_prob` is not stated, and in GGUF, by the sum plus `floor`. With a `jitter_key`
    experts are chosen by `sparsemixer`, with the jitter that `config.json` states there; a GGUF file that states none
    means `scoring`. With a
    `switch_key` a model may have no experts at all, as `config.json` says there, or with `optional` by their number;
    then the block that all tokens go through is that of the layer. `used_key` there gives how many each token has,
    `first_key` how many of the first layers have none.
    `states_rule`: GGUF files say how scores are made, whether shares are divided by their sum, and how many of the
    first layers have no experts. `activation` is that of the experts, where it is not
    the model's. `shared_key` gives the features of the block that all tokens go through, or with `shared` "count" how
    many experts there are in it. `shared_gate`, `bias` (of the router, too), `choice_bias` and `expert_scales`: see
    `Experts`. `interleaved`: in Hugging Face folders the rows of gate and up alternate, and stacks of experts have
    their columns first, unless they are quantised. `gated`: of what an expert activates half is a gate.
    """

    count_keys: tuple[str, ...] = ("num_experts",)
    features_key: str = "moe_intermediate_size"
    scoring: Scoring = "softmax"
    jitter_key: str | None = None
    renormalises: bool = False
    floor: float = 0.0
    switch_key: str | None = None
    optional: bool = False
    first_key: str = "first_k_dense_replace"
    used_key: str = "num_experts_per_tok"
    states_rule: bool = False
    activation: Activation | None = None
    shared_key: str | None = None
    shared: Shared = "features"
    shared_gate: bool = False
    bias: bool = False
    choice_bias: bool = False
    expert_scales: bool = False
    interleaved: bool = False
    gated: bool = True


def read_hf_mixture(
    fields: Fields, row: MixtureRow | None, layers: int, activation: Activation
) -> tuple[Experts, MixtureLayers] | tuple[None, None]:
    """The mixture that a `config.json` states, and which layers have it (None: all)."""
    key = next((key for key in row.count_keys if fields.get(key) is not None), row.count_keys[0]) if row else ""
    if row is None or (row.switch_key is not None and not fields.flag(row.switch_key, False)):
        return _NONE
    experts = fields.integer(key, 0 if row.optional else 1, limits.MAX_STATED)
    if not experts:
        return _NONE
    groups = fields.integer("n_group", 1, limits.MAX_STATED, default=1)
    used = fields.integer(row.used_key, 1, limits.MAX_STATED)
    if row.jitter_key is not None and used != SPARSE_USED:
        fields.refuse(row.used_key, f"{SPARSE_USED}, for which alone this routing is known")
    rule = RoutingRule(
        used,
        row.scoring if row.jitter_key is None else "sparsemixer",
        renormalises=fields.flag("norm_topk_prob", row.renormalises),
        floor=row.floor,
        scale=fields.number("routed_scaling_factor", 0.0, limits.MAX_SCALE, default=1.0),
        groups=groups,
        groups_used=fields.integer("topk_group", 1, limits.MAX_STATED, default=groups),
        jitter=0.0 if row.jitter_key is None else fields.number(row.jitter_key, 0.0, 1.0, default=USUAL_JITTER),
    )
    features = fields.integer(row.features_key, 1, limits.MAX_WIDTH)
    shared = 0 if row.shared_key is None else fields.integer(row.shared_key, 0, limits.MAX_WIDTH, default=0)
    mixture = _make_mixture(row, experts, features, shared, activation, rule)
    return mixture, _read_hf_layers(fields, row, layers)


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


def _read_hf_layers(fields: Fields, row: MixtureRow, layers: int) -> MixtureLayers:
    """Which layers have experts: each one at the end of a step, but for those that are named and for the first ones."""
    step = fields.integer("decoder_sparse_step", 1, layers, default=1)
    first = fields.integer(row.first_key, 0, layers, default=0)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < layers for index in dense):
        fields.refuse("mlp_only_layers", f"a list of layers below {layers}")
    flags = tuple((index + 1) % step == 0 and index not in dense and index >= first for index in range(layers))
    return None if all(flags) else flags


def read_gguf_mixture(
    fields: Fields, row: MixtureRow | None, tensors: Container[str], layers: int, activation: Activation
) -> tuple[Experts, MixtureLayers] | tuple[None, None]:
    """The mixture that GGUF's metadata state; a layer has it that has a router."""
    count = fields.integer("expert_count", 0, limits.MAX_STATED, default=0)
    if row is None or ((row.switch_key is not None or row.optional) and not count):
        fields.refuse_unless(("expert_count", "expert_used_count"), (0,), "mixture of experts is not supported there")
        return _NONE
    groups = fields.integer("expert_group_count", 0, limits.MAX_STATED, default=1) or 1
    is_sparse = row.jitter_key is not None and fields.get(row.jitter_key) is not None
    rule = RoutingRule(
        fields.integer("expert_used_count", 1, limits.MAX_STATED),
        "sparsemixer" if is_sparse else _read_scoring(fields, row),
        renormalises=fields.flag("expert_weights_norm", row.renormalises),
        floor=row.floor,
        scale=fields.number("expert_weights_scale", 0.0, limits.MAX_SCALE, default=1.0) or 1.0,
        groups=groups,
        groups_used=fields.integer("expert_group_used_count", 0, limits.MAX_STATED, default=groups) or groups,
        jitter=fields.number(row.jitter_key, 0.0, 1.0) if is_sparse and row.jitter_key else 0.0,
    )
    has_width = fields.get("expert_feed_forward_length") is not None
    width = fields.integer("expert_feed_forward_length" if has_width else "feed_forward_length", 1, limits.MAX_WIDTH)
    shared = _read_gguf_shared(fields, row)
    flags = tuple(f"blk.{index}.ffn_gate_inp.weight" in tensors for index in range(layers))
    return _make_mixture(row, count, width, shared, activation, rule), None if all(flags) else flags


def _read_gguf_shared(fields: Fields, row: MixtureRow) -> int:
    if row.shared_key is None:
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


def mixture_metadata(config: ModelConfig, row: MixtureRow | None) -> dict[str, object]:
    """The keys of GGUF that state the experts of a model."""
    mixture = config.mixture
    if mixture is None or row is None:
        return {}
    rule = mixture.rule
    stated: dict[str, object] = {
        "expert_count": mixture.count,
        "expert_used_count": rule.used,
        "expert_feed_forward_length": mixture.features,
    }
    if row.jitter_key is not None and rule.scoring == "sparsemixer":
        stated[row.jitter_key] = rule.jitter
    if row.states_rule:
        stated |= _rule_metadata(config, rule)
    elif (rule.renormalises, rule.scale, rule.groups) != (row.renormalises, 1.0, 1):
        raise ModelError(
            f"a model whose shares of experts are {'' if rule.renormalises else 'not '}divided by their sum and "
            f"multiplied by {rule.scale:g}, of {rule.groups} groups, cannot be stated in a GGUF file of architecture "
            f"{config.architecture}"
        )
    if row.shared_key is not None and mixture.shared_features:
        if row.shared == "count":
            stated["expert_shared_count"] = mixture.shared_features // mixture.features
        else:
            stated["expert_shared_feed_forward_length"] = mixture.shared_features
    return stated


def _rule_metadata(config: ModelConfig, rule: RoutingRule) -> dict[str, object]:
    blocks = config.mixer_layers or (False,) * config.layers
    flags = config.mixture_layers or (True,) * config.layers
    has_experts = [flag for flag, is_mixer in zip(flags, blocks, strict=True) if not is_mixer]
    first = has_experts.index(True)
    if not all(has_experts[first:]) or (config.mixer_layers and first):
        raise ModelError(f"these layers with experts cannot be stated in a GGUF file of {config.architecture}")
    leading: dict[str, object] = {} if config.mixer_layers else {"leading_dense_block_count": first}
    return leading | {
        "expert_gating_func": next(number for number, scoring in _SCORINGS.items() if scoring == rule.scoring),
        "expert_weights_norm": rule.renormalises,
        "expert_weights_scale": rule.scale,
        "expert_group_count": rule.groups,
        "expert_group_used_count": rule.groups_used,
    }
