"""Command R and R+, and Cohere 2: two blocks side by side after one layer norm without a bias, logits that are scaled.

Command R+ norms each head of queries and keys. Three of four layers of Cohere 2 have a window, and only these rotate.
Cohere 2 with experts halves the sum of these and of a block that all tokens go through.
"""

from __future__ import annotations

from mlxr.kernels.rope_and_write_kv import HeadNormKind
from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Experts, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, RMS_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.mixers import read_expert_layers, state_experts
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import WINDOW_PATTERN, WINDOW_THETA, Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout(turns_neighbours=True)


def _state_common(c: FolderConfig, kv_heads: int | None, *context_keys: str) -> None:
    eps_key = c.find_key("norm_epsilon", "layer_norm_eps")
    c.state_model(
        kv_heads=kv_heads, eps=(LAYER_EPS,), eps_key=eps_key, context_keys=context_keys, biases="block", tied=True
    )
    c.state_width()
    _state_logits(c)
    state_rotation(c)


def state_cohere(c: FolderConfig) -> None:
    """State a Command R or R+; published ones state the longest context in two fields."""
    _state_common(c, c.heads, "model_max_length", "max_position_embeddings")
    c.state_head_norms("use_qk_norm")


def state_cohere2(c: FolderConfig) -> None:
    """State a Cohere 2; layers without a window rotate nothing."""
    _state_common(c, None, "max_position_embeddings")
    state_windows(c, full_every=4)


def state_mixture(c: FolderConfig) -> None:
    """State a Cohere 2 with experts."""
    c.fields.refuse_unless(("shared_expert_combination_strategy",), ("average",), "not supported")
    c.fields.refuse_unless(("prefix_dense_sliding_window_pattern",), (1,), "not supported")
    is_rms = c.fields.get("rms_norm_eps") is not None
    eps, eps_key = (RMS_EPS, "rms_norm_eps") if is_rms else (LAYER_EPS, "layer_norm_eps")
    c.state_model(kv_heads=c.heads, eps=(eps,), eps_key=eps_key, biases="block", tied=True)
    chooses = c.fields.text("expert_selection_fn", default="softmax")
    if chooses not in ("softmax", "sigmoid"):
        c.fields.refuse("expert_selection_fn", "softmax or sigmoid")
    flags = state_experts(
        c,
        features_key="intermediate_size",
        shared_key="num_shared_experts",
        shared="count",
        scoring="sigmoid" if chooses == "sigmoid" else "softmax_chosen",
        renormalises=True,
        layers=read_expert_layers(c),
    )
    if c.fields.get("layer_types") is None and not all(flags):
        c.fields.refuse("layer_types", f"a list of {c.layers}")
    c.state_width("intermediate_size" if all(flags) else "prefix_dense_intermediate_size")
    _state_logits(c)
    state_rotation(c)
    state_windows(c, full_every=4, states_layers=True)


def _state_logits(c: FolderConfig) -> None:
    scale = c.fields.number("logit_scale", 1e-9, limits.MAX_SCALE, default=0.0625)
    c.out.put("logit_scale", scale, c.fields, "logit_scale")


def build(m: Metadata) -> Model:
    """Return a model whose layers are all alike: Command R and R+."""
    norms, rope = Norms(m.layer_eps, kind="layer"), m.rope(interleaved=True)
    head_norms: HeadNormKind | None = "layer" if m.has_head_norms() else None
    return m.model(
        (
            Layer(m.attention(rope, window=window, head_norms=head_norms), m.feed_forward(), norms, is_parallel=True)
            for window in m.windows()
        ),
        logit_scale=m.scale("logit_scale") or 1.0,
    )


def build_windowed(m: Metadata) -> Model:
    """Return a model with windows: Cohere 2."""
    norms, rope, windowed = Norms(m.layer_eps, kind="layer"), m.rope(interleaved=True), m.windowed(full_every=4)
    m.fields.note((WINDOW_THETA,))  # which is that of all layers that rotate
    rotates = m.rotates(windowed if any(windowed) else (True,) * m.layers)
    return m.model(
        (
            Layer(
                m.attention(rope if turns else NO_ROPE, window=m.window if has_window else None),
                m.feed_forward(),
                norms,
                is_parallel=True,
            )
            for has_window, turns in zip(windowed, rotates, strict=True)
        ),
        logit_scale=m.scale("logit_scale") or 1.0,
    )


def build_mixture(m: Metadata) -> Model:
    """Return a Cohere 2 with experts; its first layers have none, and rotate although they have no window."""
    is_layer_norm = m.fields.get("attention.layer_norm_rms_epsilon") is None
    norms = Norms(m.layer_eps, kind="layer") if is_layer_norm else Norms(m.rms_eps)
    if m.fields.get(WINDOW_PATTERN) is None:
        m.fields.refuse(WINDOW_PATTERN, "a flag for each layer")
    m.fields.note((WINDOW_THETA,))  # which is that of all layers that rotate
    rope, shared = m.rope(interleaved=True), m.integer("expert_shared_count", 0, default=0) * m.expert_features
    experts = Experts(
        m.experts,
        m.expert_features,
        m.activation(),
        m.routing("sigmoid"),
        shared_features=m.shared_features() or shared,
        averages=True,
    )
    layers = []
    for windowed, has_experts in zip(m.windowed(full_every=4), m.has_experts, strict=True):
        turns = rope if windowed or not has_experts else NO_ROPE
        attention = m.attention(turns, window=m.window if windowed else None)
        layers.append(Layer(attention, experts if has_experts else m.feed_forward(), norms, is_parallel=True))
    return m.model(layers, logit_scale=m.scale("logit_scale") or 1.0)


FAMILIES = (
    Family("cohere2moe", build_mixture, (Folder("cohere2_moe", "Cohere2MoeForCausalLM", state_mixture, _TENSORS),)),
    Family("command-r", build, (Folder("cohere", "CohereForCausalLM", state_cohere, _TENSORS),)),
    Family("cohere2", build_windowed, (Folder("cohere2", "Cohere2ForCausalLM", state_cohere2, _TENSORS),)),
)
