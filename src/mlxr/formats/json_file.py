"""JSON that comes with weights, read without trust.

Knows JSON objects; nothing of what they say. Whatever is wrong (not UTF-8, not JSON, nested without end, a key twice,
not an object) is a FormatError that names the file and what was read.
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
    file = MappedFile(path)
    try:
        if file.size_bytes > LARGEST_JSON_BYTES:
            raise FormatError(path, "file", None, f"has {file.size_bytes} bytes; {LARGEST_JSON_BYTES} are allowed")
        return parse_json_object(path, "file", 0, bytes(file.bytes))
    finally:
        file.close()


def parse_json_object(path: Path, field: str, offset: int, text: bytes) -> dict[str, object]:
    """Parse the object that stands at `offset` of the file; errors call it `field`."""

    def refuse(reason: str) -> NoReturn:
        raise FormatError(path, field, offset, reason)

    def make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            refuse(f"has the key {key[:80]!r} twice")
        return result

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 ({error.reason} in its byte {error.start})")
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not JSON: {error}")
    if not isinstance(parsed, dict):
        refuse(f"is a JSON {type(parsed).__name__}, not an object")
    return parsed
