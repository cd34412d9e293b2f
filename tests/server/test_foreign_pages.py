"""Web pages of others reach nothing, on any route, that changes, costs or reveals anything.

The routes are read from the servers, so a new one is covered without a word here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

import httpx
import pytest
from running_server import RunningServer, start_server

from mlxr.server.access import Head, check_embedding
from mlxr.server.errors import ServerError

EVIL = "https://evil.example"
BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "content": "Hi",
    "input": "Hi",
}
SAFE = ("GET", "HEAD")
READ_S = 2.0  # of a reply that has no end, such as a live view


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server without keys that only this machine reaches, as it is by default."""
    server = start_server(tmp_path_factory.mktemp("local"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server without keys on every address; its owner named one of its names."""
    server = start_server(tmp_path_factory.mktemp("public"), host="0.0.0.0", allowed_hosts="models.example")
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    yield server
    server.stop()


@dataclass(frozen=True)
class Reply:
    """A reply; of an endless one, such as a live view, `text` is its beginning."""

    status_code: int
    headers: httpx.Headers
    text: str


def read_beginning(reply: httpx.Response) -> str:
    """Read a reply to its end, or until READ_S are over or pass without a word."""
    parts: list[str] = []
    end_s = monotonic() + READ_S
    reply.request.extensions["timeout"]["read"] = READ_S  # from here on; until it began, it had the usual time
    with contextlib.suppress(httpx.ReadTimeout):
        for part in reply.iter_text():
            parts.append(part)
            if monotonic() > end_s:
                break
    return "".join(parts)


def list_routes(server: RunningServer) -> list[tuple[str, str]]:
    """Method and path of every route, with the parts of the path filled in."""
    return sorted((method, re.sub(r"\{[^}]*\}", "x", r.path)) for r in server.app.routes for method in r.methods)


def ask_all(server: RunningServer, methods: str, **headers: str) -> dict[tuple[str, str], Reply]:
    """Ask every route that changes something ("changing") or that does not ("reading") with `headers`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    replies: dict[tuple[str, str], Reply] = {}
    with server.client() as client:
        for method, path in list_routes(server):
            if (method in SAFE) == (methods == "reading"):
                body = None if method in SAFE else BODY
                with client.stream(method, path, json=body, headers=named) as reply:
                    replies[method, path] = Reply(reply.status_code, reply.headers, read_beginning(reply))
    assert len(replies) > 20
    return replies


def assert_refused(replies: dict[tuple[str, str], Reply]) -> None:
    passed = {route: reply.status_code for route, reply in replies.items() if reply.status_code != 403}
    assert not passed
    assert not [route for route, reply in replies.items() if "access-control-allow-origin" in reply.headers]


def test_the_routes_that_change_something_are_all_there(local: RunningServer) -> None:
    changing = {path for method, path in list_routes(local) if method not in SAFE}
    assert {"/v1/chat/completions", "/api/pull", "/api/create", "/api/copy", "/api/delete", "/infill"} <= changing
    assert {method for method, _ in list_routes(local)} <= {*SAFE, "POST", "DELETE"}


@pytest.mark.parametrize(
    "origin",
    [EVIL, "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "chrome-extension://abc"],
)
def test_a_foreign_origin_changes_nothing(origin: str, local: RunningServer, public: RunningServer) -> None:
    for server in (local, public):
        assert_refused(ask_all(server, "changing", origin=origin))


def test_a_form_of_a_foreign_page_changes_nothing(local: RunningServer) -> None:
    plain = {"content_type": "text/plain", "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert_refused(ask_all(local, "changing", origin=EVIL, **plain))


@pytest.mark.parametrize("port", ["", ":11434"])
def test_a_name_that_was_pointed_here_reaches_nothing(port: str, local: RunningServer) -> None:
    for methods in ("changing", "reading"):
        assert_refused(ask_all(local, methods, host=f"evil.example{port}"))
        assert_refused(ask_all(local, methods, host=f"evil.example{port}", origin=f"http://evil.example{port}"))


def test_a_name_that_was_pointed_to_a_public_server_changes_nothing(public: RunningServer) -> None:
    """Browsers send the origin with every request that may change something, also to the page's own server."""
    assert_refused(ask_all(public, "changing", host="evil.example:11434", origin="http://evil.example:11434"))


@pytest.mark.slow
def test_what_a_name_pointed_to_a_public_server_can_read_holds_no_conversation(public: RunningServer) -> None:
    secret = "the ferret sleeps in the piano"
    with public.client() as client:
        asked = client.post("/v1/responses", json={"model": "demo", "input": secret, "max_output_tokens": 40}).json()
        chat = {"model": "demo", "messages": [{"role": "user", "content": secret}], "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=chat):  # while it runs, too
            replies = ask_all(public, "reading", host="evil.example:11434")
        answer = asked["output"][0]["content"][0]["text"]
        assert answer[:20] in client.get(f"/v1/responses/{asked['id']}").text, "it is kept for whoever knows its name"
    texts = "".join(reply.text for reply in replies.values())
    assert "mlxr_requests_total" in texts
    assert "ferret" not in texts
    assert asked["id"] not in texts
    assert answer[:20] not in texts


@pytest.mark.parametrize(
    ("mode", "dest"), [("no-cors", "image"), ("no-cors", "script"), ("navigate", "iframe"), ("navigate", "object")]
)
def test_a_foreign_page_embeds_nothing(mode: str, dest: str, local: RunningServer) -> None:
    head = {"sec_fetch_site": "cross-site", "sec_fetch_mode": mode, "sec_fetch_dest": dest}
    assert_refused(ask_all(local, "reading", **head))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},  # a link
        {"sec-fetch-site": "same-origin", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},  # of an extension
    ],
)
def test_what_embeds_nothing_passes(headers: dict[str, str]) -> None:
    check_embedding(Head("GET", "/props", headers, "127.0.0.1", "127.0.0.1"))


def test_a_model_is_not_loaded_for_a_picture_of_a_foreign_page() -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    with pytest.raises(ServerError, match="another site") as caught:
        check_embedding(Head("GET", "/props", headers, "127.0.0.1", "127.0.0.1"))
    assert caught.value.status == 403


def test_programs_and_the_page_itself_pass_everywhere(local: RunningServer, public: RunningServer) -> None:
    """None of these is refused for its origin; most are for their content."""
    for server in (local, public):
        port = server.url.rpartition(":")[2]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"192.168.7.9:{port}"):
            own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            for headers in ({"host": host}, own):
                with server.client() as client:
                    for method, path in list_routes(server):
                        if method == "DELETE" or (method == "POST" and path in ("/tokenize", "/api/copy", "/api/show")):
                            status = client.request(method, path, json={}, headers=headers).status_code
                            assert status not in (403, 500), (host, method, path)
    with public.client() as client:
        for name in ("ollama:11434", "gpu-box.corp.example:11434"):  # a container's name, a name in a company's DNS
            assert client.post("/tokenize", json={"content": "x"}, headers={"host": name}).status_code == 200
        origin = {"host": "models.example", "origin": "https://models.example"}  # behind a proxy, listed
        assert client.post("/tokenize", json={"content": "x"}, headers=origin).status_code == 200
