"""What GGUF files call the tensors of a model where the canonical names, which the layers use, differ."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlxr.models.families import find_family
from mlxr.models.model import Model

_CANONICAL_PREFIX = re.compile(r"(blk\.[0-9]+)\.(.+)")
_CANONICAL = re.compile(r"(blk\.[0-9]+)\.(.+)\.(weight|bias)")


def gguf_name(name: str, model: Model) -> str:
    """What GGUF files of the model's architecture call the tensor of that canonical name."""
    family = find_family(model.architecture)
    layer = _CANONICAL.fullmatch(name)
    if layer is not None and layer[2] in family.gguf_bare:
        return f"{layer[1]}.{layer[2]}"
    return _rename(name, family.gguf_names)


def from_gguf_name(name: str, model: Model) -> str:
    """The other way round."""
    family = find_family(model.architecture)
    bare = _CANONICAL_PREFIX.fullmatch(name)
    if bare is not None and bare[2] in family.gguf_bare:
        return f"{name}.weight"
    return _rename(name, {gguf: canonical for canonical, gguf in family.gguf_names.items()})


def _rename(name: str, names: Mapping[str, str]) -> str:
    layer = _CANONICAL.fullmatch(name)
    return name if layer is None or layer[2] not in names else f"{layer[1]}.{names[layer[2]]}.{layer[3]}"
