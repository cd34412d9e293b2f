"""Processes: those that work for strangers (templates, pictures, PDFs), and this one while it imports modules.

A process for strangers gets few variables and limited resources. While modules are imported, a signal ends this process
at once and silently: Python's own handler would raise in the middle of some import, and the traceback would not help
the user who pressed Ctrl-C.
"""

from __future__ import annotations

import atexit
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
END_S = 10.0  # the longest wait for the system to end a killed process
_OWN_FOLDER = str(Path(__file__).parents[2])


def make_environment() -> dict[str, str]:
    """Return the variables of this process that Python needs, with this package on its path, and no secrets."""
    environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environment |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")  # threads count as processes
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_OWN_FOLDER, environment.get("PYTHONPATH"))))
    return environment


def limit(kind: int, amount: int) -> None:
    """Bound this process by `amount` of a `resource.RLIMIT_` kind; does nothing if the system lacks that kind."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount, hard))


def ask(module: str, data: bytes, seconds: float, *arguments: str) -> bytes:
    """Run `python -m module arguments` on `data`; return its output. Raises TimeoutExpired if it took longer."""
    return _finish(_start(module, *arguments), data, seconds)


def _start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=make_environment(),
        process_group=0,
    )


def _finish(process: subprocess.Popen[bytes], data: bytes, seconds: float) -> bytes:
    with process:
        try:
            return process.communicate(data, timeout=seconds)[0]
        except BaseException:
            process.kill()
            raise


class Spare:
    """A process for strangers, `python -m module`, started before it is asked, so that its imports are done.

    It answers once; then another one is started. It ends with this process, because its input closes then. Safe to use
    from several threads; a thread that finds no process ready starts its own.
    """

    _process: subprocess.Popen[bytes] | None

    def __init__(self, module: str) -> None:
        self._module, self._process = module, None
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)

    def prepare(self) -> None:
        """Start a process unless one waits; returns at once. If none can be started, `ask` raises the error."""
        with self._lock, contextlib.suppress(OSError):
            if self._process is None:
                self._process = _start(self._module)

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Return its answer to `data`, as the function `ask` does. Raises TimeoutExpired if it took longer."""
        try:
            return _finish(self._take() or _start(self._module), data, seconds)
        finally:
            self.prepare()

    def stop(self) -> None:
        """End the waiting process, if any."""
        process = self._take()
        if process is not None:
            process.kill()
            _finish(process, b"", END_S)

    def _take(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            process, self._process = self._process, None
        if process is None or process.poll() is None:
            return process
        _finish(process, b"", END_S)  # it ended before it was asked
        return None

    def _forget(self) -> None:
        """Begin without a process: at first, and in a fork of this process, which must not hold the other's input."""
        self._lock, process = threading.Lock(), self._process
        self._process = None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # a fork cannot wait for its parent's child


def end_on_terminate() -> None:
    """Let SIGTERM end the process with success until another handler is set.

    A server that is told to end while it starts has nothing to finish.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


@contextmanager
def end_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process without a word.

    Does nothing if another handler is set, or if the signal is ignored, as in a background job.
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
