"""The files of the page: access, caching, and the headers that the browser gets with them."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import MakeServer, RunningServer, start_server

from mlxr.core.errors import SettingError
from mlxr.core.settings import resolve
from mlxr.server import page_files
from mlxr.server.page_files import Page, accepts_gzip, wants_page

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"}
SCRIPT = b"export const words = 'the same again and again';\n" * 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A page that is served in place of the built one, and a secret beside it."""
    folder = tmp_path_factory.mktemp("built") / "page"
    (folder / "assets" / "deep").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>page</title>" + " " * 500)
    (folder / "icon.svg").write_text("<svg/>")
    (folder / "assets" / "index-abc_1.js").write_bytes(SCRIPT)
    (folder / "assets" / "picture-x.png").write_bytes(b"\x89PNG")
    (folder / "assets" / "deep" / "file.js").write_text("deep")
    (folder / "assets" / ".hidden.js").write_text("hidden")
    (folder.parent / "secret.txt").write_text("secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_files, "FOLDER", folder)
        patch.setattr(Page.__init__, "__defaults__", ((), folder))
        yield folder


@pytest.fixture(scope="module")
def paged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = start_server(
        tmp_path_factory.mktemp("registry"), page_tool_origins="http://localhost:9000,https://a.example"
    )
    yield server
    server.stop()


@pytest.fixture
def asking(paged: RunningServer) -> Iterator[httpx.Client]:
    with paged.client() as client:
        yield client


def test_a_browser_gets_the_page_and_others_what_they_look_for(asking: httpx.Client) -> None:
    page = asking.get("/", headers=BROWSER)
    assert page.text.startswith("<!doctype html>")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for accept in ("*/*", "application/json", "text/plain", "text/html;q=0, */*", ""):
        other = asking.get("/", headers={"accept": accept})
        assert other.text == "Ollama is running", accept
        assert other.headers["content-type"] == "text/plain; charset=utf-8"
        assert "content-security-policy" not in other.headers
    assert asking.head("/").headers["content-type"] == "text/plain; charset=utf-8"
    for reply in (page, asking.get("/")):
        assert "Accept" in reply.headers["vary"]


def test_head_is_get_without_a_body(asking: httpx.Client) -> None:
    for path, headers in (("/", BROWSER), ("/assets/index-abc_1.js", {}), ("/icon.svg", {})):
        got, asked = asking.get(path, headers=headers), asking.head(path, headers=headers)
        assert asked.content == b""
        for name in ("content-length", "etag", "content-type", "cache-control"):
            assert asked.headers[name] == got.headers[name]


def test_what_has_a_digest_in_its_name_is_kept_for_ever_and_the_rest_is_asked_for_again(asking: httpx.Client) -> None:
    asset = asking.get("/assets/index-abc_1.js")
    assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert asset.headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/", "/icon.svg"):
        first = asking.get(path, headers=BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        for tag in (first.headers["etag"], f"W/{first.headers['etag']}", f'"other", {first.headers["etag"]}', "*"):
            again = asking.get(path, headers={**BROWSER, "if-none-match": tag})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert asking.get(path, headers={**BROWSER, "if-none-match": '"other"'}).status_code == 200


def test_a_changed_file_has_another_tag(folder: Path, asking: httpx.Client) -> None:
    before = asking.get("/icon.svg").headers["etag"]
    (folder / "icon.svg").write_text("<svg><path/></svg>")
    after = asking.get("/icon.svg", headers={"if-none-match": before})
    assert after.text == "<svg><path/></svg>"
    assert after.headers["etag"] != before


def test_text_is_compressed_for_those_who_can_read_that(asking: httpx.Client) -> None:
    with asking.stream("GET", "/assets/index-abc_1.js", headers={"accept-encoding": "br, gzip"}) as small:
        content = b"".join(small.iter_raw())
    assert small.headers["content-encoding"] == "gzip"
    assert len(content) < len(SCRIPT) / 10
    assert gzip.decompress(content) == SCRIPT
    plain = asking.get("/assets/index-abc_1.js", headers={"accept-encoding": "gzip;q=0"})
    assert "content-encoding" not in plain.headers
    assert plain.content == SCRIPT
    assert plain.headers["etag"] != small.headers["etag"]
    assert "Accept-Encoding" in plain.headers["vary"]
    assert "content-encoding" not in asking.get("/assets/picture-x.png").headers


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/%2e%2e/%2e%2e/secret.txt",
        "/assets/..%5c..%5csecret.txt",
        "/assets/....//secret.txt",
        "/assets/%2fetc%2fpasswd",
        "/assets//etc/passwd",
        "/assets/index-abc_1.js%00",
        "/assets/deep/file.js",
        "/assets/deep%2ffile.js",
        "/assets/.hidden.js",
        "/assets/..",
        "/assets/.",
        "/assets/",
        "/assets/deep",
        "/assets/no-such-file.js",
        "/index.html",
        "/secret.txt",
    ],
)
def test_nothing_else_is_given_out(path: str, paged: RunningServer) -> None:
    target = httpx.URL(paged.url).copy_with(raw_path=path.encode())
    with paged.client() as client:
        reply = client.send(httpx.Request("GET", target, extensions={"target": path.encode()}))
    assert reply.status_code == 404, reply.text
    assert "secret" not in reply.text.replace("secret.txt", "")


def test_the_browser_is_told_to_run_and_fetch_nothing_from_elsewhere(asking: httpx.Client) -> None:
    headers = asking.get("/", headers=BROWSER).headers
    policy = {
        name: set(rest) for name, *rest in (rule.split() for rule in headers["content-security-policy"].split(";"))
    }
    assert policy == {
        "default-src": {"'none'"},
        "script-src": {"'self'"},
        "style-src": {"'self'"},
        "font-src": {"'self'"},
        "img-src": {"'self'", "data:", "blob:"},
        "manifest-src": {"'self'"},
        "worker-src": {"'self'"},
        "frame-src": {"'self'"},
        "connect-src": {"'self'", "http://localhost:9000", "https://a.example"},
        "base-uri": {"'none'"},
        "form-action": {"'none'"},
        "frame-ancestors": {"'none'"},
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_sandbox_runs_its_own_script_alone_and_reaches_nobody(folder: Path, asking: httpx.Client) -> None:
    (folder / "sandbox.html").write_text("<script>\n let a = 1;\n</script>")
    reply = asking.get("/sandbox")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    digest = base64.b64encode(hashlib.sha256(b"\n let a = 1;\n").digest()).decode()
    rules = reply.headers["content-security-policy"].split("; ")
    assert f"script-src 'sha256-{digest}' blob:" in rules
    assert {"default-src 'none'", "sandbox allow-scripts", "frame-ancestors 'self'"} <= set(rules)
    assert not [rule for rule in rules if "connect" in rule or "unsafe-eval" in rule or "same-origin" in rule]


def test_files_of_the_page_need_no_key_and_count_as_no_request(folder: Path, make_server: MakeServer) -> None:
    with make_server(api_keys="k", requests_per_minute=1).client() as client:
        for path in ("/", "/icon.svg", "/assets/index-abc_1.js") * 3:
            assert client.get(path, headers=BROWSER).status_code == 200
            assert client.head(path, headers=BROWSER).status_code == 200
        assert client.get("/").status_code == 401, "what clients of an API get needs a key as before"
        for method in ("POST", "DELETE", "PUT", "OPTIONS"):
            assert client.request(method, "/assets/index-abc_1.js", headers=BROWSER).status_code == 401
        assert client.get("/v1/models", headers=BROWSER).status_code == 401
        foreign = {**BROWSER, "host": "evil.example"}
        assert client.get("/", headers=foreign).status_code == 403


def test_the_page_can_be_turned_off(folder: Path, make_server: MakeServer) -> None:
    with make_server(page="false", api_keys="k").client("k") as client:
        assert client.get("/", headers=BROWSER).text == "Ollama is running"
        assert client.get("/assets/index-abc_1.js").status_code == 404
        del client.headers["authorization"]
        for path in ("/", "/assets/index-abc_1.js", "/icon.svg"):
            assert client.get(path, headers=BROWSER).status_code == 401


def test_a_server_without_a_built_page(folder: Path, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "FOLDER", folder / "nowhere")
    with make_server().client() as client:
        assert client.get("/", headers=BROWSER).text == "Ollama is running"
        assert client.get("/icon.svg").status_code == 404


@pytest.mark.parametrize(
    "origin",
    [
        "localhost:9000",
        "http://localhost:9000/",
        "http://*.example",
        "*",
        "https:",
        "ws://localhost",
        "http://a.example; script-src *",
        "http://a.example 'unsafe-inline'",
        "http://a.example\nx-header: 1",
    ],
)
def test_what_is_no_origin_of_a_tool_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(SettingError, match="page_tool_origins"):
        Page.read(resolve({"page_tool_origins": [origin]}, {}))


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (BROWSER["accept"], True),
        ("TEXT/HTML", True),
        ("application/json, text/html;q=0.1", True),
        ("text/html;q=0", False),
        ("text/*", False),
        ("*/*", False),
        ("text/html-sandboxed", False),
        ("", False),
    ],
)
def test_who_wants_the_page(accept: str, wanted: bool) -> None:
    assert wants_page(accept) is wanted


def test_who_reads_gzip() -> None:
    assert [accepts_gzip(text) for text in ("gzip, deflate, br", "br;q=1.0, GZIP;q=0.5", "gzip;q=0", "br", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]
