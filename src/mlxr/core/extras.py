"""Says what to install for the optional parts of mlxr, in words that work wherever mlxr itself came from.

mlxr is on no package index, so the remedy names the packages that an extra of `pyproject.toml` stands for.
"""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires


def name_install(extra: str) -> str:
    """The command that installs the packages of an extra, such as `pip install 'mlx[cuda13]>=0.32.1'`."""
    try:
        found = [line.split(";", 1) for line in requires("mlxr") or ()]
    except PackageNotFoundError:  # the sources, without an installation
        found = []
    packages = [name.strip() for name, *condition in found if f'extra == "{extra}"' in "".join(condition)]
    return shlex.join(["pip", "install", *packages]) if packages else f"pip install '.[{extra}]' in the sources of mlxr"
