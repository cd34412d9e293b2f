"""JSON that comes with weights, read without trust.

Knows JSON objects and lists; nothing of what they say. Whatever is wrong (not UTF-8, not JSON, nested without end, a
key twice, not what was wanted) is a FormatError that names the file and what was read.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NoReturn

from mlxr.core.errors import FormatError

from .mapped_file import MappedFile

# Headers and indexes of the largest models have some 10 MB; parsed objects take up to 20 times the text.
LARGEST_JSON_BYTES = 25_000_000


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file. NotFound when there is no file."""
    return parse_json_object(path, "file", 0, _read(path))


def read_json_list(path: Path) -> list[object]:
    """The list in a JSON file. NotFound when there is no file."""
    parsed = _parse(path, "file", 0, _read(path))
    if not isinstance(parsed, list):
        raise FormatError(path, "file", 0, f"is a JSON {type(parsed).__name__}, not a list")
    return parsed


def _read(path: Path) -> bytes:
    file = MappedFile(path)
    try:
        if file.size_bytes > LARGEST_JSON_BYTES:
            raise FormatError(path, "file", None, f"has {file.size_bytes} bytes; {LARGEST_JSON_BYTES} are allowed")
        return bytes(file.bytes)
    finally:
        file.close()


def parse_json_object(path: Path, field: str, offset: int, text: bytes) -> dict[str, object]:
    """Parse the object that stands at `offset` of the file; errors call it `field`."""
    parsed = _parse(path, field, offset, text)
    if not isinstance(parsed, dict):
        raise FormatError(path, field, offset, f"is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _parse(path: Path, field: str, offset: int, text: bytes) -> object:
    def refuse(reason: str) -> NoReturn:
        raise FormatError(path, field, offset, reason)

    def make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            refuse(f"has the key {key[:80]!r} twice")
        return result

    try:
        parsed: object = json.loads(text.decode(), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 ({error.reason} in its byte {error.start})")
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not JSON: {error}")
    return parsed
