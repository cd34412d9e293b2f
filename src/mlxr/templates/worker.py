"""The process in which templates run: `python -m mlxr.templates.worker`, with its connection as standard input.

The system enforces its limits, because a C function called by a template checks no budget: memory for the whole
process, processor time for each rendering. It can write no file and start no process. It ends when the connection does.
"""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import time
from datetime import datetime
from typing import Any

from mlxr.templates import messages
from mlxr.templates.budget import MAX_MEMORY_BYTES
from mlxr.templates.program import ProgramError, Programs


def main() -> None:
    """Answer until the other side is gone."""
    connection = socket.socket(fileno=0)
    programs = Programs()
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    connection.sendall(messages.pack((messages.READY, "")))
    with contextlib.suppress(messages.Closed, ConnectionError):
        while True:
            processor_s, kind, *given = messages.receive(connection)
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + processor_s)
            try:
                reply = messages.pack(_answer(programs, kind, given))
            except MemoryError:
                del programs, given  # so that there is memory for the last words
                connection.sendall(messages.pack(("memory", "")))
                return
            connection.sendall(reply)
            del given, reply  # before the next message is received


def _answer(programs: Programs, kind: str, given: list[Any]) -> tuple[str, object]:
    if kind == "variables":
        return "text", programs.find_variables(*given)
    try:
        if kind == "check":
            return "text", programs.check(*given)
        source, label, variables, now = given
        return "text", programs.render(source, label, variables, datetime.fromisoformat(now))
    except ProgramError as error:
        return "refusal" if error.is_refusal else "error", str(error)


def _limit(kind: int, amount: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    with contextlib.suppress(ValueError, OSError):  # systems that do not know a limit do without it
        resource.setrlimit(kind, (amount, hard))


if __name__ == "__main__":
    main()
