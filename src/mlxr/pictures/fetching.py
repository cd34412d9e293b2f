"""Download of pictures and documents at https: addresses, only from origins that the settings name.

A host name is looked up once, and the connection goes to the address that was found, which must be public, even if the
name changes later. No redirects are followed, no proxy is used, and nothing is sent that identifies the user.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from http.client import HTTPConnection, HTTPException
from urllib.parse import SplitResult, urlsplit

from mlxr.core.errors import InvalidRequest, SettingError
from mlxr.core.frozen import frozen

MAX_FETCH_S, MAX_FETCHED_BYTES, _PORT = 5.0, 20 << 20, 443


@frozen
class Address:
    """The address of a picture or a document, as in a request."""

    url: str


def name_origin(url: str) -> str | None:
    """Return https://host[:port] of a URL in lower case; None if it is not an https: URL, or names a user."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORT
    except ValueError:
        return None
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme != "https" or not host or "@" in parts.netloc or any(ord(one) <= 32 for one in url):
        return None
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}" if port == _PORT else f"https://{host}:{port}"


def check_origins(origins: Collection[str]) -> None:
    """Raise SettingError if one of them is not an https: origin."""
    for one in origins:
        if name_origin(one) is None or urlsplit(one).path not in ("", "/"):
            raise SettingError(f"image_origins: must be origins such as https://pictures.example, got {one!r}")


def fetch(address: Address, origins: Collection[str], field: str) -> bytes:
    """Fetch an address of one of the `origins`. Raises InvalidRequest naming `field`."""
    origin = name_origin(address.url)
    if origin is None or origin not in map(name_origin, origins):
        raise InvalidRequest(
            field,
            f"must be a data: URL with base64, got {address.url[:100]!r}: no address is fetched but those of the "
            "setting image_origins; send the picture",
        )
    parts = urlsplit(address.url)
    host, port = (parts.hostname or "").rstrip("."), parts.port or _PORT
    held: list[socket.socket] = []
    timer, end_s = threading.Timer(MAX_FETCH_S, _give_up, [held]), time.monotonic() + MAX_FETCH_S
    timer.start()
    try:
        data = _ask(_connect(host, port, held, field), parts, field)
        if time.monotonic() >= end_s:
            raise TimeoutError
        return data
    except (OSError, HTTPException, ValueError) as error:  # such as a wrong certificate, or signs that no path has
        reason = f"it took longer than {MAX_FETCH_S:g} s" if time.monotonic() >= end_s else type(error).__name__
        raise InvalidRequest(field, f"could not be fetched from {origin}: {reason}") from None
    finally:
        timer.cancel()
        for sock in held:
            sock.close()


def _give_up(held: list[socket.socket]) -> None:
    """Shut the sockets down, which ends a download however slowly the other side sends."""
    for sock in held:
        with contextlib.suppress(OSError):  # a plain socket that TLS has taken over
            sock.shutdown(socket.SHUT_RDWR)


def _connect(host: str, port: int, held: list[socket.socket], field: str) -> socket.socket:
    """Return an encrypted connection to an address of `host`, which is looked up only here."""
    found = [str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise InvalidRequest(field, f"is at {host[:100]}, whose address is not a public one; nothing is fetched there")
    held.append(socket.create_connection((found[0], port), timeout=MAX_FETCH_S))
    held.append(encrypt(held[0], host))
    if isinstance(held[1], ssl.SSLSocket):
        held[1].do_handshake()
    return held[1]


def is_public(address: str) -> bool:
    """Return True if an address is on the public internet, not of this machine, its network or a cloud's services."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in _TRANSLATED:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        tunnels = parsed.sixtofour, (parsed.teredo or (None, None))[1]
        if parsed not in _UNICAST or any(tunnels):
            return False
    return parsed.is_global and not parsed.is_multicast


_UNICAST, _TRANSLATED = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")  # RFC 4291, RFC 6052


def encrypt(plain: socket.socket, host: str) -> socket.socket:
    """Return the connection with TLS, which requires the certificate of `host`, before the handshake."""
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)


def _ask(sock: socket.socket, parts: SplitResult, field: str) -> bytes:
    connection = HTTPConnection(parts.netloc)
    connection.sock = sock
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    connection.request("GET", path, headers={"Accept-Encoding": "identity", "User-Agent": "mlxr"})
    with connection.getresponse() as answer:
        if answer.status != 200:
            more = ", and redirects are not followed" if 300 <= answer.status < 400 else ""
            raise InvalidRequest(field, f"could not be fetched: the server answers {answer.status}{more}")
        if answer.getheader("Content-Encoding", "identity") != "identity":
            raise InvalidRequest(field, "could not be fetched: the server sends it compressed")
        data = answer.read(MAX_FETCHED_BYTES + 1)
        if len(data) > MAX_FETCHED_BYTES:
            raise InvalidRequest(field, f"is larger than {MAX_FETCHED_BYTES >> 20} MiB; send a smaller one")
        if answer.length:
            raise InvalidRequest(field, "could not be fetched: the server sends less than it says")
        return data
