"""Which models a client may name: those of the catalogue, their aliases, and the paths that the server's owner gave.

The pool asks here, so a name from a request never opens a file of its choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from mlxr.core.errors import InvalidRequest, NotFound, SettingError
from mlxr.core.settings import BY_NAME, Settings
from mlxr.registry import ModelRecord, Registry


class ServedModels:
    """The registry as the pool sees it; raises SettingError for aliases that are none."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry, self._aliases = registry, read_aliases(settings)
        self._own = frozenset({settings.default_model, *settings.pinned_models, *self._aliases.values()})

    def find(self, name: str, /) -> ModelRecord:
        """The model of that name or alias; a path only if the settings name it. Raises as the registry."""
        if name in self._own:
            return self._registry.find(name)
        try:
            return self._registry.get(name)
        except (NotFound, InvalidRequest):
            model = find_alias(self._aliases, name)
            if model is None:
                raise
            return self._registry.find(model)

    def touch(self, name: str, /) -> None:
        """Note that a model was used now."""
        self._registry.touch(name)


def read_aliases(settings: Settings) -> Mapping[str, str]:
    """Aliases in lower case and their models, from the setting `model_aliases`; raises SettingError."""
    aliases: dict[str, str] = {}
    for row in settings.model_aliases:
        alias, _, model = (part.strip() for part in row.partition("="))
        if not alias or not model:
            raise SettingError(f"model_aliases: must be alias=model, such as gpt-4o=llama3:8b; got {row!r}")
        aliases[alias.lower()] = model
    return aliases


def find_alias(aliases: Mapping[str, str], name: str) -> str | None:
    """The model that `name` is an alias of: one that is spelt out counts more than one with a `*`."""
    wanted = name.lower().removesuffix(":latest")
    fitting = (model for alias, model in aliases.items() if "*" in alias and fnmatchcase(wanted, _escape(alias)))
    return aliases.get(wanted) or next(fitting, None)


def find_stand_in(registry: Registry, settings: Settings) -> str | None:
    """The model that answers for names that no model has: the default model, or the only one there is.

    None where it would be a guess, and where the setting `strict_model_names` is on. The default model counts as set
    when it is another one than that of a fresh installation; models that come with mlxr count only if they are all.
    """
    if settings.strict_model_names:
        return None
    if settings.default_model != BY_NAME["default_model"].default:
        return settings.default_model
    names = [record.name for record in registry.list() if record.files and record.problem is None]
    return names[0] if len(names) == 1 else None if names else settings.default_model


def _escape(alias: str) -> str:
    """A pattern of fnmatch in which only `*` means something."""
    return "".join(f"[{char}]" if char in "?[" else char for char in alias)
