"""Folders of StableLM, which are read as those of Llama but for their norms."""

from __future__ import annotations

from mlxr.models.folders.config import LAYER_EPS, FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.rotations import state_rotation

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


FOLDERS = (FolderFamily("stablelm", "StableLmForCausalLM", "stablelm", state),)
