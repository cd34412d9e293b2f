"""A hub of models on loopback, as far as pulling needs one, and as ill-behaved as a test asks for.

It answers `/api/models/{owner}/{repo}` with the listing, sizes and checksums, and `/{owner}/{repo}/resolve/...` with
bytes, ranges included. `Behaviour` states its faults with a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

REVISION = "c0ffee" + "0" * 34


@dataclass
class Behaviour:
    """Faults: each connection ends after `drop_after` bytes; the first `refusals` answers are errors `status`."""

    drop_after: int | None = None
    drops: int = 10**9
    refusals: int = 0
    status: int = 503
    ignores_ranges: bool = False
    wrong_range: bool = False
    extra: bytes = b""
    listed_size: int | None = None
    listed_sha256: str | None = None
    sent_length: int | None = None
    served: bytes | None = None
    pause: threading.Event | None = None  # set it to let the second half of each answer go


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)  # kept in git itself, so no SHA-256 is listed
    behaviour: dict[str, Behaviour] = field(default_factory=dict)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that die are part of the tests."""


class FakeHub:
    """`with FakeHub() as hub`: `hub.url` is its endpoint, `hub.requests` are the requests: path and Range."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.headers: list[dict[str, str]] = []
        self.listing: bytes | None = None  # sent in the place of every listing
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, repo_id: str, files: dict[str, bytes], plain: set[str] = frozenset()) -> Repository:  # type: ignore[assignment]
        self.repositories[repo_id] = Repository(files, set(plain))
        return self.repositories[repo_id]

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((path, handler.headers.get("Range")))
        self.headers.append(dict(handler.headers.items()))
        try:
            if path.startswith("/api/models"):
                self._list(handler, path.removeprefix("/api/models/"))
            else:
                repo_id, _, rest = path[1:].partition("/resolve/")
                self._send(handler, repo_id, rest.partition("/")[2])
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def _list(self, handler: BaseHTTPRequestHandler, repo_id: str) -> None:
        if self.listing is not None:
            _reply(handler, 200, self.listing, {"Content-Type": "application/json"})
            return
        repository = self.repositories.get(repo_id)
        if repository is None:
            _reply(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = []
        for name, data in repository.files.items():
            behaviour = repository.behaviour.get(name, Behaviour())
            size = len(data) if behaviour.listed_size is None else behaviour.listed_size
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": oid}
            if name not in repository.plain:
                sha256 = behaviour.listed_sha256 or hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 130}
            siblings.append(entry)
        body = {"id": repo_id, "modelId": repo_id, "sha": REVISION, "siblings": siblings, "tags": [], "private": False}
        _reply(handler, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, handler: BaseHTTPRequestHandler, repo_id: str, name: str) -> None:
        repository = self.repositories.get(repo_id)
        if repository is None or name not in repository.files:
            _reply(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        behaviour = repository.behaviour.get(name, Behaviour())
        if behaviour.refusals > 0:
            behaviour.refusals -= 1
            _reply(handler, behaviour.status, b"", {"Location": handler.path} if behaviour.status == 302 else {})
            return
        whole = (repository.files[name] if behaviour.served is None else behaviour.served) + behaviour.extra
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not behaviour.ignores_ranges else 0
        body = whole[start:]
        handler.send_response(206 if start else 200)
        if start:
            stated = start + 1 if behaviour.wrong_range else start
            handler.send_header("Content-Range", f"bytes {stated}-{len(whole) - 1}/{len(whole)}")
        length = len(body) if behaviour.sent_length is None else behaviour.sent_length
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.close_connection = length != len(body)
        if behaviour.drop_after is not None and behaviour.drops > 0 and len(body) > behaviour.drop_after:
            behaviour.drops -= 1
            body = body[: behaviour.drop_after]
            handler.close_connection = True
        if behaviour.pause is None:
            handler.wfile.write(body)
        else:
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            behaviour.pause.wait(30)
            handler.wfile.write(body[len(body) // 2 :])


class SlowHub:
    """Answers every request with a head that never ends, one byte at a time, until the other side is gone."""

    def __init__(self) -> None:
        self.asked, self.left = threading.Semaphore(0), threading.Semaphore(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._drip, args=(self._listener.accept()[0],), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            self.asked.release()
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while True:
                connection.sendall(b"x")
                time.sleep(0.005)
        self.left.release()


def _reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for key, value in headers.items():
        handler.send_header(key, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
