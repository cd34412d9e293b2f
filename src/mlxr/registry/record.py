"""Plain values that describe a model: its name, the facts in its files, and its record with the settings.

Names are Ollama's: `[host/][namespace/]model[:tag]`, the tag `latest` when none is given. A name is text from a
stranger. It is checked here once, so that it can never be a path: no part begins with a dot, and no part
holds a separator.
Names that differ in case only are the same name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen

DEFAULT_TAG = "latest"
_PART = re.compile(r".*-\d{5}-of-\d{5}\.gguf", re.ASCII)  # of a split GGUF file
MAX_NAME_CHARACTERS = 512
_SHOWN_CHARACTERS = 80
_OMITTED_HOST, _OMITTED_NAMESPACE = "registry.ollama.ai", "library"  # Ollama's clients mean these if a name has none
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}(:[0-9]{1,5})?", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}", re.ASCII)
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


@frozen
class ModelName:
    """A checked name; `host` and `namespace` are empty where the name has none. `str` gives it with its tag."""

    model: str
    tag: str = DEFAULT_TAG
    namespace: str = ""
    host: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "model") -> ModelName:
        """Read a name; raises InvalidRequest naming `field` if `text` is none."""
        if not text or len(text) > MAX_NAME_CHARACTERS:
            raise _refuse(field, text, f"has {len(text)} characters; from 1 to {MAX_NAME_CHARACTERS} are allowed")
        *path, last = text.split("/")
        if len(path) > 2:
            raise _refuse(field, text, "has more parts than [host/][namespace/]model[:tag]")
        model, colon, tag = last.partition(":")
        host = path[0] if len(path) == 2 else ""
        namespace = path[-1] if path else ""
        parts = [(_MODEL, model, "model"), (_TAG, tag if colon else DEFAULT_TAG, "tag")]
        parts += [(_NAMESPACE, namespace, "namespace")] if path else []
        parts += [(_HOST, host, "host")] if len(path) == 2 else []
        for pattern, part, what in parts:
            if pattern.fullmatch(part) is None:
                raise _refuse(field, text, f"{part[:_SHOWN_CHARACTERS]!r} cannot be a {what}")
        if host.lower() == _OMITTED_HOST:
            host = ""
        if not host and namespace.lower() == _OMITTED_NAMESPACE:
            namespace = ""
        return cls(model, tag if colon else DEFAULT_TAG, namespace, host)

    def __str__(self) -> str:
        return f"{'/'.join(part for part in (self.host, self.namespace, self.model) if part)}:{self.tag}"

    @property
    def short(self) -> str:
        """The name as people write it: without the tag if that is `latest`."""
        return str(self).removesuffix(f":{DEFAULT_TAG}")


def _refuse(field: str, text: str, reason: str) -> InvalidRequest:
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return InvalidRequest(field, f"{shown!r} is not the name of a model: {reason}")


Progress = Callable[[int, int], None]
_COUNT_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@frozen
class ModelFacts:
    """The facts in the files of a model.

    `format` is "gguf" or "safetensors", `parameters` the number of weights, `quantization` in ggml's words (`Q4_K_M`),
    `embedding_length` the size of a hidden vector, `template` the chat template of the files, "" without one.
    `capabilities` are of "completion", "tools", "thinking", "vision", "audio", "embedding". `files` are all files of
    the model, with its vision tower; `takes_tower` is True if a GGUF model can use one that fits.
    `sampling` holds the parameters that the files recommend, as the `parameters` of a record.
    """

    format: str
    architecture: str
    parameters: int
    quantization: str
    context_tokens: int
    embedding_length: int
    template: str
    capabilities: frozenset[str]
    files: tuple[Path, ...]
    license: str = ""
    sampling: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    takes_tower: bool = False


@frozen
class AdapterFacts:
    """Facts from an adapter's files: `format` "gguf" or "safetensors", largest `rank`, number of updated `weights`."""

    format: str
    rank: int
    weights: int
    files: tuple[Path, ...]


class Inspect(Protocol):
    """Reads the facts of a model, whose `tower` may be a file elsewhere or with an unusual name.

    Raises FormatError, ModelError and the like if the files are no model.
    """

    def __call__(self, path: Path, tower: Path | None = None, /) -> ModelFacts:
        """The facts of the file or folder at `path`."""
        ...


InspectAdapter = Callable[[Path, Path], AdapterFacts]  # of an adapter and its base; raises the same if they do not fit


@frozen
class ModelFile:
    """A file of a model: its name beside the others, its SHA-256 in hexadecimal, its size and time of change."""

    name: str
    sha256: str
    size_bytes: int
    changed_ns: int


@frozen
class AdapterRef:
    """The adapter that a model was made with: the name of its record, and the digest that it must have."""

    name: str
    digest: str


@frozen
class AdapterRecord:
    """A low-rank adapter by name, for the model `base` and others with the same files.

    `digest` is the SHA-256 of its files. One with `is_part` belongs to the models that were made with it: it is in no
    list, and is removed with the last of them. The other fields are those of `ModelRecord`.
    """

    name: str
    base: str
    digest: str
    path: Path
    size_bytes: int
    format: str
    rank: int
    weights: int
    modified_at: datetime
    is_owned: bool
    files: tuple[ModelFile, ...]
    is_part: bool = False
    problem: str | None = None


@frozen
class Changes:
    """The settings of a model that is made from another one; None keeps the other's."""

    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, object] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    license: str | None = None
    capabilities: frozenset[str] | None = None
    adapter: AdapterRef | None = None


@frozen
class ModelRecord:
    """A model by name.

    `path` is the file or folder to load. `is_owned` is True if its files lie in our store; others are only referenced.
    `digest` is the SHA-256, in hexadecimal, of the model's files and settings. For a path that was never imported it
    stands for path, size and time of last change instead of the contents.
    `template` is the chat template to use instead of the files' own (`own_template`), None to use that; `system` the
    system message of conversations that have none; `parameters` are generation options under Ollama's names;
    `from_name` the model that this one was made from, `adapter` the low-rank adapter that it always runs with.
    `problem` says why it cannot be used, None if it can.
    """

    name: str
    digest: str
    path: Path
    size_bytes: int
    format: str
    architecture: str
    parameters_count: int
    quantization: str
    context_tokens: int
    embedding_length: int
    modified_at: datetime
    last_used_at: datetime | None
    is_owned: bool
    own_template: str
    capabilities: frozenset[str]
    files: tuple[ModelFile, ...]
    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    messages: tuple[Mapping[str, str], ...] = ()
    license: str = ""
    from_name: str | None = None
    adapter: AdapterRef | None = None
    problem: str | None = None

    @property
    def short_name(self) -> str:
        """The name without the tag `latest`."""
        return self.name.removesuffix(":latest")

    @property
    def tower(self) -> Path | None:
        """The file of a GGUF model's vision tower, None if it has none."""
        if self.format != "gguf" or len(self.files) < 2:
            return None
        names = (file.name for file in self.files if file.name != self.path.name and not _PART.fullmatch(file.name))
        return next((self.path.parent / name for name in names), None)

    @property
    def parameter_size(self) -> str:
        """The number of weights as people say it: 1.1B, 20.5M."""
        for unit, letter in _COUNT_UNITS:
            if self.parameters_count >= unit:
                return f"{self.parameters_count / unit:.1f}{letter}"
        return str(self.parameters_count)


def name_for(path: Path) -> ModelName:
    """A name made from that of a file or folder: characters that names cannot have become dashes."""
    stem = path.name.removesuffix(".gguf")
    text = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in stem)
    return ModelName.parse(text.lstrip(".-")[:128] or "model", "NAME")
