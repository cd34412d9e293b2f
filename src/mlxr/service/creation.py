"""Makes a model from another one, as a Modelfile or a request asks, and checks it before it is stored."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlxr.conversion import find_lossy, plan_tensors, write_model
from mlxr.core.errors import InvalidRequest, MlxrError, ModelError
from mlxr.core.types import is_tower_file
from mlxr.loading import Progress, open_source
from mlxr.registry import AdapterRecord, Changes, ModelRecord, Registry
from mlxr.service.catalogue import find_capabilities, inspect_model
from mlxr.service.chat_templates import read_template

AdapterSource = AdapterRecord | Path | Mapping[str, str]


def create_model(
    registry: Registry,
    name: str,
    source: ModelRecord | Mapping[str, str],
    changes: Changes,
    *,
    quantize: str | None = None,
    progress: Progress | None = None,
    adapter: AdapterSource | None = None,
    replaces: bool = False,
    renderer: str | None = None,
) -> ModelRecord:
    """Make `name` of another model, or of blobs in the store (file name to digest), with `changes`.

    All answers of the new model use the `adapter`, if one is given: by a name, by files, or by blobs as above.

    With `quantize`, such as q4_K_M, the weights are written anew in that type, into the store; `progress` gets the
    bytes done and in all. A name that is taken is refused (NameTaken) unless the new model `replaces` the old one,
    which stays until the new one is complete. A `renderer` is the part of Ollama that writes the model's prompts there;
    it is refused if no template does so here. Raises InvalidRequest, NotFound, and the loader's errors for files that
    it cannot run.
    """
    registry.check_free(name, replaces=replaces)
    if changes.template is not None:
        template = read_template(changes.template)
        capabilities = _find_capabilities(registry, source, template)
        changes = replace(changes, template=template, capabilities=capabilities)
    elif renderer is not None and not _has_template(registry, source):
        raise InvalidRequest("RENDERER", f"{renderer[:80]!r} is a part of Ollama, and the model has no template to use")
    if adapter is not None:
        if not isinstance(source, ModelRecord) or quantize is not None:
            raise InvalidRequest("adapter", "goes with a model that is there, as it is: give from, and no quantize")
        if source.adapter is not None:
            raise InvalidRequest("adapter", f"{source.short_name} has one already, and a model has one")
        changes = replace(changes, adapter=registry.adapters.make_part(adapter, source))
    elif quantize is not None and isinstance(source, ModelRecord) and source.adapter is not None:
        raise InvalidRequest("quantize", f"{source.short_name} has an adapter; `mlxr merge` writes both as one model")
    if quantize is not None:
        return _create_quantized(registry, name, source, changes, quantize, progress, replaces)
    if isinstance(source, ModelRecord):
        return registry.derive(name, source, changes, replaces=replaces)
    return registry.add(name, source, changes, replaces=replaces)


def _find_capabilities(registry: Registry, source: ModelRecord | Mapping[str, str], template: str) -> frozenset[str]:
    """Return the capabilities of a model with another template."""
    if isinstance(source, ModelRecord):
        known, has_tower = source.capabilities, source.tower is not None
    else:
        facts = registry.inspect(source)
        known, has_tower = facts.capabilities, any(is_tower_file(path.name) for path in facts.files)
    return find_capabilities(template, writes="completion" in known, sees="vision" in known or has_tower)


def _has_template(registry: Registry, source: ModelRecord | Mapping[str, str]) -> bool:
    if isinstance(source, ModelRecord):
        return bool(source.template or source.own_template)
    return bool(inspect_model(registry.assemble(source)).template)


def _create_quantized(
    registry: Registry,
    name: str,
    source: ModelRecord | Mapping[str, str],
    changes: Changes,
    type_name: str,
    progress: Progress | None,
    replaces: bool,
) -> ModelRecord:
    path = source.path if isinstance(source, ModelRecord) else registry.assemble(source)
    files = {"model.gguf": registry.make_blob(lambda out: _quantize(path, out, type_name, progress))}
    tower = _find_tower(registry, source)
    try:
        if tower is not None:
            files["mmproj.gguf"] = registry.make_blob(lambda out: shutil.copyfile(tower, out))
        if not isinstance(source, ModelRecord):
            return registry.add(name, files, changes, replaces=replaces)
        inherited = _inherit(source, changes)
        return registry.add(name, files, inherited, from_name=source.short_name, replaces=replaces)
    except MlxrError:
        registry.discard(list(files.values()))
        raise


def _find_tower(registry: Registry, source: ModelRecord | Mapping[str, str]) -> Path | None:
    """Return the file of the vision or audio encoder that the new model gets, too."""
    if isinstance(source, ModelRecord):
        return source.tower
    towers = [registry.blobs.find(digest) for name, digest in source.items() if is_tower_file(name)]
    return next(iter(towers), None)


def _quantize(path: Path, out: Path, type_name: str, progress: Progress | None) -> None:
    """Write the model at `path` in the types of a recipe; raises InvalidRequest if it is quantised already."""
    model = open_source(path)
    with model.file:
        try:
            tensors = plan_tensors(model, type_name)
        except ModelError as error:
            raise InvalidRequest("quantize", str(error)) from error
        lossy = find_lossy(model, tensors)
        if lossy:
            reason = f"these weights are quantised already ({', '.join(lossy)}); `mlxr convert` would do it anyway"
            raise InvalidRequest("quantize", reason)
        write_model(model, tensors, type_name, out, progress)


def _inherit(source: ModelRecord, changes: Changes) -> Changes:
    """Return the changes, completed with the settings of the source model."""
    capabilities = source.capabilities if changes.capabilities is None else changes.capabilities
    return Changes(
        template=source.template if changes.template is None else changes.template,
        system=source.system if changes.system is None else changes.system,
        parameters={**source.parameters, **(changes.parameters or {})},
        messages=source.messages if changes.messages is None else changes.messages,
        license=source.license if changes.license is None else changes.license,
        capabilities=capabilities
        if source.tower
        else capabilities - {"vision", "audio"},  # a folder's tower is not written
    )
