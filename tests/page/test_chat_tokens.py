"""The tokens of an answer: their shades, what else could have stood there, and branches from there."""

from __future__ import annotations

import pytest
from browsing import read_sent
from chatting import QUESTION, answers, ask, set_up, text_of, wait_for_answer
from playwright.sync_api import Locator, Page, expect


def tokens_of(answer: Locator) -> Locator:
    """The tokens of an answer."""
    return answer.locator("[data-token]")


def ask_for_tokens(page: Page) -> Locator:
    """An answer with the probabilities of its tokens."""
    page.get_by_role("button", name="Tokens by probability").click()
    set_up(page, Temperature="0")
    return ask(page)


@pytest.mark.smoke
def test_probabilities_are_asked_for_only_when_they_are_shown(page: Page) -> None:
    with page.expect_request("**/v1/chat/completions") as waiting:
        ask(page)
    assert "logprobs" not in read_sent(waiting.value)
    with page.expect_request("**/v1/chat/completions") as waiting:
        answer = ask_for_tokens(page)
    assert read_sent(waiting.value)["logprobs"] is True
    assert "".join(tokens_of(answer).all_inner_texts()) == text_of(answer)
    page.get_by_role("button", name="Tokens by probability").click()
    expect(tokens_of(answer)).to_have_count(0)


def test_a_hovered_token_shows_the_others_and_a_click_branches(page: Page) -> None:
    answer = ask_for_tokens(page)
    before = text_of(answer)
    first = tokens_of(answer).first
    first.hover()
    others = page.get_by_role("dialog").get_by_role("button")
    expect(others).to_have_count(8)
    expect(others.first).to_be_disabled()
    chosen = others.nth(1).locator("code").inner_text().replace("␣", " ")
    others.nth(1).click()
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    after = text_of(wait_for_answer(page))
    assert after.startswith(chosen)
    assert len(after) > len(chosen)
    assert after != before
    assert "".join(tokens_of(answers(page).last).all_inner_texts()) == after
    answers(page).last.get_by_role("button", name="Version before").click()
    expect(answers(page).last.get_by_text("1 of 2")).to_be_visible()
    assert text_of(answers(page).last) == before


def test_tokens_are_reached_by_keyboard(page: Page) -> None:
    answer = ask_for_tokens(page)
    tokens_of(answer).first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens_of(answer).nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("[data-alternative]:focus")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("[data-alternative]")).to_have_count(0)
    expect(tokens_of(answer).nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("[data-alternative]:focus")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    wait_for_answer(page)


def test_the_branch_that_the_model_would_take_gives_the_same_answer(page: Page) -> None:
    answer = ask_for_tokens(page)
    whole = text_of(answer)
    set_up(page, Max_tokens="3")
    beginning = text_of(ask_again(page))
    assert whole.startswith(beginning)
    set_up(page, Max_tokens="")
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.get_by_text("The answer is as long as it may be")).to_have_count(0)
    assert text_of(wait_for_answer(page)) == whole
    assert "".join(tokens_of(answers(page).last).all_inner_texts()) == whole


def ask_again(page: Page) -> Locator:
    """Another answer to the last question."""
    answers(page).last.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    return wait_for_answer(page)


def test_shades_stay_after_a_reload(page: Page) -> None:
    answer = ask_for_tokens(page)
    count = tokens_of(answer).count()
    expect(tokens_of(answer).first).to_have_attribute("aria-label", "`os, 100 %")
    page.reload()
    expect(page.get_by_role("article", name="You")).to_contain_text(QUESTION)
    expect(tokens_of(answers(page).last)).to_have_count(count)
