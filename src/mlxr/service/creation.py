"""Making a model from another one: what a Modelfile or a request to create asks for, checked before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.registry import Changes, ModelRecord, Registry
from mlxr.service.capabilities import find_capabilities
from mlxr.tokenizers import ChatTemplate

_PROBE = ({"role": "user", "content": "x"},)


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
    """Raise InvalidRequest for a template that does not compile. It may refuse our probe; that is its own business."""
    template = ChatTemplate(source, bos_token="", eos_token="", name="in TEMPLATE")
    try:
        template.render(_PROBE)
    except TemplateError as error:
        if "{{ ." in source or "{{." in source or "{{- ." in source:
            raise InvalidRequest("template", f"is a Go template; give a Jinja template ({error})") from error
        if isinstance(error.__cause__, Exception) and "SyntaxError" in type(error.__cause__).__name__:
            raise InvalidRequest("template", str(error)) from error
