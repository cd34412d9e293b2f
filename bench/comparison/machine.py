"""The description of the machine for results, and the load by other processes during a measurement."""

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
    """The processor, the cores that this process may use, the memory, the system."""
    return {
        "processor": _name_processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def read_commit() -> str:
    """The commit of the running package, with `+` if its files differ; empty if it is not in a checkout of its own.

    It is that of the package's folder, which need not be the checkout of this script.
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
    """The first digits of the native module's SHA-256: the build may be older than the sources."""
    return hashlib.sha256(Path(load_native().__file__).read_bytes()).hexdigest()[:12]


def read_version() -> str:
    """The version of mlxr in the sources."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version


def _name_processor() -> str:
    """The processor's name, with family and model if known: on virtual machines generations can share a name."""
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
    """The share of all cores that other processes use: the time in /proc/stat, less this process and its children.

    Time that the hypervisor gave to other machines counts, too.
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
        """The share since the beginning, 0 to 1."""
        seconds = (time.monotonic() - self._start_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (self._read() - self._others_s) / seconds))
