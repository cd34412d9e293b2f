"""Addresses in requests: named origins only, one look-up, public addresses, no redirects, bounded time and size."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxr.core.errors import InvalidRequest, SettingError
from mlxr.pictures import fetching
from mlxr.pictures.fetching import Address, check_origins, fetch, is_public, name_origin

ORIGIN = "https://pictures.example"


class Loopback:
    """A server without TLS that gives every connection one answer and keeps the requests."""

    def __init__(self) -> None:
        self.answer: bytes | Callable[[socket.socket], None] = b""
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                self.asked.append(sock.recv(65536))
                if callable(self.answer):
                    self.answer(sock)
                else:
                    sock.sendall(self.answer)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    server = Loopback()
    yield server
    server.close()


@pytest.fixture
def lookups(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The looked-up names; all get a public address, whose server is the one on loopback."""
    asked: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", port))]

    def reach(place: tuple[str, int], timeout: float) -> socket.socket:
        assert place[0] == "93.184.215.14"
        sock = socket.socket()
        sock.settimeout(timeout)
        sock.connect(("127.0.0.1", loopback.port))
        return sock

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", reach)
    monkeypatch.setattr(fetching, "encrypt", lambda plain, _: plain)
    return asked


def refuse(url: str, message: str, *origins: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        fetch(Address(url), origins or (ORIGIN,), "content[0]")
    assert caught.value.field == "content[0]"


def test_what_is_at_a_named_origin_is_fetched(loopback: Loopback, lookups: list[str]) -> None:
    loopback.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    assert fetch(Address("https://Pictures.Example:443/a%20b.png?c=d"), [f"{ORIGIN}/"], "x") == b"abc"
    asked = loopback.asked[0]
    assert asked.startswith(b"GET /a%20b.png?c=d HTTP/1.1\r\nHost: ")
    assert not {b"authorization", b"cookie", b"referer"} & {
        line.partition(b":")[0].lower() for line in asked.splitlines()
    }
    assert lookups == ["pictures.example"]  # once, though the name might be another machine's the next time


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/a",
        "https://pictures.example.evil.example/a",
        "https://pictures.example@evil.example/a",
        "https://user:word@pictures.example/a",
        "https://pictures.example:8443/a",
        "https://evil.example#@pictures.example/",
        "https://evil.example\\@pictures.example/",
        "https://127.0.0.1/a",
        "https://[::1]/a",
        "https://pictures.example:99999/a",
        "https://pictures.example/a b",
        "https://pictures.example/a\r\nHost: evil",
        "https:///a",
        "https:pictures.example/a",
    ],
)
def test_other_addresses_are_not_asked(loopback: Loopback, lookups: list[str], url: str) -> None:
    refuse(url, "no address is fetched but those of the setting image_origins")
    assert not lookups
    assert not loopback.asked


PRIVATE = (
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "::ffff:127.0.0.1"),
    *("::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::1", "fe80::1", "fe80::1%lo"),
    *("fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "localhost", ""),
)


def test_private_addresses_are_not_asked(
    loopback: Loopback, lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may lead to them alone or among public addresses."""
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public("64:ff9b::5db8:d70e")
    for address in PRIVATE:
        for found in ([address], ["93.184.215.14", address]):
            rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 443)) for one in found]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, rows=rows, **__: rows)
            refuse(f"{ORIGIN}/a", "whose address is not a public one")
    assert not loopback.asked


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n", "answers 302, and redirects are not followed"),
        (b"404 Not Found\r\nContent-Length: 0\r\n\r\n", "answers 404"),
        (b"200 OK\r\nContent-Length: 9\r\n\r\nabc", "sends less than it says|IncompleteRead"),
        (b"200 OK\r\nContent-Encoding: gzip\r\n\r\nabc", "sends it compressed"),
        (b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n999999999999999\r\nabc", "could not be fetched"),
        (b"200 OK\r\nContent-Length: 99\r\n\r\n" + b"a" * 99, "is larger than 0 MiB"),
        (b"\0\0\0", "could not be fetched from https://pictures.example: "),
    ],
)
def test_answers_that_are_none_are_refused(
    loopback: Loopback, lookups: list[str], answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MAX_FETCHED_BYTES", 50)
    loopback.answer = b"HTTP/1.1 " * (answer[0] != 0) + answer
    refuse(f"{ORIGIN}/a", message)
    assert len(lookups) == len(loopback.asked) == 1


def test_a_server_that_takes_its_time_is_given_up(
    loopback: Loopback, lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MAX_FETCH_S", 0.2)
    stop = threading.Event()

    def drip(sock: socket.socket) -> None:
        try:
            sock.sendall(b"HTTP/1.1 200 OK\r\n")
            while not stop.wait(0.05):
                sock.sendall(b"X-A: b\r\n")
        except OSError:
            pass

    loopback.answer = drip
    refuse(f"{ORIGIN}/a", "took longer than 0.2 s")
    stop.set()


def test_origins_are_checked() -> None:
    assert name_origin("HTTPS://A.example:443/b") == "https://a.example"
    for wrong in ("http://a.example", "a.example", "https://a.example/path", "*"):
        with pytest.raises(SettingError, match="image_origins: must be origins"):
            check_origins([wrong])
