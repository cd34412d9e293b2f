"""One row of the settings table: its name, what values it takes, and how text becomes such a value.

A row is declared with `setting`, as the default of a field of a dataclass (`ModelSettings`, `Settings`), so that its
name, its type and all else are said in one place. Knows no settings and no sources; `settings` says where values come
from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from mlxr.core.errors import SettingError

Value = str | int | float | bool | tuple[str, ...] | None
Kind = Literal["int", "bytes", "seconds", "flag", "choice", "path", "text", "list", "object"]
Scope = Literal["model", "registry", "hub", "server"]
ENVIRONMENT_PREFIX = "MLXR_"
_BYTE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_WANTED = {
    "int": "a whole number",
    "bytes": "a size in bytes such as 536870912, 512M or 2G",
    "seconds": "a number of seconds",
    "flag": "true or false",
    "path": "the path of a file or folder",
    "text": "text",
    "list": "names separated by commas",
    "object": 'an object in JSON such as {"key": true}',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table.

    `kind` says what values it takes: bytes also as text such as 512M or 2G, a list also as text with commas,
    an object also as a mapping; it is kept as JSON text. `default`
    None means decided at run time. `scope` says whom it concerns: every model that is run, the registry of models,
    whoever pulls models into it, or the server alone. A `secret` has no flag, as flags are seen by every user of the
    machine, and is never shown.
    """

    name: str = ""
    kind: Kind
    default: Value
    help: str
    minimum: int = 0
    maximum: int = 2**62
    choices: tuple[str, ...] = ()
    scope: Scope = "model"
    secret: bool = False

    @property
    def environment_variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """As written on the command line."""
        return "--" + self.name.replace("_", "-")

    def parse(self, value: object) -> Value:
        """Check `value` and bring it to the setting's type; raises SettingError naming the setting."""
        if value is None:
            return None
        if self.kind == "choice":
            if value not in self.choices:
                raise SettingError(f"{self.name}: must be one of {', '.join(self.choices)}; got {value}")
            return str(value)
        parsed = _parse(self.kind, value)
        if parsed is None:
            shown = "something else" if self.secret else repr(value)
            raise SettingError(f"{self.name}: must be {_WANTED[self.kind]}; got {shown}")
        if self.kind in ("int", "bytes", "seconds"):
            assert isinstance(parsed, int | float)
            if not self.minimum <= parsed <= self.maximum:
                raise SettingError(f"{self.name}: must be from {self.minimum} to {self.maximum}; got {parsed}")
        return parsed


def setting(
    kind: Kind,
    default: Value,
    text: str,
    *,
    minimum: int = 0,
    maximum: int = 2**62,
    choices: tuple[str, ...] = (),
    scope: Scope = "model",
    secret: bool = False,
) -> Any:
    """The declaration of a row, as the default of a dataclass field; `text` is its help."""
    row = Setting(
        kind=kind,
        default=default,
        help=text,
        minimum=minimum,
        maximum=maximum,
        choices=choices,
        scope=scope,
        secret=secret,
    )
    return field(default=default, metadata={"setting": row})


def list_rows(table: type) -> tuple[Setting, ...]:
    """The rows that a dataclass declares, those that it inherits first."""
    return tuple(replace(field.metadata["setting"], name=field.name) for field in fields(table))


def _parse(kind: Kind, value: object) -> Value:
    """The value, or None for one that does not fit."""
    if kind == "int":
        return _parse_int(value)
    if kind == "bytes":
        return _parse_bytes(value)
    if kind == "seconds":
        return _parse_seconds(value)
    if kind == "flag":
        return value if isinstance(value, bool) else _FLAGS.get(value.lower()) if isinstance(value, str) else None
    if kind == "path":
        return _parse_path(value)
    if kind == "text":
        return value if isinstance(value, str) and value else None
    return _parse_object(value) if kind == "object" else _parse_list(value)


def _parse_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _parse_bytes(value: object) -> int | None:
    if isinstance(value, str):
        text = value.strip().lower().removesuffix("b").removesuffix("i")
        unit = text[-1:] if text[-1:].isalpha() else ""
        number = _parse_int(text.removesuffix(unit))
        factor = _BYTE_UNITS.get(unit)
        return None if number is None or factor is None else number * factor
    return _parse_int(value)


def _parse_seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _parse_path(value: object) -> str | None:
    if not isinstance(value, str | os.PathLike):
        return None
    text = os.fspath(value)
    return text if isinstance(text, str) and text else None


def _parse_object(value: object) -> str | None:
    try:
        given = json.loads(value) if isinstance(value, str) else value
        return json.dumps(dict(given), allow_nan=False) if isinstance(given, Mapping) else None
    except (TypeError, ValueError, RecursionError):
        return None


def _parse_list(value: object) -> tuple[str, ...] | None:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or isinstance(items, bytes) or not all(isinstance(item, str) for item in items):
        return None
    return tuple(item.strip() for item in items if item.strip())
