"""The messages of a conversation, checked and brought into the one form that chat templates read, and JSON in texts.

Plain values in, plain values out: OpenAI's shape, with text content, arguments of tool calls as mappings and the names
of tools beside their results. Knows no template. JSON of models and clients may have literal newlines in its strings;
commas before a closing bracket, single quotes and Python's words are mended. Written JSON has no NaN, no number beyond
float64 and no half of a surrogate pair, which JSON parsers refuse or read differently.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json

from mlxr.core.errors import InvalidRequest

MAX_NUMBER_CHARACTERS = 300  # before an exponent; one more digit changes no float64, or makes it infinite
_SURROGATES = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_TOKENS = re.compile(
    r"""(?P<quote>["'])(?P<text>(?:(?!(?P=quote))[^\\]|\\.)*)(?P<end>(?P=quote)?)"""
    r"""|(?P<word>[A-Za-z_$][\w$]*)(?P<colon>\s*:)?|(?P<comma>,)(?=\s*[}\]])""",
    re.DOTALL,
)
_PLACES = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|(.))|(["\x00-\x1f])', re.DOTALL)
_INSIDE, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'"|-?[0-9]|-\Z')
_NUMBER = re.compile(r"[0-9.eE+-]*")


def read_json(text: str, *, bounds_numbers: bool = False) -> object:
    """Return the value of JSON text, whose strings may have unescaped control characters.

    Raises ValueError for anything else, also for NaN and, unless it `bounds_numbers`, for numbers beyond float64.
    """
    read_number = _bound_float if bounds_numbers else _read_float
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=read_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: object) -> str:
    """Return JSON as models read and write it, without escapes of non-ASCII characters."""
    return _SURROGATES.sub(_REPLACEMENT, json.dumps(value, ensure_ascii=False))


def mend_json(text: str) -> str:
    """Mend text that is nearly JSON: drop commas before a closing bracket, put double quotes around strings and names,
    replace Python's words by JSON's, and write escapes that JSON knows. Other mistakes stay.
    """
    return _TOKENS.sub(_mend_token, text)


class JsonMender:
    """Makes valid JSON that grows into JSON that every client can read; the result is the same whatever the pieces.

    A number that no float64 can hold becomes a large one, and half of a surrogate pair the replacement character.
    """

    def __init__(self) -> None:
        self._is_in_string = False
        self._number = ""  # the number being read; its digits are given out already
        self._held = ""  # text that is not decided yet

    def push(self, text: str) -> str:
        """Add a piece; returns the text that is now certain."""
        text, self._held = self._held + text, ""
        written, place = list[str](), 0
        while place < len(text):
            read = self._read_string if self._is_in_string else self._read_number if self._number else self._read_plain
            part, end = read(text, place)
            written.append(part)
            if end is None:
                break
            place = end
        return "".join(written)

    def _read_plain(self, text: str, place: int) -> tuple[str, int | None]:
        """Read what stands outside of strings, up to a string or a number."""
        sign = _OUTSIDE.search(text, place)
        if sign is None:
            return text[place:], len(text)
        if sign[0] == '"':
            self._is_in_string = True
            return text[place : sign.end()], sign.end()
        if sign[0] == "-":
            self._held = "-"
            return text[place : sign.start()], None
        self._number = sign[0]
        return text[place : sign.end()], sign.end()

    def _read_number(self, text: str, place: int) -> tuple[str, int | None]:
        """Read more of a number: gives out digits at once, the exponent when it is complete."""
        run = _NUMBER.match(text, place)
        assert run is not None
        before, self._number = self._number, self._number + run[0]
        digits, exponent = _split_number(self._number)
        given = len(_bound_digits(_split_number(before)[0]))
        digits = _bound_digits(digits)
        part = digits[given:]
        if run.end() < len(text):
            self._number = ""
            part += _bound_exponent(digits, exponent)
        return part, run.end()

    def _read_string(self, text: str, place: int) -> tuple[str, int | None]:
        """Read a string up to its end, or up to and with the next escape."""
        sign = _INSIDE.search(text, place)
        if sign is None:
            return text[place:], len(text)
        before, at = text[place : sign.start()], sign.start()
        if sign[0] == '"':
            self._is_in_string = False
            return before + '"', at + 1
        first, second = _read_unit(text, at), _read_unit(text, at + 6)
        if first is None and text[at + 1 : at + 2] not in ("", "u"):
            return before + text[at : at + 2], at + 2
        is_high = first is not None and 0xD800 <= first < 0xDC00
        if first is None or (is_high and second is None and _may_be_unit(text[at + 6 : at + 12])):
            self._held = text[at:]
            return before, None
        if is_high and second is not None and 0xDC00 <= second < 0xE000:
            return before + text[at : at + 12], at + 12
        is_half = 0xD800 <= first < 0xE000
        return before + ("\\ufffd" if is_half else text[at : at + 6]), at + 6


def _mend_token(token: re.Match[str]) -> str:
    if token["comma"]:
        return ""
    if token["word"]:
        colon = token["colon"] or ""
        return f'"{token["word"]}"{colon}' if colon else _WORDS.get(token["word"], token["word"])
    return '"' + _PLACES.sub(_mend_sign, token["text"]) + ('"' if token["end"] else "")


def _mend_sign(sign: re.Match[str]) -> str:
    """Return one escape that JSON knows, for an escape or a character that must be escaped."""
    known, unknown, bare = sign[1], sign[2], sign[3]
    if known:
        return sign[0]
    if unknown:
        return "'" if unknown == "'" else "\\\\" + _PLACES.sub(_mend_sign, unknown)
    return json.dumps(bare)[1:-1]


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _bound_float(text: str) -> float:
    """Return the number, or the largest of its sign if it would be infinite."""
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _split_number(number: str) -> tuple[str, str]:
    """Split a number into its digits, and its exponent with the letter."""
    digits = re.split("[eE]", number, maxsplit=1)[0]
    return digits, number[len(digits) :]


def _bound_digits(digits: str) -> str:
    """Return the digits that count; they do not end with a point."""
    most = MAX_NUMBER_CHARACTERS
    return digits[: most - 1] if digits[most - 1 : most] == "." else digits[:most]


def _bound_exponent(digits: str, exponent: str) -> str:
    """Return the exponent, or the largest one for which the number is finite; text that is no number stays."""
    try:
        is_finite = not exponent or math.isfinite(float(digits + exponent))
    except ValueError:
        is_finite = True
    return exponent if is_finite else f"e{308 - len(digits.lstrip('-').partition('.')[0])}"


def _read_unit(text: str, at: int) -> int | None:
    """Return the UTF-16 unit whose escape begins at `at`; None if there is none, or it is not complete yet."""
    code = text[at + 2 : at + 6]
    is_unit = text.startswith("\\u", at) and len(code) == 4
    return int(code, 16) if is_unit and all(sign in "0123456789abcdefABCDEF" for sign in code) else None


def _may_be_unit(text: str) -> bool:
    """Return True if a text could become an escaped unit."""
    return len(text) < 6 and (text[:2] in ("", "\\", "\\u"))


Message = Mapping[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_OTHER_KEYS = {"role", "content", "name"}
MAX_ARGUMENTS_CHARACTERS, MAX_ARGUMENTS_PARTS = 1 << 20, 1 << 17  # of one call


def check_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return the messages in the form that templates read; raises InvalidRequest naming the part that is wrong.

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
    """Return name and arguments of the calls that the model made in both of the last two rounds, if results come last.

    A round is the calls between two results; rounds before the user's last message do not count. `messages` must be
    such as `check_messages` takes.
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
    """Return the arguments of a call as a mapping; raises InvalidRequest unless they are one, or text, in valid
    Unicode.

    Clients send calls back as they got them, from this server or another one, so any text will do. JSON that breaks
    off, since an answer ran out of tokens, counts as far as it goes; small mistakes are mended. An empty list means no
    arguments, as PHP writes them. Any other value that is no object, and text that is no JSON, becomes the `input` of
    an object.
    """
    if isinstance(arguments, str):
        # The interpreter does nothing else while it is read.
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
    """Return the value of a text of arguments, or the text itself if it is no JSON."""
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
