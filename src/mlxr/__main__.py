"""The `mlxr` command, also as `python -m mlxr`."""

from __future__ import annotations

import sys

from mlxr.core.processes import end_on_interrupt, end_on_terminate


def run() -> int:
    """Run the command line of this process and return the exit code."""
    if sys.argv[1:2] == ["serve"]:
        end_on_terminate()
    with end_on_interrupt():
        from mlxr.cli.main import main
    return main()


if __name__ == "__main__":
    sys.exit(run())
