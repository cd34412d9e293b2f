"""From the names that clients use for sampling parameters to fields of SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.core.parameter import Parameter
from mlxr.core.types import PARAMETERS

ALL_TOKENS = -1  # of `max_tokens`: until the context is full
BY_SPELLING: Mapping[str, Parameter] = {
    name: row for row in PARAMETERS for name in (row.name, *row.names.values())
}  # every name that any dialect has for a parameter


def read_params(*layers: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Fields of SamplingParams from values under the names of any dialect; later layers win over earlier ones.

    None counts as not given, one text as a list of it, and names of other things are passed over. Raises InvalidRequest
    with the name that was used, after `prefix`.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            row = BY_SPELLING.get(name)
            if row is not None and value is not None:
                found[row.name] = row.check(_list_texts(value) if row.kind == "texts" else value, prefix + name)
    return found


def _list_texts(value: object) -> object:
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(text for text in value if text != "") if isinstance(value, list | tuple) else (value,)
