"""The page as a whole: it opens, asks nobody but the server, wants a key, has views and notices a lost server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browsing import Visit
from page_server import PageServer
from playwright.sync_api import Page, expect

from conftest import MakePageServer, OpenTab

VIEWS = ["Chat", "Compare", "Models", "Engine", "Settings"]


def test_the_page_opens_and_everything_comes_from_the_server(visit: Visit, server: PageServer) -> None:
    expect(visit.page.get_by_role("navigation", name="Views")).to_be_visible()
    visit.page.wait_for_load_state("networkidle")
    assert len(visit.requests) > 4
    assert all(url.startswith(server.url) for url in visit.requests)


@pytest.mark.parametrize("name", VIEWS)
def test_each_view_has_an_address(name: str, page: Page) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
    expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute("aria-current", "page")
    assert page.url.endswith(f"#/{name.lower()}")
    page.reload()
    expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute("aria-current", "page")


def test_the_key_is_asked_for_once(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server(api_keys="correct")
    visit = tab(server, "/#/models")
    dialog = visit.page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.get_by_text("does not know this key")).to_be_visible()
    dialog.get_by_label("API key").fill("correct")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_be_hidden()
    expect(visit.page.get_by_role("main").get_by_text("demo").first).to_be_visible()
    visit.page.reload()
    expect(visit.page.get_by_role("main").get_by_text("demo").first).to_be_visible()
    expect(dialog).to_be_hidden()
    assert visit.page.evaluate("() => localStorage.getItem('mlxr.key')") is None


def test_a_server_that_goes_away_and_comes_back(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server()
    visit = tab(server)
    expect(visit.page.get_by_role("navigation", name="Views")).to_be_visible()
    lost = visit.page.get_by_text("The server does not answer")
    expect(lost).to_be_hidden()
    server.kill()
    expect(lost).to_be_visible()
    server.start()
    expect(lost).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_in_the_way_of_anybody(
    scheme: str, server: PageServer, tab: OpenTab, find_violations: Callable[[Page], list[str]]
) -> None:
    page = tab(server, "/#/settings", color_scheme=scheme).page
    expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible()
    assert find_violations(page) == []
