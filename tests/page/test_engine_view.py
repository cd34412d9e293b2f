"""The engine view draws what the engine does."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from browsing import Visit
from page_server import PageServer, wait_until
from playwright.sync_api import Page, expect

from conftest import MakePageServer, OpenTab


@contextmanager
def answers(server: PageServer, count: int, tokens: int = 1500) -> Iterator[None]:
    """Let so many long answers grow in the block, and end them afterwards."""

    def ask(number: int) -> None:
        body = {"prompt": f"import os  # {number}\n", "max_tokens": tokens, "ignore_eos": True}
        with server.client() as client:
            client.post("/v1/completions", json=body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        with server.client() as client:
            for row in client.get("/v1/admin/requests").json()["requests"]:
                if row["path"] == "/v1/completions":
                    client.delete(f"/v1/admin/requests/{row['id']}")
        for thread in threads:
            thread.join()


def count_of(page: Page, kind: str) -> int:
    """The number beside a kind of page in the legend."""
    text = page.get_by_role("listitem").filter(has_text=re.compile(f"^{kind}")).first.inner_text()
    return int(text.removeprefix(kind).replace(",", ""))


@pytest.fixture
def engine(visit: Visit, server: PageServer) -> Page:
    visit.page.goto(f"{server.url}/#/engine")
    expect(visit.page.get_by_text("Live", exact=True)).to_be_visible()
    return visit.page


def test_sixteen_requests_are_seen_as_they_run(engine: Page, server: PageServer) -> None:
    expect(engine.get_by_text("Nothing runs")).to_be_visible()
    with answers(server, 16):
        rows = engine.get_by_role("region", name="Running answers", exact=True).get_by_role("listitem")
        expect(rows).to_have_count(16)
        wait_until(lambda: count_of(engine, "Private") + count_of(engine, "Shared") > 0, 20)
        expect(engine.get_by_role("region", name="Kernels", exact=True)).to_contain_text("attend")
        expect(engine.get_by_role("region", name="Events", exact=True)).to_contain_text("started")
    expect(rows).to_have_count(0)
    expect(engine.get_by_role("region", name="Events", exact=True)).to_contain_text("ended")
    wait_until(lambda: count_of(engine, "Private") == 0, 20)


def test_the_legend_counts_what_the_cache_holds(engine: Page, server: PageServer) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "import sys\n" * 60, "max_tokens": 1})

        def is_told() -> bool:
            cache = client.get("/v1/admin/cache").json()["caches"][0]["engine"]
            held = (cache["cached_pages"], cache["free_pages"])
            return held[0] > 0 and held == (count_of(engine, "Cached"), count_of(engine, "Free"))

        wait_until(is_told, 20)


def test_evictions_are_told(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server(arena_bytes="13M")
    page = tab(server, "/#/engine").page
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    with server.client() as client:
        for number in range(12):
            client.post("/v1/completions", json={"prompt": f"{number}: " + "import sys\n" * 150, "max_tokens": 1})
    page.get_by_label("Show").select_option("evicted")
    events = page.get_by_role("region", name="Events", exact=True)
    expect(events.get_by_role("listitem").first).to_contain_text("evicted")
    expect(events).not_to_contain_text("started")


def test_a_page_says_who_holds_it(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server()  # nothing is cached in it yet, so its first pages are those of the answers
    engine = tab(server, "/#/engine").page
    with answers(server, 8):
        rows = engine.get_by_role("region", name="Running answers", exact=True).get_by_role("listitem")
        expect(rows).to_have_count(8)
        cells = engine.get_by_role("region", name="Map of pages")
        cells.focus()
        note = engine.get_by_text(re.compile(r"^Page [\d,]+ is"))
        for _ in range(40):
            engine.keyboard.press("ArrowRight")
            if "private" in note.inner_text():
                break
        expect(note).to_contain_text("Held by answer")
        engine.keyboard.press("Escape")
        expect(note).to_have_count(0)


def test_pausing_stops_watching(engine: Page, server: PageServer) -> None:
    def watchers() -> int:
        with server.client() as client:
            rows = client.get("/v1/admin/requests").json()["requests"]
        return sum(row["path"] == "/v1/admin/live" for row in rows)

    wait_until(lambda: watchers() == 1, 20)  # that of the test before may still be there
    engine.get_by_role("button", name="Pause").click()
    expect(engine.get_by_text("Paused", exact=True)).to_be_visible()
    wait_until(lambda: watchers() == 0, 20)
    engine.get_by_role("button", name="Go on").click()
    expect(engine.get_by_text("Live", exact=True)).to_be_visible()
    engine.get_by_role("link", name="Chat", exact=True).click()
    wait_until(lambda: watchers() == 0, 20)


def test_the_machine_is_measured(engine: Page) -> None:
    roofline = engine.get_by_role("region", name="Roofline")
    roofline.get_by_role("button", name=re.compile("Measure")).click()
    expect(roofline).to_contain_text("GB/s,", timeout=60_000)
    expect(roofline.get_by_role("button", name="Measure again")).to_be_visible()


def test_a_server_that_comes_back_is_watched_again(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server()
    visit = tab(server, "/#/engine")
    live = visit.page.get_by_text("Live", exact=True)
    expect(live).to_be_visible()
    server.kill()
    expect(visit.page.get_by_text("Lost; trying again")).to_be_visible()
    server.start()
    expect(live).to_be_visible()
    visit.faults.clear()


def test_without_a_model_it_says_what_to_do(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server()
    with server.client() as client:
        assert client.delete("/v1/admin/models/demo:latest").status_code == 200
    page = tab(server, "/#/engine").page
    expect(page.get_by_role("heading", name="No model is loaded")).to_be_visible()
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "import", "max_tokens": 1})
    expect(page.get_by_role("region", name="Kernels", exact=True)).to_be_visible()


def test_each_figure_says_what_it_means(engine: Page) -> None:
    for name, meaning in (("Decode", "How fast answers are written"), ("Kernels", "small programs")):
        engine.get_by_role("button", name=f"About {name}").click()
        expect(engine.get_by_role("dialog", name=name)).to_contain_text(meaning)
        engine.keyboard.press("Escape")
    helps = engine.get_by_role("button", name=re.compile("About "))
    expect(helps.nth(12)).to_be_attached()
