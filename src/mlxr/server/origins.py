"""Which names of this server and which web pages may be used: Ollama's rules, so that its clients work unchanged.

A page that a browser loaded from elsewhere can reach a server on this machine in two ways. It can point a name of its
own to this machine (DNS rebinding), which the Host header shows: where only this machine can connect, names that the
public DNS could hold are refused. Or it sends a plain request to another origin, which the Origin header shows: only
listed origins pass, and the origin of the server itself where its name is one that nobody else can point here. What it
embeds has no such header; there, those count with which browsers say how a request came about (Sec-Fetch-Site).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.server.errors import ServerError
from mlxr.server.security import Head

PRIVATE_ENDINGS = (".localhost", ".local", ".internal")  # reserved: no public DNS holds them
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")
APP_ORIGINS = ("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*")
ORIGIN_FORM = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names by which the server may be called: `names` in lower case besides those that are always let through.

    `everywhere` says that the server listens on every address, where names are not checked.
    """

    names: frozenset[str]
    everywhere: bool = False

    @classmethod
    def read(cls, settings: Settings) -> Hosts:
        """From the settings `allowed_hosts` and `host`, with the name of this machine."""
        names = frozenset(name.lower() for name in (*settings.allowed_hosts, settings.host, socket.gethostname()))
        return cls(names, is_address(settings.host) and ipaddress.ip_address(settings.host).is_unspecified)

    def check(self, head: Head) -> None:
        """Raise ServerError 403 for a Host header with a name that others can point to this machine.

        Names are checked on connections that came to a loopback address. What came from the network was let in by
        whoever chose the address to listen on.
        """
        if self.everywhere or head.server is None or not is_loopback(head.server):
            return
        name = host_name(head.headers.get("host", ""))
        if name and not self.is_own(name):
            raise ServerError(
                403, "forbidden", f"the host name {name[:100]!r} is not allowed; add it to the setting allowed_hosts"
            )

    def is_own(self, name: str) -> bool:
        """Whether a name (lower case, no port) can only mean this server: it is local, listed, or an address."""
        return name == "localhost" or name.endswith(PRIVATE_ENDINGS) or name in self.names or is_address(name)


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of web pages that may use the server, as a regular expression for the whole Origin header."""

    pattern: str

    @classmethod
    def read(cls, settings: Settings) -> Origins:
        """Ollama's list and the setting `cors_origins`; raises SettingError for what is no origin."""
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
        """Raise ServerError 403 for a request that a web page of an origin makes which is not listed.

        A page of the server's own origin passes if the name is one of its own in `hosts`: any other name can have been
        pointed here by the page itself.
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
    """Raise ServerError 403 for what a page of another site embeds, such as a picture or a frame.

    Browsers send no origin for that. They tell the site and the mode of every request to an address of this machine,
    and to others where the server is behind HTTPS. Following a link to the server, which embeds nothing, passes.
    """
    site, mode = head.headers.get("sec-fetch-site"), head.headers.get("sec-fetch-mode")
    is_frame = mode == "navigate" and head.headers.get("sec-fetch-dest") != "document"
    if site == "cross-site" and (mode == "no-cors" or is_frame):
        raise ServerError(403, "forbidden", "a web page of another site cannot embed what this server answers")


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(name: str) -> bool:
    """Whether `name` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _translate(origin: str) -> str:
    """An origin in which * stands for any name, port or id, as a regular expression."""
    return ".*" if origin == "*" else re.escape(origin).replace(r"\*", "[^/]*")
