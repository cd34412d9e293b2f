"""Asking and answering: streams, stopping, branches, going on, a page or a server that goes away in the middle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Visit
from chatting import (
    QUESTION,
    answers,
    ask,
    composer,
    endless_answers,
    figures_of,
    next_answer,
    questions,
    send,
    set_up,
    start_chat,
    text_of,
    wait_for_answer,
)
from long_demo import write_long_demo
from page_server import PageServer, wait_until
from playwright.sync_api import Browser, Page, expect

from conftest import MakePageServer, OpenTab

# The lengths of an answer that are drawn while it grows.
NOTE_LENGTHS = """() => {
  const lengths = window.lengths = new Set();
  const note = () => {
    const answer = document.querySelector("article[aria-label=Answer][aria-busy=true]");
    if (answer) lengths.add(answer.textContent.length);
  };
  new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


@pytest.fixture(scope="module")
def lasting(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server whose model has room for an answer that outlasts whatever a test does meanwhile."""
    folder = tmp_path_factory.mktemp("lasting")
    server = PageServer(folder, {"default_model": write_long_demo(folder / "long.gguf")}).start()
    yield server
    server.kill()


@pytest.mark.smoke
def test_the_first_visit_asks_and_answers_with_one_click(page: Page) -> None:
    more = page.get_by_role("link", name="Get one for everyday questions")
    expect(more).to_have_attribute("href", "#/models")
    page.get_by_role("button", name=QUESTION).click()
    answer = wait_for_answer(page)
    expect(answer).to_contain_text("os.path.join")
    expect(answer).to_contain_text(re.compile(r"\d+ tokens · [\d.,]+ tokens/s"))
    figures = figures_of(answer)
    expect(figures).to_contain_text(re.compile(r"First token\d.*Speed[\d.,]+ tokens/s.*Answer\d+ tokens"))
    expect(figures).to_contain_text(re.compile(r"Cached\d+ of \d+prompt tokens"))
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation", name="Conversations").get_by_role("link", name=QUESTION)).to_be_visible()


def test_an_answer_comes_bit_by_bit(lasting: PageServer, tab: OpenTab) -> None:
    page = tab(lasting).page
    with endless_answers(page):
        page.evaluate(NOTE_LENGTHS)
        send(page, QUESTION)
        page.wait_for_function("() => window.lengths.size > 4")
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.smoke
def test_stopping_ends_the_request_and_returns_its_pages(lasting: PageServer, tab: OpenTab) -> None:
    page, server = tab(lasting).page, lasting
    with endless_answers(page):
        send(page, QUESTION)
        expect(answers(page).last).to_contain_text("os.path.join")
        wait_until(lambda: server.answers_in_flight() == 1)
        assert server.used_pages() > 0
        page.get_by_role("button", name="Stop the answer").click()
        expect(page.get_by_text("You stopped here.")).to_be_visible()
        wait_until(lambda: server.answers_in_flight() == 0 and server.used_pages() == 0, 20)
    expect(wait_for_answer(page)).to_contain_text("os.path.join")


def test_escape_stops_an_answer(lasting: PageServer, tab: OpenTab) -> None:
    page = tab(lasting).page
    with endless_answers(page):
        send(page, QUESTION)
        expect(answers(page).last).to_contain_text("os.path.join")
        composer(page).press("Escape")
        expect(page.get_by_text("You stopped here.")).to_be_visible()


def test_another_answer_becomes_a_version(page: Page) -> None:
    first = text_of(ask(page))
    with next_answer(page):
        answers(page).last.get_by_role("button", name="Regenerate").click()
    second = answers(page).last
    expect(second.get_by_text("2 of 2")).to_be_visible()
    second.get_by_role("button", name="Version before").click()
    expect(answers(page).last.get_by_text("1 of 2")).to_be_visible()
    assert text_of(answers(page).last) == first


def test_an_edited_question_makes_a_branch(page: Page) -> None:
    ask(page)
    ask(page, "What does len do?")
    questions(page).first.hover()
    questions(page).first.get_by_role("button", name="Edit").click()
    box = page.get_by_role("textbox", name="Your message")
    box.fill("What does itertools.chain do?")
    page.get_by_role("button", name="Save and ask again").click()
    expect(questions(page)).to_have_count(1)
    wait_for_answer(page)
    expect(questions(page).first).to_contain_text("itertools.chain")
    questions(page).first.get_by_role("button", name="Version before").click()
    expect(questions(page)).to_have_count(2)
    expect(questions(page).first).to_contain_text(QUESTION)
    expect(questions(page).last).to_contain_text("What does len do?")
    page.reload()
    expect(questions(page).last).to_contain_text("What does len do?")


def test_an_answer_can_be_edited_and_gone_on_with(page: Page) -> None:
    ask(page)
    answers(page).last.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Answer").fill("It joins")
    page.get_by_role("button", name="Save as a version").click()
    expect(answers(page).last).to_contain_text("It joins")
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    answers(page).last.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Answer").fill("`os.path")
    page.get_by_role("button", name="Save and continue").click()
    expect(answers(page).last.get_by_text("3 of 3")).to_be_visible()
    assert text_of(wait_for_answer(page)).startswith("`os.path.join")


def test_an_answer_that_was_cut_goes_on_where_it_ended(page: Page) -> None:
    set_up(page, Max_tokens="4", Temperature="0")
    beginning = text_of(ask(page))
    expect(page.get_by_text("The answer is as long as it may be")).to_be_visible()
    set_up(page, Max_tokens="")
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.get_by_text("The answer is as long as it may be")).to_have_count(0)
    whole = text_of(wait_for_answer(page))
    assert whole.startswith(beginning)
    assert len(whole) > len(beginning)
    start_chat(page)
    set_up(page, Temperature="0")
    assert text_of(ask(page)) == whole


def test_any_last_answer_can_be_continued(page: Page) -> None:
    set_up(page, Max_tokens="5")
    before = text_of(ask(page))
    with page.expect_response("**/v1/chat/completions") as waiting:
        answers(page).last.get_by_role("button", name="Continue", exact=True).click()
    assert waiting.value.ok
    after = text_of(wait_for_answer(page))
    assert after.startswith(before)
    assert len(after) > len(before)


def test_the_same_seed_gives_the_same_answer(page: Page) -> None:
    set_up(page, Seed="7", Temperature="1.5")
    first = text_of(ask(page, "Tell me about lists."))
    answers(page).last.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    assert text_of(wait_for_answer(page)) == first
    set_up(page, Seed="")
    seeds = set()
    for version in (3, 4):
        answers(page).last.get_by_role("button", name="Regenerate").click()
        expect(answers(page).last.get_by_text(f"{version} of {version}")).to_be_visible()
        found = re.search(r"Seed\s*(\d+)", figures_of(wait_for_answer(page)).inner_text())
        assert found is not None
        page.keyboard.press("Escape")
        seeds.add(found[1])
    assert len(seeds - {"7"}) == 2


def test_a_reload_in_the_middle_keeps_what_had_come(lasting: PageServer, tab: OpenTab) -> None:
    page, server = tab(lasting).page, lasting
    with endless_answers(page):
        send(page, QUESTION)
        expect(answers(page).last).to_contain_text("Join two or more")
        page.reload()
    wait_until(lambda: server.answers_in_flight() == 0)
    expect(answers(page).last).to_contain_text("Join two or more")
    expect(page.get_by_text("The page was left in the middle of this answer.")).to_be_visible()
    before = text_of(answers(page).last)
    set_up(page, Max_tokens="20")
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.get_by_text("The page was left in the middle")).to_have_count(0)
    assert text_of(wait_for_answer(page)).startswith(before)


def test_a_server_lost_in_the_middle_leaves_what_came(
    make_server: MakePageServer, tab: OpenTab, tmp_path: Path
) -> None:
    server = make_server(default_model=write_long_demo(tmp_path / "long.gguf"))
    page = tab(server).page
    # An answer tells that the server is away only until the whole page does, which asks for a sign of life.
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok"}))
    with endless_answers(page):
        send(page, QUESTION)
        expect(answers(page).last).to_contain_text("os.path.join")
        server.kill()
        expect(page.get_by_text("What had come is kept.")).to_be_visible()
    expect(answers(page).last).to_contain_text("os.path.join")
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.get_by_text("Start it again with").first).to_be_visible()
    server.start()
    page.unroute("**/health")
    set_up(page, Max_tokens="10")
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.get_by_text("What had come is kept.")).to_have_count(0)
    expect(wait_for_answer(page)).to_contain_text("os.path.join")


def test_a_wrong_key_is_told_and_the_question_stays(make_server: MakePageServer, tab: OpenTab) -> None:
    page = tab(make_server(api_keys="correct")).page
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_role("button", name="Close").click()
    for _ in range(2):  # what the page reads every few seconds does not open it again
        with page.expect_response(re.compile("/api/ps$")) as refused:
            pass
        assert refused.value.status == 401
    expect(dialog).to_have_count(0)
    send(page, QUESTION)
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog.get_by_text("does not know this key")).to_be_visible()
    dialog.get_by_label("API key").fill("correct")
    dialog.get_by_role("button", name="Use this key").click()
    expect(page.get_by_text("The server wants an API key")).to_be_visible()
    page.get_by_role("button", name="Try again").click()
    expect(wait_for_answer(page)).to_contain_text("os.path.join")


def test_a_message_can_be_deleted(page: Page) -> None:
    ask(page)
    answers(page).last.get_by_role("button", name="Regenerate").click()
    expect(wait_for_answer(page).get_by_text("2 of 2")).to_be_visible()
    answers(page).last.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("2 of 2")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    answers(page).last.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("2 of 2")).to_have_count(0)
    expect(answers(page)).to_have_count(1)
    page.reload()
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_text("of 2")).to_have_count(0)


def test_everything_goes_by_keyboard(page: Page) -> None:
    expect(composer(page)).to_be_focused()
    page.keyboard.type("What does")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("os.path.join do?")
    page.keyboard.press("Enter")
    expect(wait_for_answer(page)).to_contain_text("os.path.join")
    expect(questions(page).first).to_contain_text("What does\nos.path.join do?", use_inner_text=True)
    expect(composer(page)).to_be_focused()
    _tab_to(page, "Edit", backwards=True)
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Answer")).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.type(" Edited.")
    page.keyboard.press("Control+Enter")
    expect(answers(page).last).to_contain_text("Edited.")
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()


def _tab_to(page: Page, label: str, *, backwards: bool = False) -> None:
    for _ in range(40):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        if page.evaluate("() => document.activeElement?.getAttribute('aria-label')") == label:
            return
    raise AssertionError(f"no key leads to {label!r}")


def test_a_question_while_the_prompt_is_too_long_says_what_to_do(visit: Visit) -> None:
    page = visit.page
    composer(page).fill("word " * 3000)
    expect(page.get_by_text(re.compile("the context has 2,048. Shorten the message"))).to_be_visible()
    page.get_by_role("button", name="Send").click()
    expect(answers(page).last.get_by_role("alert")).to_contain_text("context")


def test_shortcuts_do_what_their_sheet_says(page: Page) -> None:
    first = text_of(ask(page))
    page.keyboard.press("Alt+R")
    expect(wait_for_answer(page).get_by_text("2 of 2")).to_be_visible()
    page.evaluate("() => navigator.clipboard.writeText('')")
    page.keyboard.press("Alt+C")
    page.wait_for_function("text => navigator.clipboard.readText().then(read => read === text)", arg=first)
    composer(page).press("ArrowUp")
    expect(page.get_by_role("textbox", name="Your message")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    expect(page.get_by_role("navigation", name="Conversations")).to_have_count(0)
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
    page.keyboard.press("Control+k")
    expect(page.get_by_role("searchbox", name="Search the conversations")).to_be_focused()
    page.keyboard.press("Control+Shift+O")
    expect(questions(page)).to_have_count(0)
    page.get_by_role("link", name="Chat", exact=True).focus()
    page.keyboard.press("/")
    expect(composer(page)).to_be_focused()
    page.keyboard.press("Alt+M")
    expect(page.get_by_role("combobox", name="Search the models")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("combobox", name="Search the models")).to_have_count(0)
    page.keyboard.press("Control+,")
    expect(page.get_by_role("complementary", name="Settings of this conversation")).to_be_visible()
    page.get_by_role("link", name="Chat", exact=True).focus()
    page.keyboard.press("?")
    sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet).to_contain_text("Regenerate the last answer")
    sheet.get_by_role("button", name="Close").click()
