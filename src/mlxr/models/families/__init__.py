"""The families of models that run, one file each; makes a model from the metadata of its files.

A family's file translates its folders' `config.json` into GGUF's words (`state`), and builds a model from such metadata
(`build`). A folder is read as the GGUF file that it amounts to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import TensorSource
from mlxr.models.family import Family, Folder
from mlxr.models.fields import NO_ORIGINS, Fields, Origin
from mlxr.models.folders.config import NO_TENSORS, FolderConfig, Statement, TensorLayout
from mlxr.models.hearing import EarFamily, EarSpec, list_projectors
from mlxr.models.metadata import Metadata
from mlxr.models.model import Model
from mlxr.models.tower import TowerFamily, TowerSpec

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
FAMILIES: tuple[Family, ...] = tuple(family for file in _FILES for family in getattr(file, "FAMILIES", ()))
FOLDERS: tuple[tuple[Family, Folder], ...] = tuple((family, one) for family in FAMILIES for one in family.folders)
_BY_NAME = {family.name: family for family in FAMILIES}
_SEEING = [file for file in _FILES if hasattr(file, "TOWERS")]  # that list the towers of their families
_TOWERS: dict[str, TowerFamily] = {tower.projector: tower for file in _SEEING for tower in file.TOWERS}
_HEARING = [file for file in _FILES if hasattr(file, "EARS")]
_EARS: tuple[EarFamily, ...] = tuple(ear for file in _HEARING for ear in file.EARS)
_HEARS_BY = {family.name: file.EARS for file in _HEARING for family in file.FAMILIES}
_SEES_BY = {family.name: [tower.projector for tower in file.TOWERS] for file in _SEEING for family in file.FAMILIES}

_BY_DIFFUSION = ("dream", "llada", "rnd1", "diffusion")


def find_family(name: str) -> Family:
    """Return the family of a GGUF file's `general.architecture`; raises ModelError when there is none."""
    if name not in _BY_NAME:
        raise _unknown(f"general.architecture is {name[:80]!r}, which", name, _BY_NAME)
    return _BY_NAME[name]


def find_layout(model: Model) -> TensorLayout:
    """Return the layout of tensors in folders of models like this one."""
    layouts = (folder.tensors for family, folder in FOLDERS if family.name == model.architecture)
    return next(layouts, TensorLayout())


def model_from_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorSource], origins: Mapping[str, Origin] = NO_ORIGINS
) -> Model:
    """Return the model of a GGUF file's metadata. Raises ModelError naming the key, or its origin, that is missing,
    absurd or not supported.

    So it does for keys that nothing here reads and that are known to change answers. Only longrope's factors are read
    from `tensors`.
    """
    return _build(Metadata(metadata, tensors, origins))


def list_unknown_keys(metadata: Mapping[str, object], tensors: Mapping[str, TensorSource]) -> list[str]:
    """Return the keys of a file that describe the model and that nothing here reads; raises as `model_from_gguf`."""
    read = Metadata(metadata, tensors)
    _build(read)
    return read.list_unknown()


def _build(metadata: Metadata) -> Model:
    model = find_family(metadata.architecture).build(metadata)
    metadata.refuse_unread()
    return model


def model_from_folder(config: Mapping[str, object], tensors: Mapping[str, TensorSource] = NO_TENSORS) -> Model:
    """Return the model of a folder: that of its metadata. Raises as `read_folder` does."""
    return read_model(read_folder(config, tensors))


def read_model(stated: Statement) -> Model:
    """Return the model that a folder's metadata state; errors name keys of `config.json`."""
    return model_from_gguf(stated.values, stated.list_vectors(), stated.origins)


def read_folder(config: Mapping[str, object], tensors: Mapping[str, TensorSource] = NO_TENSORS) -> Statement:
    """Return the metadata that a folder amounts to. Raises ModelError naming a missing, absurd or unsupported key.

    Without its `tensors`, numbers that they state are those of a new model.
    """
    whole = Fields(config)
    text = whole.mapping("text_config")
    fields = text or whole
    family, folder = _find_folder(fields)
    if text is not None:
        fields = text.fill(folder.left_out)
    stated = Statement(folder.tensors, family.name)
    read = FolderConfig(whole, fields, stated, tensors)
    folder.state(read)
    read.refuse_others()
    stated.finish()
    return stated


def _find_folder(fields: Fields) -> tuple[Family, Folder]:
    """Return the kind of folder by class if `architectures` names one, else by `model_type`; they must agree."""
    classes = fields.get("architectures")
    model_type = fields.text("model_type", default="")
    if classes is None:
        return _find_by_type(model_type)
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        fields.refuse("architectures", "a list of one class")
    found = [pair for pair in FOLDERS if classes[0] in (pair[1].hf_class, pair[1].older_class)]
    for family, folder in found:
        if model_type in ("", folder.model_type):
            return family, folder
    if found:
        fields.refuse("model_type", f"{found[0][1].model_type}, as architectures is {classes}")
    raise _unknown(
        f"architectures is [{classes[0][:80]!r}], which", classes[0], {folder.hf_class for _, folder in FOLDERS}
    )


def _find_by_type(model_type: str) -> tuple[Family, Folder]:
    for family, folder in FOLDERS:
        if folder.model_type == model_type:
            return family, folder
    raise _unknown(f"architecture {model_type[:80]!r}", model_type, {folder.model_type for _, folder in FOLDERS})


def _unknown(what: str, name: str, known: Collection[str]) -> ModelError:
    """Return the error for a name that is not `known`, with one that is spelt like it, if there is any."""
    if name.lower().startswith(_BY_DIFFUSION):
        return ModelError(
            f"{what} is not supported: it writes by diffusion, many tokens at once, not from left to right"
        )
    names = sorted(known)
    nearest = get_close_matches(name.lower()[:64], names, n=1, cutoff=0.5)
    return ModelError(
        f"{what} is not supported{'; the nearest name that is: ' + nearest[0] if nearest else ''}; supported are "
        f"{', '.join(names)}; docs/adding.md says how to ask for a family and how to add one"
    )


def takes_pictures(model: Model) -> bool:
    """Return True if a model like this one may have a tower."""
    return model.architecture in _SEES_BY and model.has_output


def fit_tower(family: TowerFamily, spec: TowerSpec, model: Model) -> None:
    """Raise ModelError unless the text of `model` takes the rows of such a tower."""
    known = _SEES_BY.get(model.architecture, [])
    if family.projector not in known:
        raise ModelError(
            f"the tower is one of {family.projector}, and {model.architecture} models see by "
            f"{' or '.join(known) or 'none'}; take the tower of the same model"
        )
    spec.fit(model)


def read_gguf_tower(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorSource]
) -> tuple[TowerFamily, TowerSpec]:
    """Return the family of the tower in an `mmproj` file, and its sizes. Raises ModelError, naming the key."""
    fields = Fields(metadata)
    fields.refuse_unless(
        ("general.architecture",), ("clip",), "expected a file with a tower, whose architecture is clip"
    )
    own = fields.get("clip.vision.projector_type")
    kind = fields.text("clip.projector_type" if own is None else "clip.vision.projector_type")
    if kind not in _TOWERS:
        raise ModelError(f"clip.projector_type is {kind!r}, which does not run yet; those that do: {_list_towers()}")
    return _TOWERS[kind], _TOWERS[kind].read_gguf(fields, tensors)


def read_folder_tower(
    config: Mapping[str, object], preprocessor: Mapping[str, object]
) -> tuple[TowerFamily, TowerSpec] | None:
    """Return the family of a folder's tower by its `config.json` and `preprocessor_config.json`, and its sizes.

    None without one. Raises ModelError, naming the key.
    """
    whole = Fields(config)
    tower = whole.mapping("vision_config")
    if tower is None:
        return None
    kinds = whole.text("model_type", default=""), tower.text("model_type", default="").removesuffix("_vision")
    for family in _TOWERS.values():
        if any(kind in family.model_types for kind in kinds):
            return family, family.read_folder(whole, tower, Fields(preprocessor))
    raise ModelError(f"model_type is {kinds[0]!r}, whose tower does not run yet; those that do: {_list_towers()}")


def _list_towers() -> str:
    return ", ".join(_TOWERS)


Found = tuple[EarFamily, EarSpec]


def read_gguf_ear(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorSource], model: Model
) -> tuple[Found | None, str]:
    """Return the ear for `model` in an `mmproj` file, or the reason that none fits."""
    fields = Fields(metadata)
    kind = fields.get("clip.audio.projector_type")
    if kind is None:
        return None, "the file of its tower has no ear (clip.audio.projector_type)"
    found = next((ear for ear in _EARS if ear.projector == kind), None)
    if found is None:
        return (
            None,
            f"clip.audio.projector_type is {str(kind)[:80]!r}, which does not run yet; those that do: {_list_ears()}",
        )
    return _fit_ear(found, lambda: found.read_gguf(fields, tensors), model)


def read_folder_ear(config: Mapping[str, object], model: Model) -> tuple[Found | None, str]:
    """Return the ear for `model` in a folder by its `config.json`, or the reason that none fits."""
    whole = Fields(config)
    try:
        ear, kind = whole.mapping("audio_config"), whole.text("model_type", default="")
    except ModelError as error:
        return None, str(error)
    if ear is None:
        return None, "config.json has no audio_config"
    found = next((one for one in _EARS if kind in one.model_types), None)
    if found is None:
        return None, f"model_type is {kind[:80]!r}, whose ear does not run yet; those that do: {_list_ears()}"
    return _fit_ear(found, lambda: found.read_folder(whole, ear), model)


def _fit_ear(family: EarFamily, read: Callable[[], EarSpec], model: Model) -> tuple[Found | None, str]:
    try:
        spec = read()
        if family not in _HEARS_BY.get(model.architecture, ()):
            raise ModelError(f"the ear is one of {family.projector}, by which {model.architecture} models do not hear")
        spec.fit(model)
    except ModelError as error:
        return None, str(error)
    return (family, spec), ""


def _list_ears() -> str:
    return list_projectors(_EARS)
