"""From a `config.json` to what its folder amounts to as a GGUF file, by the functions of its family."""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.core.errors import ModelError
from mlxr.models.families import FOLDERS, model_from_gguf
from mlxr.models.fields import Fields
from mlxr.models.folders.config import FolderConfig
from mlxr.models.folders.family import FolderFamily
from mlxr.models.folders.statement import Statement
from mlxr.models.model import Model


def model_from_folder(config: Mapping[str, object]) -> Model:
    """Return the model of a folder: that of its metadata. Raises as `read_folder` does."""
    return read_model(read_folder(config))


def read_model(stated: Statement) -> Model:
    """Return the model that a folder's metadata state; errors name keys of `config.json`."""
    return model_from_gguf(stated.values, stated.list_vectors(), stated.origins)


def read_folder(config: Mapping[str, object]) -> Statement:
    """Return what a folder amounts to. Raises ModelError naming a key that is missing, absurd or not supported."""
    whole = Fields(config)
    fields = whole.mapping("text_config") or whole
    family = _find_family(fields)
    stated = Statement(family.tensors, family.architecture)
    read = FolderConfig(whole, fields, stated)
    family.state(read)
    read.refuse_others()
    stated.finish()
    return stated


def _find_family(fields: Fields) -> FolderFamily:
    """Return the family by class where `architectures` names one, else by `model_type`; they must agree."""
    classes = fields.get("architectures")
    model_type = fields.text("model_type", default="")
    if classes is None:
        return _find_by_type(model_type)
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        fields.refuse("architectures", "a list of one class")
    for family in FOLDERS:
        if classes[0] in (family.hf_class, family.older_class):
            if model_type not in ("", family.model_type):
                fields.refuse("model_type", f"{family.model_type}, as architectures is {classes}")
            return family
    known = ", ".join(sorted(family.hf_class for family in FOLDERS))
    raise ModelError(f"architectures is [{classes[0]!r}], which is not supported; supported are {known}")


def _find_by_type(model_type: str) -> FolderFamily:
    for family in FOLDERS:
        if family.model_type == model_type:
            return family
    known = ", ".join(sorted(family.model_type for family in FOLDERS))
    raise ModelError(f"architecture {model_type!r} is not supported; supported are {known}")
