"""The families of models that run, one file each, and a model out of the metadata of its files.

A family's file says what its folders' `config.json` states in GGUF's words (`state`), and which model such metadata are
(`build`).
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import TensorSource
from mlxr.models.families import (
    cohere,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    ministral3,
    nemotron_h,
    olmo,
    phi3,
    phimoe,
    qwen,
    qwen35,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from mlxr.models.family import Family
from mlxr.models.fields import NO_ORIGINS, Origin
from mlxr.models.folders.statement import TensorLayout
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model

FAMILIES = (
    *cohere.FAMILIES,
    *exaone4.FAMILIES,
    *falcon_h1.FAMILIES,
    *gemma.FAMILIES,
    *gemma4.FAMILIES,
    *glm4_moe.FAMILIES,
    *gpt_oss.FAMILIES,
    *granite.FAMILIES,
    *hunyuan.FAMILIES,
    *lfm2.FAMILIES,
    *llama.FAMILIES,
    *ministral3.FAMILIES,
    *nemotron_h.FAMILIES,
    *olmo.FAMILIES,
    *phi3.FAMILIES,
    *phimoe.FAMILIES,
    *qwen.FAMILIES,
    *qwen35.FAMILIES,
    *seed_oss.FAMILIES,
    *smollm3.FAMILIES,
    *stablelm.FAMILIES,
    *starcoder2.FAMILIES,
)
FOLDERS = (
    *cohere.FOLDERS,
    *exaone4.FOLDERS,
    *falcon_h1.FOLDERS,
    *gemma.FOLDERS,
    *gemma4.FOLDERS,
    *glm4_moe.FOLDERS,
    *gpt_oss.FOLDERS,
    *granite.FOLDERS,
    *hunyuan.FOLDERS,
    *lfm2.FOLDERS,
    *llama.FOLDERS,
    *ministral3.FOLDERS,
    *nemotron_h.FOLDERS,
    *olmo.FOLDERS,
    *phi3.FOLDERS,
    *phimoe.FOLDERS,
    *qwen.FOLDERS,
    *qwen35.FOLDERS,
    *seed_oss.FOLDERS,
    *smollm3.FOLDERS,
    *stablelm.FOLDERS,
    *starcoder2.FOLDERS,
)
_BY_NAME = {family.name: family for family in FAMILIES}


def find_family(name: str) -> Family:
    """Return the family of a GGUF file's `general.architecture`; ModelError when there is none."""
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        raise ModelError(f"general.architecture is {name!r}, which is not supported; supported are {known}")
    return _BY_NAME[name]


def find_layout(model: Model) -> TensorLayout:
    """Return how folders of models like this one keep tensors."""
    name = model.architecture
    layouts = [folder.tensors for folder in FOLDERS if name in (folder.architecture, folder.experts_architecture)]
    return layouts[0] if layouts else TensorLayout()


def model_from_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorSource], origins: Mapping[str, Origin] = NO_ORIGINS
) -> Model:
    """Return the model of a GGUF file's metadata. Raises ModelError naming the key that is missing, absurd or not
    supported, or its origin.

    So it does for keys that nobody here reads and that are known to change answers. Of the `tensors` only the factors
    of longrope are read.
    """
    return _build(Metadata(metadata, tensors, origins))


def list_unknown_keys(metadata: Mapping[str, object], tensors: Mapping[str, TensorSource]) -> list[str]:
    """Return the keys of a file that state something of the model and that nothing here reads; raises as above."""
    read = Metadata(metadata, tensors)
    _build(read)
    return read.list_unknown()


def _build(metadata: Metadata) -> Model:
    model = find_family(metadata.architecture).build(metadata)
    metadata.refuse_unread()
    return model
