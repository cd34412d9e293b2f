"""Falcon-H1: attention and Mamba-2 side by side in each layer.

Its folders state factors of products' results, which GGUF files include in the weights.
"""

from __future__ import annotations

from math import prod

from mlxr.models.components import Layer, Norms, ParallelMixers
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import FolderConfig, TensorLayout, WeightFactors
from mlxr.models.folders.mixers import Mamba2Keys, state_mamba2
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_NAMES = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_KEYS = Mamba2Keys(
    columns="mamba_d_ssm",
    norm="mamba_rms_norm",
    needed=(("mamba_proj_bias", False), ("mamba_conv_bias", True), ("projectors_bias", False)),
)
_LOWEST, _HIGHEST = 1e-9, 1e6
_MULTIPLIERS = {  # of single weights; those of attention's input and of its keys both apply to the keys' weight
    "token_embd.weight": ("embedding_multiplier",),
    "output.weight": ("lm_head_multiplier",),
    "attn_q.weight": ("attention_in_multiplier",),
    "attn_k.weight": ("attention_in_multiplier", "key_multiplier"),
    "attn_v.weight": ("attention_in_multiplier",),
    "attn_output.weight": ("attention_out_multiplier",),
    "ssm_out.weight": ("ssm_out_multiplier",),
}


def state(c: FolderConfig) -> None:
    """State a model, whose mixers stand side by side in each layer."""
    c.state_model()
    c.state_width()
    state_rotation(c)
    state_mamba2(c, _KEYS)
    _state_factors(c)
    c.out.put_own("tied_embeddings", False)  # with its own factor, the output has a weight of its own


def _state_factors(c: FolderConfig) -> None:
    """State the factors of weights, each for the rows that make a part of the result."""
    out, (gate, down) = c.out, _read_list(c, "mlp_multipliers", 2)
    factors = {"ffn_gate.weight": gate, "ffn_down.weight": down}
    for name, keys in _MULTIPLIERS.items():
        factors[name] = prod(c.fields.number(key, _LOWEST, _HIGHEST, default=1.0) for key in keys)
    out.factors |= {name: WeightFactors((factor,)) for name, factor in factors.items() if factor != 1.0}
    factor = c.fields.number("ssm_in_multiplier", _LOWEST, _HIGHEST, default=1.0)
    parts = tuple(factor * part for part in _read_list(c, "ssm_multipliers", 5))
    inner, heads = out.integer("ssm.inner_size"), out.integer("ssm.time_step_rank")
    states = out.integer("ssm.group_count") * out.integer("ssm.state_size")
    out.factors["ssm_in.weight"] = WeightFactors(parts, (inner, inner, states, states, heads))


def _read_list(c: FolderConfig, name: str, count: int) -> tuple[float, ...]:
    if c.fields.get(name) is None:
        return (1.0,) * count
    numbers = c.fields.numbers(name, _LOWEST, _HIGHEST)
    if len(numbers) != count:
        c.fields.refuse(name, f"a list of {count} numbers")
    return numbers


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, mamba, kv_heads = Norms(m.rms_eps), m.rope(), m.mamba2(), max(m.kv_counts)
    return m.model(
        Layer(ParallelMixers(m.attention(rope, kv_heads=kv_heads, window=window), mamba), m.feed_forward(), norms)
        for window in m.windows()
    )


FAMILIES = (
    Family(
        "falcon-h1",
        build,
        (Folder("falcon_h1", "FalconH1ForCausalLM", state, TensorLayout(_NAMES)),),
        bare_names=("ffn_norm",),
    ),
)
