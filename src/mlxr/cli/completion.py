"""Tells the shell what to offer when a person presses Tab behind a command that takes the name of a model."""

from __future__ import annotations

from mlxr.core.errors import MlxrError


def complete_models(incomplete: str) -> list[str]:
    """The names of the catalogue that begin with `incomplete`; none where the catalogue cannot be read."""
    from mlxr.core.settings import resolve
    from mlxr.service.catalogue import open_registry

    try:
        names = [record.short_name for record in open_registry(resolve()).list()]
    except MlxrError:
        return []
    return [name for name in names if name.startswith(incomplete)]
