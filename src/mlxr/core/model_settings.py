"""The settings of a model that runs: the rows that `LLM`, every command that loads a model, and the engine share.

A row is declared with `setting`, as the default of a field of a dataclass (`ModelSettings`, `Settings`), so that its
name, its type and all else stand in one place. Flags, variables, lines of the settings file, documents and the keywords
of `LLM` follow from the row; `make format` writes it into `model_keywords`. `settings` reads the values.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, Literal

from mlxr.core.errors import SettingError
from mlxr.core.frozen import frozen

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


@frozen(kw_only=True)
class Setting:
    """One row of the table."""

    name: str = ""
    kind: Kind  # bytes also as text such as 512M, a list as text with commas, an object as a mapping, kept as JSON text
    default: Value  # None: decided at run time
    help: str
    minimum: int = 0
    maximum: int = 2**62
    choices: tuple[str, ...] = ()
    scope: Scope = "model"  # what it concerns: running models, the registry, pulls into it, or the server
    secret: bool = False  # has no flag, as flags are seen by every user of the machine, and is never shown

    @property
    def environment_variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The flag on the command line."""
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


def setting(kind: Kind, default: Value, text: str, **more: Any) -> Any:
    """The declaration of a row, as the default of a dataclass field; `text` is its help, `more` its other fields."""
    return field(default=default, metadata={"setting": Setting(kind=kind, default=default, help=text, **more)})


def list_rows(table: type) -> tuple[Setting, ...]:
    """The rows that a dataclass declares, those that it inherits first."""
    return tuple(replace(field.metadata["setting"], name=field.name) for field in fields(table))


def _parse(kind: Kind, value: object) -> Value:
    """The value in the setting's type, or None if it does not fit."""
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


DRAFT_WORDS = ("auto", "ngram", "mtp", "off")  # values of `draft` that are no model
THINKING_MESSAGE = "That is as long as I may think. I answer with what I have found so far."
DEVICES = ("auto", "cpu", "metal", "cuda", "reference", "mlx-cpu", "emulated")


@frozen
class ModelSettings:
    """Resolved values of the rows; None means decided where they are used."""

    device: str = setting("choice", "auto", "Where the model runs.", choices=DEVICES)
    threads: int | None = setting(
        "int", None, "Compute threads; default: the cores this process may use.", minimum=1, maximum=256
    )
    isa: str | None = setting(
        "choice",
        None,
        "Instruction set of the CPU kernels; default: the best this machine has.",
        choices=("portable", "avx2", "avx512", "avx512bf16", "neon", "amx"),
    )
    gpus: int = setting("int", 1, "How many GPUs compute a model together, each its share.", minimum=1, maximum=16)
    expert_bytes: int | None = setting(
        "bytes",
        None,
        "Memory for a model's experts; others are read from the file as they are used. Default: all, if there is room.",
    )
    mmproj: str | None = setting(
        "path", None, "GGUF file of the tower that a model sees by; default: a file mmproj*.gguf beside the model."
    )
    image_tokens: int = setting(
        "int",
        1024,
        "Most tokens of the context that one picture takes; small text needs more.",
        minimum=16,
        maximum=16384,
    )
    arena_bytes: int | None = setting(
        "bytes", None, "Memory for the KV cache; default: what the context needs, within arena_percent of free memory."
    )
    arena_percent: int = setting(
        "int",
        50,
        "Share of the free memory that the KV cache may take if arena_bytes is not given, in percent.",
        minimum=1,
        maximum=100,
    )
    kv_cache: str = setting(
        "choice",
        "auto",
        "paged: pages that requests share and that are kept; simple: one plain run for each request.",
        choices=("auto", "paged", "simple"),
    )
    page_size: int = setting("int", 32, "Token positions in one page of the KV cache.", minimum=1, maximum=1024)
    kv_type: str | None = setting(
        "choice",
        None,
        "Number format of the KV cache; default: the device's own. q8 takes half the memory.",
        choices=("bf16", "f16", "f32", "q8"),
    )
    snapshot_percent: int = setting(
        "int",
        33,
        "Share of the KV cache for snapshots of recurrent states, from which later requests go on, in percent.",
        minimum=1,
        maximum=90,
    )
    store_bytes: int = setting(
        "bytes", 0, "Disk space for cache pages, which then outlive memory and restarts; 0: none."
    )
    store_folder: str | None = setting(
        "path", None, "Where cache pages are kept on disk; default: in the user's cache folder."
    )
    context_tokens: int | None = setting(
        "int", None, "Longest context of a request; default: what the model was made for.", minimum=1
    )
    max_batch_tokens: int | None = setting(
        "int",
        None,
        "Most tokens that one step computes; default: 512 (small encoders on a processor 1024), on an NVIDIA GPU 2048 "
        "(from 60 GiB on 4096, small encoders 16384).",
        minimum=1,
        maximum=2**20,
    )
    max_sequences: int | None = setting(
        "int",
        None,
        "Most answers that are computed at the same time; default: 64, on a GPU 128.",
        minimum=1,
        maximum=4096,
    )
    prefill_chunk_tokens: int | None = setting(
        "int",
        None,
        "Most tokens of one prompt that one step computes; default: 512, on an NVIDIA GPU 2048 (from 60 GiB on 4096, "
        "small encoders 16384).",
        minimum=1,
        maximum=2**20,
    )
    draft: str = setting(
        "text",
        "auto",
        "Guess the next tokens and check them in one pass. ngram: by what the text had before; mtp: by the layer of "
        "the model's file that drafts as well; the name or file of a small model with the same vocabulary, or of an "
        "EAGLE-3 head: by that as well; auto: where it can pay; off.",
    )
    draft_tokens: int = setting("int", 15, "Most tokens guessed at a time for one answer.", minimum=1, maximum=15)
    thinking_budget_tokens: int | None = setting(
        "int",
        None,
        "Most tokens that a model thinks before it is made to answer, if a request does not say; default: any number.",
        minimum=0,
        maximum=2**31 - 1,
    )
    thinking_message: str = setting(
        "text",
        THINKING_MESSAGE,
        "What a thought ends with, on a line of its own, when its budget is used up.",
    )
    warm_up: str = setting(
        "choice",
        "auto",
        "Have a GPU compile the kernels of steps before the first answer instead of in it. auto: on NVIDIA's those of "
        "all steps, on Apple's those of one answer; on: those of all steps, on an emulated one, too.",
        choices=("auto", "on", "off"),
    )
    chat_template: str | None = setting(
        "path",
        None,
        "Chat template of all models instead of their own: a file, or the name of one that comes with mlxr, such as "
        "chatml, llama2, llama3, gemma, mistral-v3, mistral-v7-tekken, phi3, phi4.",
    )
    chat_template_kwargs: str | None = setting(
        "object",
        None,
        'Further variables of chat templates as JSON, such as {"enable_thinking": false}; requests may bring others.',
    )
    adapter_bytes: int = setting("bytes", 2**30, "Memory for low-rank adapters (LoRA) that are loaded.")
    max_waiting: int = setting(
        "int", 1024, "Most requests that may wait for their turn; more are refused.", minimum=1, maximum=2**20
    )


MODEL_DEFAULTS = ModelSettings()


@frozen
class StepSizes:
    """The limits of one step, under the names of the settings."""

    max_batch_tokens: int
    max_sequences: int
    prefill_chunk_tokens: int


USUAL_SIZES = StepSizes(512, 64, 512)
GPU_SIZES = StepSizes(2048, 128, 2048)  # from this size on, a GPU's products are bound by arithmetic
SIZES = {"cuda": GPU_SIZES, "metal": StepSizes(512, 16, 512)}  # by device; a Mac's GPU computes a tenth of that
ROOM_SIZES = {"cuda": StepSizes(4096, 128, 4096)}  # with much free memory: weights are expanded half as often
LIGHT_SIZES = {  # for small encoders, whose steps cost much beside their arithmetic
    "cpu": StepSizes(1024, 64, 1024),
    "cuda": StepSizes(16384, 256, 16384),
}


def size_steps(settings: ModelSettings, device: str, *, is_light: bool = False, has_room: bool = False) -> StepSizes:
    """Take the sizes of a step from the settings; unset ones suit `device` (not "auto"; with much memory if it
    `has_room`) and the model (a small encoder if it `is_light`)."""
    usual = (LIGHT_SIZES if is_light else ROOM_SIZES if has_room else SIZES).get(device)
    usual = usual or SIZES.get(device, USUAL_SIZES)
    given = {row.name: getattr(settings, row.name) for row in fields(StepSizes)}
    return replace(usual, **{name: value for name, value in given.items() if value is not None})
