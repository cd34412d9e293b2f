"""Phi: 1, 1.5 and 2, then 3 and 4, and Phi-3.5-MoE.

In the first models both blocks read one layer norm, side by side, with biases everywhere and no gate. Phi-3 and Phi-4
have Llama's layers, stretched by longrope; files join q, k and v, and gate and up. Phi-3.5-MoE has layer norms with
biases, and experts that sparsemixer chooses. Files state the eps of its layer norms under the key of RMS norms, and
those that state no jitter mean a softmax of the logits of the chosen experts.
"""

from __future__ import annotations

from mlxr.models.components import Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import state_expert_width, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout({"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"})


def state_phi2(c: FolderConfig) -> None:
    """State the sizes of a model; all products have biases, the output too."""
    c.state_model(kv_heads=c.heads, eps=(LAYER_EPS,), eps_key="layer_norm_eps", activation="gelu_tanh", biases="use")
    c.out.put_own("output_bias", True)
    c.state_width()
    state_rotation(c, part=0.5)


def build_phi2(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.layer_eps, kind="layer", bias=True), m.rope()
    return m.model(
        Layer(m.attention(rope), m.feed_forward("gelu_tanh", gated=False), norms, is_parallel=True)
        for _ in range(m.layers)
    )


def state_phi3(c: FolderConfig) -> None:
    """State the sizes of a model."""
    c.state_model(kv_heads=c.heads)
    c.state_width()
    state_rotation(c)
    state_windows(c, default=0)


def build_phi3(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps), m.rope()
    layers = (Layer(m.attention(rope, window=window), m.feed_forward(), norms) for window in m.windows())
    return m.model(layers, joins=("attn_qkv", "ffn_up"))


_JITTER, _USUAL_JITTER = "router_jitter_noise", 0.01  # the key of GGUF and of folders
_USED = 2  # experts of a token


def state_phimoe(c: FolderConfig) -> None:
    """State a model; files state the eps of its layer norms under the key of RMS norms."""
    c.state_model(biases="block")
    experts = state_experts(c, count_keys=("num_local_experts",), features_key="intermediate_size")
    if c.out.integer("expert_used_count") != _USED:
        c.fields.refuse("num_experts_per_tok", f"{_USED}, for which alone this routing is known")
    c.out.put(_JITTER, c.fields.number(_JITTER, 0.0, 1.0, default=_USUAL_JITTER), c.fields, _JITTER)
    state_expert_width(c, experts)
    state_rotation(c, theta=1e6, has_mscales=True)
    state_windows(c, default=0)


def build_phimoe(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope = Norms(m.rms_eps, kind="layer", bias=True), m.rope()
    if m.fields.get(_JITTER) is None:
        rule = m.routing("softmax_chosen")
    else:
        rule = m.routing("sparsemixer", jitter=m.number(_JITTER, 0.0, 1.0))
    experts = Experts(m.experts, m.expert_features, m.activation(), rule)
    return m.model(
        Layer(m.attention(rope, window=window), experts if has_experts else m.feed_forward(), norms)
        for window, has_experts in zip(m.windows(), m.has_experts, strict=True)
    )


FAMILIES = (
    Family("phi2", build_phi2, (Folder("phi", "PhiForCausalLM", state_phi2, _TENSORS),)),
    Family("phi3", build_phi3, (Folder("phi3", "Phi3ForCausalLM", state_phi3),)),
    Family(
        "phimoe",
        build_phimoe,
        (Folder("phimoe", "PhimoeForCausalLM", state_phimoe, older_class="PhiMoEForCausalLM"),),
    ),
)
