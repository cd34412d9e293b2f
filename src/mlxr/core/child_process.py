"""Processes that do work for strangers (templates, pictures): which variables they get, and what bounds them."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_OWN_FOLDER = str(Path(__file__).parents[2])


def make_environment() -> dict[str, str]:
    """Return what Python needs of this process's variables, with this package on its path, and no secrets."""
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_OWN_FOLDER, environment.get("PYTHONPATH"))))
    return environment


def limit(kind: int, amount: int) -> None:
    """Bound this process by `amount` of a `resource.RLIMIT_` kind; systems that do not know the kind do without."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount, hard))


def ask(module: str, data: bytes, seconds: float) -> bytes:
    """What `python -m module` answers to `data` before it ends. Raises TimeoutExpired, when it was stopped."""
    return subprocess.run(
        [sys.executable, "-P", "-m", module],
        input=data,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=make_environment(),
        timeout=seconds,
        check=False,
        process_group=0,
    ).stdout
