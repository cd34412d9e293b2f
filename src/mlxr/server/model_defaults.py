"""What a model brings along for requests that do not say otherwise: its parameters and the messages it begins with.

They are set when a model is made from another one, under Ollama's names, and hold in every dialect.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel

from mlxr.core.sampling import BY_SPELLING, read_params
from mlxr.core.types import SamplingParams
from mlxr.registry.options import read_draft_tokens
from mlxr.registry.record import ModelRecord
from mlxr.server.parameter_fields import ParameterFields
from mlxr.service.requests import ChatRequest, TextRequest


def find_given(body: BaseModel) -> frozenset[str]:
    """The SamplingParams that a request sets itself; null counts as not given."""
    names = {name for name in body.model_fields_set if getattr(body, name) is not None}
    names |= body.list_given().keys() if isinstance(body, ParameterFields) else set()
    return frozenset(BY_SPELLING[name].name if name in BY_SPELLING else name for name in names)


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
    found = {**read_params(record.parameters), "draft_tokens": read_draft_tokens(record.parameters)}
    return replace(params, **{name: value for name, value in found.items() if name not in given})
