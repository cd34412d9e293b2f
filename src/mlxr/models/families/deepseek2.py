"""DeepSeek V2 and V3 and similar models (Coder V2, R1, Kimi K2, Moonlight, GLM-4.7-Flash, Mistral 4).

Latent attention, then experts beside a block that all tokens go through; the first layers have none. V2 chooses experts
by the softmax of all scores, V3 by sigmoids and a bias, and both may choose groups of experts first.

V3.2 and GLM 5 attend to the `top_k` tokens before each one that an indexer finds. In a text with no more tokens the
choice does not matter, so they run with contexts of that length, and the indexer's weights are left in the file.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.kernels.moe import Scoring
from mlxr.models import limits
from mlxr.models.components import Experts, LatentAttention, Layer, Norms
from mlxr.models.components.feed_forward import CHOICE_BIAS
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts, state_latent_attention
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_COUNT_KEYS = ("n_routed_experts", "num_local_experts")
_INDEXER = "attention.indexer."
_INDEXED = TensorLayout(
    {
        f"self_attn.indexer.{module}": f"indexer.{name}"
        for module, name in (("wq_b", "attn_q_b"), ("wk", "attn_k"), ("k_norm", "k_norm"), ("weights_proj", "proj"))
    }
)


def state_v2(c: FolderConfig) -> None:
    """State the sizes of a V2."""
    c.fields.refuse_unless(("topk_method",), ("greedy",), "groups chosen by their best expert are not supported")
    _state(c, "softmax", renormalises=False)


def state_v3(c: FolderConfig) -> None:
    """State the sizes of a V3."""
    c.fields.refuse_unless(("rope_interleave",), (True,), "rotations of halves are not supported there")
    _state(c, "sigmoid", renormalises=True)


def state_indexed(c: FolderConfig) -> None:
    """State the sizes of a V3.2 or a GLM 5, whose indexer chooses the positions that are seen."""
    state_v3(c)
    c.out.put(f"{_INDEXER}top_k", c.fields.integer("index_topk", 1, limits.MAX_CONTEXT), c.fields, "index_topk")


def state_mistral4(c: FolderConfig) -> None:
    """State the sizes of a Mistral 4."""
    c.fields.refuse_unless(("rope_interleave",), (True,), "rotations of halves are not supported there")
    _state(c, "softmax", renormalises=True)


def _state(c: FolderConfig, scoring: Scoring, *, renormalises: bool) -> None:
    c.fields.refuse_unless(("scoring_func",), (scoring,), "not supported there")
    c.fields.refuse_unless(("moe_layer_freq",), (1,), "layers without experts between others are not supported")
    state_latent_attention(c)
    experts = state_experts(
        c,
        count_keys=_COUNT_KEYS,
        shared_key="n_shared_experts",
        shared="count",
        scoring=scoring,
        renormalises=renormalises,
        layers=read_expert_layers(c),
    )
    state_expert_width(c, experts)


def build(m: Metadata) -> Model:
    """Return the model of these metadata. In old files that do not say it, experts are chosen by sigmoids if there is a
    bias."""
    return _build(m, m.latent_attention())


def build_indexed(m: Metadata) -> Model:
    """Return the model of these metadata, for contexts in which its indexer leaves nothing out."""
    m.fields.note(f"{_INDEXER}{name}" for name in ("head_count", "key_length", "types"))
    model = _build(m, replace(m.latent_attention(), indexed=True))
    most = m.integer(f"{_INDEXER}top_k", 1, limits.MAX_CONTEXT)
    return replace(model, context_length=min(model.context_length, most))


def _build(m: Metadata, attention: LatentAttention) -> Model:
    norms, experts = Norms(m.rms_eps), None
    if m.experts:
        rule = m.routing("sigmoid" if m.has_tensor(CHOICE_BIAS) else "softmax", floor=1e-20)
        if m.architecture == "deepseek2" and rule.scoring == "softmax" and rule.groups_used < rule.groups:
            m.fields.refuse("expert_group_used_count", "all groups, as those of a V2 are chosen by their best expert")
        experts = Experts(
            m.experts,
            m.expert_features,
            m.activation(),
            rule,
            choice_bias=rule.scoring == "sigmoid",
            shared_features=m.integer("expert_shared_count", 0, default=0) * m.expert_features,
        )
    return m.model(
        Layer(attention, experts if experts is not None and has_experts else m.feed_forward(), norms)
        for has_experts in m.has_experts
    )


FAMILIES = (
    Family(
        "deepseek2",
        build,
        (
            Folder("deepseek_v2", "DeepseekV2ForCausalLM", state_v2),
            Folder("deepseek_v3", "DeepseekV3ForCausalLM", state_v3),
            Folder("kimi_k2", "DeepseekV3ForCausalLM", state_v3),
            Folder("glm4_moe_lite", "Glm4MoeLiteForCausalLM", state_v3),
        ),
    ),
    Family("deepseek32", build_indexed, (Folder("deepseek_v32", "DeepseekV32ForCausalLM", state_indexed, _INDEXED),)),
    Family("glm-dsa", build_indexed, (Folder("glm_moe_dsa", "GlmMoeDsaForCausalLM", state_indexed, _INDEXED),)),
    Family("mistral4", build, (Folder("mistral4", "Mistral4ForCausalLM", state_mistral4),)),
)
