"""Generation options under Ollama's names: what each takes, and which of them mean something here.

One table for Modelfiles, the catalogue and the Ollama routes. Options of a machine (threads, batches, memory) and those
that Ollama itself has given up are accepted, as its clients send them, and have no effect; what would change the answer
and is not supported is refused by name.
Names and kinds: https://github.com/ollama/ollama/blob/main/docs/modelfile.md and api/types.go there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import Kind as ParameterKind
from mlxr.core.sampling import read_params
from mlxr.core.types import PARAMETERS

Kind = Literal["int", "float", "bool", "texts"]
MAX_STOPS = 64


@dataclass(frozen=True, slots=True)
class Option:
    """A row. `has_effect` is False for what is accepted for the clients' sake; `least` is the smallest value that means
    anything. What sampling parameters may be, their own table says.
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
    """The options with values of their kinds, without those that are null and those that nobody knows (`find_idle`).

    Raises InvalidRequest naming the option whose value is wrong.
    """
    checked: dict[str, object] = {}
    for name, value in options.items():
        option = BY_NAME.get(name)
        if option is not None and value is not None:
            checked[name] = _check(option, value, f"{field}.{name}")
    return checked


def read_draft_tokens(*layers: Mapping[str, object]) -> int | None:
    """Most tokens guessed at a time, of checked options of which later ones count more; None where none says."""
    found: object = None
    for options in layers:
        found = options.get("draft_num_predict", found)
    return max(found, 0) if isinstance(found, int) else None


def find_idle(options: Mapping[str, object]) -> list[str]:
    """Those of the options given that have no effect here: the machine's, and those that nobody knows."""
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
        pass  # the check below says what it must be
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
