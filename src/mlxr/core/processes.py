"""Processes: those that work for strangers (templates, pictures, PDFs), and this one while it imports modules.

A process for strangers gets few variables and is bounded by the system. While modules are imported, a signal ends this
process at once and nothing is printed: Python's own handler would raise in the middle of some import, whose traceback
says nothing to whoever pressed Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_OWN_FOLDER = str(Path(__file__).parents[2])


def make_environment() -> dict[str, str]:
    """Return what Python needs of this process's variables, with this package on its path, and no secrets."""
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environment |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")  # threads count as processes
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_OWN_FOLDER, environment.get("PYTHONPATH"))))
    return environment


def limit(kind: int, amount: int) -> None:
    """Bound this process by `amount` of a `resource.RLIMIT_` kind; systems that do not know the kind do without."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount, hard))


def ask(module: str, data: bytes, seconds: float, *arguments: str) -> bytes:
    """Run `python -m module arguments` on `data`; return its output. Raises TimeoutExpired when it was stopped."""
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        input=data,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=make_environment(),
        timeout=seconds,
        check=False,
        process_group=0,
    ).stdout


def end_on_terminate() -> None:
    """Let SIGTERM end the process as one that is done, until somebody else handles it.

    A server that is told to end while it starts has nothing to finish.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


@contextmanager
def end_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process without a word.

    Nothing changes where somebody else handles it, or where it is ignored, as in a background job.
    """
    is_main = threading.current_thread() is threading.main_thread()
    raises = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
