"""Modelfiles: a model made from another one, as text. A subset of Ollama's, read and written.

FROM, ADAPTER, PARAMETER, TEMPLATE, SYSTEM, MESSAGE and LICENSE are understood. RENDERER, PARSER and REQUIRES speak of
what is built into Ollama; they are kept as `hints` for whoever makes the model. All else is refused by name.
A value runs to the end of the line. One that begins with a quote, or with three, ends with the first line that ends
with as many, as Ollama reads it. Backslashes are backslashes; only in the quotes of a PARAMETER they escape as in JSON,
for stops such as "\\n\\n". A TEMPLATE is Jinja, as model files carry it, or a Go template, which is translated where
the model is made.
Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

import codecs
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
_HINTS = ("RENDERER", "PARSER", "REQUIRES")
_NO_TEMPLATE = "{{.Prompt}}"  # that of models whose prompts a renderer of Ollama's writes


@dataclass(slots=True)
class Modelfile:
    """What a Modelfile says; `source` is what stands after FROM, `adapter` after ADAPTER.

    `hints` are instructions that speak of Ollama's own programs, and their values.
    """

    source: str = ""
    adapter: str | None = None
    template: str | None = None
    system: str | None = None
    license: str | None = None
    parameters: dict[str, object] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    hints: dict[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> Changes:
        """What the new model sets anew."""
        return Changes(self.template, self.system, self.parameters or None, self.messages or None, self.license)


def decode_modelfile(data: bytes) -> str:
    """The text of a Modelfile: UTF-8 or, where a byte order mark says so, UTF-16. Raises InvalidRequest."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        name = "UTF-16" if is_wide else "UTF-8"
        raise InvalidRequest("Modelfile", f"is not {name}: {error.reason} at byte {error.start}") from error


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
    if "RENDERER" in modelfile.hints and (modelfile.template or "").replace(" ", "") == _NO_TEMPLATE:
        modelfile.hints["TEMPLATE"], modelfile.template = modelfile.template or "", None
    return modelfile


def write_modelfile(record: ModelRecord, adapter: Path | None = None) -> str:
    """The Modelfile that makes `record` from its files, and those of its `adapter`."""
    lines = [f"# To change it: mlxr create NEW -f THIS, with FROM {record.short_name}", f"FROM {record.path}"]
    if adapter is not None:
        lines.append(f"ADAPTER {adapter}")
    if record.template is not None:
        lines.append(_write("TEMPLATE", record.template))
    if record.system is not None:
        lines.append(_write("SYSTEM", record.system))
    lines += [f"PARAMETER {line}" for line in list_parameters(record.parameters)]
    lines += [_write(f"MESSAGE {message['role']}", message["content"]) for message in record.messages]
    if record.license:
        lines.append(_write("LICENSE", record.license))
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
        case name if name in _HINTS:
            modelfile.hints[name] = value
        case _:
            known = "FROM, ADAPTER, PARAMETER, TEMPLATE, SYSTEM, MESSAGE and LICENSE"
            raise InvalidRequest(instruction[:40], f"is not supported; there are {known}")


def _add_parameter(modelfile: Modelfile, name: str, value: object) -> None:
    known = modelfile.parameters.get(name)
    modelfile.parameters[name] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value


def _read_instructions(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Line number, instruction in capitals, the word after it for those that have one, and value."""
    at = len("\ufeff") if text.startswith("\ufeff") else 0
    while (at := _skip(text, at)) < len(text):
        line = text.count("\n", 0, at) + 1
        match = _INSTRUCTION.match(text, at)
        if match is None:
            raise InvalidRequest("Modelfile", f"line {line}: {text[at : at + 40].splitlines()[0]!r} is no instruction")
        instruction, at = match[1].upper(), match.end()
        word = ""
        if instruction in _WITH_WORD and (found := _WORD.match(text, at)) is not None:
            word, at = found[1], found.end()
        escapes = instruction == "PARAMETER" and text.startswith('"', at)
        value, at = _read_value(text, at, line)
        if escapes:
            value = _unescape(value)
        yield line, instruction, word, value


def _skip(text: str, at: int) -> int:
    """Past empty lines and comments."""
    match = _SKIPPED.match(text, at)
    return at if match is None else match.end()


def _read_value(text: str, start: int, line: int) -> tuple[str, int]:
    """The value that begins at `start`, and where it ends."""
    quotes = next((quotes for quotes in ('"""', '"') if text.startswith(quotes, start)), "")
    begin = start
    while True:
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        last = begin + len(text[begin:end].rstrip())
        if not quotes:
            return text[start:end].strip(), end
        if last - start >= 2 * len(quotes) and text.endswith(quotes, begin, last):
            return text[start + len(quotes) : last - len(quotes)], end
        if end == len(text):
            raise InvalidRequest("Modelfile", f"line {line}: no line ends with {quotes}, which the value begins with")
        begin = end + 1


def _unescape(text: str) -> str:
    """The text with its backslashes read as JSON reads them, or as it is where it cannot be read so."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _write(instruction: str, text: str) -> str:
    """The instruction with the text as its value, in the quotes with which it reads back."""
    for quotes in ('"""', '"') if '"' in text else ('"',):
        written = f"{quotes}{text}{quotes}"
        try:
            if _read_value(f"{written}\n", 0, 1) == (text, len(written)):
                return f"{instruction} {written}"
        except InvalidRequest:
            continue
    return f"# {instruction} cannot be written: a line of its text ends with quotes"
