"""What the models view shows of its routes: memory before loading, imports, and why they are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

from page_server import PageServer
from playwright.sync_api import expect

from conftest import MakePageServer, OpenTab
from mlxr.loading import ASSETS


def test_memory_is_told_before_a_model_is_loaded(server: PageServer, tab: OpenTab) -> None:
    page = tab(server, "/#/models/demo-draft").page
    memory = page.get_by_role("region", name="Memory")
    expect(memory).to_contain_text("needed")
    expect(memory).to_contain_text("Cache 64 MiB")
    with server.client() as client:
        assert client.post("/api/generate", json={"model": "demo-draft"}).status_code == 200
        page.reload()
        expect(memory).to_contain_text("in use")
        assert client.post("/api/generate", json={"model": "demo-draft", "keep_alive": 0}).status_code == 200


def test_why_a_model_does_not_fit_is_told(make_server: MakePageServer, tab: OpenTab) -> None:
    server = make_server(models_memory_bytes="130M", pinned_models="demo")
    memory = tab(server, "/#/models/demo-draft").page.get_by_role("region", name="Memory")
    expect(memory.get_by_role("alert")).to_contain_text("raise the setting models_memory_bytes")


def test_a_file_is_imported_by_its_path(make_server: MakePageServer, tab: OpenTab, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    shutil.copy(ASSETS / "demo-draft.gguf", shelf / "little.gguf")
    page = tab(make_server(import_folders=shelf), "/#/models").page
    field = page.get_by_label("Import a file or folder")
    field.fill("/etc/passwd")
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_text(f"only what lies below {shelf} can be imported")).to_be_visible()
    field.fill(str(shelf / "little.gguf"))
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_role("main").get_by_text("little", exact=True).first).to_be_visible()


def test_without_folders_for_imports_the_remedy_is_told(server: PageServer, tab: OpenTab) -> None:
    page = tab(server, "/#/models").page
    page.get_by_label("Import a file or folder").fill("/some/model.gguf")
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_text("--import-folders FOLDER")).to_be_visible()
