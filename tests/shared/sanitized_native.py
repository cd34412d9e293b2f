"""For `make sanitize`: `pytest -p sanitized_native` gives the tests the native module that sanitizers watch.

`SANITIZED` in the environment says which one: `address`, which also watches for undefined behaviour, or `thread`.
Processes that tests start have the ordinary one, unless they import this.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

KIND = os.environ["SANITIZED"]
FOLDER = Path(__file__).parents[2] / "build" / "sanitized" / KIND
NAME = "mlxr._native"


def load() -> None:
    """Put the module in the place of the ordinary one."""
    found = next(FOLDER.glob("_native.*.so"), None)
    if found is None:
        raise SystemExit(f"{FOLDER} has no native module; make sanitize builds it")
    spec = spec_from_file_location(NAME, found)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


load()
