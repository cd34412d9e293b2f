"""What a model brings along for requests that do not say otherwise: its parameters and the messages it begins with.

They are set when a model is made from another one, under Ollama's names, and hold in every dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from mlxr.core.types import SamplingParams
from mlxr.registry.record import ModelRecord
from mlxr.server.json_models import bound_top_p
from mlxr.service.requests import ChatRequest, TextRequest

# Ollama's name of an option, and that of SamplingParams; `num_predict` and `stop` are read below.
_SAME: Mapping[str, str] = {
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# Fields of requests that stand for another one of SamplingParams.
_SPELLINGS: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
}


def find_given(body: BaseModel) -> frozenset[str]:
    """The SamplingParams that a request sets itself; null counts as not given."""
    fields = {name for name in body.model_fields_set if getattr(body, name) is not None}
    return frozenset(_SPELLINGS.get(name, name) for name in fields)


def fill_text(wanted: TextRequest, record: ModelRecord, body: BaseModel) -> TextRequest:
    """The request with what the model brings along."""
    return (
        replace(wanted, params=_fill_params(wanted.params, record, find_given(body))) if record.parameters else wanted
    )


def fill_chat(wanted: ChatRequest, record: ModelRecord, body: BaseModel) -> ChatRequest:
    """The conversation with what the model brings along."""
    params = _fill_params(wanted.params, record, find_given(body))
    return replace(wanted, params=params, messages=[*record.messages, *wanted.messages])


def _fill_params(params: SamplingParams, record: ModelRecord, given: frozenset[str]) -> SamplingParams:
    if not record.parameters:
        return params
    found: dict[str, Any] = {}
    for name, value in record.parameters.items():
        if name in _SAME:
            found[_SAME[name]] = value
        elif name == "num_predict" and isinstance(value, int):
            found["max_tokens"] = value if value > 0 else None
        elif name == "stop" and isinstance(value, list):
            found["stop"] = tuple(value)
    if isinstance(found.get("seed"), int) and found["seed"] < 0:
        found["seed"] = None
    if "top_p" in found:
        found["top_p"] = bound_top_p(found["top_p"])
    return replace(params, **{name: value for name, value in found.items() if name not in given})
