"""Finds the fields of a request that have no effect here: they go into a header of the response and the debug log.

Clients of other servers send fields that change no answer: labels, hints, what their own server stores. Such a field
passes when the request's model does not declare it. Here is the one place that finds those fields; `routes` calls it
for every body, and `note_ignored` is for parts of a body that have no model, such as Ollama's `options`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from urllib.parse import quote

from pydantic import AliasChoices, BaseModel
from starlette.requests import Request

from mlxr.server.activity import in_flight
from mlxr.server.json_models import RequestModel
from mlxr.server.logs import log_ignored

HEADER = "x-mlxr-ignored"
MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64
MAX_LOOKS = 20_000  # parts of a body that are looked at


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Let the response to `request` and the debug log name these fields; `names` may be hostile and many."""
    row = in_flight(request)
    known = len(row.ignored)
    for name in dict.fromkeys(islice(names, MAX_LOOKS)):
        if len(row.ignored) > MAX_NAMES:  # one too many says that there are more
            break
        spelt = _spell(name)
        if spelt not in row.ignored:
            row.ignored.append(spelt)
    if len(row.ignored) > known:
        log_ignored(row, join_names(row.ignored))


def join_names(names: list[str]) -> str:
    """The value of the header: the first names, and `...` where there are more."""
    return ", ".join([*names[:MAX_NAMES], "..."] if len(names) > MAX_NAMES else names)


def find_ignored(value: object, model: BaseModel) -> Iterator[str]:
    """The fields in `value` that `model`, which was made of it, does not have: `metadata`, `messages[].id`.

    Null is no value, so a field that is null is not among them. Of a very long body only the beginning is looked at.
    """
    return (name for name in islice(_walk(value, model, ""), MAX_LOOKS) if name is not None)


def _walk(value: object, part: object, place: str) -> Iterator[str | None]:
    """One item for everything looked at: the name of a field without effect, or None."""
    if isinstance(part, RequestModel) and isinstance(value, Mapping):
        fields = _name_fields(type(part))
        for key, inner in value.items():
            name = fields.get(key)
            yield None if name is not None or inner is None else f"{place}{key}"
            if name is not None and isinstance(inner, Mapping | list):
                yield from _walk(inner, getattr(part, name), f"{place}{key}.")
    elif isinstance(part, list) and isinstance(value, list):
        place = place.removesuffix(".") + "[]."
        for inner_value, inner_part in zip(value, part, strict=False):
            yield None
            yield from _walk(inner_value, inner_part, place)


@cache
def _name_fields(model: type[BaseModel]) -> Mapping[str, str]:
    """The key of a field in JSON, and its name in the model."""
    names: dict[str, str] = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        keys = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
        names |= {key: name for key in keys if isinstance(key, str)}
    return names


def _spell(name: str) -> str:
    """The name as a header may carry it: plain characters, others as %XX, not too long, and `%` for the empty name."""
    plain = quote(name[:MAX_NAME_CHARACTERS], safe="[]", errors="replace")
    return plain[:MAX_NAME_CHARACTERS] or "%"
