"""Pictures in the chat: dropped, pasted and chosen, shown to a model that sees, and kept."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from browsing import read_sent
from chatting import ask, choose_model, composer, questions, set_up
from playwright.sync_api import Page, expect

from conftest import ROOT, MakePageServer, OpenTab

sys.path.insert(0, str(ROOT / "tests" / "models"))
Image = pytest.importorskip("PIL.Image")

from vision_models import write_chat_folder  # noqa: E402 -- needs the path

GIVE = """([target, kind, name, type, base64]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  if (kind === "paste") target.dispatchEvent(new ClipboardEvent("paste", { ...options, clipboardData: data }));
  else for (const event of ["dragenter", "dragover", "drop"])
    target.dispatchEvent(new DragEvent(event, { ...options, dataTransfer: data }));
}"""


def draw(width: int, height: int, kind: str, orientation: int = 1) -> bytes:
    """A file of a picture whose left half is red, and its right half blue."""
    picture = Image.new("RGB", (width, height), (0, 0, 255))
    picture.paste((255, 0, 0), (0, 0, width // 2, height))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    picture.save(buffer, kind, exif=exif)
    return buffer.getvalue()


def give(page: Page, kind: str, name: str, data: bytes) -> None:
    target = composer(page).element_handle()
    page.evaluate(GIVE, [target, kind, name, "image/png", base64.b64encode(data).decode()])


def decode_part(part: dict[str, Any]) -> bytes:
    return base64.b64decode(part["image_url"]["url"].partition(";base64,")[2])


def test_pictures_are_seen_shown_and_kept(make_server: MakePageServer, tab: OpenTab, tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "eyes", "qwen3vl")
    page = tab(make_server(default_model=str(folder), image_tokens=64)).page
    set_up(page, Max_tokens="3")
    small, large = draw(64, 48, "PNG"), draw(3000, 1200, "JPEG", orientation=6)  # a quarter to the right
    (tmp_path / "photo.jpg").write_bytes(large)
    attached = page.get_by_role("list", name="Pictures of the message")
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Add pictures, PDFs or text files").click()
    waiting.value.set_files(tmp_path / "photo.jpg")
    expect(attached.get_by_role("img", name="photo.jpg")).to_be_visible()
    give(page, "drop", "small.png", small)
    give(page, "paste", "pasted.png", draw(40, 40, "PNG"))
    expect(attached.get_by_role("img")).to_have_count(3)
    page.get_by_role("button", name="Remove pasted.png").click()
    with page.expect_request("**/v1/chat/completions") as asking:
        answer = ask(page, "What is this?")
    expect(answer.get_by_role("alert")).to_have_count(0)
    (message,) = read_sent(asking.value)["messages"]
    first, second, text = message["content"]
    assert (decode_part(second), text) == (small, {"type": "text", "text": "What is this?"})
    seen = Image.open(io.BytesIO(decode_part(first)))
    assert seen.size == (819, 2048)
    red, blue = seen.getpixel((400, 500)), seen.getpixel((400, 1500))
    assert red[0] > 200 > 50 > red[2]
    assert blue[2] > 200 > 50 > blue[0]

    expect(attached).to_have_count(1)  # that of the question; the next message has none
    page.reload()
    pictures = questions(page).first.get_by_role("img")
    expect(pictures).to_have_count(2)
    assert pictures.first.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [
        819,
        2048,
    ]
    page.get_by_role("button", name="Actions for “What is this?”").first.click()
    page.get_by_role("menuitem", name="View code").click()
    dialog = page.get_by_role("dialog", name="View code")
    expect(dialog).to_contain_text("Pictures are shown by their beginnings")
    assert len(dialog.inner_text()) < 5000
    dialog.get_by_role("button", name="Copy code").click()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert base64.b64encode(small).decode() in copied
    page.keyboard.press("Escape")

    choose_model(page, "Demo: Python library only")
    give(page, "paste", "small.png", small)
    expect(page.get_by_role("alert")).to_contain_text("demo reads text only. Choose a model that sees")
    expect(page.get_by_role("button", name="Add PDFs or text files")).to_be_visible()
    choose_model(page, f"{folder.name} (default)")
    expect(page.get_by_role("alert")).to_have_count(0)
