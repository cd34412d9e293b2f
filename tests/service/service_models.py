"""The demo model, loaded once for all tests here that need real tokens."""

from __future__ import annotations

from functools import cache

from mlxr.core.settings import Settings
from mlxr.loading import LoadedModel
from mlxr.service.opening import open_model


@cache
def open_demo() -> LoadedModel:
    """Load the demo once; it is never closed."""
    return open_model("demo", Settings())
