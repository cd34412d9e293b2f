"""Who may ask: keys, names of this host, web pages.

Pure checks over the head of a request; `guard` runs them before anything else sees it. Keys are compared in constant
time by their digests, and only the first characters of a digest are ever logged. A page that a browser loaded from
elsewhere can reach a server on this machine in two ways: through a name of its own that points here (DNS rebinding),
which the Host header betrays, and by a plain cross-origin request, which the Origin header betrays.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.server.errors import ServerError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
KEY_ID_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Head:
    """What the checks see: header names in lower case, `client` an address, `is_local` for a Unix socket."""

    method: str
    path: str
    headers: dict[str, str]
    client: str
    is_local: bool


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of which each request must bring one; without keys every request passes."""

    digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """From the keys themselves."""
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


def check_host(head: Head, allowed: Collection[str]) -> None:
    """Raise ServerError 403 unless the Host header is an address, localhost or one of `allowed` (lower case).

    A name is what an attacker can point to this machine; an address cannot be. Nothing of this reaches a Unix socket.
    """
    if head.is_local:
        return
    name = host_name(head.headers.get("host", ""))
    if name == "localhost" or name.endswith(".localhost") or name in allowed or _is_address(name):
        return
    raise ServerError(403, "forbidden", f"the host name {name[:100]!r} is not allowed; see the setting allowed_hosts")


def check_origin(head: Head, allowed: Collection[str]) -> None:
    """Raise ServerError 403 for a request that a web page of another origin makes, unless it is one of `allowed`."""
    origin = head.headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc.lower() != head.headers.get("host", "").lower():
        raise ServerError(403, "forbidden", f"the origin {origin[:100]!r} is not allowed; see the setting cors_origins")


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
