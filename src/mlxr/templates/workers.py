"""Worker processes for templates: started when needed, shared by all models, replaced when a template overruns.

A caller waits on a socket, so other threads go on whatever a template does. A rendering that takes long gets the lowest
priority; one that takes too long ends with its process. If something else ended or stopped the process (the system for
want of memory, an administrator), that says nothing of the template: a new process does the work again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from mlxr.core.errors import ConversationRefused, NoTemplateWorker, TemplateError
from mlxr.core.processes import make_environment
from mlxr.templates.budget import MAX_MEMORY_BYTES, MAX_PROCESSOR_S, MAX_RENDER_S, READY, Closed, pack, receive

MAX_WORKERS = 4
MAX_WORKERS_PER_TEMPLATE = 2  # so that other templates always find a worker
MAX_IDLE = 2
START_S = 30.0
END_S = 1.0  # in which the system ends a process whose connection is closed
PATIENCE_S = 0.1  # after which a rendering goes on at the lowest priority
LOOK_S = 0.5  # between two checks whether a working process has been stopped
LOWEST_PRIORITY = 19


class _Overrun(Exception):
    """A template was stopped with its process; the message says why."""


class _Lost(Exception):
    """A process was ended or stopped from outside; the message says how."""


class _Worker:
    """One process, which does one task at a time."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            self._connection, theirs = socket.socketpair()
            undo.callback(self._connection.close)
            with theirs:
                self._process = _start_process(theirs)
            undo.pop_all()
        self._is_ready = self._is_cut = False
        self.is_spent = False

    def ask(self, processor_s: int, *given: object) -> Any:
        """Return the answer to a message, computed in at most `processor_s` of processor time.

        Raises TemplateError; _Overrun or _Lost, after which the process is spent; or NoTemplateWorker if the machine
        gave it no time.
        """
        message = pack((processor_s, *given))
        try:
            if not self._is_ready:
                self._is_ready = self._receive(START_S)[0] == READY
            kind, answer = self._exchange(message)
        except (Closed, ConnectionError) as error:
            self.is_spent = True
            raise self._explain_end(processor_s) from error
        except TimeoutError as error:
            self.is_spent = True
            raise NoTemplateWorker(
                f": was not done in {MAX_RENDER_S:g} s, though it had not used {processor_s} s of processor time; the "
                "machine is overloaded, try again later"
            ) from error
        if kind == "memory":
            self.is_spent = True
            raise _Overrun(f"used more than {MAX_MEMORY_BYTES >> 20} MiB of memory")
        if kind in ("error", "refusal"):
            raise ConversationRefused(str(answer)) if kind == "refusal" else TemplateError(str(answer))
        return answer

    def find_loss(self) -> str | None:
        """Return how the process was ended or stopped from outside; None if it was not."""
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):
                found, status = os.waitpid(self._process.pid, os.WNOHANG | os.WUNTRACED)
                if found and os.WIFSTOPPED(status):
                    return "was stopped by a signal"
                if found:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
        code = self._process.returncode
        if code is None:
            return None
        return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """End the process at once; a caller that waits for its answer gets an error."""
        self.is_spent = self._is_cut = True
        self._process.kill()

    def end(self) -> None:
        """End the process and close everything that belongs to it."""
        self.kill()
        self._connection.close()
        self._process.wait()

    def _exchange(self, message: bytes) -> Any:
        self._send(message)
        self._connection.settimeout(PATIENCE_S)
        with contextlib.suppress(TimeoutError):
            self._connection.recv(1, socket.MSG_PEEK)
            return self._receive(MAX_RENDER_S)
        self.is_spent = True  # a priority that was lowered cannot be raised again
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
        return self._receive(MAX_RENDER_S)

    def _send(self, message: bytes) -> None:
        view, end_s = memoryview(message), time.monotonic() + MAX_RENDER_S
        while view:
            view = view[self._wait(partial(self._connection.send, view), end_s) :]

    def _receive(self, patience_s: float) -> Any:
        """Wait at most `patience_s` for a message."""
        self._wait(partial(self._connection.recv, 1, socket.MSG_PEEK), time.monotonic() + patience_s)
        self._connection.settimeout(patience_s)
        return receive(self._connection)

    def _wait(self, work: Callable[[], Any], end_s: float) -> Any:
        """Do `work` on the connection; raises _Lost as soon as the process is seen to be stopped."""
        self._connection.settimeout(LOOK_S)
        while True:
            try:
                return work()
            except TimeoutError:
                loss = self.find_loss()
                if loss is not None:
                    self.is_spent = True
                    raise _Lost(loss) from None
                if time.monotonic() > end_s:
                    raise

    def _explain_end(self, processor_s: int) -> _Overrun | _Lost:
        """Return why the connection broke: the template used up its time, or the process was ended from outside."""
        if self._is_cut:
            return _Overrun("was on its way when this program ended it")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.returncode == -signal.SIGXCPU:
            return _Overrun(f"used more than {processor_s} s of processor time")
        return _Lost(self.find_loss() or "closed its connection")


class TemplateWorkers:
    """The workers of this process, which may use `processor_s` for a rendering. Safe to use from several threads."""

    _idle: list[_Worker]
    _busy: set[_Worker]
    _in_use: Counter[str]

    def __init__(self, processor_s: int = MAX_PROCESSOR_S) -> None:
        self._processor_s = processor_s
        self.forget()

    def prepare(self) -> None:
        """Start a worker if there is none, without waiting for it."""
        with self._changed:
            if not self._idle and not self._busy:
                self._idle.append(_start())

    def render(self, source: str, label: str, variables: Mapping[str, object], now: datetime) -> str:
        """Return the text that the template `source` makes of `variables`; TemplateError names it by `label`.

        Raises NoTemplateWorker, as the methods below do, if no process could do it.
        """
        text: str = self._ask(source, label, "render", source, label, dict(variables), now.isoformat())
        return text

    def check(self, source: str, label: str) -> None:
        """Raise TemplateError, naming the template by `label`, unless `source` compiles."""
        self._ask(source, label, "check", source, label)

    def find_variables(self, source: str) -> frozenset[str]:
        """Return the variables that `source` reads and does not set itself; none if it does not compile."""
        try:
            return frozenset(self._ask(source, "", "variables", source))
        except TemplateError:
            return frozenset()

    def cut_short(self) -> None:
        """End the workers that are rendering now; callers that wait for them get TemplateError."""
        with self._changed:
            workers = list(self._busy)
        for worker in workers:
            worker.kill()

    def stop(self) -> None:
        """End all workers. Later renderings start new ones."""
        self.cut_short()
        with self._changed:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def forget(self) -> None:
        """Begin without workers: when this process starts, and in one that is forked from it."""
        self._changed = threading.Condition()
        self._idle, self._busy, self._in_use = [], set(), Counter()

    def _ask(self, source: str, label: str, *given: object) -> Any:
        try:
            try:
                return self._try(source, *given)
            except _Lost:  # the request is not to blame
                return self._try(source, *given, is_new=True)
        except _Lost as error:
            raise NoTemplateWorker(
                f"chat template {label}: its process {error}, and so did another one; try again later"
            ) from error
        except _Overrun as error:
            raise TemplateError(f"chat template {label}: {error}; it was stopped") from error
        except (TemplateError, NoTemplateWorker) as error:
            raise type(error)(f"chat template {label}{error}") from None
        except ValueError as error:
            raise TemplateError(f"chat template {label}: {error}") from error

    def _try(self, source: str, *given: object, is_new: bool = False) -> Any:
        with self._borrow(source, is_new) as worker:
            return worker.ask(self._processor_s, *given)

    @contextlib.contextmanager
    def _borrow(self, source: str, is_new: bool) -> Iterator[_Worker]:
        with self._changed:
            self._wait_for_turn(source)
            worker = self._take_idle() if self._idle and not is_new else _start()
            self._busy.add(worker)
            self._in_use[source] += 1
        try:
            yield worker
        finally:
            with self._changed:
                self._busy.discard(worker)
                self._in_use[source] -= 1
                if not self._in_use[source]:
                    del self._in_use[source]
                if worker.is_spent or len(self._idle) >= MAX_IDLE:
                    worker.end()
                    if not self._idle:
                        with contextlib.suppress(NoTemplateWorker):  # the next caller tries again
                            self._idle.append(_start())
                else:
                    self._idle.append(worker)
                self._changed.notify_all()

    def _take_idle(self) -> _Worker:
        """Return an idle worker, or a new one if all idle ones were ended or stopped meanwhile."""
        while self._idle:
            worker = self._idle.pop()
            if worker.find_loss() is None:
                return worker
            worker.end()
        return _start()

    def _wait_for_turn(self, source: str) -> None:
        end_s = time.monotonic() + MAX_RENDER_S
        while len(self._busy) >= MAX_WORKERS or self._in_use[source] >= MAX_WORKERS_PER_TEMPLATE:
            if not self._changed.wait(end_s - time.monotonic()):
                raise NoTemplateWorker(": waited too long, as other conversations took all worker processes")


def _start_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "mlxr.templates.worker"],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=make_environment(),
        process_group=0,  # an interrupt from the keyboard does not reach it
    )


def _start() -> _Worker:
    try:
        return _Worker()
    except OSError as error:
        raise NoTemplateWorker(f": no process can be started to run it in ({error})") from error


template_workers = TemplateWorkers()
atexit.register(template_workers.stop)
os.register_at_fork(after_in_child=template_workers.forget)
