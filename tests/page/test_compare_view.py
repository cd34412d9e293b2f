"""The compare view: two answers side by side, and 16 equal ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browsing import Visit
from chatting import choose_model
from long_demo import write_long_demo
from page_server import PageServer, wait_until
from playwright.sync_api import Page, Route, expect
from questions import ANSWER, QUESTION

from conftest import MakePageServer, OpenTab


@pytest.fixture
def compare(visit: Visit, server: PageServer) -> Page:
    visit.page.goto(f"{server.url}/#/compare")
    return visit.page


def test_two_answers_stand_side_by_side(compare: Page) -> None:
    compare.get_by_label("One question for all").fill(QUESTION)
    right = compare.get_by_role("region", name="B", exact=True)
    right.get_by_label("Max tokens").fill("3")
    compare.get_by_role("button", name="Ask all").click()
    left = compare.get_by_role("region", name="A", exact=True)
    expect(left).to_contain_text("Join two or more pathname components")
    expect(left).to_contain_text("tokens/s")
    expect(right).to_contain_text("3 tokens")
    expect(compare.get_by_role("button", name="Ask all")).to_be_visible()
    compare.reload()
    compare.get_by_label("One question for all").fill("Something else")
    compare.get_by_role("button", name="Earlier questions").click()
    compare.get_by_role("menuitem", name=QUESTION).click()
    expect(compare.get_by_label("One question for all")).to_have_value(QUESTION)
    compare.get_by_role("button", name="Earlier questions").click()
    compare.get_by_role("menuitem", name="Forget them").click()
    expect(compare.get_by_role("button", name="Earlier questions")).to_have_count(0)


def test_a_usual_question_that_comes_late_leaves_what_is_being_typed(visit: Visit, server: PageServer) -> None:
    page, held = visit.page, list[Route]()
    page.route("**/v1/admin/info", lambda route: held.append(route))
    page.goto("about:blank")
    page.goto(f"{server.url}/#/compare")
    question = page.get_by_label("One question for all")
    question.focus()
    wait_until(lambda: page.evaluate("true") and bool(held), 20)
    held[0].continue_()
    expect(page.get_by_role("region", name="A", exact=True)).to_contain_text("(default)")
    question.press_sequentially(QUESTION)
    expect(question).to_have_value(QUESTION)


def test_two_models_answer(compare: Page, server: PageServer) -> None:
    choose_model(compare, "demo-draft", compare.get_by_role("region", name="B", exact=True))
    for side in ("A", "B"):
        compare.get_by_role("region", name=side, exact=True).get_by_label("Max tokens").fill("8")
    compare.get_by_role("button", name="Ask all").click()
    expect(compare.get_by_text("8 tokens")).to_have_count(2)
    with server.client() as client:
        names = {model["name"] for model in client.get("/api/ps").json()["models"]}
    assert names >= {"demo:latest", "demo-draft:latest"}


def test_up_to_four_answer_and_the_best_gets_a_vote(compare: Page) -> None:
    compare.get_by_role("button", name="Add a model").click()
    compare.get_by_role("button", name="Add a model").click()
    expect(compare.get_by_role("button", name="Add a model")).to_be_disabled()
    compare.get_by_role("button", name="Remove D").click()
    for side in "ABC":
        compare.get_by_role("region", name=side, exact=True).get_by_label("Max tokens").fill("4")
    compare.get_by_role("button", name="Ask all").click()
    compare.get_by_role("button", name="A is best").click()
    votes = compare.get_by_role("region", name="Votes")
    expect(votes.get_by_role("row")).to_contain_text(["Model", "demo, temperature 01 (100 %)1", "0 (0 %)1"])
    compare.get_by_role("button", name="Ask all").click()
    compare.get_by_role("button", name="None is better").click()
    expect(votes.get_by_role("row").nth(1)).to_contain_text("1 (50 %)2")
    compare.reload()
    expect(votes.get_by_role("row").nth(1)).to_contain_text("1 (50 %)2")
    votes.get_by_role("button", name="Clear the votes").click()
    expect(votes).to_have_count(0)


def test_what_differs_between_two_answers_is_marked(compare: Page) -> None:
    said = iter(("It joins paths.", "It joins two paths, always.", "Same.", "Same."))
    compare.route("**/v1/chat/completions", lambda route: _answer(route, next(said)))
    left, right = (compare.get_by_role("region", name=side, exact=True) for side in "AB")
    compare.get_by_role("button", name="Ask all").click()
    compare.get_by_label("Mark what differs from A").check()
    expect(right).to_contain_text(re.compile(r"\d words? differs? from A\."))
    marked = right.locator("ins, del")
    if left.get_by_text("It joins paths.", exact=True).count():
        assert marked.all_inner_texts() == ["two ", ", always"]
    expect(marked).to_have_count(2)
    compare.get_by_role("button", name="Ask all").click()
    expect(right).to_contain_text("The same text as A.")
    compare.get_by_label("Mark what differs from A").uncheck()
    expect(right.locator("ins, del")).to_have_count(0)


def _answer(route: Route, text: str) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


def test_stopping_ends_both_on_the_server(make_server: MakePageServer, tab: OpenTab, tmp_path: Path) -> None:
    server = make_server(default_model=write_long_demo(tmp_path / "long.gguf"))  # whose answers last until the stop
    compare = tab(server, "/#/compare").page
    for side in ("A", "B"):
        compare.get_by_role("region", name=side, exact=True).get_by_label("Max tokens").fill("")
        compare.get_by_role("region", name=side, exact=True).get_by_label("Temperature").fill("5")
    compare.get_by_role("button", name="Ask all").click()
    expect(compare.get_by_text("first after")).to_have_count(2)
    compare.get_by_role("button", name="Stop").click()
    expect(compare.get_by_text("stopped")).to_have_count(2)
    wait_until(lambda: server.answers_in_flight() == 0, 20)


def test_a_model_that_is_gone_is_an_error_in_words(compare: Page) -> None:
    compare.route("**/v1/chat/completions", lambda route: route.abort())
    compare.get_by_role("button", name="Ask all").click()
    expect(compare.get_by_role("alert").first).to_contain_text("The server does not answer")


def test_sixteen_answers_are_the_one_asked_alone(compare: Page) -> None:
    compare.get_by_role("tab", name="16 times at once").click()
    compare.get_by_label("A question, asked alone and then 16 times at once").fill(QUESTION)
    compare.get_by_label("Max tokens").fill("24")
    compare.get_by_role("button", name="Ask it 16 times").click()
    expect(compare.get_by_text("All 16 answers are equal")).to_be_visible(timeout=90_000)
    expect(compare.get_by_text("equal", exact=True)).to_have_count(16)
    assert compare.url.endswith("#/compare/sixteen")


def test_answers_that_differ_are_shown_as_such(compare: Page) -> None:
    """The server is made to change the fourth answer."""
    asked: list[None] = []

    def answer(route: Route) -> None:
        asked.append(None)
        _answer(route, "other" if len(asked) == 4 else "same")

    compare.route("**/v1/chat/completions", answer)
    compare.get_by_role("tab", name="16 times at once").click()
    compare.get_by_role("button", name="Ask it 16 times").click()
    expect(compare.get_by_text("1 of 16 answers differ")).to_be_visible()
    expect(compare.get_by_text("differs at character 0")).to_have_count(1)
    assert ANSWER not in compare.inner_text("main")
