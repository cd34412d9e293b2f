"""Every setting of mlxr: one table, from which flags, environment variables and documents are made.

A value comes, in this order, from the caller (a flag or a keyword), from the environment variable `MLXR_<NAME>`, or
from the default in the table. Nothing else in the package reads the environment. Unknown names and values that do
not fit are refused with the setting's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlxr.core.errors import SettingError

Value = str | int | float | None
Source = Literal["caller", "environment", "default"]
ENVIRONMENT_PREFIX = "MLXR_"
DEVICES = ("auto", "cpu", "metal", "cuda", "reference", "mlx-cpu", "emulated")
_BYTE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    `kind` is int, bytes (an int, or text such as 512M or 2G), choice or path; `default` None means decided at run time.
    """

    name: str
    kind: Literal["int", "bytes", "choice", "path"]
    default: Value
    help: str
    minimum: int = 0
    maximum: int = 2**62
    choices: tuple[str, ...] = ()

    @property
    def environment_variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    def parse(self, value: object) -> Value:
        """Check `value` and bring it to the setting's type; raises SettingError naming the setting."""
        if value is None:
            return None
        if self.kind == "choice":
            if value not in self.choices:
                raise SettingError(f"{self.name}: must be one of {', '.join(self.choices)}; got {value}")
            return str(value)
        if self.kind == "path":
            return self._parse_path(value)
        number = _parse_bytes(value) if self.kind == "bytes" else _parse_int(value)
        if number is None:
            wanted = "a size in bytes such as 536870912, 512M or 2G" if self.kind == "bytes" else "a whole number"
            raise SettingError(f"{self.name}: must be {wanted}; got {value!r}")
        if not self.minimum <= number <= self.maximum:
            raise SettingError(f"{self.name}: must be from {self.minimum} to {self.maximum}; got {number}")
        return number

    def _parse_path(self, value: object) -> str:
        if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str) or not text:
            raise SettingError(f"{self.name}: must be the path of a folder; got {value!r}")
        return text


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


SETTINGS: tuple[Setting, ...] = (
    Setting("device", "choice", "auto", "Where the model runs.", choices=DEVICES),
    Setting(
        "threads",
        "int",
        None,
        "Compute threads; default: the cores this process may use.",
        minimum=1,
        maximum=256,
    ),
    Setting(
        "isa",
        "choice",
        None,
        "Instruction set of the CPU kernels; default: the best this machine has.",
        choices=("portable", "avx2", "avx512"),
    ),
    Setting(
        "arena_bytes",
        "bytes",
        None,
        "Memory for the KV cache; default: what the context needs, within arena_percent of free memory.",
    ),
    Setting(
        "arena_percent",
        "int",
        50,
        "Most of the free memory that the KV cache takes where arena_bytes is not given, in percent.",
        minimum=1,
        maximum=100,
    ),
    Setting(
        "kv_cache",
        "choice",
        "auto",
        "Pages that requests share and keep, or one plain run for each request.",
        choices=("auto", "paged", "simple"),
    ),
    Setting("page_size", "int", 32, "Token positions in one page of the KV cache.", minimum=1, maximum=1024),
    Setting(
        "kv_type",
        "choice",
        None,
        "Number format of the KV cache; default: the device's own.",
        choices=("bf16", "f16", "f32"),
    ),
    Setting("store_bytes", "bytes", 0, "Disk space for cache pages that outlive memory and restarts; 0: none."),
    Setting("store_folder", "path", None, "Where cache pages are kept on disk; default: in the user's cache folder."),
    Setting(
        "context_tokens",
        "int",
        None,
        "Longest context served; default: what the model was made for.",
        minimum=1,
    ),
    Setting("max_batch_tokens", "int", 512, "Most tokens that one step computes.", minimum=1, maximum=2**20),
    Setting("max_sequences", "int", 64, "Most answers that grow at the same time.", minimum=1, maximum=4096),
    Setting(
        "prefill_chunk_tokens",
        "int",
        512,
        "Most tokens of one prompt that one step computes.",
        minimum=1,
        maximum=2**20,
    ),
    Setting(
        "max_waiting",
        "int",
        1024,
        "Most requests that may wait for their turn; more are refused.",
        minimum=1,
        maximum=2**20,
    ),
)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved values; one field per row of SETTINGS (a test holds the two equal)."""

    device: str = "auto"
    threads: int | None = None
    isa: str | None = None
    arena_bytes: int | None = None
    arena_percent: int = 50
    kv_cache: str = "auto"
    page_size: int = 32
    kv_type: str | None = None
    store_bytes: int = 0
    store_folder: str | None = None
    context_tokens: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    prefill_chunk_tokens: int = 512
    max_waiting: int = 1024


def resolve(overrides: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from `overrides` (None values count as not given), the environment, and the defaults, in this order."""
    return Settings(**{name: value for name, (value, _) in explain(overrides, environment).items()})  # type: ignore[arg-type]


def explain(
    overrides: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, tuple[Value, Source]]:
    """Every setting's value and where it came from. Raises SettingError for unknown names and unfit values."""
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    unknown = [name for name in given if name not in BY_NAME]
    if unknown:
        raise SettingError(f"{unknown[0]}: no such setting; there are {', '.join(BY_NAME)}")
    environment = os.environ if environment is None else environment
    resolved: dict[str, tuple[Value, Source]] = {}
    for setting in SETTINGS:
        if setting.name in given:
            resolved[setting.name] = (setting.parse(given[setting.name]), "caller")
        elif setting.environment_variable in environment:
            resolved[setting.name] = (setting.parse(environment[setting.environment_variable]), "environment")
        else:
            resolved[setting.name] = (setting.default, "default")
    return resolved
