"""Making a model from another one: what a Modelfile or a request to create asks for, checked before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.registry import Changes, ModelRecord, Registry
from mlxr.service.capabilities import find_capabilities
from mlxr.tokenizers import ChatTemplate


def create_model(
    registry: Registry, name: str, source: ModelRecord | Mapping[str, str], changes: Changes
) -> ModelRecord:
    """Make `name` of another model, or of blobs in the store (file name to digest), with `changes`.

    Raises InvalidRequest, NotFound, and what the loader says of files that it cannot run.
    """
    if changes.template is not None:
        check_template(changes.template)
        changes = replace(changes, capabilities=find_capabilities(changes.template))
    if isinstance(source, ModelRecord):
        return registry.derive(name, source, changes)
    return registry.add(name, source, changes)


def check_template(source: str) -> None:
    """Raise InvalidRequest for a template that does not compile. What it makes of conversations is its own business."""
    try:
        ChatTemplate(source, bos_token="", eos_token="", name="in TEMPLATE").check()
    except TemplateError as error:
        if "{{ ." in source or "{{." in source or "{{- ." in source:
            raise InvalidRequest("template", f"is a Go template; give a Jinja template ({error})") from error
        raise InvalidRequest("template", str(error)) from error
