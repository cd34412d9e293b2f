"""GLM-5.3-Flash: Kimi Linear's layers, with decays that have a bound and products that are clamped, between residual
streams that mix, and an indexer that chooses what latent attention sees.

The indexer scores pools of neighbouring tokens and adds the tokens behind the last pool. In a text with no more pools
than it may choose it chooses all, so these models run with contexts of that length, and its weights are left out.
Source: llama.cpp, src/models/glm5-next.cpp and conversion/glm.py; transformers, models/glm5_next.
"""

from __future__ import annotations

from dataclasses import replace

from mlxr.models import limits
from mlxr.models.components import BalancedStreams, Experts, FeedForward, Layer, Norms
from mlxr.models.families import kimi_linear
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import EXPERTS, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_expert_width, state_experts, state_latent_attention
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_INDEXER, _HYPER, _BOUND = "attention.indexer.", "hyper_connection.", "kda.gate_lower_bound"
_LIMITS = ("swiglu_clamp_exp", "swiglu_clamp_shexp")  # of experts; of blocks that all tokens go through
_NO_LIMIT = 1e-6  # what is no larger limits nothing
_TAIL = "index_kpool_always_select_tail"
_NAMES = (
    kimi_linear.DELTA_NAMES
    | {f"self_attn.indexer.index_kpool_compress_{part}": f"indexer.kpool_{part}" for part in ("ape", "gate")}
    | {
        f"self_attn.indexer.{module}": f"indexer.{name}"
        for module, name in (("wq_b", "attn_q_b"), ("wk", "attn_k"), ("k_norm", "k_norm"), ("weights_proj", "proj"))
    }
)


def state(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.fields.note((*EXPERTS, "swiglu_limit"))
    types = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(c.layers)]
    c = c.rename({}, {"layer_types": types, "first_k_dense_replace": min(3, c.layers), "qk_rope_head_dim": 0})
    fields, out = c.fields, c.out
    fields.refuse_unless(("mla_use_nope", "mhc"), (True,), "not supported there")
    fields.refuse_unless(("qk_rope_head_dim",), (0,), "attention that rotates is not supported there")
    state_latent_attention(c, rotates=False)
    c.state_kv_layers([not flag for flag in kimi_linear.state_delta(c)])
    linear = fields.mapping("linear_attn_config")
    own, key = (fields, "linear_lower_bound") if linear is None else (linear, "gate_lower_bound")
    is_free = own.has(key) and own.get(key) is None and not own.flag("safe_gate", linear is not None)
    if not is_free:
        out.put(_BOUND, own.number(key, -100.0, -1e-3, default=-5.0), own, key)
    limit = fields.number("swiglu_limit", 0.0, limits.MAX_SCALE, default=10.0)
    for name in _LIMITS:
        out.put(name, [limit] * c.layers, fields, "swiglu_limit")
    for name, key, usual in (
        (f"{_HYPER}count", "hc_mult", 4),
        (f"{_HYPER}sinkhorn_iterations", "hc_sinkhorn_iters", 20),
        (f"{_INDEXER}top_k", "index_topk", 2048),
        (f"{_INDEXER}kpool", "index_kpool", 16),
    ):
        out.put(name, fields.integer(key, 1, limits.MAX_CONTEXT, default=usual), fields, key)
    out.put(f"{_HYPER}epsilon", fields.number("hc_eps", 0.0, 1.0, default=1e-6), fields, "hc_eps")
    out.put(f"{_INDEXER}kpool_select_tail", fields.flag(_TAIL, True), fields, _TAIL)
    flags = state_experts(
        c,
        count_keys=("n_routed_experts",),
        shared_key="n_shared_experts",
        shared="count",
        scoring="sigmoid",
        renormalises=True,
        layers=read_expert_layers(c),
    )
    state_expert_width(c, flags)


def build(m: Metadata) -> Model:
    """Return the model of these metadata: layers without keys have the delta rule."""
    m.fields.note(f"{_INDEXER}{name}" for name in ("head_count", "key_length", "types"))
    m.fields.refuse_unless(("rope.dimension_count",), (0,), "attention that rotates is not supported there")
    m.fields.refuse_unless((f"{_INDEXER}kpool_select_tail",), (True,), "then the last tokens of a text are not seen")
    most = m.integer(f"{_INDEXER}top_k", 1, limits.MAX_CONTEXT)
    pool = m.integer(f"{_INDEXER}kpool", 1, limits.MAX_CONTEXT)
    if most % pool:
        m.fields.refuse(f"{_INDEXER}top_k", f"a multiple of the {pool} tokens of a pool")
    streams = BalancedStreams(
        m.integer(f"{_HYPER}count", 2, 64),
        m.integer(f"{_HYPER}sinkhorn_iterations", 1, 1024),
        m.number(f"{_HYPER}epsilon", 0.0, 1.0),
    )
    norms, attention = Norms(m.rms_eps), replace(m.latent_attention(rotates=False), indexed=True)
    bound = m.number(_BOUND, -100.0, -1e-3, default=0.0)
    delta = kimi_linear.read_delta(m, bound, has_flat_rates=True)
    model = m.model(
        Layer(attention if keys else delta, block, norms, streams=streams, is_last=index + 1 == m.layers)
        for index, (keys, block) in enumerate(zip(m.kv_counts, _list_blocks(m), strict=True))
    )
    return replace(model, context_length=min(model.context_length, most + pool - 1))


def _list_blocks(m: Metadata) -> list[FeedForward | Experts]:
    """Return the second block of each layer, whose gates and factors may have a limit."""
    free, stated = (0.0,) * m.layers, [name for name in _LIMITS if m.fields.get(name) is not None]
    read = {name: m.numbers(name, 0.0, limits.MAX_SCALE) for name in stated}
    experts = read.get(_LIMITS[0], free)
    blocks, shared = list[FeedForward | Experts](), read.get(_LIMITS[1], experts)
    for own, beside, has_experts in zip(experts, shared, m.has_experts, strict=True):
        if has_experts and own != beside:
            m.fields.refuse(_LIMITS[1], f"in layers with experts the limit of these, {own:g}")
        limited = (beside,) if beside > _NO_LIMIT else ()
        block = m.feed_forward("limited_swiglu" if limited else "silu", parameters=limited)
        if has_experts:
            sizes = m.experts, m.expert_features, block.activation, m.routing("sigmoid", renormalises=True, floor=1e-20)
            width = m.integer("expert_shared_count", 0, default=0) * m.expert_features
            blocks.append(Experts(*sizes, choice_bias=True, shared_features=width, parameters=limited))
        else:
            blocks.append(block)
    return blocks


FAMILIES = (
    Family(
        "glm5-next",
        build,
        tuple(
            Folder(kind, "Glm5NextForConditionalGeneration", state, TensorLayout(_NAMES))
            for kind in ("glm5_next_text", "glm5_next")
        ),
    ),
)
