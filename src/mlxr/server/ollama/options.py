"""`options`, `keep_alive` and `format` of a request, as the service's parameters, seconds and grammar.

Defaults: https://github.com/ollama/ollama/blob/main/docs/modelfile.md, api/types.go there (DefaultOptions).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import read_params
from mlxr.core.types import Grammar, SamplingParams
from mlxr.registry import ModelRecord
from mlxr.registry.options import BY_NAME, check_options, find_idle, read_draft_tokens
from mlxr.server.formats import make_schema_grammar
from mlxr.server.ignored import note_ignored
from mlxr.server.json_models import JsonObject
from mlxr.service.window import Window

KeepAlive = Annotated[
    float | str | None, Field(description="Seconds, or a duration such as 5m; 0: unload after use, negative: for ever.")
]
Format = Annotated[str | JsonObject | None, Field(description='"json" or a JSON schema.')]
Options = Annotated[dict[str, object] | None, Field(description=f"Of {', '.join(BY_NAME)}.")]
MAX_TOP_LOGPROBS = 20
NUM_KEEP = 4  # Ollama's default
_DEFAULTS: Mapping[str, object] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repeat_last_n": 64,
    "num_predict": -1,
}
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9.]+)(ns|us|µs|μs|ms|s|m|h)")


def note_options(request: Request, options: Mapping[str, object] | None, field: str = "options") -> None:
    """Let the response name the options that have no effect here."""
    note_ignored(request, (f"{field}.{name}" for name in find_idle(options or {})))


def make_params(
    record: ModelRecord, options: Mapping[str, object] | None, *, logprobs: bool | None, top_logprobs: int | None
) -> SamplingParams:
    """How to choose tokens: the request's options over the model's over Ollama's defaults.

    Raises InvalidRequest naming the option.
    """
    given = check_options(options or {})
    fields = read_params(_DEFAULTS, record.parameters, given, prefix="options.")
    draft_tokens = read_draft_tokens(record.parameters, given)
    return SamplingParams(**fields, logprobs=_count_logprobs(logprobs, top_logprobs), draft_tokens=draft_tokens)


def make_window(
    record: ModelRecord, options: Mapping[str, object] | None, truncate: bool | None, room_tokens: int
) -> Window:
    """The part of the context that a request takes: `num_ctx` as far as the model and its cache allow.

    Unless `truncate` is false, a prompt that is too long for it is cut behind its first `num_keep` tokens; -1 keeps as
    much of the beginning as there is room for.
    """
    chosen: dict[str, Any] = {"num_ctx": room_tokens, "num_keep": NUM_KEEP, **record.parameters}
    chosen |= check_options(options or {})
    kept_tokens = room_tokens if chosen["num_keep"] < 0 else chosen["num_keep"]
    return Window(min(chosen["num_ctx"], room_tokens), None if truncate is False else kept_tokens)


def read_grammar(wanted: str | JsonObject | None) -> Grammar | None:
    """What the answer must look like; None for any text."""
    if wanted is None or wanted == "":
        return None
    if isinstance(wanted, Mapping):
        return make_schema_grammar(wanted, "format")
    if wanted != "json":
        raise InvalidRequest("format", f'must be "json" or a JSON schema, got {wanted[:80]!r}')
    return Grammar("json_object", field="format")


def read_keep_alive(wanted: float | str | None) -> float | None:
    """Seconds, negative for ever; None where the request does not say. Raises InvalidRequest."""
    if wanted is None or isinstance(wanted, int | float):
        return wanted
    text = wanted.strip()
    try:
        seconds = float(text)  # a number in quotes
    except ValueError:
        seconds = _read_duration(text)
    if math.isnan(seconds):
        raise InvalidRequest("keep_alive", f"must be seconds or a duration such as 5m or 1h30m, got {wanted[:40]!r}")
    return seconds


def _read_duration(text: str) -> float:
    """Seconds of a duration such as 1h30m; not a number for what is none."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    parts = _PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return math.nan
    try:
        return sign * sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    except ValueError:
        return math.nan


def _count_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {top_logprobs}")
    return (top_logprobs or 0) if logprobs else None
