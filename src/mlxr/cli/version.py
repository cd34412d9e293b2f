"""`mlxr version`: print the version of the installed package."""

from __future__ import annotations

import mlxr


def version() -> None:
    """Print the version of mlxr."""
    print(f"mlxr {mlxr.__version__}")
