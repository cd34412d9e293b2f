"""Signals while modules are being imported: the process ends at once, and nothing is printed.

Python's own handler would raise in the middle of some import, whose traceback says nothing to whoever pressed it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
