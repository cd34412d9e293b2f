"""Which models a client may name: those of the catalogue, their aliases, and the files that the server's owner gave.

The pool asks here, so a name from a request never opens a file of its choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property

from mlxr.core.errors import InvalidRequest, MlxrError, NotFound, SettingError
from mlxr.core.settings import BY_NAME, Settings
from mlxr.registry import ModelName, ModelRecord, Registry
from mlxr.registry.record import name_for
from mlxr.server.adapters import ServedAdapters


class ServedModels:
    """The registry as clients see it, with aliases and with the files that the settings name beside it.

    Such a file has the name that `mlxr import` would give it, or, where that is taken, its path. Raises SettingError
    for aliases that are none.
    """

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self.registry, self.aliases, self._settings = registry, read_aliases(settings), settings
        given = [settings.default_model, *settings.pinned_models, *self.aliases.values()]
        self._given = tuple(dict.fromkeys(given))
        self.adapters = ServedAdapters(self, settings)

    def find(self, name: str, /) -> ModelRecord:
        """The model of that name or alias; a path only if the settings name it. Raises as the registry."""
        file = self._files.get(name) or self._files.get(_normalise(name))
        if file is not None:
            return self._find_file(*file)
        if name in self._given:
            return self.registry.find(name)
        try:
            return self.registry.get(name)
        except (NotFound, InvalidRequest):
            model = find_alias(self.aliases, name)
            if model is None:
                raise
            return self._find_file(*self._files[model]) if model in self._files else self.registry.find(model)

    def refuse_file_name(self, name: str, field: str) -> None:
        """Raise InvalidRequest for the name of a file that the settings give, which the catalogue does not have.

        A model of that name could not be found, and one that is no model of the catalogue cannot be removed from it.
        """
        file = self._files.get(name) or self._files.get(_normalise(name))
        if file is not None:
            told = f"{file[0].removesuffix(':latest')} is a file that the server was started with, {file[1]}"
            raise InvalidRequest(field, f"{told}; the catalogue has only what is imported, under another name")

    def find_base(self, name: str) -> ModelRecord:
        """The model of that name or alias, or the one that the adapter is for which `name` means; raises as `find`."""
        found = self.adapters.match(name)
        return self.find(name if found is None else found[0])

    def has(self, name: str) -> bool:
        """Whether a model has that name, or an alias that is spelt out."""
        if name in self._files or _normalise(name) in self._files or name.lower() in self.aliases:
            return True
        return self._is_in_catalogue(name)

    def list(self) -> tuple[ModelRecord, ...]:
        """All models, without aliases; `problem` is set for those of the catalogue whose files are gone or changed."""
        files: list[ModelRecord] = []
        for name, path in dict.fromkeys(self._files.values()):
            try:
                files.append(self._find_file(name, path))
            except MlxrError:  # it has gone
                continue
        return (*files, *self.registry.list())

    def find_stand_in(self) -> str | None:
        """The model that answers for names that no model has: the default model, or the only one there is.

        None where it would be a guess, and where the setting `strict_model_names` is on. The default model counts as
        set when it is another one than that of a fresh installation; models that come with mlxr count only if they are
        all.
        """
        if self._settings.strict_model_names:
            return None
        if self._settings.default_model != BY_NAME["default_model"].default:
            return self._settings.default_model
        names = [record.name for record in self.registry.list() if record.files and record.problem is None]
        return names[0] if len(names) == 1 else None if names else self._settings.default_model

    def touch(self, name: str, /) -> None:
        """Note that a model was used now."""
        self.registry.touch(name)

    @cached_property
    def _files(self) -> dict[str, tuple[str, str]]:
        """Of the files that the settings name: name and path, by either."""
        files: dict[str, tuple[str, str]] = {}
        for path in self._given:
            if self._is_in_catalogue(path):
                continue
            try:
                name = str(name_for(self.registry.find(path).path))
            except MlxrError:  # there is no such file, or it is no model: whoever asks for it hears why
                continue
            if _normalise(name) in files or self._is_in_catalogue(name):
                name = path
            files[path] = files[_normalise(name)] = (name, path)
        return files

    def _find_file(self, name: str, path: str) -> ModelRecord:
        return replace(self.registry.find(path), name=name)

    def _is_in_catalogue(self, name: str) -> bool:
        try:
            self.registry.get(name)
        except (NotFound, InvalidRequest):
            return False
        except MlxrError:  # it is there and cannot be used
            pass
        return True


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


def _escape(alias: str) -> str:
    """A pattern of fnmatch in which only `*` means something."""
    return "".join(f"[{char}]" if char in "?[" else char for char in alias)


def _normalise(name: str) -> str:
    """One spelling for all that mean the same name; what is no name stays as it is."""
    try:
        return str(ModelName.parse(name)).lower()
    except InvalidRequest:
        return name
