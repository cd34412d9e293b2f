"""`python -m mlxr` is the `mlxr` command."""

from __future__ import annotations

import sys

from mlxr.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
