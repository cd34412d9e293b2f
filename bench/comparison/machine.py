"""What a result must say of where it was measured, and how busy the machine was with other things meanwhile."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlxr
from comparison.child import Child
from mlxr.kernels.context import load_native

ROOT = Path(__file__).parents[2]


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system."""
    return {
        "processor": _name_processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def read_commit() -> str:
    """The commit of the package that runs, with `+` when its files differ; empty when it is in no checkout of its own.

    Asked of the package's folder and not of this script's: the two need not be the same.
    """
    folder = Path(mlxr.__file__).parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def hash_native() -> str:
    """The first digits of the native module's SHA-256: what was built need not be what the sources say now."""
    return hashlib.sha256(Path(load_native().__file__).read_bytes()).hexdigest()[:12]


def read_version() -> str:
    """Of mlxr, as the sources say."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version


def _name_processor() -> str:
    """With family and model, where there are some: virtual machines shorten names until generations share one."""
    name = _find("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.processor()
    family, model = (_find("/proc/cpuinfo", rf"^{key}\s*:\s*(\d+)$") for key in ("cpu family", "model"))
    return f"{name} (family {family}, model {model})" if family and model else name


def _find(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match[1] if match else ""


class Bystanders:
    """The share of all cores that others use: what /proc/stat counts, less this process and its children.

    Time that the hypervisor gave to other machines counts as theirs.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._start_s = time.monotonic()
        self._others_s = self._read()

    def _read(self) -> float:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return 0.0
        user, nice, system, _, _, irq, soft_irq, steal = map(int, fields)
        busy_s = (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
        return busy_s - sum(child.cpu_s for child in self._children) - time.process_time()

    def measure(self) -> float:
        """0 to 1, since the beginning."""
        seconds = (time.monotonic() - self._start_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (self._read() - self._others_s) / seconds))
