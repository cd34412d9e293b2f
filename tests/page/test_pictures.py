"""Each view as it is in use, in three widths and both themes: it fits, and nothing covers anything else.

`--save-pictures` writes the pictures of the documentation to docs/img: for each view one as it is, and a sheet of all.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chatting import COMPLETIONS, answer_with, ask, choose_model, composer, open_settings, set_up
from page_server import PageServer, wait_until
from playwright.sync_api import Browser, Page, expect
from questions import QUESTION
from test_chat_pictures import count_tokens, draw, drop, write_chat_folder

from conftest import ROOT, OpenTab

FOLDER = ROOT / "docs" / "img"
WIDTHS, HEIGHT, SCHEMES = (1280, 820, 360), 800, ("light", "dark")
SCALE, QUALITY = 0.5, 55  # of a sheet, which is a WebP file
DIAGRAM = "flowchart LR\n  A[Request] --> B{Prefix cached?}\n  B -->|yes| D[Decode]\n  B -->|no| C[Prefill] --> D"
Prepare = Callable[[Page, PageServer], None]


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server that may import a model that sees."""
    folder = tmp_path_factory.mktemp("server")
    server = PageServer(folder, {"import_folders": folder, "image_tokens": 64}).start()
    yield server
    server.kill()


def open_chat(page: Page, server: PageServer) -> None:
    ask(page, QUESTION)
    ask(page, "What does math.sqrt do?")


def open_welcome(page: Page, server: PageServer) -> None:
    expect(page.get_by_role("button", name="What does itertools.chain do?")).to_be_visible()


def open_tools(page: Page, server: PageServer) -> None:
    answer_with(page, {"content": f"```mermaid\n{DIAGRAM}\n```"})
    ask(page, "Draw how a request is answered.")
    page.unroute(COMPLETIONS)
    expect(page.get_by_role("img", name="Diagram")).to_be_visible()
    open_settings(page)
    page.get_by_label("Calculator (answered here)").check()
    page.get_by_label("JavaScript in a sandbox (asks before it runs)").check()
    set_up(page, System_prompt="Be brief.", Temperature="0")


def open_seen(page: Page, server: PageServer) -> None:
    """Open a model that sees; it is removed at the end, as other views show a new server."""
    folder = write_chat_folder(server.folder / "tiny-qwen3-vl", "qwen3vl", 4096)
    with server.client() as client:
        assert client.post("/v1/admin/models/import", json={"path": str(folder), "replace": True}).is_success
    page.reload()
    choose_model(page, folder.name)
    answer_with(page, {"content": "A flag: its left half is red, its right half blue."})
    drop(page, "flag.png", draw(300, 200, "PNG"))
    ask(page, "What is this?")
    page.unroute(COMPLETIONS)
    drop(page, "photo.jpg", draw(800, 600, "JPEG", orientation=6), "image/jpeg")
    drop(page, "notes.txt", b"Red, then blue.", "text/plain")
    composer(page).fill("And here?")
    expect(page.get_by_role("list", name="Files of the message")).to_be_visible()
    count_tokens(page)


def open_sides(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/compare")
    choose_model(page, "demo-draft", page.get_by_role("region", name="B", exact=True))
    page.get_by_role("button", name="Ask all").click()
    page.get_by_label("Mark what differs from A").check()
    expect(page.get_by_role("button", name="B is best")).to_be_visible()


def open_compare(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/compare/sixteen")
    page.get_by_label("Max tokens").fill("40")
    page.get_by_role("button", name="Ask it 16 times").click()
    expect(page.get_by_text("All 16 answers are equal")).to_be_visible(timeout=90_000)


def open_models(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/models/demo")
    expect(page.get_by_role("region", name="Memory")).to_be_visible()


def open_list(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/models")
    expect(page.get_by_role("list", name="Models on this machine")).to_be_visible()
    expect(page.get_by_role("region", name="Discover models").get_by_role("listitem").first).to_be_visible()


def open_page_settings(page: Page, server: PageServer) -> None:
    page.goto(f"{server.url}/#/settings")
    expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible()


def open_engine(page: Page, server: PageServer) -> None:
    """Start eight long answers, some of which share a prompt, over a cache that earlier ones have partly filled."""

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


def compress(picture: bytes) -> bytes:
    """The same picture as a small file."""
    target = io.BytesIO()
    pytest.importorskip("PIL.Image").open(io.BytesIO(picture)).save(target, "WEBP", lossless=True, method=6)
    return target.getvalue()


def draw_sheet(pictures: list[bytes]) -> bytes:
    """The pictures of a view, a row for each theme, as one small file."""
    image = pytest.importorskip("PIL.Image")
    parts = [image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    parts = [part.resize((int(part.width * SCALE), int(part.height * SCALE))) for part in parts]
    rows = [parts[: len(WIDTHS)], parts[len(WIDTHS) :]]
    sheet = image.new("RGB", (sum(part.width for part in rows[0]), 2 * parts[0].height))
    for number, row in enumerate(rows):
        left = 0
        for part in row:
            sheet.paste(part, (left, number * part.height))
            left += part.width
    target = io.BytesIO()
    sheet.save(target, "WEBP", quality=QUALITY, method=6)
    return target.getvalue()


@pytest.mark.parametrize(
    ("name", "shown", "prepare"),
    [
        ("welcome", None, open_welcome),
        ("chat", "light", open_chat),
        ("tools", None, open_tools),
        ("pictures", None, open_seen),
        ("sides", None, open_sides),
        ("compare", "light", open_compare),
        ("list", None, open_list),
        ("models", "light", open_models),
        ("engine", "dark", open_engine),
        ("settings", None, open_page_settings),
    ],
)
def test_a_view_in_use(
    name: str,
    shown: str | None,
    prepare: Prepare,
    tab: OpenTab,
    server: PageServer,
    request: pytest.FixtureRequest,
    find_violations: Callable[[Page], list[str]],
) -> None:
    page = tab(server, width=WIDTHS[0], height=HEIGHT, color_scheme=SCHEMES[0]).page
    prepare(page, server)
    saves, pictures = request.config.getoption("--save-pictures"), list[bytes]()
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": HEIGHT})
            page.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=width)
            if width != WIDTHS[1]:
                assert find_violations(page) == []
            if saves:
                page.wait_for_timeout(300)
                pictures.append(page.screenshot())
            if saves and shown == scheme and width == WIDTHS[0]:
                Path(FOLDER, f"page-{name}.webp").write_bytes(compress(pictures[-1]))
    end_answers(server)
    if prepare is open_seen:
        with server.client() as client:
            assert client.request("DELETE", "/api/delete", json={"model": "tiny-qwen3-vl"}).is_success
    if saves:
        Path(FOLDER, f"views-{name}.webp").write_bytes(draw_sheet(pictures))
