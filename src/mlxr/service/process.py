"""What the operating system knows of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def read_peak_memory_bytes() -> int:
    """The most resident memory this process ever had, mapped files included."""
    try:
        # VmHWM starts anew with the program; getrusage also counts what the parent held when it forked.
        match = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is not None:
        return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux and the BSDs count KiB
