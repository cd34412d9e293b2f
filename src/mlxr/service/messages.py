"""The messages of a conversation, checked and brought into the one form that chat templates read.

Plain values in, plain values out: OpenAI's shape, with text content, arguments of tool calls as mappings and the names
of tools beside their results. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from mlxr.core.errors import InvalidRequest
from mlxr.service.json_text import mend_json

Message = Mapping[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_OTHER_KEYS = {"role", "content", "name"}
MAX_ARGUMENTS_CHARACTERS, MAX_ARGUMENTS_PARTS = 1 << 20, 1 << 17  # of one call


def check_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages as templates read them; raises InvalidRequest naming the part that is none.

    Content given as a list of text parts is joined; `arguments` given as JSON text are parsed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", "must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidRequest("messages", "is empty; a conversation needs at least one message")
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return _name_results(checked)


def _check_message(message: Message, field: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be a mapping with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", f"must be a name such as 'user', got {role!r}")
    if role not in ROLES:
        raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(ROLES)}; got {role[:64]!r}")
    keys = _KEYS.get(role, _OTHER_KEYS)
    unknown = sorted(str(key) for key in set(message) - keys)
    if unknown:
        listed = ", ".join(sorted(keys))
        raise InvalidRequest(f"{field}.{unknown[0]}", f"is not supported; a message of role {role} has {listed}")
    calls = _check_calls(message.get("tool_calls"), f"{field}.tool_calls")
    content = message.get("content")
    checked: dict[str, object] = {"role": role}
    checked["content"] = "" if content is None and calls else _join_content(content, f"{field}.content")
    if calls:
        checked["tool_calls"] = calls
    for key in ("name", "reasoning", "tool_call_id"):
        value = message.get(key)
        if value is not None and not (key == "reasoning" and value == ""):
            checked[key] = _check_text(value, f"{field}.{key}")
    return checked


def _join_content(content: object, field: str) -> str:
    if isinstance(content, str):
        return _check_unicode(content, field)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(field, f"must be text or a list of text parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{field}[{index}]", "must be {'type': 'text', 'text': ...}; other parts are not supported"
            )
        texts.append(_check_unicode(text, f"{field}[{index}].text"))
    return "".join(texts)


def _check_calls(calls: object, field: str) -> list[dict[str, object]]:
    if calls is None:
        return []
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise InvalidRequest(field, "must be a list of tool calls")
    return [_check_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _check_call(call: object, field: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        shape = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        raise InvalidRequest(field, f"must be {shape}")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{field}.type", f"must be 'function', got {call['type']!r}")
    checked: dict[str, object] = {
        "type": "function",
        "function": {
            "name": _check_text(function.get("name"), f"{field}.function.name"),
            "arguments": parse_arguments(function.get("arguments"), f"{field}.function.arguments"),
        },
    }
    if call.get("id") is not None:
        checked["id"] = _check_text(call["id"], f"{field}.id")
    return checked


def list_repeated_calls(messages: Sequence[Mapping[str, object]]) -> list[tuple[str, Mapping[str, object]]]:
    """Name and arguments of the calls that the model has made in both of the last two rounds, if results come last.

    A round are the calls between two results; the user's messages end the count. The messages are ones that
    `check_messages` takes.
    """
    rounds: list[list[dict[str, Any]]] = []
    last = "user"
    for message in reversed(messages):
        role = str(message.get("role"))
        if role not in ("assistant", "tool") or (role == "assistant" and not rounds and last != "tool"):
            break
        if role == "assistant" and last == "tool":
            rounds.append([])
        if role == "assistant":
            calls = _check_calls(message.get("tool_calls"), "tool_calls")
            rounds[-1] += [cast(dict[str, Any], call["function"]) for call in calls]
        last = role
    latest, before = [*rounds, [], []][:2]
    return [(function["name"], function["arguments"]) for function in latest if function in before]


def parse_arguments(arguments: object, field: str) -> Mapping[str, object]:
    """The arguments of a call as a mapping; raises InvalidRequest unless they are one, or text, of whole characters.

    Clients send calls back as they got them, from this server or another one, so any text will do. JSON that breaks
    off, as that of an answer that ran out of tokens does, counts as far as it goes; small mistakes are mended. An empty
    list is no arguments, as PHP writes them. Any other value that is no object, and text that is no JSON, become an
    object with that as its `input`.
    """
    if isinstance(arguments, str):
        # Nobody else has the interpreter while it is read.
        if len(arguments) > MAX_ARGUMENTS_CHARACTERS or sum(map(arguments.count, "[{,")) > MAX_ARGUMENTS_PARTS:
            most = f"{MAX_ARGUMENTS_CHARACTERS} characters, with {MAX_ARGUMENTS_PARTS} commas and brackets"
            raise InvalidRequest(field, f"is longer than the arguments of a call may be: {most}")
        value = _read_arguments(arguments)
        arguments = value if isinstance(value, Mapping) else {} if value in (None, []) else {"input": value}
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(field, f"must be a JSON object, got {type(arguments).__name__}")
    _check_unicode(json.dumps(arguments, ensure_ascii=False, default=str), field)
    return arguments


def _read_arguments(text: str) -> object:
    """Return the value of a text of arguments, the text itself where it is no JSON."""
    if not text.strip():
        return {}
    for candidate in (text, mend_json(text)):
        try:
            value = json.loads(candidate, strict=False)
            return _read_arguments(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        except (ValueError, RecursionError):
            pass
        try:
            beginning = from_json(candidate, allow_partial="trailing-strings")
        except ValueError:
            continue
        if isinstance(beginning, Mapping):
            return beginning
    return text


def _check_text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(field, "must be text, and not empty")
    return _check_unicode(value, field)


def _check_unicode(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"character {error.start} is half of a surrogate pair") from None
    return text


def _name_results(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Give the results of tools the names of their tools, which some templates want and most clients leave out."""
    names: dict[object, object] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages
