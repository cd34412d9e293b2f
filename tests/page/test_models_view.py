"""Each control of the models view has its effect on the server."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from browsing import Visit, read_sent
from chatting import model_button
from page_server import PageServer
from playwright.sync_api import Locator, Page, expect

import mlxr
from conftest import MakePageServer, OpenTab

DEMO = Path(mlxr.__file__).parent / "assets" / "demo.gguf"


def row_of(page: Page, name: str) -> Locator:
    rows = page.get_by_role("list", name="Models on this machine").get_by_role("listitem")
    return rows.filter(has=page.get_by_role("link", name=name, exact=True))


def read(server: PageServer, path: str) -> Any:
    with server.client() as client:
        return client.get(path).json()


def loaded(server: PageServer) -> set[str]:
    return {model["name"] for model in read(server, "/api/ps")["models"]}


def listed(server: PageServer) -> set[str]:
    return {model["name"] for model in read(server, "/api/tags")["models"]}


@pytest.fixture
def models(visit: Visit, server: PageServer) -> Page:
    visit.page.goto(f"{server.url}/#/models")
    expect(row_of(visit.page, "demo")).to_be_visible()
    return visit.page


def test_the_list_says_what_the_models_are(models: Page) -> None:
    expect(row_of(models, "demo")).to_contain_text("llama · 19.9M · Q8_0 · 2,048 tokens of context")
    expect(row_of(models, "demo")).to_contain_text("20 MiB")
    expect(models.get_by_text("2 on this machine")).to_be_visible()


def test_a_model_is_loaded_and_unloaded(models: Page, server: PageServer) -> None:
    row = row_of(models, "demo-draft")
    row.get_by_role("button", name="Load demo-draft").click()
    expect(row).to_contain_text("Loaded")
    assert "demo-draft:latest" in loaded(server)
    row.get_by_role("button", name="Unload demo-draft").click()
    expect(row).to_contain_text("Not loaded")
    assert "demo-draft:latest" not in loaded(server)


def test_a_model_is_copied_and_the_copy_deleted(models: Page, server: PageServer) -> None:
    row_of(models, "demo").get_by_role("button", name="More for demo").click()
    models.get_by_role("menuitem", name="Copy").click()
    dialog = models.get_by_role("dialog", name="Copy demo")
    dialog.get_by_label("Name of the copy").fill("twin")
    dialog.get_by_role("button", name="Copy", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(row_of(models, "twin")).to_be_visible()
    assert "twin:latest" in listed(server)
    row_of(models, "twin").get_by_role("button", name="More for twin").click()
    models.get_by_role("menuitem", name="Delete").click()
    question = models.get_by_role("dialog", name="Delete twin?")
    expect(question).to_contain_text("Only this name goes: demo has the same file.")
    question.get_by_role("button", name="Keep it").click()
    assert "twin:latest" in listed(server)
    row_of(models, "twin").get_by_role("button", name="More for twin").click()
    models.get_by_role("menuitem", name="Delete").click()
    question.get_by_role("button", name="Delete twin").click()
    expect(row_of(models, "twin")).to_have_count(0)
    assert listed(server) == {"demo:latest", "demo-draft:latest"}


def test_a_copy_that_cannot_be_says_why(models: Page) -> None:
    row_of(models, "demo-draft").get_by_role("button", name="More for demo-draft").click()
    models.get_by_role("menuitem", name="Copy").click()
    dialog = models.get_by_role("dialog", name="Copy demo-draft")
    dialog.get_by_label("Name of the copy").fill("no such:name:at all")
    dialog.get_by_role("button", name="Copy", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("name")
    models.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_a_model_is_replaced_only_when_that_is_said(models: Page, server: PageServer) -> None:
    with server.client() as client:
        made = {"model": "taken", "from": "demo-draft", "system": "Be brief.", "stream": False}
        assert client.post("/api/create", json=made).is_success
        models.reload()
        row_of(models, "demo").get_by_role("button", name="More for demo").click()
        models.get_by_role("menuitem", name="Copy").click()
        dialog = models.get_by_role("dialog", name="Copy demo")
        dialog.get_by_label("Name of the copy").fill("taken")
        dialog.get_by_role("button", name="Copy", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text("There is a model taken")
        assert client.post("/api/show", json={"model": "taken"}).json()["system"] == "Be brief."
        dialog.get_by_role("button", name="Replace taken").click()
        expect(dialog).to_be_hidden()
        assert "system" not in client.post("/api/show", json={"model": "taken"}).json()
        client.request("DELETE", "/api/delete", json={"model": "taken"})


def test_a_chat_begins_with_the_model(models: Page) -> None:
    row_of(models, "demo-draft").get_by_role("button", name="Chat with demo-draft").click()
    expect(model_button(models)).to_have_attribute("data-value", "demo-draft")
    models.get_by_role("link", name="Models", exact=True).click()
    row_of(models, "demo").get_by_role("link", name="demo", exact=True).click()
    models.get_by_role("button", name="Chat with it").click()
    expect(model_button(models)).to_have_attribute("data-value", "demo")


def test_the_details_tell_metadata_tensors_and_memory(models: Page) -> None:
    row_of(models, "demo").get_by_role("button", name="More for demo").click()
    models.get_by_role("menuitem", name="Details").click()
    expect(models.get_by_role("heading", name="demo", exact=True)).to_be_visible()
    models.get_by_text("Chat template", exact=True).click()
    expect(models.get_by_role("region", name="Chat template")).to_contain_text("messages")
    expect(models.get_by_role("region", name="Memory")).to_contain_text("free for models")
    models.get_by_label("Filter metadata").fill("block_count")
    metadata = models.get_by_role("region", name="Metadata").first
    expect(metadata).to_contain_text("llama.block_count")
    expect(metadata.get_by_role("row")).to_have_count(2)
    models.get_by_label("Filter tensors").fill("blk.0.ffn_down")
    expect(models.get_by_role("region", name="Tensors").first).to_contain_text("512 × 1,280")
    models.get_by_label("Filter tensors").fill("nothing like it")
    expect(models.get_by_text("Nothing matches")).to_be_visible()
    models.get_by_role("link", name="Models").first.click()
    expect(row_of(models, "demo")).to_be_visible()


def test_a_model_that_is_not_there(visit: Visit, server: PageServer) -> None:
    visit.page.goto(f"{server.url}/#/models/nobody")
    expect(visit.page.get_by_role("alert").first).to_contain_text("nobody could not be read")


def test_a_pull_that_fails_says_why_and_can_be_dismissed(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server(hub_url="http://127.0.0.1:9")
    page = tab(server, "/#/models").page
    page.get_by_label("Pull a model").fill("hf.co/somebody/something")
    page.get_by_role("button", name="Pull", exact=True).click()
    pulls = page.get_by_role("list", name="Pulls")
    expect(pulls).to_contain_text("hf.co/somebody/something")
    expect(pulls.get_by_role("button", name="Try again")).to_be_visible(timeout=60_000)
    pulls.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Pull a model")).to_have_value("hf.co/somebody/something")
    expect(pulls).to_have_count(0)


def test_a_pull_that_broke_off_is_resumed_or_taken_off_the_list(models: Page) -> None:
    some = '{"status": "pulling", "digest": "sha256:1", "total": 9, "completed": 4}\n{"error": "the hub went away"}\n'
    models.route("**/api/pull", lambda route: route.fulfill(body=some))
    models.get_by_label("Pull a model").fill("hf.co/somebody/something")
    models.get_by_role("button", name="Pull", exact=True).click()
    pulls = models.get_by_role("list", name="Pulls")
    expect(pulls).to_contain_text("the hub went away")
    models.reload()
    expect(pulls).to_contain_text("Not finished")
    expect(pulls.get_by_role("button", name="Resume")).to_be_visible()
    pulls.get_by_role("button", name="Take it off the list").click()
    expect(pulls).to_have_count(0)
    models.unroute("**/api/pull")
    models.route("**/api/pull", lambda route: route.fulfill(body='{"status": "success"}\n'))
    models.get_by_label("Pull a model").fill("tiny")
    models.get_by_role("button", name="Pull", exact=True).click()
    expect(pulls).to_contain_text("It is here.")
    pulls.get_by_role("button", name="Chat with it").click()
    expect(model_button(models)).to_have_accessible_name("Model: tiny (not here)")


def test_well_known_models_are_found_and_pulled(models: Page) -> None:
    asked = []
    models.route("**/api/pull", lambda route: (asked.append(route.request), route.abort()))
    known = {"name": "tiny:1b", "about": "small chat", "repository": "a/tiny", "size_bytes": 2**30, "fits": "yes"}
    large = {"name": "huge:1t", "about": "code", "repository": "a/huge", "size_bytes": 2**40, "fits": "no"}
    table = {"models": [known | {"tokens_per_s": 12.3}, large | {"tokens_per_s": 0.02}], "hub": []}
    hub = {"hub": [{"name": "hf.co/a/tiny-GGUF", "downloads": 1234}]}
    models.route("**/v1/admin/library", lambda route: route.fulfill(json=table))
    models.route("**/v1/admin/library?search=tiny", lambda route: route.fulfill(json=table | hub))
    models.route("**/v1/admin/library?search=gone", lambda route: route.fulfill(json=table))
    models.reload()
    rows = models.get_by_role("region", name="Well-known models").get_by_role("listitem")
    expect(rows).to_have_count(1)  # only the demo is here, so the list is open
    expect(rows).to_contain_text("1.0 GiBFits, about 12.3 tokens/s")
    models.get_by_label("Only those that fit").uncheck()
    models.get_by_label("Search the well-known models").fill("CODE")
    expect(rows).to_contain_text("Too large for the free memory")
    models.get_by_label("Search the well-known models").fill("tiny")
    models.get_by_role("button", name=re.compile("Pull ")).last.click()
    expect(models.get_by_role("list", name="Pulls")).to_contain_text("tiny:1b")
    expect(
        models.get_by_role("list", name="Pulls").get_by_role("button", name="Edit")
    ).to_be_visible()  # it was refused
    assert [read_sent(request) for request in asked] == [{"model": "tiny:1b"}]
    models.get_by_role("button", name="Search Hugging Face, too").click()
    on_hub = models.get_by_role("region", name="On Hugging Face").get_by_role("listitem")
    expect(on_hub).to_contain_text("hf.co/a/tiny-GGUF1,234 downloads in a month")
    on_hub.get_by_role("button").click()
    expect(models.get_by_role("list", name="Pulls")).to_contain_text("hf.co/a/tiny-GGUF")
    models.get_by_label("Search the well-known models").fill("gone")
    models.get_by_role("button", name="Search Hugging Face, too").click()
    expect(models.get_by_text("Hugging Face has no GGUF files for “gone”.")).to_be_visible()
    models.get_by_role("button", name="Discover models").click()
    expect(rows).to_have_count(0)


def test_a_file_is_imported(make_server: MakePageServer, tab: OpenTab, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    shutil.copy(DEMO, folder / "mine.gguf")
    server = make_server(import_folders=str(folder))
    page = tab(server, "/#/models").page
    page.get_by_label("Import a file or folder").fill("missing.gguf")
    page.get_by_role("button", name="Import", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("there is no file")
    page.get_by_label("Import a file or folder").fill("mine.gguf")
    page.get_by_role("button", name="Import", exact=True).click()
    expect(row_of(page, "mine")).to_be_visible()
    assert "mine:latest" in listed(server)


def test_imports_that_are_not_allowed_say_how_to_allow_them(models: Page) -> None:
    expect(models.get_by_label("Import a file or folder")).to_be_disabled()
    expect(models.get_by_text("--import-folders")).to_be_visible()
