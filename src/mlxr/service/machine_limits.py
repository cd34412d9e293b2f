"""The machine's limits as the probe measures them: measured on request, and kept for later.

The probe takes all threads for a second, so it never runs by itself beside answers. What it measured last is kept in a
file for each processor, instruction set and number of threads, because the rates depend on these.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

from mlxr.core.errors import DeviceError
from mlxr.core.settings import Settings
from mlxr.core.stats import MachineLimits
from mlxr.engine.memory_plan import read_room_bytes
from mlxr.loading import LoadedModel, make_context
from mlxr.registry.library import fits_room
from mlxr.service.catalogue import find_models_folder

logger = logging.getLogger(__name__)
FILE_NAME = "limits.json"
MAX_FILE_BYTES = 1 << 20
PROBE_ROOM_BYTES = 1 << 30  # twice its buffer, so that some memory stays free
MAX_KEPT = 64  # measurements in the file; the oldest goes first
UNMEASURED = (
    "the limits of this machine have not been measured with this number of threads; `mlxr bench --probe` does, and so "
    "does POST /v1/admin/probe, for which answers pause for about a second"
)


def measure_limits(loaded: LoadedModel) -> MachineLimits:
    """Measure memory reads and int8 products per second with the threads of a loaded model; takes about 1 s.

    Raises DeviceError if the model does not run on the processor, or memory is short.
    """
    if loaded.ctx.device != "cpu":
        raise DeviceError(explain_missing(loaded))
    room_bytes = read_room_bytes("cpu")
    if room_bytes is not None and room_bytes < PROBE_ROOM_BYTES:
        text = f"the probe needs {PROBE_ROOM_BYTES >> 20} MiB of free memory, {room_bytes >> 20} MiB are free"
        raise DeviceError(f"{text}; unload a model")
    limits = loaded.ctx.start_probe().measure()
    return MachineLimits(limits.read_bytes_per_s, limits.int8_macs_per_s, time.time())


def measure_machine(settings: Settings) -> MachineLimits:
    """Measure the same without a model, with the threads of the settings; kept for models that run with as many."""
    ctx = make_context("cpu", settings.threads)
    limits = ctx.start_probe().measure()
    measured = MachineLimits(limits.read_bytes_per_s, limits.int8_macs_per_s, time.time())
    KeptLimits(settings).keep(ctx.isa, ctx.threads, measured)
    return measured


def find_read_rate(settings: Settings) -> float | None:
    """Return the bytes of memory per second that this processor last read in a measurement; None without one."""
    rates = [
        float(row["read_bytes_per_s"])
        for name, row in KeptLimits(settings).read().items()
        if name.startswith(f"{_name_processor()} / ") and isinstance(row, dict) and "read_bytes_per_s" in row
    ]
    return rates[-1] if rates else None


def find_room_bytes(device: str = "auto") -> int | None:
    """Return the bytes of memory that models may take now; None if the system does not tell."""
    return read_room_bytes(device)


def judge_fits(sizes_bytes: Sequence[int], device: str = "auto") -> list[str]:
    """Judge for each size of a model's files whether that model alone fits the free memory: yes, tight or no.

    If the system does not tell how much is free, the answer is unknown.
    """
    room_bytes = find_room_bytes(device)
    if room_bytes is None:
        return ["unknown"] * len(sizes_bytes)
    return ["yes" if fits_room(size, room_bytes) else "tight" if size <= room_bytes else "no" for size in sizes_bytes]


def judge_speed(fit: str, tokens_per_s: float | None) -> str:
    """Return `fit`, or "slow" if the model fits but makes too few tokens per second to be useful."""
    return "slow" if fit == "yes" and tokens_per_s is not None and tokens_per_s < 1 else fit


def explain_missing(loaded: LoadedModel) -> str:
    """Return the reason why there are no limits for a model, and what helps."""
    if loaded.ctx.device == "cpu":
        return UNMEASURED
    return f"the probe measures processors; this model runs on the device {loaded.ctx.device!r}"


class KeptLimits:
    """The file of measurements; it is made with the first one."""

    def __init__(self, settings: Settings) -> None:
        self.path = find_models_folder(settings) / FILE_NAME

    def find(self, loaded: LoadedModel) -> MachineLimits | None:
        """Return the last measurement that holds for a loaded model; None if there is none that can be read."""
        row = self.read().get(_name_machine(loaded.ctx.isa, loaded.ctx.threads))
        if not isinstance(row, dict) or row.keys() != {field.name for field in fields(MachineLimits)}:
            return None
        if not all(isinstance(value, float) and 0 < value < math.inf for value in row.values()):
            return None
        return MachineLimits(**row)

    def keep(self, isa: str, threads: int, limits: MachineLimits) -> None:
        """Write a measurement beside the others; only warns if the folder cannot be written."""
        rows = self.read()
        rows.pop(_name_machine(isa, threads), None)
        kept = dict(list(rows.items())[-MAX_KEPT + 1 :]) | {_name_machine(isa, threads): asdict(limits)}
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept, indent=1))
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            logger.warning("what the probe measured cannot be kept in %s: %s", self.path, error.strerror or error)

    def read(self) -> dict[str, object]:
        """Return all measurements; none if the file is not ours."""
        try:
            with self.path.open("rb") as file:
                rows = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return rows if isinstance(rows, dict) else {}


def _name_machine(isa: str, threads: int) -> str:
    """Return the key of a measurement: the rates depend on processor, instruction set and number of threads."""
    return f"{_name_processor()} / {isa} / {threads} threads"


@cache
def _name_processor() -> str:
    with suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match is not None:
            return match[1]
    return platform.processor() or platform.machine()
