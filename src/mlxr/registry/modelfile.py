"""Modelfiles: a model made from another one, as text. A subset of Ollama's, read and written.

FROM, ADAPTER, PARAMETER, TEMPLATE, SYSTEM, MESSAGE and LICENSE are understood; all else is refused by name.
Values run to the end of the line, stand in quotes, or between lines of three quotes. A TEMPLATE is Jinja, as model
files carry it, or a Go template, which is translated where the model is made.
Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxr.core.errors import InvalidRequest
from mlxr.registry.options import read_parameter
from mlxr.registry.record import Changes, ModelRecord

MAX_CHARACTERS = 1 << 22
ROLES = ("system", "user", "assistant")
_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z_]+)(?:[ \t]+|(?=\r?\n|\Z))", re.ASCII)
_WITH_WORD = ("PARAMETER", "MESSAGE")
_WORD = re.compile(r"([^\s\"]+)[ \t]*")
_SKIPPED = re.compile(r"(?:[ \t\r]*(?:#[^\n]*)?\n)+|[ \t\r]*(?:#[^\n]*)?\Z")
_TRIPLE = '"""'


@dataclass(slots=True)
class Modelfile:
    """What a Modelfile says; `source` is what stands after FROM, `adapter` after ADAPTER."""

    source: str = ""
    adapter: str | None = None
    template: str | None = None
    system: str | None = None
    license: str | None = None
    parameters: dict[str, object] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def changes(self) -> Changes:
        """What the new model sets anew."""
        return Changes(self.template, self.system, self.parameters or None, self.messages or None, self.license)


def parse_modelfile(text: str) -> Modelfile:
    """Read a Modelfile; raises InvalidRequest naming the line and the instruction."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest("Modelfile", f"has {len(text)} characters, more than {MAX_CHARACTERS}")
    modelfile = Modelfile()
    for line, instruction, word, value in _read_instructions(text):
        try:
            _apply(modelfile, instruction, word, value)
        except InvalidRequest as error:
            raise InvalidRequest("Modelfile", f"line {line}: {error}") from error
    if not modelfile.source:
        raise InvalidRequest("Modelfile", "has no FROM, which names the model to start from")
    return modelfile


def write_modelfile(record: ModelRecord, adapter: Path | None = None) -> str:
    """The Modelfile that makes `record` from its files, and those of its `adapter`."""
    lines = [f"# To change it: mlxr create NEW -f THIS, with FROM {record.short_name}", f"FROM {record.path}"]
    if adapter is not None:
        lines.append(f"ADAPTER {adapter}")
    if record.template is not None:
        lines.append(f"TEMPLATE {_quote(record.template)}")
    if record.system is not None:
        lines.append(f"SYSTEM {_quote(record.system)}")
    lines += [f"PARAMETER {line}" for line in list_parameters(record.parameters)]
    lines += [f"MESSAGE {message['role']} {_quote(message['content'])}" for message in record.messages]
    if record.license:
        lines.append(f"LICENSE {_quote(record.license)}")
    return "\n".join(lines) + "\n"


def list_parameters(parameters: Mapping[str, object]) -> list[str]:
    """Generation options as lines of name and value."""
    lines = []
    for name, value in sorted(parameters.items()):
        for one in value if isinstance(value, list) else [value]:
            lines.append(f"{name} {json.dumps(one, ensure_ascii=False)}")
    return lines


def _apply(modelfile: Modelfile, instruction: str, word: str, value: str) -> None:
    match instruction:
        case "FROM":
            if modelfile.source:
                raise InvalidRequest("FROM", "may stand there once")
            modelfile.source = value
        case "ADAPTER":
            if modelfile.adapter is not None or not value:
                raise InvalidRequest("ADAPTER", "may stand there once, with the path or the name of an adapter")
            modelfile.adapter = value
        case "TEMPLATE":
            modelfile.template = value
        case "SYSTEM":
            modelfile.system = value
        case "LICENSE":
            modelfile.license = value if modelfile.license is None else f"{modelfile.license}\n\n{value}"
        case "PARAMETER":
            _add_parameter(modelfile, word.lower(), read_parameter(word.lower(), value))
        case "MESSAGE":
            if word not in ROLES:
                raise InvalidRequest("MESSAGE", f"begins with a role, one of {', '.join(ROLES)}; got {word[:40]!r}")
            modelfile.messages.append({"role": word, "content": value})
        case _:
            known = "FROM, ADAPTER, PARAMETER, TEMPLATE, SYSTEM, MESSAGE and LICENSE"
            raise InvalidRequest(instruction[:40], f"is not supported; there are {known}")


def _add_parameter(modelfile: Modelfile, name: str, value: object) -> None:
    known = modelfile.parameters.get(name)
    modelfile.parameters[name] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value


def _read_instructions(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Line number, instruction in capitals, the word after it for those that have one, and value."""
    at = 0
    while (at := _skip(text, at)) < len(text):
        line = text.count("\n", 0, at) + 1
        match = _INSTRUCTION.match(text, at)
        if match is None:
            raise InvalidRequest("Modelfile", f"line {line}: {text[at : at + 40].splitlines()[0]!r} is no instruction")
        instruction, at = match[1].upper(), match.end()
        word = ""
        if instruction in _WITH_WORD and (found := _WORD.match(text, at)) is not None:
            word, at = found[1], found.end()
        value, at = _read_value(text, at, line)
        yield line, instruction, word, value


def _skip(text: str, at: int) -> int:
    """Past empty lines and comments."""
    match = _SKIPPED.match(text, at)
    return at if match is None else match.end()


def _read_value(text: str, start: int, line: int) -> tuple[str, int]:
    """The value that begins at `start`, and where it ends."""
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    if not text.startswith(_TRIPLE, start):
        return _unquote(text[start:end].strip()), end
    start += len(_TRIPLE)
    closing = text.find(_TRIPLE, start)
    if closing < 0:
        raise InvalidRequest("Modelfile", f"line {line}: the text after three quotes never ends")
    end = closing + len(_TRIPLE)
    rest = text[end:].partition("\n")[0]
    if rest.strip():
        raise InvalidRequest("Modelfile", f"line {line}: something follows the closing quotes: {rest[:40]!r}")
    return text[start:closing], end + len(rest)


def _unquote(text: str) -> str:
    """Text without the quotes around it; within them backslashes escape, as they do in JSON."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text[1:-1]
    return value if isinstance(value, str) else text


def _quote(text: str) -> str:
    if "\n" in text and _TRIPLE not in text and not text.endswith('"'):
        return f"{_TRIPLE}{text}{_TRIPLE}"
    return json.dumps(text, ensure_ascii=False)
