"""The page's sandbox draws diagrams and runs programs of a model; neither gets out."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browsing import Visit, read_sent
from chatting import (
    COMPLETIONS,
    answer_with,
    answers,
    ask,
    have_called,
    next_answer,
    open_settings,
    set_up,
    wait_for_answer,
)
from page_server import PageServer
from playwright.sync_api import Frame, Locator, Page, expect

DIAGRAMS = (
    "flowchart LR\n  A[Start] --> B{Sure?}\n  B -->|yes| C[Go]\n  B -->|no| A",
    "sequenceDiagram\n  Alice->>Bob: Hello\n  Bob-->>Alice: Hi",
    "classDiagram\n  Animal <|-- Duck\n  class Duck {\n    +swim()\n  }",
    "stateDiagram-v2\n  [*] --> Still\n  Still --> [*]",
    "gantt\n  dateFormat YYYY-MM-DD\n  section A\n  One :a1, 2024-01-01, 3d\n  Two :after a1, 2d",
    'pie\n  "Dogs" : 3\n  "Cats" : 2',
)
WRONG = "flowchart LR\n  A[Start --> ???"
HOSTILE = """%%{init: {"securityLevel": "loose", "themeCSS": "* { background: url(SPY/css) }"}}%%
flowchart TD
  A["<img src='SPY/x.png' onerror='top.ran = 1'>"] --> B["<script>top.ran = 1</script>"]
  B --> C["<a href='javascript:top.ran = 1'>here</a>"]
  click A "javascript:top.ran = 1"
  click B call ran()
  click C "SPY/" _top"""

WIDTHS = "images => Promise.all(images.map(image => image.decode().then(() => image.naturalWidth)))"

# What a program in the frame could try, if one could be smuggled into it.
ESCAPES = """async (origin) => {
  const name = (act) => { try { return String(act()); } catch (error) { return error.name; } };
  const load = (element) => new Promise((done) => {
    element.onload = () => done("loaded");
    element.onerror = () => done("refused");
    document.body.append(element);
  });
  return [
    await fetch(origin + "/v1/models").then(() => "reached", (error) => error.name),
    name(() => parent.document),
    name(() => localStorage),
    name(() => document.cookie),
    await load(Object.assign(new Image(), { src: origin + "/icon.png" })),
    await load(Object.assign(document.createElement("script"), { src: origin + "/docs.js" })),
    name(() => self.origin),
  ];
}"""
REFUSED = ["TypeError", *["SecurityError"] * 3, "refused", "refused", "null"]


def show(page: Page, *diagrams: str) -> Locator:
    """An answer with these diagrams in it."""
    answer_with(page, {"content": "\n\n".join(f"```mermaid\n{text}\n```" for text in diagrams)})
    answer = ask(page, "Draw it")
    page.unroute(COMPLETIONS)
    return answer


def drawings(answer: Locator) -> Locator:
    return answer.get_by_role("img", name="Diagram")


def sandbox_of(page: Page) -> Frame:
    return next(frame for frame in page.frames if frame.url.endswith("/sandbox"))


def test_diagrams_are_drawn_and_a_wrong_one_shows_its_source(page: Page) -> None:
    answer = show(page, *DIAGRAMS[:3], WRONG)
    expect(drawings(answer)).to_have_count(3)
    expect(answer.get_by_text(re.compile(r"This diagram cannot be drawn\. Parse error on line \d\.$"))).to_be_visible()
    expect(answer.locator("pre")).to_have_text(WRONG)
    answer.get_by_role("button", name="Source").first.click()
    expect(answer.locator("pre").first).to_have_text(DIAGRAMS[0])
    expect(drawings(answer)).to_have_count(2)
    answer.get_by_role("button", name="Source").first.click()
    last = show(page, *DIAGRAMS[3:])
    expect(drawings(last)).to_have_count(3)
    widths = drawings(last).evaluate_all(WIDTHS)
    assert all(width > 40 for width in widths), widths
    light = drawings(last).first.get_attribute("src")
    page.evaluate("() => localStorage.setItem('mlxr.theme', '\"dark\"')")
    page.evaluate("() => window.dispatchEvent(new StorageEvent('storage', { key: 'mlxr.theme' }))")
    expect(drawings(last).first).not_to_have_attribute("src", light or "")


@pytest.fixture
def spy() -> Iterator[tuple[str, list[str]]]:
    """Another server, and the requests that it got."""
    asked: list[str] = []

    class Spy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Spy) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}", asked
        site.shutdown()


def test_hostile_diagrams_do_nothing_and_the_sandbox_is_shut(visit: Visit, spy: tuple[str, list[str]]) -> None:
    page, (address, asked) = visit.page, spy
    answer = show(page, HOSTILE.replace("SPY", address))
    place = drawings(answer).or_(answer.get_by_text("This diagram cannot be drawn"))
    expect(place).to_be_visible()
    place.click()
    frame = sandbox_of(page)
    assert frame.evaluate(ESCAPES, visit.origin) == REFUSED
    frame.evaluate("(address) => { location.href = `${address}/?secret`; }", address)
    page.wait_for_timeout(300)
    assert page.evaluate("() => [window.ran, document.querySelector('article script, article svg a')]") == [None, None]
    assert page.url.startswith(visit.origin)
    assert len(page.context.pages) == 1
    assert asked == [], "what a diagram names is not fetched"
    visit.faults.clear()  # the browser's words about what it refused
    visit.requests.clear()


def _call(page: Page, *programs: str) -> None:
    have_called(page, "Compute it", "run_javascript", *({"code": program} for program in programs))


def test_programs_of_the_model_run_in_the_sandbox_once_they_are_confirmed(visit: Visit, server: PageServer) -> None:
    page = visit.page
    set_up(page, Max_tokens="8")
    settings = open_settings(page)
    settings.get_by_label("JavaScript in a sandbox (asks before it runs)").check()
    settings.get_by_label("Tool choice", exact=True).select_option("None")
    _call(page, "6 * 7")
    expect(page.get_by_role("region", name="Call of run_javascript")).to_contain_text("6 * 7")
    with page.expect_request(COMPLETIONS) as asked:
        page.get_by_role("button", name="Run once in the sandbox").click()
    assert read_sent(asked.value)["messages"][-1]["content"] == "42"
    wait_for_answer(page)
    expect(settings.get_by_label("Run JavaScript without asking me")).not_to_be_checked()
    _call(page, "1")
    with next_answer(page):
        page.get_by_role("button", name="Decline").click()
    expect(page.get_by_role("article", name="Result of run_javascript").last).to_contain_text("declined")
    settings.get_by_label("Run JavaScript without asking me").check()
    _call(
        page,
        "const x = [];\nfor (let i = 0; i < 3; i++) x.push(i);\nconsole.log(x, { a: 1n });\nreturn x.length",
        "for (;;) {}",
        f"fetch('{server.url}/v1/models').then(() => 'reached', (error) => error.name)",
        "for (;;) console.log('x'.repeat(1000))",
        f"try {{ importScripts('{server.url}/docs.js') }} catch (error) {{ return error.name }}",
        "[typeof document, typeof localStorage, typeof parent, self.origin]",
        "throw new RangeError('no')",
        "nonsense(",
    )
    with page.expect_request(COMPLETIONS) as asked:  # when the endless program has been stopped
        pass
    told = [m["content"] for m in read_sent(asked.value)["messages"] if m["role"] == "tool"][2:]
    assert told[:3] == ['[0,1,2] {"a":"1n"}\n3', "Error: It was stopped after 4 s.", "TypeError"]
    assert told[3].startswith("xxx")
    assert told[3].endswith("(cut)")
    assert len(told[3]) < 20_100
    assert told[4:7] == ["NetworkError", '["undefined","undefined","undefined","null"]', "Error: RangeError: no"]
    assert told[7].startswith("Error: ")
    assert "SyntaxError" in told[7]
    wait_for_answer(page)
    expect(page.locator("iframe")).to_have_count(0)  # a sandbox is gone when its program has ended
    expect(answers(page).nth(1)).to_be_attached()  # the last one may still begin
    visit.faults.clear()  # the browser's words about what it refused
