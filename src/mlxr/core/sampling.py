"""From the names that clients use for sampling parameters to fields of SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxr.core.errors import InvalidRequest
from mlxr.core.parameter import Parameter
from mlxr.core.types import PARAMETERS

ALL_TOKENS = -1  # of `max_tokens`: until the context is full
BY_SPELLING: Mapping[str, Parameter] = {
    name: row for row in PARAMETERS for name in (row.name, *row.names.values(), *row.spellings)
}  # every name that any dialect has for a parameter

# What people expect of an answer that they read themselves, where neither they nor the model say otherwise: `mlxr run`,
# `mlxr chat` and the page sample so. The dialects have the defaults of their own servers.
EVERYDAY: Mapping[str, float] = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

GGUF_PREFIX = "general.sampling."
# What GGUF has keys for (gguf-py's `Keys.General`), by its name there.
_GGUF_ROWS: Mapping[str, Parameter] = {
    row.list_names("gguf")[-1]: row
    for row in PARAMETERS
    if row.name
    in (
        *("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
        *("repetition_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
    )
}
_DIGITS = 6  # files keep 32 bits of a number


def read_file_defaults(metadata: Mapping[str, object]) -> dict[str, object]:
    """The sampling parameters that a file recommends, from its GGUF keys, under the names that models are made with.

    What is no value of a parameter is passed over: a recommendation that is no good keeps nobody from using a model.
    """
    found: dict[str, object] = {}
    for name, row in _GGUF_ROWS.items():
        value = metadata.get(GGUF_PREFIX + name)
        try:
            checked = None if value is None else row.check(value)
        except InvalidRequest:
            continue
        if checked is not None:
            found[row.list_names("ollama")[-1]] = float(f"{checked:.{_DIGITS}g}") if row.kind == "float" else checked
    return found


def name_file_defaults(generation: Mapping[str, object]) -> dict[str, object]:
    """GGUF keys and values for what a `generation_config.json` recommends; none where it is not to be sampled from."""
    if generation.get("do_sample") is False:
        return {}
    values = {name: generation.get(row.list_names("hub")[-1]) for name, row in _GGUF_ROWS.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {
        GGUF_PREFIX + name: float(value) if _GGUF_ROWS[name].kind == "float" else value
        for name, value in numbers.items()
        if not isinstance(value, bool)
    }


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
