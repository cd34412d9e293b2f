"""Processes: those that work for strangers (templates, pictures, PDFs), and this one while it imports modules.

A process for strangers gets few variables and is bounded by the system. While modules are imported, a signal ends this
process at once and nothing is printed: Python's own handler would raise in the middle of some import, whose traceback
says nothing to whoever pressed Ctrl-C.
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
END_S = 10.0  # until the system has ended a process that was killed
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
    """A process for strangers, `python -m module`, that is there before it is asked: it has imported what it needs.

    It answers once; then another one is started. It ends with this process, as its input does. Safe to use from several
    threads; one that finds none there starts its own.
    """

    _process: subprocess.Popen[bytes] | None

    def __init__(self, module: str) -> None:
        self._module, self._process = module, None
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)

    def prepare(self) -> None:
        """Start one unless one waits, and do not wait for it. Where the system has none, whoever asks hears of it."""
        with self._lock, contextlib.suppress(OSError):
            if self._process is None:
                self._process = _start(self._module)

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Return what it answers to `data`, as `ask` does. Raises TimeoutExpired when it was stopped."""
        try:
            return _finish(self._take() or _start(self._module), data, seconds)
        finally:
            self.prepare()

    def stop(self) -> None:
        """End the one that waits, if there is one."""
        process = self._take()
        if process is not None:
            process.kill()
            _finish(process, b"", END_S)

    def _take(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            process, self._process = self._process, None
        if process is None or process.poll() is None:
            return process
        _finish(process, b"", END_S)  # ended by others
        return None

    def _forget(self) -> None:
        """Begin without one: at first, and in a process that is forked from this one, which must not hold its input."""
        self._lock, process = threading.Lock(), self._process
        self._process = None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # it is not ours to wait for


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
