"""Keys on every route there is, host names, origins, limits, sockets."""

from __future__ import annotations

import gc
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import httpx
import pytest
from running_server import MakeServer, RunningServer, start_server

from mlxr.core.errors import SettingError
from mlxr.core.settings import resolve
from mlxr.server.access import Head, Hosts, Keys, Origins
from mlxr.server.app import DIALECTS
from mlxr.server.errors import ServerError
from mlxr.server.guard import MAX_CALLERS, RateLimit
from mlxr.server.listen import open_socket
from mlxr.server.page_files import ROOT_PATHS

KEY = "correct horse battery staple"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with one key in its settings and two in a file."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("# for the editor\nsecond\n\n  third  \n")
    server = start_server(folder, api_keys=[KEY], api_keys_file=folder / "keys")
    yield server
    server.stop()


def fill_path(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


def test_every_route_but_health_needs_a_key(locked: RunningServer) -> None:
    routes = {(method, fill_path(route.path)) for route in locked.app.routes for method in route.methods}
    assert len(routes) > 15
    assert {(row.method, fill_path(row.path)) for dialect in DIALECTS for row in dialect.router.rows} <= routes
    with locked.client() as client:
        for method, path in [*sorted(routes), ("GET", "/no/such/path"), ("OPTIONS", "/v1/models"), ("TRACE", "/")]:
            status = client.request(method, path).status_code
            if path in ("/health", "/health/live", "/health/ready"):
                assert status == 200, path
            elif path in ROOT_PATHS | {"/assets/x"} and method in ("GET", "HEAD"):  # the same for everybody
                assert status in ((401,) if locked.app.state.parts.page is None else (200, 404)), path
            else:
                assert status == 401, (method, path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": "second"}, 200),
        ({"x-api-key": "third"}, 200),
        ({"Authorization": "Bearer second"}, 200),
        ({}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"x-api-key": "# for the editor"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": b"\xff\xfe"}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int, locked: RunningServer) -> None:
    with locked.client() as client:
        response = client.get("/v1/admin/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "unauthorized"
        assert KEY not in response.text


def test_a_key_is_named_by_its_digest_alone(locked: RunningServer) -> None:
    with locked.client(KEY) as client:
        (row,) = client.get("/v1/admin/requests").json()["requests"]
    assert re.fullmatch("[0-9a-f]{8}", row["key"])
    assert KEY not in repr(Keys.of([KEY]))


@pytest.mark.parametrize("content", [None, "", "# nothing\n\n", b"\xff"])
def test_a_file_without_keys_is_refused(content: str | bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match="api_keys_file"):
        Keys.read(resolve({"api_keys_file": file}, {}))


def head(server: str | None = "127.0.0.1", **headers: str) -> Head:
    return Head("GET", "/", {name.replace("_", "-"): value for name, value in headers.items()}, "127.0.0.1", server)


HOSTS = Hosts(frozenset({"models.example", "machine"}))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("localhost:11434", True),
        ("LOCALHOST.:11434", True),
        ("app.localhost", True),
        ("host.docker.internal:11434", True),
        ("macbook.local", True),
        ("Machine", True),
        ("127.0.0.1:1", True),
        ("192.168.1.7", True),
        ("[::1]:11434", True),
        ("models.example", True),
        ("Models.Example:80", True),
        ("", True),  # no browser sends it
        ("ollama:11434", False),
        ("evil.example", False),
        ("evil.example:11434", False),
        ("localhost.evil.example", False),
        ("host.docker.internal.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("models.example.evil", False),
        ("xlocalhost", False),
        ("evillocal", False),
        ("[::1].evil.example", True),  # no browser makes this of a name
        ("999.1.1.1", False),
    ],
)
def test_host_names_on_loopback(host: str, allowed: bool) -> None:
    for server in ("127.0.0.1", "::1"):
        with nullcontext() if allowed else pytest.raises(ServerError, match="allowed_hosts") as caught:
            HOSTS.check(head(server, host=host))
        assert caught is None or caught.value.status == 403


def test_where_others_can_connect_every_host_name_passes() -> None:
    for address in ("0.0.0.0", "::"):
        Hosts.read(resolve({"host": address}, {})).check(head(host="ollama:11434"))  # even if it came to loopback
    Hosts.read(resolve({"host": "10.0.0.7"}, {})).check(head("10.0.0.7", host="chat.example"))
    HOSTS.check(head(None, host="whatever"))  # a Unix socket


DEFAULT_ORIGINS = [
    "http://localhost",
    "http://localhost:3000",
    "https://127.0.0.1:8443",
    "http://[::1]:5173",
    "http://0.0.0.0:8080",
    "app://obsidian.md",
    "app://-",
    "file://",
    "tauri://localhost",
    "vscode-webview://1a2b3c",
    "vscode-file://vscode-app",
]
LISTED_ORIGINS = ["chrome-extension://abcdef", "moz-extension://1-2-3", "https://chat.example", "https://a.b.example"]
EXTENSIONS = "chrome-extension://*,moz-extension://*,https://chat.example,https://*.b.example"


@pytest.mark.parametrize("origin", DEFAULT_ORIGINS)
def test_local_pages_and_apps_pass(origin: str) -> None:
    Origins.read(resolve({}, {})).check(head(host="localhost:1", origin=origin), HOSTS)


@pytest.mark.parametrize("origin", LISTED_ORIGINS)
def test_other_pages_pass_once_they_are_listed(origin: str) -> None:
    asked = head(host="localhost:1", origin=origin)
    with pytest.raises(ServerError, match="cors_origins"):
        Origins.read(resolve({}, {})).check(asked, HOSTS)
    Origins.read(resolve({"cors_origins": EXTENSIONS}, {})).check(asked, HOSTS)
    Origins.read(resolve({"cors_origins": "*"}, {})).check(asked, HOSTS)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost.evil.example",
        "http://localhost:3000.evil.example",
        "http://xlocalhost:3000",
        "http://127x0.0.1",
        "https://chat.example.evil.example",
        "https://evil.example/.b.example",
        "https://chatxexample",
        "xapp://obsidian.md",
        "null",
        "",
        "http://",
    ],
)
def test_other_origins_are_refused(origin: str) -> None:
    origins = Origins.read(resolve({"cors_origins": EXTENSIONS}, {}))
    for host in ("localhost:1", ""):
        with pytest.raises(ServerError, match="cors_origins") as caught:
            origins.check(head(host=host, origin=origin), HOSTS)
        assert caught.value.status == 403


def test_a_page_of_the_servers_own_origin_must_have_a_name_that_is_ours() -> None:
    origins = Origins.read(resolve({}, {}))
    for name in ("models.example", "10.0.0.7:11434", "nas.local"):
        origins.check(head("10.0.0.7", host=name, origin=f"http://{name}"), HOSTS)
        origins.check(head("10.0.0.7", host=name, origin=f"https://{name}"), HOSTS)
    with pytest.raises(ServerError, match="allowed_hosts"):  # a name that was pointed here
        origins.check(head("10.0.0.7", host="evil.example", origin="http://evil.example"), HOSTS)


@pytest.mark.parametrize("origin", ["localhost:3000", "http://a.example/page", "http://a.example/", "chrome extension"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(SettingError, match="cors_origins"):
        Origins.read(resolve({"cors_origins": [origin]}, {}))


def test_a_foreign_name_and_a_foreign_page_get_nothing(client: httpx.Client) -> None:
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    response = client.post("/tokenize", json={"content": "x"}, headers={"origin": "https://evil.example"})
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.options("/tokenize", headers=preflight).headers


def test_clients_in_containers_and_local_pages_are_answered(client: httpx.Client) -> None:
    assert client.get("/health", headers={"host": "host.docker.internal:11434"}).status_code == 200
    origin = "vscode-file://vscode-app"
    response = client.post("/tokenize", json={"content": "x"}, headers={"origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    preflight = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    headers = client.options("/v1/chat/completions", headers=preflight).headers
    assert headers["access-control-allow-origin"] == "http://localhost:3000"
    assert headers["access-control-allow-private-network"] == "true"
    assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"


def test_a_server_on_every_address(make_server: MakeServer) -> None:
    running = make_server(host="0.0.0.0", cors_origins="https://chat.example", allowed_hosts="my.host")
    port = running.url.rpartition(":")[2]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        assert client.get("/health", headers={"host": "ollama:11434"}).status_code == 200
        for host, origin, status in [
            ("api.example", "https://chat.example", 200),
            ("my.host", "https://my.host", 200),
            ("evil.example", "http://evil.example", 403),  # DNS rebinding
        ]:
            headers = {"host": host, "origin": origin}
            assert client.post("/tokenize", json={"content": "x"}, headers=headers).status_code == status


def test_a_page_can_read_why_it_was_refused(make_server: MakeServer) -> None:
    origin = "http://localhost:3000"
    with make_server(allowed_hosts="my.host", api_keys="k").client() as client:
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        assert client.options("/tokenize", headers=preflight).headers["access-control-allow-origin"] == origin
        refused = client.post("/tokenize", json={"content": "x"}, headers={"origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin
        assert client.get("/metrics", headers={"host": "my.host", "x-api-key": "k"}).status_code == 200


def test_large_bodies_are_refused_by_their_length_or_when_they_arrive(make_server: MakeServer) -> None:
    with make_server(max_body_bytes=2048).client() as client:
        body = b'{"content": "' + b"x" * 4000 + b'"}'
        by_length = client.post("/tokenize", content=body)
        chunked = client.post("/tokenize", content=iter([body[:1000], body[1000:]]))
        for response in (by_length, chunked):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == 413
            assert "2048" in response.text
        assert client.post("/tokenize", content=iter([body[:100], b'"}'])).status_code == 200


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (HEAD, b""),
        (HEAD + b"Content-Length: 20\r\n\r\n{", b"408"),
        (HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"con\r\n', b"408"),
    ],
    ids=["silent", "half a head", "half a body", "half a chunked body"],
)
def test_clients_that_stop_in_the_middle(make_server: MakeServer, sent: bytes, answer: bytes) -> None:
    running = make_server(request_timeout_s=1)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(10)
        if sent == HEAD:  # also after a request that was whole
            connection.sendall(HEAD + b'Content-Length: 15\r\n\r\n{"content":"x"}')
            assert b"200 OK" in connection.recv(65536)
        start_s = time.monotonic()
        connection.sendall(sent)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
        assert 0.9 < time.monotonic() - start_s < 5
    assert reply.split(b" ")[1:2] == ([answer] if answer else [])
    if answer == b"408":
        assert b"did not arrive within 1 s; see the setting request_timeout_s" in reply


def test_drops_of_a_body_do_not_keep_a_request_open(make_server: MakeServer) -> None:
    def drip() -> Iterator[bytes]:
        while True:
            yield b" "
            time.sleep(0.05)

    with make_server(request_timeout_s=1).client() as client:
        start_s = time.monotonic()
        with suppress(httpx.HTTPError):  # the answer may come while the client is still writing
            assert client.post("/tokenize", content=drip()).status_code == 408
        assert time.monotonic() - start_s < 5


@pytest.mark.slow
def test_a_long_answer_is_no_silence(make_server: MakeServer) -> None:
    with make_server(request_timeout_s=1).client() as client:
        body = {"prompt": "import os", "max_tokens": 1500, "n": 4, "ignore_eos": True, "stream": True}
        start_s = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = list(response.iter_lines())
        assert "data: [DONE]" in lines
        assert time.monotonic() - start_s > 1, "the answer was too short to show anything"


def test_requests_per_minute(make_server: MakeServer) -> None:
    with make_server(requests_per_minute=3, api_keys=["a", "b"]).client() as client:
        statuses = [client.get("/v1/admin/models", headers={"x-api-key": "a"}).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        response = client.get("/v1/admin/models", headers={"x-api-key": "a"})
        assert 1 <= int(response.headers["retry-after"]) <= 20
        assert response.json()["error"]["code"] == "rate_limited"
        assert client.get("/v1/admin/models", headers={"x-api-key": "b"}).status_code == 200
        assert client.get("/health").status_code == 200


def test_the_bucket_fills_again_and_forgets_old_callers() -> None:
    now_s = 0.0
    limit = RateLimit(6, clock=lambda: now_s)
    for _ in range(6):
        limit.take("a")
    for _ in range(3):
        with pytest.raises(ServerError) as caught:
            limit.take("a")
        assert caught.value.retry_after_s == pytest.approx(10)
    now_s = 10.0
    limit.take("a")
    with pytest.raises(ServerError):
        limit.take("a")
    for caller in range(MAX_CALLERS):
        limit.take(str(caller))
    limit.take("a")


def test_a_unix_socket(make_server: MakeServer, tmp_path: Path) -> None:
    path = tmp_path / "mlxr.sock"
    running = make_server(unix_socket=path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with running.client() as client:
        assert client.get("/health", headers={"host": "whatever"}).status_code == 200
        (row,) = client.get("/v1/admin/requests").json()["requests"]
        assert row["client"] == "local"
    with pytest.raises(SettingError, match="listens on"):
        make_server(unix_socket=path)
    running.stop()
    again = make_server(unix_socket=path)  # what the first one left behind is no obstacle
    with again.client() as client:
        assert client.get("/health").status_code == 200


def test_an_address_that_is_taken(make_server: MakeServer) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SettingError, match="another program listens on"),
    ):
        make_server(port=taken.getsockname()[1])


def test_an_address_that_is_not_ours(make_server: MakeServer) -> None:
    with pytest.raises(SettingError, match="cannot be listened on"):
        make_server(host="host.invalid")


def test_small_pieces_are_sent_at_once() -> None:
    """Otherwise a connection's second request, and each token, waits 40 ms for the confirmation of the first."""
    listener = open_socket(resolve({"port": 0}, {}))
    with listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_a_refused_body_is_let_go_at_once(make_server: MakeServer) -> None:
    """Errors hold their functions' frames, and these hold the body, until Python collects such circles."""
    message = {"role": "user", "content": "one of very many words " * 20}
    asked = {"model": "demo", "messages": [message] * 4000}
    with make_server().client() as client:
        assert client.post("/v1/chat/completions", json=asked).status_code == 400
        gc.collect()
        before = len(gc.get_objects())
        gc.disable()
        try:
            assert client.post("/v1/chat/completions", json=asked).status_code == 400
            end_s = time.monotonic() + 20.0  # the server may still be on its way out of the request
            while len(gc.get_objects()) > before + 3000:
                assert time.monotonic() < end_s, "the body is still held"
                time.sleep(0.05)
        finally:
            gc.enable()
