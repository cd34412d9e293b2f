"""Chat templates that users bring: in Jinja or Go's syntax, in a file, or by the name of one that comes with mlxr."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mlxr.core.errors import InvalidRequest, SettingError, TemplateError
from mlxr.core.model_settings import ModelSettings
from mlxr.templates.budget import MAX_SOURCE_CHARACTERS
from mlxr.templates.go_translation import looks_like_go, translate
from mlxr.tokenizers import ChatTemplate, Tokenizer, chat_template_from_source
from mlxr.tokenizers.chat_template import NAMED, RESERVED, find_named

BROUGHT = "that was given"  # what errors call a template that comes with a request or a setting


def read_template(source: str, field: str = "template") -> str:
    """The Jinja template of a Jinja or a Go template; raises InvalidRequest for what is neither, or cannot be one."""
    try:
        _check(source)
    except TemplateError as error:
        if not looks_like_go(source):
            raise InvalidRequest(field, str(error)) from error
        translated = translate(source)
        try:
            _check(translated)
        except TemplateError as reason:  # a bound on what a template may be
            raise InvalidRequest(field, f"cannot be translated from Go: {reason}") from reason
        return translated
    return source


def check_template(settings: ModelSettings) -> None:
    """Raise SettingError unless models can be used with the template and the variables of the settings."""
    find_source(settings)
    read_values(settings)


def make_template(
    source: str | None, own: ChatTemplate | None, settings: ModelSettings, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template that a model is used with: `source`, or where there is none its `own`.

    It has the variables that the settings give. Raises SettingError for them.
    """
    template = own
    if source is not None:
        name = own.name if own is not None else "set for the model"
        template = chat_template_from_source(source, tokenizer, own, name)
    if template is not None:
        template.values = read_values(settings)
    return template


def read_values(settings: ModelSettings) -> Mapping[str, object]:
    """Further variables of chat templates, as the settings give them; raises SettingError."""
    values: Mapping[str, object] = json.loads(settings.chat_template_kwargs or "{}")
    taken = sorted(RESERVED & values.keys())
    if taken:
        raise SettingError(f"chat_template_kwargs: {taken[0]} is what the template gets from the conversation")
    return values


def choose_template(given: str, field: str) -> str:
    """The Jinja template that a request means: one of ours by its name, or what it brings; raises InvalidRequest."""
    named = find_named(given)
    if named is None and "{" not in given:
        raise InvalidRequest(field, f"is no template, and none has the name {given[:40]!r}; there are {_list_names()}")
    return named or read_template(given, field)


def find_source(settings: ModelSettings) -> str | None:
    """The Jinja template that the settings mean: a file, a name, or the template itself; None where they mean none.

    Raises SettingError.
    """
    given = settings.chat_template
    if given is None:
        return None
    try:
        if "{{" in given or "{%" in given:
            return read_template(given, "chat_template")
        path, named = Path(given).expanduser(), find_named(given)
        if not path.is_file():
            if named is not None:
                return named
            raise SettingError(f"chat_template: {given} is no file, and none of {_list_names()}")
        if path.stat().st_size > 4 * MAX_SOURCE_CHARACTERS:
            raise SettingError(f"chat_template: {given} has more than {MAX_SOURCE_CHARACTERS} characters")
        return read_template(path.read_text(encoding="utf-8-sig"), "chat_template")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SettingError(f"chat_template: {given[:80]} cannot be read: {error}") from error
    except InvalidRequest as error:
        raise SettingError(f"chat_template: {given[:80]}: {error.reason}") from error


def _list_names() -> str:
    return ", ".join(NAMED)


def _check(source: str) -> None:
    ChatTemplate(source, bos_token="", eos_token="", name=BROUGHT).check()
