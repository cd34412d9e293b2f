"""The head of a request and the keys that it may need.

Keys are compared in constant time by their digests, and only the first characters of a digest are ever logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.server.errors import ServerError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
KEY_ID_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Head:
    """Says what the checks see: header names in lower case, `client` an address.

    `server` is the address of this machine that the connection came to, None for a Unix socket.
    """

    method: str
    path: str
    headers: dict[str, str]
    client: str
    server: str | None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of which each request must bring one; without keys every request passes."""

    digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Make the set from the keys themselves."""
        return cls(tuple(sorted({_digest(key) for key in keys})))

    @classmethod
    def read(cls, settings: Settings) -> Keys:
        """From the settings `api_keys` and `api_keys_file`; raises SettingError for a file that gives none."""
        keys = list(settings.api_keys)
        if settings.api_keys_file is not None:
            keys += read_keys_file(Path(settings.api_keys_file))
        return cls.of(keys)

    def check(self, head: Head) -> str | None:
        """The id of the key that was brought, None where none is needed; raises ServerError 401."""
        if not self.digests or head.path in OPEN_PATHS:
            return None
        brought = _digest(find_key(head.headers))
        found = [hmac.compare_digest(digest, brought) for digest in self.digests]  # all of them, whichever fits
        if not any(found):
            raise ServerError(401, "unauthorized", "a valid API key is needed: Authorization: Bearer KEY, or x-api-key")
        return brought.hex()[:KEY_ID_CHARACTERS]


def read_keys_file(path: Path) -> list[str]:
    """One key on each line; empty lines and those that begin with # do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"api_keys_file: {path} cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingError(f"api_keys_file: {path} holds no key")
    return keys


def find_key(headers: dict[str, str]) -> str:
    """The key that a request brings, "" for none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
