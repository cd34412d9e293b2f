"""Prompts as llama.cpp takes them, and texts to make vectors of: text, token ids, both mixed, an object with text, or a
list of these.

A list whose items are all numbers and texts with at least one number among them is one prompt; any other list is
several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mlxr.core.errors import InvalidRequest
from mlxr.core.types import MAX_INT
from mlxr.server.json_models import JsonObject
from mlxr.service.async_session import AsyncSession
from mlxr.service.prompt import Prompt

MAX_PROMPTS = 2048
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Mixed = list[TokenId | str]
OnePrompt = str | Mixed | JsonObject
Prompts = Annotated[
    str | JsonObject | Annotated[list[TokenId | str | Mixed | JsonObject], Field(max_length=MAX_PROMPTS * 1024)],
    Field(description="Text, token ids, both mixed, an object with `prompt_string`, or a list of these."),
]


def split_prompts(given: object, field: str) -> tuple[list[object], bool]:
    """The prompts one by one, and whether they came as a list; raises InvalidRequest for an empty list."""
    if not isinstance(given, list):
        return [given], False
    if not given:
        raise InvalidRequest(field, "is an empty list")
    kinds = set(map(type, given))  # quick, as there may be very many
    if int in kinds and kinds <= {int, str}:
        return [given], False
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(field, f"has {len(given)} prompts; at most {MAX_PROMPTS} are taken")
    return given, True


def read_prompt(session: AsyncSession, prompt: object, field: str, *, parse_special: bool = True) -> Prompt:
    """One prompt as the service takes it; texts between token ids are encoded without what begins a text."""
    if isinstance(prompt, dict):
        return _read_object(prompt, field)
    if not isinstance(prompt, list):
        return str(prompt)
    return _join_parts(session, prompt, parse_special)


def _join_parts(session: AsyncSession, parts: Sequence[object], parse_special: bool) -> list[int]:
    ids: list[int] = []
    for place, part in enumerate(parts):
        if not isinstance(part, str):
            ids.append(part)  # type: ignore[arg-type]  # checked by the request's model
        elif part:
            ids += session.tokenizer.encode(part, add_special=place == 0, parse_special=parse_special)
    return ids


def _read_object(prompt: JsonObject, field: str) -> str:
    """The text of an object: `prompt_string`, or `content` with parts of text. Other media are refused."""
    if prompt.get("multimodal_data"):
        raise InvalidRequest(f"{field}.multimodal_data", "is not supported: models read text only")
    text = prompt.get("prompt_string")
    if isinstance(text, str):
        return text
    parts = prompt.get("content")
    if not isinstance(parts, list):
        raise InvalidRequest(field, "must hold `prompt_string`, a text, or `content`, a list of text parts")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(one, str) for one in texts):
        raise InvalidRequest(f"{field}.content", "must be a list of text parts; models read text only")
    return "".join(str(one) for one in texts)
