"""Making a model from another one: what a Modelfile or a request to create asks for, checked before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.registry import Changes, ModelRecord, Registry
from mlxr.service.capabilities import find_capabilities
from mlxr.templates.go_translation import looks_like_go, translate
from mlxr.tokenizers import ChatTemplate


def create_model(
    registry: Registry, name: str, source: ModelRecord | Mapping[str, str], changes: Changes
) -> ModelRecord:
    """Make `name` of another model, or of blobs in the store (file name to digest), with `changes`.

    Raises InvalidRequest, NotFound, and what the loader says of files that it cannot run.
    """
    if changes.template is not None:
        template = read_template(changes.template)
        changes = replace(changes, template=template, capabilities=find_capabilities(template))
    if isinstance(source, ModelRecord):
        return registry.derive(name, source, changes)
    return registry.add(name, source, changes)


def read_template(source: str) -> str:
    """The Jinja template of a Jinja or a Go template; raises InvalidRequest for what is neither, or cannot be one."""
    try:
        _check(source)
    except TemplateError as error:
        if not looks_like_go(source):
            raise InvalidRequest("template", str(error)) from error
        translated = translate(source)
        try:
            _check(translated)
        except TemplateError as reason:  # a bound on what a template may be
            raise InvalidRequest("template", f"cannot be translated from Go: {reason}") from reason
        return translated
    return source


def _check(source: str) -> None:
    ChatTemplate(source, bos_token="", eos_token="", name="in TEMPLATE").check()
