"""What files say of mixtures of experts: out of `config.json` and out of GGUF's metadata, and back into the latter.

How a family spells it and what it leaves unsaid is its `MixtureRow`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import Activation
from mlxr.kernels.moe import RoutingRule, Scoring
from mlxr.models.fields import Fields
from mlxr.models.specs import Mixture

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

MixtureLayers = tuple[bool, ...] | None
_NONE: tuple[None, None] = (None, None)
_MAX_EXPERTS, _MAX_WIDTH = 1 << 16, 1 << 20  # what a configuration checks more closely


@dataclass(frozen=True, slots=True)
class MixtureRow:
    """How a family routes, and how its `config.json` spells the sizes.

    `renormalises` holds where `norm_topk_prob` is not stated, and in GGUF. With `is_optional` a model may have no
    experts at all.
    """

    count_keys: tuple[str, ...] = ("num_experts",)
    features_key: str = "moe_intermediate_size"
    scoring: Scoring = "softmax"
    renormalises: bool = False
    is_optional: bool = False


def read_hf_mixture(
    fields: Fields, row: MixtureRow | None, layers: int, activation: Activation
) -> tuple[Mixture, MixtureLayers] | tuple[None, None]:
    """The mixture that a `config.json` states, and which layers have it (None: all)."""
    key = next((key for key in row.count_keys if fields.get(key) is not None), row.count_keys[0]) if row else ""
    if row is None or (row.is_optional and fields.get(key) is None):
        return _NONE
    rule = RoutingRule(
        fields.integer("num_experts_per_tok", 1, _MAX_EXPERTS),
        row.scoring,
        renormalises=fields.flag("norm_topk_prob", row.renormalises),
    )
    mixture = Mixture(
        fields.integer(key, 1, _MAX_EXPERTS), fields.integer(row.features_key, 1, _MAX_WIDTH), activation, rule
    )
    return mixture, _read_hf_layers(fields, layers)


def _read_hf_layers(fields: Fields, layers: int) -> MixtureLayers:
    """Which layers have experts: each one at the end of a step, but for those that are named."""
    step = fields.integer("decoder_sparse_step", 1, layers, default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < layers for index in dense):
        fields.refuse("mlp_only_layers", f"a list of layers below {layers}")
    flags = tuple((index + 1) % step == 0 and index not in dense for index in range(layers))
    return None if all(flags) else flags


def read_gguf_mixture(
    fields: Fields, row: MixtureRow | None, tensors: Container[str], layers: int, activation: Activation
) -> tuple[Mixture, MixtureLayers] | tuple[None, None]:
    """The mixture that GGUF's metadata state; a layer has it that has a router."""
    count = fields.integer("expert_count", 0, _MAX_EXPERTS, default=0)
    if row is None or (row.is_optional and not count):
        fields.refuse_unless(("expert_count", "expert_used_count"), (0,), "mixture of experts is not supported there")
        return _NONE
    rule = RoutingRule(
        fields.integer("expert_used_count", 1, _MAX_EXPERTS),
        row.scoring,
        renormalises=fields.flag("expert_weights_norm", row.renormalises),
    )
    width = fields.integer(
        "expert_feed_forward_length", 1, _MAX_WIDTH, default=fields.integer("feed_forward_length", 1, _MAX_WIDTH)
    )
    flags = tuple(f"blk.{index}.ffn_gate_inp.weight" in tensors for index in range(layers))
    return Mixture(count, width, activation, rule), None if all(flags) else flags


def mixture_metadata(config: ModelConfig, row: MixtureRow | None) -> dict[str, object]:
    """The keys of GGUF that state the experts of a model."""
    mixture = config.mixture
    if mixture is None or row is None:
        return {}
    if mixture.rule.renormalises != row.renormalises:
        raise ModelError(
            f"a model whose shares of experts are {'' if mixture.rule.renormalises else 'not '}divided by their sum "
            f"cannot be stated in a GGUF file of architecture {config.architecture}"
        )
    return {
        "expert_count": mixture.experts,
        "expert_used_count": mixture.rule.used,
        "expert_feed_forward_length": mixture.features,
    }
