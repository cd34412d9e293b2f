"""The low-rank adapters of one open model: by name, loaded and unloaded while it answers, in bounded memory.

An answer that has begun with an adapter keeps it until it ends, also when its name is unloaded meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from mlxr.core.errors import InvalidRequest
from mlxr.loading import Adapter

MAX_NAME_CHARACTERS = 200


class Adapters:
    """Adapters that `read` makes of files, all of them in at most `most_bytes`. Safe to use from several threads."""

    def __init__(self, read: Callable[[str | Path], Adapter], most_bytes: int) -> None:
        self._read, self._most_bytes = read, most_bytes
        self._by_name: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """What is loaded, sorted."""
        return sorted(self._by_name)

    def load(self, path: str | Path, name: str | None = None) -> str:
        """Read a PEFT folder or a GGUF adapter; returns its name, by default that of the folder or the file.

        Raises InvalidRequest for a name that is taken and where the memory does not suffice, NotFound, FormatError or
        ModelError for files that are none of this model's adapters.
        """
        chosen = name or Path(path).resolve().stem
        if not chosen or len(chosen) > MAX_NAME_CHARACTERS or not chosen.isprintable():
            raise InvalidRequest("adapter", f"cannot be named {chosen[:40]!r}")
        self._check_free(chosen)
        adapter = self._read(path)
        with self._lock:
            self._check_free(chosen)
            held_bytes = sum(one.nbytes for one in self._by_name.values())
            if held_bytes + adapter.nbytes > self._most_bytes:
                raise InvalidRequest(
                    "adapter",
                    f"{chosen} takes {adapter.nbytes} bytes, and {held_bytes} of {self._most_bytes} are taken; unload "
                    "another one, or raise adapter_bytes",
                )
            self._by_name[chosen] = adapter
        return chosen

    def unload(self, name: str) -> None:
        """Forget an adapter; answers that have it go on with it. Raises InvalidRequest for an unknown name."""
        with self._lock:
            self.find(name)
            del self._by_name[name]

    def find(self, name: str) -> Adapter:
        """The adapter of that name; raises InvalidRequest, with those that there are, for an unknown one."""
        adapter = self._by_name.get(name)
        if adapter is None:
            known = ", ".join(self.names[:8]) or "none"
            raise InvalidRequest("adapter", f"{name[:MAX_NAME_CHARACTERS]!r} is not loaded; loaded are: {known}")
        return adapter

    def _check_free(self, name: str) -> None:
        if name in self._by_name:
            raise InvalidRequest("adapter", f"{name} is loaded already; unload it first, or choose another name")
