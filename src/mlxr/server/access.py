"""Access control: checks the keys, the host names and the origins of requests.

Keys are compared in constant time by their digests, and only the first characters of a digest are ever logged. Host
names and origins keep out web pages that the owner of the server did not allow.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from mlxr.core.errors import SettingError
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.server.errors import ServerError

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
KEY_ID_CHARACTERS = 8


@frozen
class Head:
    """The parts of a request that the checks see: header names in lower case, `client` an address.

    `server` is the address of this machine that the connection came to, None for a Unix socket.
    """

    method: str
    path: str
    headers: dict[str, str]
    client: str
    server: str | None


@frozen
class Keys:
    """The valid keys; each request must bring one of them. Without keys every request passes."""

    digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Make the set from the keys themselves."""
        return cls(tuple(sorted({_digest(key) for key in keys})))

    @classmethod
    def read(cls, settings: Settings) -> Keys:
        """Read the settings `api_keys` and `api_keys_file`; raises SettingError for a file without keys."""
        keys = list(settings.api_keys)
        if settings.api_keys_file is not None:
            keys += read_keys_file(Path(settings.api_keys_file))
        return cls.of(keys)

    def check(self, head: Head) -> str | None:
        """Return the id of the request's key, None if none is needed; raises ServerError 401."""
        if not self.digests or head.path in OPEN_PATHS:
            return None
        brought = _digest(find_key(head.headers))
        found = [hmac.compare_digest(digest, brought) for digest in self.digests]  # all, so that the time tells nothing
        if not any(found):
            raise ServerError(401, "unauthorized", "a valid API key is needed: Authorization: Bearer KEY, or x-api-key")
        return brought.hex()[:KEY_ID_CHARACTERS]


def read_keys_file(path: Path) -> list[str]:
    """Read one key from each line; empty lines and those that begin with # do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"api_keys_file: {path} cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingError(f"api_keys_file: {path} holds no key")
    return keys


def find_key(headers: dict[str, str]) -> str:
    """Return the key that a request brings, "" for none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


PRIVATE_ENDINGS = (".localhost", ".local", ".internal")  # reserved: no public DNS holds them
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")
APP_ORIGINS = ("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*")
ORIGIN_FORM = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]*", re.IGNORECASE)


@frozen
class Hosts:
    """The host names that requests may use: `names` in lower case, and those that are always allowed.

    If `everywhere`, the server listens on every address, and names are not checked.
    """

    names: frozenset[str]
    everywhere: bool = False

    @classmethod
    def read(cls, settings: Settings) -> Hosts:
        """Read the settings `allowed_hosts` and `host`; adds the name of this machine."""
        names = frozenset(name.lower() for name in (*settings.allowed_hosts, settings.host, socket.gethostname()))
        return cls(names, is_address(settings.host) and ipaddress.ip_address(settings.host).is_unspecified)

    def check(self, head: Head) -> None:
        """Raise ServerError 403 for a Host header with a name that others can point to this machine.

        Names are checked on connections to a loopback address. Connections from the network were allowed by the choice
        of the address to listen on.
        """
        if self.everywhere or head.server is None or not is_loopback(head.server):
            return
        name = host_name(head.headers.get("host", ""))
        if name and not self.is_own(name):
            raise ServerError(
                403, "forbidden", f"the host name {name[:100]!r} is not allowed; add it to the setting allowed_hosts"
            )

    def is_own(self, name: str) -> bool:
        """Return True if a name (lower case, no port) can only mean this server: it is local, listed, or an address."""
        return name == "localhost" or name.endswith(PRIVATE_ENDINGS) or name in self.names or is_address(name)


@frozen
class Origins:
    """The origins of web pages that may use the server, as a regular expression for the whole Origin header."""

    pattern: str

    @classmethod
    def read(cls, settings: Settings) -> Origins:
        """Read Ollama's list and the setting `cors_origins`; raises SettingError for an entry that is no origin."""
        for origin in settings.cors_origins:
            if not ORIGIN_FORM.fullmatch(origin):
                raise SettingError(
                    f"cors_origins: {origin!r} is no origin; it must be like http://localhost:3000 or "
                    "chrome-extension://*, without a path, or * for every page"
                )
        local = "|".join(map(re.escape, LOCAL_NAMES))
        listed = "|".join(_translate(origin) for origin in (*APP_ORIGINS, *settings.cors_origins))
        return cls(rf"(?i:https?://(?:{local})(?::\d+)?|{listed})")

    def check(self, head: Head, hosts: Hosts) -> None:
        """Raise ServerError 403 for a request of a web page whose origin is not listed.

        A page of the server's own origin passes if its host name is in `hosts`: a page of an attacker could have
        pointed any other name here.
        """
        origin = head.headers.get("origin")
        if origin is None:
            check_embedding(head)
            return
        if re.fullmatch(self.pattern, origin):
            return
        host = head.headers.get("host", "").lower()
        is_same = host != "" and origin.lower() in (f"http://{host}", f"https://{host}")
        if not is_same:
            setting = "cors_origins"
        elif head.server is None or hosts.is_own(host_name(host)):
            return
        else:
            setting = "allowed_hosts or cors_origins"
        raise ServerError(
            403, "forbidden", f"the origin {origin[:100]!r} is not allowed; add it to the setting {setting}"
        )


def check_embedding(head: Head) -> None:
    """Raise ServerError 403 for a request by which a page of another site embeds something, as a picture or a frame.

    Browsers send no origin for that. They tell the site and the mode of every request to an address of this machine,
    and to others if the server is behind HTTPS. Following a link to the server, which embeds nothing, passes.
    """
    site, mode = head.headers.get("sec-fetch-site"), head.headers.get("sec-fetch-mode")
    is_frame = mode == "navigate" and head.headers.get("sec-fetch-dest") != "document"
    if site == "cross-site" and (mode == "no-cors" or is_frame):
        raise ServerError(403, "forbidden", "a web page of another site cannot embed what this server answers")


def host_name(host: str) -> str:
    """Return a Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address to listen on."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(name: str) -> bool:
    """Return True if `name` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _translate(origin: str) -> str:
    """Return the regular expression of an origin in which * stands for any name, port or id."""
    return ".*" if origin == "*" else re.escape(origin).replace(r"\*", "[^/]*")
