"""StableLM: layer norms with biases; in 12B the blocks stand side by side, and each head is normed."""

from __future__ import annotations

from mlxr.kernels.rope_and_write_kv import HeadNormKind
from mlxr.models.components import Layer, Norms
from mlxr.models.family import Family, Folder
from mlxr.models.folders.config import LAYER_EPS, FolderConfig
from mlxr.models.folders.rotations import state_rotation
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

_PARALLEL = "use_parallel_residual"


def state(c: FolderConfig) -> None:
    """State a model, whose two blocks of a layer may stand side by side."""
    c.state_model(eps=(LAYER_EPS,), eps_key=c.find_key("norm_epsilon", "layer_norm_eps"))
    c.state_width()
    c.state_head_norms("qk_layernorm")
    is_parallel = c.fields.flag(_PARALLEL, False)
    c.out.put(_PARALLEL, is_parallel, c.fields, _PARALLEL)
    c.out.put_own("parallel_blocks", is_parallel, c.fields, _PARALLEL)
    state_rotation(c, part=0.25)


def build(m: Metadata) -> Model:
    """Return the model of these metadata."""
    norms, rope, is_parallel = Norms(m.layer_eps, kind="layer", bias=True), m.rope(), m.is_parallel()
    head_norms: HeadNormKind | None = "layer" if m.has_head_norms() else None
    return m.model(
        Layer(m.attention(rope, window=window, head_norms=head_norms), m.feed_forward(), norms, is_parallel=is_parallel)
        for window in m.windows()
    )


FAMILIES = (Family("stablelm", build, (Folder("stablelm", "StableLmForCausalLM", state),)),)
