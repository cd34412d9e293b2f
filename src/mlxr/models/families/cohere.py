"""Command R and R+, and Cohere 2: two blocks side by side after one layer norm without a bias, logits that are scaled.

Command R+ norms each head of queries and keys. Of Cohere 2 three of four layers have a window, and these alone rotate.
"""

from __future__ import annotations

from mlxr.kernels.rope_and_write_kv import HeadNormKind
from mlxr.models import limits
from mlxr.models.components import NO_ROPE, Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig, TensorLayout
from mlxr.models.folders.rotations import state_rotation, state_windows
from mlxr.models.metadata import WINDOW_THETA, Metadata
from mlxr.models.model import Model

_TENSORS = TensorLayout(turns_neighbours=True)


def _state_common(c: FolderConfig, kv_heads: int | None, *context_keys: str) -> None:
    eps_key = c.find_key("norm_epsilon", "layer_norm_eps")
    c.state_model(
        kv_heads=kv_heads, eps=(LAYER_EPS,), eps_key=eps_key, context_keys=context_keys, biases="block", tied=True
    )
    c.state_width()
    scale = c.fields.number("logit_scale", 1e-9, limits.MAX_SCALE, default=0.0625)
    c.out.put("logit_scale", scale, c.fields, "logit_scale")
    state_rotation(c)


def state_cohere(c: FolderConfig) -> None:
    """State a Command R or R+; published ones state the longest context in two fields."""
    _state_common(c, c.heads, "model_max_length", "max_position_embeddings")
    c.state_head_norms("use_qk_norm")


def state_cohere2(c: FolderConfig) -> None:
    """State a Cohere 2; layers without a window rotate nothing."""
    _state_common(c, None, "max_position_embeddings")
    state_windows(c, full_every=4)


def build(m: Metadata) -> Model:
    """Return a model of which all layers are alike: Command R and R+."""
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


FAMILIES = (
    Family("command-r", build, (Folder("cohere", "CohereForCausalLM", state_cohere, _TENSORS),)),
    Family("cohere2", build_windowed, (Folder("cohere2", "Cohere2ForCausalLM", state_cohere2, _TENSORS),)),
)
