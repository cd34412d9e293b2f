"""The page as a whole: it opens, asks nobody but the server, wants a key, has views and notices a lost server."""

from __future__ import annotations

import pytest
from browsing import Visit
from page_server import PageServer
from playwright.sync_api import Page, Route, expect

from conftest import MakePageServer, OpenTab

VIEWS = ["Chat", "Compare", "Models", "Engine", "Settings"]


@pytest.mark.smoke
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


def test_skipping_to_the_content_by_the_keyboard(page: Page) -> None:
    expect(page.get_by_role("navigation", name="Views")).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()  # as the view does once it is drawn
    skip = page.get_by_role("button", name="Skip to the content")
    skip.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()


def test_a_theme_is_kept(page: Page) -> None:
    page.get_by_role("link", name="Settings", exact=True).click()
    page.get_by_label("Theme").select_option("dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_letters_grow_and_the_server_says_what_it_is(page: Page) -> None:
    page.get_by_role("link", name="Settings", exact=True).click()
    page.get_by_label("Text size").select_option("large")
    expect(page.locator("html")).to_have_css("font-size", "18px")
    server = page.get_by_role("region", name="Server")
    expect(server).to_contain_text("Default modelDemo: Python library only")
    expect(server.get_by_role("link", name="openapi.json")).to_have_attribute("href", "./openapi.json")
    licences = server.get_by_role("link", name="their licences").get_attribute("href")
    assert "react-dom 1" in page.evaluate("(path) => fetch(path).then((reply) => reply.text())", licences)
    page.get_by_role("button", name="Keyboard shortcuts").click()
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()


def test_an_installed_page_opens_while_the_server_is_away(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server()
    visit = tab(server, service_workers="allow")
    page = visit.page
    page.evaluate("() => navigator.serviceWorker.ready.then(() => undefined)")
    page.wait_for_function("() => navigator.serviceWorker.controller !== null")
    page.get_by_role("link", name="Settings", exact=True).click()
    expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible()
    server.kill()
    page.reload()
    expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible()
    expect(page.get_by_text("The server does not answer")).to_be_visible()
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page.get_by_label("Message")).to_be_visible()
    visit.faults.clear()


def test_a_key_can_be_entered_before_it_is_asked_for(page: Page) -> None:
    page.get_by_role("link", name="Settings", exact=True).click()
    page.get_by_role("button", name="Enter a key").click()
    expect(page.get_by_role("dialog", name="API key").get_by_label("API key")).to_be_focused()


def test_a_key_is_remembered_when_asked_and_forgotten_again(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server(api_keys="correct")
    page = tab(server, "/#/models").page
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("API key").fill("correct")
    dialog.get_by_label("Remember it on this computer, not only in this tab").check()
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_be_hidden()
    other = tab(server, "/#/models").page
    expect(other.get_by_role("main").get_by_text("demo").first).to_be_visible()
    other.get_by_role("link", name="Settings", exact=True).click()
    other.get_by_role("button", name="Forget the key").click()
    expect(other.get_by_text("No key is used.")).to_be_visible()
    assert other.evaluate("() => localStorage.getItem('mlxr.key')") is None
    other.goto("about:blank")
    other.goto(f"{server.url}/#/models")
    other.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(other.get_by_role("dialog")).to_have_count(0)


def test_comparing_goes_from_one_part_to_the_other(page: Page) -> None:
    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_role("tab", name="16 times at once").click()
    expect(page.get_by_role("tab", name="16 times at once")).to_have_attribute("aria-selected", "true")
    page.get_by_role("tab", name="Side by side").click()
    expect(page.get_by_role("tab", name="Side by side")).to_have_attribute("aria-selected", "true")


def test_the_machine_is_measured_when_asked(make_server: MakePageServer, tab: OpenTab) -> None:
    page = tab(make_server(), "/#/engine").page
    page.get_by_label("Model to watch").select_option("demo:latest")
    with page.expect_response(lambda reply: "/v1/admin/probe" in reply.url, timeout=60_000) as measured:
        page.get_by_role("button", name="Measure now").click()
    assert measured.value.ok
    expect(page.get_by_role("button", name="Measure now")).to_be_hidden()


def test_a_view_that_does_not_come_is_tried_again_by_itself_and_by_a_button(server: PageServer, tab: OpenTab) -> None:
    visit = tab(server)
    page, refused, held, holds = visit.page, list[str](), list[Route](), True

    def refuse_first(route: Route) -> None:
        if not refused:
            refused.append(route.request.url)
            route.fulfill(status=404, body="")
        elif holds:
            held.append(route)
        else:
            route.continue_()

    page.route("**/assets/ModelsView-*", refuse_first)
    page.get_by_role("link", name="Models", exact=True).click()
    problem = page.get_by_text("This view could not be loaded")
    expect(problem).to_be_visible()
    expect(page.get_by_role("navigation", name="Views")).to_be_visible()
    page.get_by_role("button", name="Try again").click()  # what is tried by itself does not take it away before
    holds = False
    for route in held:
        route.continue_()
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
    expect(problem).to_be_hidden()
    assert len(refused) == 1
    visit.faults.clear()


def test_a_view_comes_when_the_server_is_back(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server()
    visit = tab(server)
    page = visit.page
    page.get_by_label("Message").fill("half a question")
    server.kill()
    page.get_by_role("link", name="Settings", exact=True).click()
    expect(page.get_by_text("This view could not be loaded")).to_be_visible()
    expect(page.get_by_role("navigation", name="Views")).to_be_visible()
    server.start()
    expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible(timeout=60_000)  # it pauses longer
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page.get_by_label("Message")).to_have_value("half a question")
    visit.faults.clear()


def test_another_version_of_the_page_is_loaded_once_and_what_was_typed_stays(server: PageServer, tab: OpenTab) -> None:
    """The tab has an old version: its script has another name, and its files are no longer there."""
    visit = tab(server)
    page = visit.page
    page.get_by_label("Message").fill("half a question")
    page.evaluate("() => document.querySelector('script[type=module]').setAttribute('src', './assets/index-old.js')")
    gone = [True]

    def refuse(route: Route) -> None:
        if gone:
            gone.clear()
            route.fulfill(status=404, body="")
        else:
            route.continue_()

    page.route("**/assets/EngineView-*", refuse)
    with page.expect_event("load"):
        page.get_by_role("link", name="Engine", exact=True).click()
    assert page.url.endswith("/#/engine")
    expect(page.get_by_role("heading", name="Engine", exact=True)).to_be_visible()
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page.get_by_label("Message")).to_have_value("half a question")
    visit.faults.clear()


def test_the_page_of_routes_shows_fields_and_sends_a_request(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/settings")
    page.get_by_role("link", name="docs", exact=True).click()
    page.wait_for_url(f"{server.url}/docs")
    page.get_by_label("Search").fill("post /v1/chat/completions answer a conversation")
    routes = page.locator("main details[data-text]:visible")
    expect(routes).to_have_count(1)
    routes.locator("summary").first.click()
    fields = routes.locator("details")
    expect(fields).to_contain_text("messages (needed)")
    body = routes.get_by_label("Body")
    body.fill(body.input_value().replace("{", '{"temperature": 0, "stream": true,', 1))
    routes.get_by_role("button", name="Send").click()
    expect(routes.locator("pre")).to_contain_text("data: [DONE]")
    expect(routes.locator("pre")).to_contain_text("200 OK")
