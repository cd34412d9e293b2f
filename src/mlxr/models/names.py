"""The names of tensors: GGUF's, but that all weights of layers end in `.weight`, as some files leave it out."""

from __future__ import annotations

import re

from mlxr.models.families import find_family
from mlxr.models.model import Model

_LAYER = re.compile(r"blk\.[0-9]+\.(.+)")


def gguf_name(name: str, model: Model) -> str:
    """Return what GGUF files of the model's architecture call the tensor of that canonical name."""
    layer = _LAYER.fullmatch(name)
    bare = None if layer is None else layer[1].removesuffix(".weight")
    return name.removesuffix(".weight") if bare in find_family(model.architecture).bare_names else name


def from_gguf_name(name: str, model: Model) -> str:
    """Return the canonical name of a tensor that GGUF files call so."""
    layer = _LAYER.fullmatch(name)
    is_bare = layer is not None and layer[1] in find_family(model.architecture).bare_names
    return f"{name}.weight" if is_bare else name
