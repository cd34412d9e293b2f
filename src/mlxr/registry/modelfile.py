"""Modelfiles: a model made from another one, as text. A subset of Ollama's, read and written.

FROM, ADAPTER, PARAMETER, TEMPLATE, SYSTEM, MESSAGE and LICENSE are understood. RENDERER, PARSER and REQUIRES name
parts of Ollama itself; they are kept as `hints` for the code that makes the model. All else is refused by name.
A value runs to the end of the line. One that begins with a quote, or with three, ends with the first line that ends
with as many, as Ollama reads it. Backslashes are backslashes; only in the quotes of a PARAMETER they escape as in JSON,
for stops such as "\\n\\n". A TEMPLATE is Jinja, as model files carry it, or a Go template, which is translated where
the model is made.
Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.md

Generation options have Ollama's names: one table for Modelfiles, the catalogue and the Ollama routes. Options of a
machine (threads, batches, memory) and those that Ollama itself has given up are accepted, as its clients send them, and
have no effect; an option that would change the answer and is not supported is refused by name. Names and kinds:
api/types.go beside that page.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.core.sampling import Kind as ParameterKind
from mlxr.core.sampling import read_params
from mlxr.core.types import PARAMETERS
from mlxr.registry.record import Changes, ModelRecord

Kind = Literal["int", "float", "bool", "texts"]
MAX_STOPS = 64


@frozen
class Option:
    """A generation option. `has_effect` is False if it is accepted only because clients send it; `least` is the
    smallest valid value. The valid values of sampling parameters are in their own table (`PARAMETERS`).
    """

    name: str
    kind: Kind
    has_effect: bool = True
    least: int | None = None


KINDS: Mapping[ParameterKind, Kind] = {"int": "int", "float": "float", "flag": "bool", "seed": "int", "texts": "texts"}
OPTIONS: tuple[Option, ...] = (
    *(Option(name, KINDS[row.kind]) for row in PARAMETERS for name in reversed(row.list_names("ollama"))),
    Option("num_ctx", "int", least=1),
    Option("num_keep", "int", least=-1),
    Option("num_batch", "int", has_effect=False, least=1),
    Option("draft_num_predict", "int", least=-1),
    Option("num_gpu", "int", has_effect=False, least=-1),
    *(Option(name, "int", has_effect=False, least=0) for name in ("main_gpu", "num_thread")),
    Option("tfs_z", "float", has_effect=False),
    *(Option(name, "bool", has_effect=False) for name in ("use_mmap", "use_mlock", "low_vram", "f16_kv", "numa")),
    *(Option(name, "bool", has_effect=False) for name in ("penalize_newline", "logits_all", "vocab_only")),
    Option("embedding_only", "bool", has_effect=False),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def check_options(options: Mapping[str, object], field: str = "options") -> dict[str, object]:
    """Return the options, their values checked, without null and unknown ones (`find_idle` lists the latter).

    Raises InvalidRequest naming the option whose value is wrong.
    """
    checked: dict[str, object] = {}
    for name, value in options.items():
        option = BY_NAME.get(name)
        if option is not None and value is not None:
            checked[name] = _check(option, value, f"{field}.{name}")
    return checked


def read_draft_tokens(*layers: Mapping[str, object]) -> int | None:
    """Return the most draft tokens at a time; later layers of checked options win. None if no layer sets it."""
    found: object = None
    for options in layers:
        found = options.get("draft_num_predict", found)
    return max(found, 0) if isinstance(found, int) else None


def find_idle(options: Mapping[str, object]) -> list[str]:
    """The names of the given options that have no effect here: the machine's, and unknown ones."""
    return [name for name, value in options.items() if value is not None and not _has_effect(name)]


def _has_effect(name: str) -> bool:
    return name in BY_NAME and BY_NAME[name].has_effect


def read_parameter(name: str, text: str) -> object:
    """The value of a PARAMETER line; `stop` gives a list of one. Raises InvalidRequest."""
    option = BY_NAME.get(name)
    if option is None:
        raise InvalidRequest(f"PARAMETER {name[:80]}", f"is not an option; there are {', '.join(BY_NAME)}")
    value: object = text
    try:
        if option.kind == "int":
            value = int(text)
        elif option.kind == "float":
            value = float(text)
        elif option.kind == "bool":
            value = {"true": True, "false": False}[text.lower()]
        else:
            value = [text]
    except (ValueError, KeyError):
        pass  # the check below raises the proper error
    return _check(option, value, f"PARAMETER {name}")


def _check(option: Option, value: object, field: str) -> object:
    value = _check_kind(option, value, field)
    read_params({option.name: value}, prefix=field.removesuffix(option.name))
    return value


def _check_kind(option: Option, value: object, field: str) -> object:
    if option.kind == "texts":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or len(texts) > MAX_STOPS:
            raise InvalidRequest(field, f"must be text or a list of at most {MAX_STOPS} texts")
        return texts
    if option.kind == "bool":
        if not isinstance(value, bool):
            raise InvalidRequest(field, f"must be true or false, got {value!r:.80}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise InvalidRequest(field, f"must be a number, got {value!r:.80}")
    if option.kind == "int":
        if value != int(value) or abs(value) >= 1 << 63:
            raise InvalidRequest(field, f"must be a whole number of 64 bits, got {value!r:.80}")
        value = int(value)
    if option.least is not None and value < option.least:
        raise InvalidRequest(field, f"must be at least {option.least}, got {value}")
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


MAX_CHARACTERS = 1 << 22
ROLES = ("system", "user", "assistant")
_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z_]+)(?:[ \t]+|(?=\r?\n|\Z))", re.ASCII)
_WITH_WORD = ("PARAMETER", "MESSAGE")
_WORD = re.compile(r"([^\s\"]+)[ \t]*")
_SKIPPED = re.compile(r"(?:[ \t\r]*(?:#[^\n]*)?\n)+|[ \t\r]*(?:#[^\n]*)?\Z")
_HINTS = ("RENDERER", "PARSER", "REQUIRES")
_NO_TEMPLATE = "{{.Prompt}}"  # the template of models whose prompts a renderer of Ollama's writes


@dataclass(slots=True)
class Modelfile:
    """A parsed Modelfile; `source` is the value of FROM, `adapter` that of ADAPTER.

    `hints` are the instructions that name parts of Ollama itself, and their values.
    """

    source: str = ""
    source_line: int = field(default=0, compare=False)
    adapter: str | None = None
    template: str | None = None
    system: str | None = None
    license: str | None = None
    parameters: dict[str, object] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    hints: dict[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> Changes:
        """The settings of the new model."""
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
            modelfile.source_line = modelfile.source_line or line * (instruction == "FROM")
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
    """Yield line number, instruction in capitals, the word after it (PARAMETER, MESSAGE), and value."""
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
    """Return the position after empty lines and comments."""
    match = _SKIPPED.match(text, at)
    return at if match is None else match.end()


def _read_value(text: str, start: int, line: int) -> tuple[str, int]:
    """Return the value that begins at `start`, and the position of its end."""
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
    """Return the text with its escapes resolved as in JSON, or unchanged if they are not valid JSON."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _write(instruction: str, text: str) -> str:
    """Return the instruction with the text as its value, in quotes that read back to the same text."""
    for quotes in ('"""', '"') if '"' in text else ('"',):
        written = f"{quotes}{text}{quotes}"
        try:
            if _read_value(f"{written}\n", 0, 1) == (text, len(written)):
                return f"{instruction} {written}"
        except InvalidRequest:
            continue
    return f"# {instruction} cannot be written: a line of its text ends with quotes"
