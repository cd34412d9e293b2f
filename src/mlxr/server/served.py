"""Which models a client may name: those of the catalogue, their aliases, and the files that the server's owner gave.

The pool asks here, so a name from a request never opens a file of its choice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property

from mlxr.core.errors import InvalidRequest, MlxrError, NotFound, SettingError, Unavailable
from mlxr.core.settings import Settings
from mlxr.registry import ModelName, ModelRecord, Registry
from mlxr.registry.record import name_for
from mlxr.server.adapters import ServedAdapters
from mlxr.service.catalogue import BUILTIN_DEFAULT, DefaultModel, choose_default

logger = logging.getLogger(__name__)
NEAR = 0.5  # of 1, how alike names are that may be meant for one another


class ServedModels:
    """The registry as clients see it, with aliases and with the files that the settings name beside it.

    Such a file has the name that `mlxr import` would give it, or, where that is taken, its path. Raises SettingError
    for aliases that are none.
    """

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self.registry, self.aliases, self._settings = registry, read_aliases(settings), settings
        given = [settings.default_model, *settings.pinned_models, *self.aliases.values()]
        self._given = tuple(dict.fromkeys(name for name in given if name is not None))
        self.adapters = ServedAdapters(self, settings)
        self._default: DefaultModel | None = None

    def find(self, name: str, /) -> ModelRecord:
        """The model of that name or alias; a path only if the settings name it. Raises as the registry."""
        try:
            return self._find_named(name)
        except (NotFound, InvalidRequest) as error:
            model = find_alias(self.aliases, name)
            if model is None:
                near = self._find_near(name) if isinstance(error, NotFound) else ""
                raise NotFound(f"{error}; {near}") if near else error from None
            return self._find_named(model)

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

        None where it would be a guess, and where the setting `strict_model_names` is on. Models that come with mlxr
        count only if they are all.
        """
        if self._settings.strict_model_names:
            return None
        if self._settings.default_model is not None:
            return self._settings.default_model
        names = [record.name for record in self.registry.list() if record.files and record.problem is None]
        return names[0] if len(names) == 1 else None if names else BUILTIN_DEFAULT

    def find_default(self) -> str:
        """The name of the model that answers where none is named; see `choose_default`."""
        return self.explain_default().name

    def explain_default(self) -> DefaultModel:
        """That model, and why. It stays the same for as long as it is there, and a model of one's own follows the demo.

        So a request that names no model is not answered by whichever model another client happened to use.
        """
        kept = self._default
        try:
            if kept is not None and (kept.is_set or (kept.is_own and self._is_in_catalogue(kept.name))):
                return kept
            self._default = chosen = choose_default(self.registry, self._settings)
        except MlxrError:  # the catalogue cannot be read now
            return kept or DefaultModel(BUILTIN_DEFAULT, "the catalogue of models cannot be read", is_own=False)
        if kept is not None and kept != chosen:
            logger.info("the default model is %s now: %s", chosen.name, chosen.reason)
        return chosen

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

    def _find_named(self, name: str) -> ModelRecord:
        """The model of that name, or the file at that path if the settings name it."""
        file = self._files.get(name) or self._files.get(_normalise(name))
        if file is not None:
            return self._find_file(*file)
        return self.registry.find(name) if name in self._given else self.registry.get(name)

    def _find_file(self, name: str, path: str) -> ModelRecord:
        return replace(self.registry.find(path), name=name)

    def _find_near(self, name: str) -> str:
        """The names that may be meant, as a part of a sentence; empty where none is near."""
        names = [record.short_name for record in self.list()]
        names += [alias for alias in self.aliases if "*" not in alias]
        near = get_close_matches(name.lower().removesuffix(":latest"), names, cutoff=NEAR)
        return f"near it: {', '.join(near)}" if near else ""

    def _is_in_catalogue(self, name: str) -> bool:
        try:
            self.registry.get(name)
        except (NotFound, InvalidRequest):
            return False
        except Unavailable:  # nobody can tell now, and no wrong answer shall be kept
            raise
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
