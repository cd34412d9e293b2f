"""The pictures of the documentation: each view as it is in use. `--save-pictures` writes them to docs/img."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import Visit
from chatting import ask
from page_server import PageServer, wait_until
from playwright.sync_api import Page, expect
from questions import QUESTION

from conftest import ROOT, OpenTab

FOLDER = ROOT / "docs" / "img"
WIDTH, HEIGHT = 1280, 800
Prepare = Callable[[Page, PageServer], None]


def open_chat(page: Page, server: PageServer) -> None:
    ask(page, QUESTION)
    ask(page, "What does math.sqrt do?")


def open_compare(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/compare/sixteen")
    page.get_by_label("Max tokens").fill("40")
    page.get_by_role("button", name="Ask it 16 times").click()
    expect(page.get_by_text("All 16 answers are equal")).to_be_visible(timeout=90_000)


def open_models(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/models/demo")
    expect(page.get_by_role("region", name="Memory")).to_be_visible()


def open_engine(page: Page, server: PageServer) -> None:
    """Eight long answers, of which some share a prompt, over a cache that earlier ones have filled a little."""

    def answer(number: int, tokens: int) -> None:
        prompt = "import os\n" * 40 + f"# {number // 3}\n"
        with server.client() as client:
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens, "ignore_eos": True})

    for number in range(40, 46):
        answer(number, 1)
    threads = [threading.Thread(target=answer, args=(number, 1800), daemon=True) for number in range(8)]
    page.goto(f"{server.url}/#/engine")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    for thread in threads:
        thread.start()
    rows = page.get_by_role("region", name="Running answers", exact=True).get_by_role("listitem")
    expect(rows).to_have_count(8)
    page.wait_for_timeout(2000)


def end_answers(server: PageServer) -> None:
    with server.client() as client:
        for row in client.get("/v1/admin/requests").json()["requests"]:
            if row["path"] == "/v1/completions":
                client.delete(f"/v1/admin/requests/{row['id']}")
    wait_until(lambda: server.answers_in_flight() == 0, 30)


@pytest.mark.parametrize(
    ("name", "scheme", "prepare"),
    [
        ("page-chat", "light", open_chat),
        ("page-compare", "light", open_compare),
        ("page-models", "light", open_models),
        ("page-engine", "dark", open_engine),
    ],
)
def test_a_view_in_use(
    name: str, scheme: str, prepare: Prepare, tab: OpenTab, server: PageServer, request: pytest.FixtureRequest
) -> None:
    visit: Visit = tab(server, width=WIDTH, height=HEIGHT, color_scheme=scheme)
    prepare(visit.page, server)
    picture = visit.page.screenshot()
    end_answers(server)
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= WIDTH
    if request.config.getoption("--save-pictures"):
        Path(FOLDER, f"{name}.png").write_bytes(picture)
