"""Folders in the chat: attached, looked up by words or by vectors, shown with each question, kept and removed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import IS_FIREFOX, Visit, read_sent, saving
from chatting import (
    COMPLETIONS,
    answer_with,
    answers,
    ask,
    composer,
    questions,
    send,
    set_up,
    start_chat,
    wait_for_answer,
)
from encoder_folder import make_encoder_folder
from made_documents import make_pdf
from page_server import PageServer
from playwright.sync_api import Browser, Locator, Page, Route, expect

from conftest import OpenTab

HOSTILE = "<img src=x onerror=\"document.title = 'hit'\">"
NOTES = {
    "cat.md": "# The cat\n\nThe cat is called Minka and sleeps on the mat.",
    "trips/paris.txt": "In May we went to Paris by train.\n\nThe hotel was near the river.",
    f"{HOSTILE[:4]}b.md": f"# Hostile\n\n{HOSTILE} wolves",
    ".secret.md": "Not for the model: Minka",
    "node_modules/left/pad.md": "Not for the model: Minka",
    "photo.png": "Minka",
    "broken.txt": "",
}


@pytest.fixture(scope="module")
def seeking(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with the demo, and beside it an encoder whose files say how it makes vectors."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "models").mkdir()
    encoder = make_encoder_folder(folder / "seeker", "bert", ("Pooling:mean_tokens", "Normalize"))
    server = PageServer(folder, {"import_folders": folder}).start()
    with server.client() as client:
        imported = client.post("/v1/admin/models/import", json={"path": str(encoder)})
        assert imported.status_code == 200, imported.text
    yield server
    server.kill()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder with three texts, and other files that nobody means."""
    folder = tmp_path / "notes"
    for name, text in NOTES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "broken.txt").write_bytes(b"\xff\xfe\x00Minka")
    return folder


def attach(page: Page, folder: Path) -> Locator:
    """Attach a folder by its button, and return the chip that stands for it."""
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Attach a folder").click()
    waiting.value.set_files(folder)
    chip = chips(page).get_by_role("listitem").filter(has_text=folder.name)
    expect(chip).to_be_visible()
    expect(page.get_by_role("progressbar")).to_have_count(0)
    return chip


def chips(page: Page) -> Locator:
    return page.get_by_role("list", name="Folders of the chat")


def open_passages(question: Locator, count: str) -> Locator:
    """Unfold the passages that went along with a question."""
    question.get_by_role("button", name=count, exact=True).click()
    return question.get_by_role("list", name="Passages that went along")


def test_a_folder_is_looked_up_by_words(
    visit: Visit, notes: Path, find_violations: Callable[[Page], list[str]]
) -> None:
    page = visit.page
    set_up(page, Max_tokens="3")
    composer(page).fill("Half a question")
    chip = attach(page, notes)
    expect(chip).to_contain_text("3 files, 3 passages, by words")
    expect(composer(page)).to_have_value("Half a question")
    said = page.get_by_role("status").filter(has_text="Left out")
    expect(said).to_contain_text("“notes/.secret.md”, “notes/node_modules/left/pad.md” (hidden")
    expect(said).to_contain_text("“notes/photo.png”, “notes/broken.txt” (no text)")
    if not IS_FIREFOX:
        assert find_violations(page) == []
    page.get_by_role("button", name="Close the note").click()
    expect(said).to_have_count(0)
    chip.get_by_role("button", name="About the lookup in notes").click()
    about = page.get_by_role("dialog", name="the lookup in notes")
    expect(about).to_contain_text("no model for vectors")
    expect(about).to_contain_text("mlxr pull qwen3-embedding:0.6b")
    expect(about).to_contain_text("photo.png")
    page.keyboard.press("Escape")

    answer_with(page, {"content": "It is Minka [1], not [7]."})
    with page.expect_request(COMPLETIONS) as asking:
        answer = ask(page, "What is the cat called?")
    (message,) = read_sent(asking.value)["messages"]
    quoted = message["content"]
    assert quoted.startswith(f"[1] notes/cat.md:1\n{NOTES['cat.md']}\n\n")
    assert quoted.endswith("Answer from these passages and name their numbers, such as [1]: What is the cat called?")
    assert "Not for the model" not in quoted
    question = questions(page).first
    expect(question).not_to_contain_text("Answer from these passages")
    answer.get_by_role("button", name="Passage 1: notes/cat.md:1").click()
    expect(page.get_by_role("dialog", name="notes/cat.md:1")).to_contain_text("The cat is called Minka")
    page.keyboard.press("Escape")
    expect(answer).to_contain_text("not [7].")

    page.reload()  # all is kept, and another answer is to the same bytes
    expect(chips(page)).to_contain_text("3 files, 3 passages, by words")
    with page.expect_request(COMPLETIONS) as again:
        answers(page).first.get_by_role("button", name="Regenerate").click()
    assert read_sent(again.value)["messages"] == [message]
    wait_for_answer(page)
    passages = open_passages(questions(page).first, "1 passage")
    expect(passages.get_by_role("listitem")).to_have_text(f"[1] notes/cat.md:1{NOTES['cat.md']}")
    if not IS_FIREFOX:
        assert find_violations(page) == []

    ask(page, "Are there wolves?")
    passages = open_passages(questions(page).last, "1 passage")
    expect(passages).to_contain_text(HOSTILE)
    expect(passages.locator("img")).to_have_count(0)
    with page.expect_request(COMPLETIONS) as unknown:
        ask(page, "Zebras?")
    told = read_sent(unknown.value)["messages"]
    assert (told[0], told[-1]["content"]) == (message, "Zebras?")
    expect(questions(page).last).to_contain_text("No passage of the folder shares a word with this question.")
    assert page.title() != "hit"

    page.get_by_role("button", name="Actions for “What is the cat called?”").first.click()
    with saving(page) as saved:
        page.get_by_role("menuitem", name="Export as JSON").click()
    (whole,) = json.loads(saved.text)["conversations"]
    (first,) = (one for one in whole["messages"] if one["parent"] is None)
    assert first["passages"][0]["path"] == "notes/cat.md"
    chips(page).get_by_role("button", name="Remove notes from the chat").click()
    expect(chips(page)).to_have_count(0)
    with page.expect_request(COMPLETIONS) as plain:
        ask(page, "And the cat?")
    assert read_sent(plain.value)["messages"][-1]["content"] == "And the cat?"


def test_a_folder_is_looked_up_by_vectors(seeking: PageServer, tab: OpenTab, notes: Path) -> None:
    visit = tab(seeking)
    page = visit.page
    set_up(page, Max_tokens="3")
    with page.expect_request("**/v1/embeddings") as embedding:
        chip = attach(page, notes)
    expect(chip).to_contain_text("3 files, 3 passages, by vectors")
    asked = read_sent(embedding.value)
    assert (asked["model"], asked["input_type"], len(asked["input"])) == ("seeker", "document", 3)
    with page.expect_request("**/v1/embeddings") as embedding:
        ask(page, NOTES["trips/paris.txt"])  # nothing is nearer to a text than itself
    assert read_sent(embedding.value)["input_type"] == "query"
    passages = open_passages(questions(page).first, "3 passages")
    expect(passages.get_by_role("listitem").first).to_contain_text("[1] notes/trips/paris.txt:1")

    start_chat(page)  # another chat, another folder with one more text: only that is computed
    (notes / "new.md").write_text("Rain falls on Berlin.")
    with page.expect_request("**/v1/embeddings") as embedding:
        attach(page, notes)
    assert read_sent(embedding.value)["input"] == ["Rain falls on Berlin."]
    page.reload()
    expect(chips(page)).to_contain_text("4 files, 4 passages, by vectors")

    seeking.kill()
    send(page, "Where does rain fall?")
    expect(page.get_by_role("alert").filter(has_text="Your question was not sent")).to_contain_text(
        "The server does not answer"
    )
    expect(composer(page)).to_have_value("Where does rain fall?")
    expect(questions(page)).to_have_count(0)
    seeking.start()
    composer(page).press("Enter")
    expect(questions(page)).to_have_count(1)
    wait_for_answer(page)
    expect(questions(page).first.get_by_role("button", name="4 passages")).to_be_visible()

    with seeking.client() as client:
        assert client.request("DELETE", "/api/delete", json={"model": "seeker"}).status_code == 200
    question = questions(page).first
    question.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Your message").fill("Where is it dry?")
    page.get_by_role("button", name="Save and ask again").click()
    expect(page.get_by_role("alert")).to_contain_text("“seeker”, which made the vectors of “notes”, is gone")
    expect(page.get_by_role("textbox", name="Your message")).to_have_value("Where is it dry?")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="About the lookup in notes").click()
    page.get_by_role("button", name="Compute the vectors anew").click()
    expect(chips(page)).to_contain_text("by words")
    visit.faults.clear()


def test_vectors_can_be_stopped_and_computed_later(seeking: PageServer, tab: OpenTab, tmp_path: Path) -> None:
    visit = tab(seeking)
    page = visit.page
    with seeking.client() as client:
        client.post("/v1/admin/models/import", json={"path": str(seeking.folder / "seeker"), "replace": True})
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index}.md").write_text(f"Text {index}")
    waiting: list[object] = []
    page.route("**/v1/embeddings", lambda route: waiting.append(route))
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach a folder").click()
    chooser.value.set_files(folder)
    expect(page.get_by_role("progressbar", name="Vectors that are computed")).to_have_attribute("max", "40")
    composer(page).fill("Which?")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("button", name="Stop the vectors").click()
    expect(chips(page)).to_contain_text("40 files, 40 passages, by words")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.unroute_all()
    page.get_by_role("button", name="About the lookup in many").click()
    page.get_by_role("button", name="Compute the vectors", exact=True).click()
    expect(chips(page)).to_contain_text("by vectors")


def test_a_question_is_sent_behind_what_is_there_once_it_was_looked_up(
    seeking: PageServer, tab: OpenTab, notes: Path
) -> None:
    page = tab(seeking).page
    with seeking.client() as client:
        client.post("/v1/admin/models/import", json={"path": str(seeking.folder / "seeker"), "replace": True})
    set_up(page, Max_tokens="3")
    holding: list[Route] = []
    page.route("**/v1/embeddings", lambda route: holding.append(route))
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach a folder").click()
    chooser.value.set_files(notes)
    offered = page.get_by_role("list", name="Questions to begin with").get_by_role("button")
    expect(page.get_by_role("progressbar", name="Vectors that are computed")).to_be_visible()
    expect(offered.first).to_be_disabled()
    release(page, holding)
    expect(chips(page)).to_contain_text("by vectors")
    offered.first.click()
    expect(offered.first).to_be_disabled()
    release(page, holding)
    expect(questions(page)).to_have_count(1)
    wait_for_answer(page)
    page.unroute_all()
    ask(page, "And the second?")

    page.route("**/v1/embeddings", lambda route: holding.append(route))
    send(page, "What is left?")
    expect(page.get_by_role("button", name="Stop the lookup")).to_be_visible()
    questions(page).last.get_by_role("button", name="Delete").click()
    expect(questions(page)).to_have_count(1)
    with page.expect_request(COMPLETIONS) as asking:
        release(page, holding)
    sent = read_sent(asking.value)["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    wait_for_answer(page)

    send(page, "Not now")
    expect(page.get_by_role("button", name="Stop the lookup")).to_be_visible()
    page.route(COMPLETIONS, lambda route: None)  # an answer that does not come before it is stopped
    answers(page).last.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
    release(page, holding)
    expect(page.get_by_text("Looks the question up…")).to_have_count(0)
    expect(composer(page)).to_have_value("Not now")
    expect(questions(page)).to_have_count(2)
    page.get_by_role("button", name="Stop the answer").click()
    wait_for_answer(page)


def release(page: Page, holding: list[Route]) -> None:
    """Let a request for vectors that is held go on, once there is one."""
    while not holding:
        page.wait_for_timeout(20)
    holding.pop().continue_()


@pytest.mark.skipif(IS_FIREFOX, reason="its driver drops nothing from the system")
def test_a_folder_is_dropped(page: Page, tmp_path: Path) -> None:
    (tmp_path / "drop" / "below" / ".git").mkdir(parents=True)
    (tmp_path / "drop" / "paper.pdf").write_bytes(make_pdf(["The number is 4711."]))
    (tmp_path / "drop" / "below" / "note.md").write_text("Colours are below.")
    (tmp_path / "drop" / "below" / ".git" / "config").write_text("Colours of git.")
    composer(page).fill("A question")
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(tmp_path / "drop")], "dragOperationsMask": 1}
    for event in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": event, "x": 800, "y": 400, "data": data})
    expect(chips(page)).to_contain_text("2 files, 2 passages, by words")
    expect(composer(page)).to_have_value("A question")
    set_up(page, Max_tokens="3")
    ask(page, "Which number?")
    expect(open_passages(questions(page).first, "1 passage")).to_contain_text("[1] drop/paper.pdf:1The number is 4711.")


def test_a_long_text_is_looked_up_instead_of_sent(page: Page, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("\n\n".join(f"Paragraph {index} is about number {index}." for index in range(2_000)))
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Add PDFs or text files").click()
    waiting.value.set_files(long)
    page.get_by_role("button", name="Look up in long.txt instead of sending all of it").click()
    expect(chips(page)).to_contain_text("1 file,")
    expect(page.get_by_role("list", name="Files of the message")).to_have_count(0)
    huge = tmp_path / "huge.txt"
    huge.write_text("One line of a very long text.\n\n" * 40_000)
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Add PDFs or text files").click()
    waiting.value.set_files(huge)
    expect(chips(page).get_by_role("listitem")).to_have_count(2)
    set_up(page, Max_tokens="3")
    ask(page, "What is paragraph 1234 about?")
    expect(open_passages(questions(page).first, "1 passage")).to_contain_text("number 1234")
