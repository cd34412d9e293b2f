"""Names of models as Ollama spells them: `[host/][namespace/]model[:tag]`, the tag `latest` when none is given.

A name is text from a stranger. It is checked here once, so that it can never be a path: no part begins with a dot, and
no part holds a separator. Names that differ in case only are the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlxr.core.errors import InvalidRequest

DEFAULT_TAG = "latest"
MAX_NAME_CHARACTERS = 512
_SHOWN_CHARACTERS = 80
_OMITTED_HOST, _OMITTED_NAMESPACE = "registry.ollama.ai", "library"  # what Ollama's clients mean by no host
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}(:[0-9]{1,5})?", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}", re.ASCII)
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A checked name; `host` and `namespace` are empty where the name has none. `str` gives it with its tag."""

    model: str
    tag: str = DEFAULT_TAG
    namespace: str = ""
    host: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "model") -> ModelName:
        """Read a name; raises InvalidRequest naming `field` for what is none."""
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
        """The name as people write it: without the tag where that is `latest`."""
        return str(self).removesuffix(f":{DEFAULT_TAG}")


def _refuse(field: str, text: str, reason: str) -> InvalidRequest:
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return InvalidRequest(field, f"{shown!r} is not the name of a model: {reason}")
