"""The models view shows the memory that a model would take before it is loaded, and why it does not fit."""

from __future__ import annotations

from page_server import PageServer
from playwright.sync_api import expect

from conftest import MakePageServer, OpenTab


def test_memory_is_told_before_a_model_is_loaded(server: PageServer, tab: OpenTab) -> None:
    page = tab(server, "/#/models/demo-draft").page
    memory = page.get_by_role("region", name="Memory")
    expect(memory).to_contain_text("needed")
    expect(memory).to_contain_text("Reserved up to 64 MiB for the cache")
    expect(memory).to_contain_text("A conversation of 2,048 tokens fills")
    page.get_by_label("Length of a conversation").press("Home")
    expect(memory).to_contain_text("A conversation of 512 tokens fills")
    with server.client() as client:
        assert client.post("/api/generate", json={"model": "demo-draft"}).status_code == 200
        page.reload()
        expect(memory).to_contain_text("in use")
        assert client.post("/api/generate", json={"model": "demo-draft", "keep_alive": 0}).status_code == 200


def test_why_a_model_does_not_fit_is_told(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server(models_memory_bytes="130M", pinned_models="demo")
    memory = tab(server, "/#/models/demo-draft").page.get_by_role("region", name="Memory")
    expect(memory.get_by_role("alert")).to_contain_text("raise the setting models_memory_bytes")
