"""JSON as models and clients write it, and as everybody can read it.

What is read may have literal newlines in its strings, and once mended commas before a closing bracket, single quotes
and Python's words. What is written has no NaN, no number beyond those of float64 and no half of a surrogate pair, which
JSON parsers refuse or read differently. Knows no calls and no messages.
"""

from __future__ import annotations

import json
import math
import re
import sys

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
    """The value of JSON text, in whose strings control characters may stand as they are.

    Raises ValueError for anything else, also for NaN and, unless it `bounds_numbers`, for those beyond float64.
    """
    read_number = _bound_float if bounds_numbers else _read_float
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=read_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: object) -> str:
    """JSON as models read and write it: characters as they are."""
    return _SURROGATES.sub(_REPLACEMENT, json.dumps(value, ensure_ascii=False))


def mend_json(text: str) -> str:
    """Text that is nearly JSON as JSON: without commas before a closing bracket, with double quotes around strings and
    names, with JSON's words for Python's, and with escapes that JSON knows. What is no mistake of these kinds stays.
    """
    return _TOKENS.sub(_mend_token, text)


class JsonMender:
    """Makes valid JSON that grows into JSON that every client can read; the result is the same whatever the pieces.

    A number that no float64 can hold becomes a large one, and half of a surrogate pair the replacement character.
    """

    def __init__(self) -> None:
        self._is_in_string = False
        self._number = ""  # the one that has begun, its digits given out already
        self._held = ""  # not decided yet

    def push(self, text: str) -> str:
        """More of the text, as far as it is certain."""
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
        """More of a number: its digits at once, its exponent when it is whole."""
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
        """A string up to its end or the next escape, and that."""
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
    """One escape, or one character that has to be escaped."""
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
    """The number, or the largest of its sign where it would be infinite."""
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _split_number(number: str) -> tuple[str, str]:
    """Digits, and the exponent with its letter."""
    digits = re.split("[eE]", number, maxsplit=1)[0]
    return digits, number[len(digits) :]


def _bound_digits(digits: str) -> str:
    """The digits that count, which do not end with a point."""
    most = MAX_NUMBER_CHARACTERS
    return digits[: most - 1] if digits[most - 1 : most] == "." else digits[:most]


def _bound_exponent(digits: str, exponent: str) -> str:
    """The exponent, or the largest one with which the number is finite; what is no number stays."""
    try:
        is_finite = not exponent or math.isfinite(float(digits + exponent))
    except ValueError:
        is_finite = True
    return exponent if is_finite else f"e{308 - len(digits.lstrip('-').partition('.')[0])}"


def _read_unit(text: str, at: int) -> int | None:
    """The UTF-16 unit that is escaped at a place, None where there is none or it is not whole yet."""
    code = text[at + 2 : at + 6]
    is_unit = text.startswith("\\u", at) and len(code) == 4
    return int(code, 16) if is_unit and all(sign in "0123456789abcdefABCDEF" for sign in code) else None


def _may_be_unit(text: str) -> bool:
    """Tell whether a text could become an escaped unit."""
    return len(text) < 6 and (text[:2] in ("", "\\", "\\u"))
