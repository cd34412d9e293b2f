"""The server helps a conversation beside answering: it calls tools of MCP servers and turns PDFs into text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tool_server
from browsing import Visit, read_sent
from chatting import (
    COMPLETIONS,
    have_called,
    next_answer,
    open_settings,
    questions,
    send,
    set_up,
    start_chat,
    wait_for_answer,
)
from made_documents import make_pdf
from page_server import PageServer
from playwright.sync_api import Browser, Page, expect

from conftest import OpenTab


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server that allows a program and an address."""
    with tool_server.serve() as address:
        settings = {"mcp_commands": f"tools={sys.executable} {Path(tool_server.__file__)}", "mcp_urls": address}
        server = PageServer(tmp_path_factory.mktemp("server"), settings).start()
        yield server
        server.kill()


def _connect(page: Page, choice: re.Pattern[str] | str, *, key: str = "") -> None:
    """Add the tool `add` of a server to the conversation."""
    page.get_by_role("button", name="Connect an MCP server").click()
    dialog = page.get_by_role("dialog", name="Connect an MCP server")
    server = dialog.get_by_label("Server", exact=True)
    expect(server).to_be_visible()
    names = server.locator("option").all_inner_texts()
    server.select_option(next(name for name in names if re.search(choice, name)))
    if key:
        dialog.get_by_role("button", name="Show its tools").click()
        expect(dialog.get_by_role("alert")).to_contain_text("wants a key")
        dialog.get_by_label("Key").fill(key)
    dialog.get_by_role("button", name="Show its tools").click()
    expect(dialog.get_by_label("add", exact=True)).to_be_checked()
    for name in ("echo", "environment", "fail", "slow", "long", "end"):
        dialog.get_by_label(name, exact=True).uncheck()
    dialog.get_by_role("button", name="Add 1 of 7 tools").click()


def _have_called(page: Page, name: str, a: int) -> None:
    have_called(page, f"Add 1 to {a}", name, {"a": a, "b": 1})


def test_the_model_calls_tools_of_mcp_servers_once_they_are_confirmed(page: Page) -> None:
    set_up(page, Max_tokens="8")
    open_settings(page)
    _connect(page, "^tools$")
    _connect(page, "^http", key="secret")
    expect(page.get_by_role("button", name=re.compile("^Remove (127|add)"))).to_have_count(2)
    page.get_by_label("Tool choice", exact=True).select_option("None")
    _have_called(page, "add", 4)
    expect(page.get_by_role("article", name="Result of add")).to_have_count(0)
    with page.expect_request(COMPLETIONS) as asked:
        page.get_by_role("button", name="Run once on tools").click()
    sent = read_sent(asked.value)
    assert sent["messages"][-1]["content"] == "5"
    assert [tool["function"]["description"] for tool in sent["tools"]] == ["Adds two numbers"] * 2
    wait_for_answer(page)
    other = sent["tools"][1]["function"]["name"]
    _have_called(page, other, 6)
    with next_answer(page):
        page.get_by_role("button", name="Always run in this chat").click()
    expect(page.get_by_role("article", name=f"Result of {other}")).to_contain_text("7")
    expect(page.get_by_label(re.compile("^Call 127.*without asking me"))).to_be_checked()
    expect(page.get_by_label("Call tools without asking me")).not_to_be_checked()
    _have_called(page, "add", 8)
    with next_answer(page):
        page.get_by_role("button", name="Decline").click()
    expect(page.get_by_role("article", name="Result of add").last).to_contain_text("declined")


def test_a_pdf_becomes_text_of_the_message(page: Page) -> None:
    start_chat(page)
    set_up(page, Max_tokens="8")

    def choose(name: str, data: bytes) -> None:
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Add PDFs or text files").click()
        chooser.value.set_files([{"name": name, "mimeType": "application/pdf", "buffer": data}])

    choose("scan.pdf", make_pdf([""]))
    expect(page.get_by_role("alert")).to_contain_text("“scan.pdf”: has no text")
    choose("notes.pdf", make_pdf(["The number is 4711."]))
    expect(page.get_by_role("list", name="Files of the message")).to_contain_text("notes.pdf")
    expect(page.get_by_role("alert")).to_have_count(0)
    with page.expect_request(COMPLETIONS) as asked:
        send(page, "Which number?")
    content = read_sent(asked.value)["messages"][-1]["content"]
    assert content == "notes.pdf:\n```pdf\nThe number is 4711.\n```\n\nWhich number?"
    wait_for_answer(page)
    expect(questions(page).last).to_contain_text("notes.pdf")


def test_who_allows_no_mcp_servers_is_told_how(tab: OpenTab, server: PageServer) -> None:
    visit: Visit = tab(server)
    visit.page.route("**/v1/admin/mcp", lambda route: route.fulfill(json={"commands": [], "urls": []}))
    visit.page.reload()
    open_settings(visit.page)
    visit.page.get_by_role("button", name="Connect an MCP server").click()
    expect(visit.page.get_by_role("dialog")).to_contain_text("--mcp-commands NAME=COMMAND")
