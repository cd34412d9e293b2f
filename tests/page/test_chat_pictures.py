"""Pictures and scans in the chat: dropped, pasted and chosen, counted, shown to a model that sees, and kept."""

from __future__ import annotations

import base64
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import IS_FIREFOX, read_sent
from chatting import ask, choose_model, composer, copy_by, figures_of, questions, set_up
from made_documents import make_pdf
from page_server import PageServer
from playwright.sync_api import Browser, Locator, Page, expect

from conftest import ROOT, OpenTab

sys.path.insert(0, str(ROOT / "tests" / "models"))
Image = pytest.importorskip("PIL.Image")

from vision_models import write_chat_folder  # noqa: E402 -- needs the path

DROP = """([target, name, type, base64]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type }));
  for (const event of ["dragenter", "dragover", "drop"])
    target.dispatchEvent(new DragEvent(event, { bubbles: true, cancelable: true, dataTransfer: data }));
}"""
COPY = """async (base64) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  await navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) })]);
}"""
# The clipboard of a Firefox without windows takes no pictures, so the test makes the event as Firefox makes it.
PASTE = """([target, base64]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], "image.png", { type: "image/png" }));
  const event = new ClipboardEvent("paste", { bubbles: true, cancelable: true });
  Object.defineProperty(event, "clipboardData", { value: data });
  target.dispatchEvent(event);
}"""
SIZE = "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server whose default model sees, beside the demo."""
    folder = tmp_path_factory.mktemp("server")
    model = write_chat_folder(folder / "eyes", "qwen3vl", 4096)
    server = PageServer(folder, {"default_model": str(model), "image_tokens": 64}).start()
    yield server
    server.kill()


def draw(width: int, height: int, kind: str, orientation: int = 1) -> bytes:
    """Make a file of a picture whose left half is red and whose right half is blue."""
    picture = Image.new("RGB", (width, height), (0, 0, 255))
    picture.paste((255, 0, 0), (0, 0, width // 2, height))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    picture.save(buffer, kind, exif=exif)
    return buffer.getvalue()


def drop(page: Page, name: str, data: bytes, media_type: str = "image/png") -> None:
    """Drop a file on the message."""
    target = composer(page).element_handle()
    page.evaluate(DROP, [target, name, media_type, base64.b64encode(data).decode()])


def paste(page: Page, data: bytes) -> None:
    """Copy a picture as a program for pictures does, and paste it into the message."""
    text = base64.b64encode(data).decode()
    if IS_FIREFOX:
        page.evaluate(PASTE, [composer(page).element_handle(), text])
        return
    page.evaluate(COPY, text)
    composer(page).press("Control+V")


def decode(url: str) -> bytes:
    return base64.b64decode(url.partition(";base64,")[2])


def pictures_of_message(page: Page) -> Locator:
    return page.get_by_role("list", name="Pictures of the message").last


def count_tokens(page: Page) -> int:
    """The number beside the message that is being written."""
    told = page.get_by_text(re.compile(r"^[\d,]+ tokens with what came before"))
    expect(told).to_be_visible()
    return int(told.inner_text().split()[0].replace(",", ""))


def test_pictures_are_counted_seen_shown_and_kept(server: PageServer, tab: OpenTab, tmp_path: Path) -> None:
    page = tab(server).page
    set_up(page, Max_tokens="3")
    small, large = draw(64, 48, "PNG"), draw(3000, 1200, "JPEG", orientation=6)  # a quarter to the right
    (tmp_path / "photo.jpg").write_bytes(large)
    attached = pictures_of_message(page)
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Add pictures, PDFs or text files").click()
    waiting.value.set_files(tmp_path / "photo.jpg")
    expect(attached.get_by_role("img", name="photo.jpg")).to_be_visible()
    assert attached.get_by_role("img").bounding_box()["width"] == 72  # type: ignore[index]
    count_tokens(page)
    with page.expect_request("**/v1/chat/completions/input_tokens"):  # a text is counted once it rests
        composer(page).fill("What is this?")
    one = count_tokens(page)
    drop(page, "small.png", small)
    paste(page, draw(40, 40, "PNG"))
    expect(attached.get_by_role("img")).to_have_count(3)
    page.get_by_role("button", name="Remove image.png").click()
    expect(attached.get_by_role("img")).to_have_count(2)
    counted = count_tokens(page)
    assert counted > one
    with page.expect_request("**/v1/chat/completions") as asking:
        answer = ask(page, "What is this?")
    expect(answer.get_by_role("alert")).to_have_count(0)
    expect(figures_of(answer)).to_contain_text(re.compile(f"Cached\\d+ of {counted:,}prompt tokens"))
    page.keyboard.press("Escape")
    (message,) = read_sent(asking.value)["messages"]
    first, second, text = message["content"]
    assert (decode(second["image_url"]["url"]), text) == (small, {"type": "text", "text": "What is this?"})
    seen = Image.open(io.BytesIO(decode(first["image_url"]["url"])))
    assert seen.size == (819, 2048)
    red, blue = seen.getpixel((400, 500)), seen.getpixel((400, 1500))
    assert red[0] > 200 > 50 > red[2]
    assert blue[2] > 200 > 50 > blue[0]

    page.reload()
    pictures = questions(page).first.locator("img")
    expect(pictures).to_have_count(2)  # those of the question; the next message has none
    expect(page.get_by_role("list", name="Pictures of the message")).to_have_count(1)
    assert pictures.first.evaluate(SIZE) == [819, 2048]
    page.get_by_role("button", name="Enlarge photo.jpg").click()
    shown = page.get_by_role("dialog", name="photo.jpg")
    assert shown.locator("img").evaluate(SIZE) == [819, 2048]
    shown.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Actions for “What is this?”").first.click()
    page.get_by_role("menuitem", name="View code").click()
    dialog = page.get_by_role("dialog", name="View code")
    expect(dialog).to_contain_text("Pictures are shown by their beginnings")
    assert len(dialog.inner_text()) < 5000
    assert base64.b64encode(small).decode() in copy_by(dialog.get_by_role("button", name="Copy code"))
    page.keyboard.press("Escape")

    choose_model(page, "Demo: Python library only")
    paste(page, small)
    expect(page.get_by_role("alert")).to_contain_text("demo reads text only. Choose a model that sees")
    expect(page.get_by_role("button", name="Add PDFs or text files")).to_be_visible()
    choose_model(page, "eyes (default)")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_photo_of_a_phone_stands_upright_and_a_scan_is_seen(server: PageServer, tab: OpenTab) -> None:
    page = tab(server).page
    set_up(page, Max_tokens="3")
    photo, scan = draw(320, 200, "JPEG", orientation=8), make_pdf([""])  # held upright, turned to the left
    drop(page, "IMG_1.jpg", photo, "image/jpeg")
    expect(pictures_of_message(page).get_by_role("img", name="IMG_1.jpg")).to_be_visible()
    assert pictures_of_message(page).get_by_role("img").evaluate(SIZE) == [200, 320]
    alone = count_tokens(page)
    drop(page, "scan.pdf", scan, "application/pdf")
    drop(page, "text.pdf", make_pdf(["The number is 4711."]), "application/pdf")
    files = page.get_by_role("list", name="Files of the message")
    expect(files.get_by_role("listitem")).to_have_count(2)
    expect(files).to_contain_text("a scan")
    assert count_tokens(page) > alone
    with page.expect_request("**/v1/chat/completions") as asking:
        answer = ask(page, "Which number?")
    expect(answer.get_by_role("alert")).to_have_count(0)
    picture, document, text = read_sent(asking.value)["messages"][0]["content"]
    assert decode(picture["image_url"]["url"]) == photo, "it is small, so it is sent as it is, with its orientation"
    assert (document["file"]["filename"], decode(document["file"]["file_data"])) == ("scan.pdf", scan)
    assert text["text"] == "text.pdf:\n```pdf\nThe number is 4711.\n```\n\nWhich number?"
    page.reload()
    expect(questions(page).first.get_by_role("list", name="Files of the message")).to_contain_text("a scan")
    assert questions(page).first.locator("img").evaluate(SIZE) == [200, 320]
