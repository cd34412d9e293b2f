"""Which models a client may name: those of the catalogue, and the paths that the server's owner gave.

The pool asks here, so a name from a request never opens a file of its choice.
"""

from __future__ import annotations

from mlxr.core.settings import Settings
from mlxr.registry import ModelRecord, Registry


class ServedModels:
    """The registry as the pool sees it."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._own = frozenset({settings.default_model, *settings.pinned_models})

    def find(self, name: str, /) -> ModelRecord:
        """The model of that name; a path only if the settings name it. Raises as the registry."""
        return self._registry.find(name) if name in self._own else self._registry.get(name)

    def touch(self, name: str, /) -> None:
        """Note that a model was used now."""
        self._registry.touch(name)
