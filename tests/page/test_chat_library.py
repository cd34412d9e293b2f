"""The conversations of a browser: finding, renaming, deleting, exporting and importing them; many of them; two tabs."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browsing import read_sent, saving
from chatting import (
    COMPLETIONS,
    QUESTION,
    answer_with,
    answers,
    ask,
    composer,
    endless_answers,
    first_question,
    next_answer,
    questions,
    scroll_to_beginning,
    send,
    start_chat,
    text_of,
    wait_for_answer,
)
from long_demo import write_long_demo
from page_server import PageServer, wait_until
from playwright.sync_api import BrowserContext, Locator, Page, Route, expect

from conftest import MakePageServer, OpenTab

OTHER = "What does len do?"


def list_of(page: Page) -> Locator:
    """The conversations in the column at the side."""
    return page.get_by_role("navigation", name="Conversations").get_by_role("link")


def choose(page: Page, action: str, name: str = "Import, export, select") -> None:
    """Choose something from a menu."""
    page.get_by_role("button", name=name).first.click()
    page.get_by_role("menuitem", name=action).click()


def import_file(page: Page, path: Path) -> None:
    """Import a file of conversations."""
    page.get_by_label("File of conversations").set_input_files(path)


def make_file(path: Path, conversations: int, messages: int) -> Path:
    """An exported file with many conversations of many messages each."""
    made = []
    for number in range(conversations):
        rows = []
        for index in range(messages):
            role = "assistant" if index % 2 else "user"
            content = f"Message {index} of {number}. " + "Some **words** to read.\n\n" * (1 + index % 5)
            rows.append(
                {"id": f"{index}", "parent": f"{index - 1}" if index else None, "created": index, "content": content}
                | ({"role": role} if role == "user" else {"role": role, "status": "done", "model": "demo"})
            )
        made.append(
            {"title": f"Talk {number}", "named": True, "updated": number, "leaf": rows[-1]["id"], "messages": rows}
        )
    path.write_text(json.dumps({"format": "mlxr-conversations", "version": 1, "conversations": made}))
    return path


@pytest.mark.smoke
def test_conversations_are_searched_renamed_and_deleted(page: Page) -> None:
    ask(page)
    start_chat(page)
    ask(page, OTHER)
    expect(list_of(page)).to_have_count(2)
    search = page.get_by_role("searchbox", name="Search the conversations")
    search.fill("LEN do")
    expect(list_of(page)).to_have_text([OTHER])
    search.fill("pathname components")  # what the model said
    expect(list_of(page)).to_have_text([QUESTION])
    search.fill("nowhere at all")
    expect(page.get_by_text("Nothing has “nowhere at all” in it.")).to_be_visible()
    search.fill("")
    choose(page, "Rename", f"Actions for “{OTHER}”")
    page.get_by_role("textbox", name="Title").fill("Lengths")
    page.get_by_role("button", name="Rename").click()
    expect(list_of(page).first).to_have_text("Lengths")
    page.reload()
    expect(list_of(page)).to_have_text(["Lengths", QUESTION])
    expect(page.get_by_role("heading", level=1, name="Lengths")).to_be_visible()
    choose(page, "Delete", "Actions for “Lengths”")
    expect(list_of(page)).to_have_text([QUESTION])
    page.get_by_role("button", name="Undo").click()
    expect(list_of(page)).to_have_text(["Lengths", QUESTION])
    choose(page, "Delete", "Actions for “Lengths”")
    expect(page.get_by_text("Deleted “Lengths”.")).to_be_visible()
    page.get_by_role("button", name="Dismiss").click()
    expect(list_of(page)).to_have_text([QUESTION])
    page.reload()
    expect(list_of(page)).to_have_text([QUESTION])


def test_conversations_are_pinned_put_into_folders_and_deleted_together(page: Page, tmp_path: Path) -> None:
    import_file(page, make_file(tmp_path / "talks.json", 4, 2))
    column = page.get_by_role("navigation", name="Conversations")
    expect(column.get_by_role("button", name="Older")).to_be_visible()
    choose(page, "Pin", "Actions for “Talk 0”")
    expect(list_of(page).first).to_have_text("Talk 0")
    choose(page, "Move to a folder", "Actions for “Talk 1”")
    page.get_by_label("Folder", exact=True).fill("Work")
    page.get_by_role("button", name="Move", exact=True).click()
    expect(list_of(page)).to_have_text(["Talk 0", "Talk 1", "Talk 3", "Talk 2"])
    column.get_by_role("button", name="Work").click()
    expect(list_of(page)).to_have_text(["Talk 0", "Talk 3", "Talk 2"])
    page.reload()
    expect(list_of(page)).to_have_text(["Talk 0", "Talk 3", "Talk 2"])
    choose(page, "Unpin", "Actions for “Talk 0”")
    choose(page, "Select several")
    page.get_by_label("Select “Talk 2”").check()
    page.get_by_label("Select “Talk 3”").check()
    page.get_by_role("button", name="Move the selected to a folder").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Delete the selected").click()
    expect(list_of(page)).to_have_text(["Talk 0"])
    expect(page.get_by_text("Deleted 2 conversations.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(list_of(page)).to_have_text(["Talk 3", "Talk 2", "Talk 0"])
    choose(page, "Select several")
    page.get_by_role("button", name="Done").click()


def test_all_conversations_are_exported_and_deleted_from_the_settings(page: Page, tmp_path: Path) -> None:
    import_file(page, make_file(tmp_path / "talks.json", 3, 2))
    expect(page.get_by_text("Imported 3 conversations.")).to_be_visible()
    page.get_by_role("link", name="Settings", exact=True).click()
    expect(page.get_by_text("3 conversations are kept in this browser")).to_be_visible()
    with saving(page) as saved:
        page.get_by_role("button", name="Export all conversations").click()
    assert len(json.loads(saved.text)["conversations"]) == 3
    page.get_by_role("button", name="Delete all conversations").click()
    expect(page.get_by_text("0 conversations are kept in this browser")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("3 conversations are kept in this browser")).to_be_visible()


def test_the_model_writes_the_title_of_a_conversation_that_begins_with_a_long_message(
    make_server: MakePageServer, tab: OpenTab
) -> None:
    server = make_server(default_model="")
    with server.client() as client:
        assert client.post("/api/create", json={"model": "coder", "from": "demo", "stream": False}).is_success
    page = tab(server).page
    long = "Please write a function in Python which merges two sorted lists into one sorted list."
    answer_with(page, {"content": "**Title:** “Merging sorted lists”."})
    title = {"choices": [{"message": {"role": "assistant", "content": "**Title:** “Merging sorted lists”."}}]}
    asked: list[dict[str, Any]] = []

    def name(route: Route) -> None:
        body = read_sent(route.request)
        if body.get("stream"):
            route.fallback()
        else:
            asked.append(body)
            route.fulfill(json=title)

    page.route(COMPLETIONS, name)
    ask(page, long)
    expect(list_of(page)).to_have_text(["Merging sorted lists"])
    (body,) = asked
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert (body["priority"], body["max_tokens"]) == (-10, 24)
    start_chat(page)
    ask(page, QUESTION)
    expect(list_of(page).first).to_have_text(QUESTION)
    page.get_by_role("link", name="Settings", exact=True).click()
    page.get_by_label("Titles").select_option("The first words of the message")
    page.get_by_role("link", name="Chat", exact=True).click()
    start_chat(page)
    ask(page, long)
    expect(list_of(page).first).to_have_text(long[:80])
    assert len(asked) == 1


def test_a_group_is_folded(page: Page) -> None:
    ask(page)
    page.get_by_role("navigation", name="Conversations").get_by_role("button", name="Today").click()
    expect(list_of(page)).to_have_count(0)


def test_a_conversation_is_shown_as_code_that_runs(page: Page, server: PageServer) -> None:
    answer = text_of(ask(page))
    choose(page, "View code", f"Actions for “{QUESTION}”")
    dialog = page.get_by_role("dialog", name="View code")
    expect(dialog).to_contain_text(f"curl {server.url}/v1/chat/completions")
    dialog.get_by_role("tab", name="Python").click()
    expect(dialog).to_contain_text("client.chat.completions.create(")
    dialog.get_by_role("tab", name="curl").click()
    dialog.get_by_role("tab", name="JavaScript").click()
    expect(dialog.locator("code")).to_contain_text("temperature")  # the page asks the server for the usual one
    program = dialog.locator("code").inner_text()
    page.keyboard.press("Escape")
    reply = page.evaluate(SEND_CODE, program)
    assert reply == answer


SEND_CODE = """async code => {
  const body = JSON.parse(code.slice(code.indexOf("JSON.stringify(") + 15, code.lastIndexOf("),\\n});")));
  const response = await fetch("/v1/chat/completions", { method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" } });
  return (await response.json()).choices[0].message.content;
}"""


def test_what_was_exported_can_be_imported(page: Page, tmp_path: Path) -> None:
    first = ask(page).inner_text()
    with next_answer(page):
        answers(page).last.get_by_role("button", name="Regenerate").click()
    with saving(page) as saved:
        choose(page, "Export all")
    file = tmp_path / "conversations.json"
    file.write_text(saved.text)
    choose(page, "Delete", f"Actions for “{QUESTION}”")
    expect(list_of(page)).to_have_count(0)
    import_file(page, file)
    expect(page.get_by_text("Imported 1 conversation.")).to_be_visible()
    list_of(page).first.click()
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    answers(page).last.get_by_role("button", name="Version before").click()
    expect(answers(page).last).to_contain_text(first.splitlines()[0])
    ask(page, OTHER)


def test_one_conversation_is_exported_and_imported_by_the_menu(page: Page, tmp_path: Path) -> None:
    ask(page)
    with saving(page) as saved:
        choose(page, "Export as JSON", f"Actions for “{QUESTION}”")
    assert saved.name == "What-does-os.path.join-do.json"
    (tmp_path / "talk.json").write_text(saved.text)
    with page.expect_file_chooser() as chooser:
        choose(page, "Import a file")
    chooser.value.set_files(tmp_path / "talk.json")
    expect(list_of(page)).to_have_text([QUESTION, QUESTION])
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.get_by_text("Imported 1 conversation.")).to_have_count(0)


def test_a_conversation_is_exported_as_markdown(page: Page, tmp_path: Path) -> None:
    ask(page)
    with saving(page) as saved:
        choose(page, "Export as Markdown", f"Actions for “{QUESTION}”")
    assert saved.name == "What-does-os.path.join-do.md"
    text = saved.text
    assert text.startswith(f"# {QUESTION}\n\n## You\n\n{QUESTION}\n\n## demo\n\n`os.path.join`")


def test_a_file_that_is_no_export_is_refused_in_words(page: Page, tmp_path: Path) -> None:
    for text, said in (("{", "is not JSON"), ('{"a": 1}', "no conversations of this page")):
        (tmp_path / "file.json").write_text(text)
        import_file(page, tmp_path / "file.json")
        expect(page.get_by_text(re.compile(said))).to_be_visible()
    expect(list_of(page)).to_have_count(0)


def test_an_address_of_no_conversation_says_so(tab: OpenTab, server: PageServer) -> None:
    page = tab(server, "/#/chat/nothing").page
    expect(page.get_by_text("This conversation is not here")).to_be_visible()
    page.get_by_role("main").get_by_role("button", name="New chat").last.click()
    expect(composer(page)).to_be_visible()


def test_what_was_typed_survives_a_reload(page: Page) -> None:
    composer(page).fill("Half a question")
    page.wait_for_function("() => Object.values(sessionStorage).includes('Half a question')")
    page.reload()
    expect(composer(page)).to_have_value("Half a question")


def test_two_tabs_lose_no_message(tab: OpenTab, make_server: MakePageServer, tmp_path: Path) -> None:
    long = write_long_demo(tmp_path / "long.gguf")  # with room for an answer that outlasts what two tabs do
    server = make_server(default_model=str(long))
    one = tab(server).page
    ask(one)
    other = tab(server, f"/#{urlsplit(one.url).fragment}").page
    expect(answers(other)).to_have_count(1)
    ask(one, OTHER)
    expect(questions(other).last).to_contain_text(OTHER)
    expect(answers(other).last).to_have_attribute("aria-busy", "false")
    with endless_answers(one), endless_answers(other):
        send(one, "First tab")
        expect(questions(other).last).to_contain_text("First tab")
        expect(answers(other).last).to_have_attribute("aria-busy", "true")
        first_question(other).hover()
        first_question(other).get_by_role("button", name="Edit").click()
        other.get_by_role("textbox", name="Your message").fill("Second tab")
        other.get_by_role("button", name="Save and ask again").click()
        expect(first_question(one).get_by_text("1 of 2")).to_be_visible()
        for page in (one, other):
            page.get_by_role("button", name="Stop the answer").click()
            wait_for_answer(page)
    wait_until(lambda: server.answers_in_flight() == 0)
    for page in (one, other):
        page.reload()
        if "Second tab" not in first_question(page).inner_text():
            first_question(page).get_by_role("button", name="Next version").click()
        expect(first_question(page)).to_contain_text("Second tab")
        expect(answers(page)).to_have_count(1)
        first_question(page).get_by_role("button", name="Version before").click()
        expect(questions(page).last).to_contain_text("First tab")


FIND = """async ([text, title]) => {
  const field = document.querySelector("[data-search]");
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  const started = performance.now();
  set.call(field, text);
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const found = () => document.body.innerText.includes(title) && !document.body.innerText.includes("Talk 4999");
  while (!found() && performance.now() - started < 10000) await new Promise(requestAnimationFrame);
  return performance.now() - started;
}"""


def test_five_thousand_conversations_stay_smooth(page: Page, tmp_path: Path) -> None:
    import_file(page, make_file(tmp_path / "many.json", 5000, 2))
    expect(page.get_by_text("Imported 5000 conversations.")).to_be_visible()
    assert list_of(page).count() < 60
    expect(list_of(page).first).to_have_text("Talk 4999")
    page.get_by_role("searchbox").fill("Talk 500")
    expect(list_of(page)).to_have_text(["Talk 500"])
    page.get_by_role("searchbox").fill("1 of 4321")
    expect(list_of(page)).to_have_text(["Talk 4321"])
    times: list[float] = []  # milliseconds from the letter typed to the list drawn
    for number in (1000, 2000, 3000, 4000, 1500, 2500, 3500, 4500, 1200, 2200, 3200, 4200):
        times.append(page.evaluate(FIND, [f"1 of {number}.", f"Talk {number}"]))
        if len(times) >= 5 and min(times) < 100:  # others compute here, too, so it has some more tries
            break
    assert min(times) < 100, times
    waits_s: list[float] = []
    while len(waits_s) < 4 and min(waits_s, default=math.inf) >= 3:
        page.reload()
        started = time.monotonic()
        expect(list_of(page).first).to_have_text("Talk 4999")
        waits_s.append(time.monotonic() - started)
    assert min(waits_s) < 3, waits_s


def test_two_thousand_messages_stay_smooth(page: Page, tmp_path: Path) -> None:
    import_file(page, make_file(tmp_path / "long.json", 1, 2000))
    list_of(page).first.click()
    expect(answers(page).last).to_contain_text("Message 1999 of 0.")
    drawn = page.get_by_role("log").get_by_role("article")
    assert drawn.count() < 40
    runs: list[dict[str, float]] = []
    while not runs or (len(runs) < 4 and not (runs[-1]["most_ms"] < 500 and runs[-1]["mean_ms"] < 60)):
        runs.append(page.evaluate(SCROLL))  # again where others took the processor meanwhile
    assert runs[-1]["most_ms"] < 500, runs
    assert runs[-1]["mean_ms"] < 60, runs
    assert drawn.count() < 60
    expect(page.get_by_role("button", name="To the end")).to_be_visible()
    page.get_by_role("button", name="To the end").click()
    expect(answers(page).last).to_contain_text("Message 1999 of 0.")


def test_a_browser_that_keeps_nothing_says_so_and_answers(
    context: BrowserContext, tab: OpenTab, server: PageServer
) -> None:
    context.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('no room here') }")
    page = tab(server).page
    expect(page.get_by_text("This browser does not keep the conversation: no room here")).to_be_visible()
    expect(ask(page)).to_contain_text("os.path.join")
    expect(ask(page, OTHER)).not_to_be_empty()


def test_an_edit_that_is_scrolled_away_is_kept(page: Page, tmp_path: Path) -> None:
    import_file(page, make_file(tmp_path / "long.json", 1, 200))
    list_of(page).first.click()
    first_question(page).hover()
    first_question(page).get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Your message").fill("Half an edit")
    page.get_by_role("button", name="To the end").click()
    expect(page.get_by_role("textbox", name="Your message")).to_have_count(0)
    scroll_to_beginning(page)
    expect(page.get_by_role("textbox", name="Your message")).to_have_value("Half an edit")
    page.get_by_role("button", name="Cancel").click()
    expect(first_question(page)).to_contain_text("Message 0 of 0.")


def test_answers_grow_in_several_conversations_at_once(
    make_server: MakePageServer, tab: OpenTab, tmp_path: Path
) -> None:
    long = write_long_demo(tmp_path / "long.gguf")  # so that the first answer grows while the second begins
    server = make_server(default_model=long)
    page = tab(server).page
    with endless_answers(page):
        send(page, QUESTION)
        expect(answers(page).last).to_contain_text("os.path.join")
        start_chat(page)
        send(page, OTHER)
        expect(answers(page).last).not_to_be_empty()
        wait_until(lambda: server.answers_in_flight() == 2)
        list_of(page).filter(has_text=QUESTION).click()
        expect(questions(page)).to_have_text(QUESTION)
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.get_by_text("You stopped here.")).to_be_visible()
        list_of(page).filter(has_text=OTHER).click()
        expect(questions(page)).to_have_text(OTHER)
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.get_by_text("You stopped here.")).to_be_visible()
    wait_until(lambda: server.answers_in_flight() == 0)


SCROLL = """async () => {
  const log = document.querySelector('[role=log]');
  const times = [];
  let last = performance.now();
  for (let step = 0; step < 60; step++) {
    log.scrollTop -= 900;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return { most_ms: Math.max(...times), mean_ms: times.reduce((a, b) => a + b) / times.length };
}"""
