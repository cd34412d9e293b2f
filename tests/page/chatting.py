"""Steps that flows of the chat share: ask, wait for the answer, change a setting, put in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from page_server import wait_until
from playwright.sync_api import Locator, Page, expect

COMPLETIONS = "**/v1/chat/completions"
QUESTION = "What does os.path.join do?"


def answers(page: Page) -> Locator:
    """All answers that are shown."""
    return page.get_by_role("article", name="Answer")


def questions(page: Page) -> Locator:
    """All messages of the person that are shown."""
    return page.get_by_role("article", name="You")


def first_question(page: Page) -> Locator:
    """The first message of the conversation, which is drawn where it can be seen."""
    expect(questions(page).last).to_be_visible()
    scroll_to_beginning(page)
    first = page.locator("[data-index='0']").get_by_role("article", name="You")
    expect(first).to_be_visible()
    return first


# True if the beginning is still shown since the last time: the page may be on its own way to the end, and then wins.
AT_BEGINNING = """log => {
  const isThere = log.scrollTop === 0 && log.querySelector("[data-index='0']") !== null;
  log.scrollTo(0, 0);
  return isThere;
}"""


def scroll_to_beginning(page: Page) -> None:
    """Scroll to the first message, and stay there."""
    wait_until(lambda: page.get_by_role("log").evaluate(AT_BEGINNING) is True, 20)


def composer(page: Page) -> Locator:
    """The field for the next message."""
    return page.get_by_role("textbox", name="Message", exact=True)


def send(page: Page, text: str) -> None:
    """Write a message and send it, once nothing that belongs to it is still being read."""
    composer(page).fill(text)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    composer(page).press("Enter")


def wait_for_answer(page: Page) -> Locator:
    """The last answer, once it is complete."""
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Stop the answer")).to_have_count(0)
    return last


def ask(page: Page, text: str = QUESTION) -> Locator:
    """Send a message and return its answer once that is complete."""
    count = answers(page).count()
    send(page, text)
    expect(answers(page)).to_have_count(count + 1)
    return wait_for_answer(page)


def start_chat(page: Page) -> None:
    """Begin a new chat, and wait until it has taken the place of the one before."""
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    expect(questions(page)).to_have_count(0)


def text_of(answer: Locator) -> str:
    """Return the text of an answer, as its button copies it to the clipboard."""
    return copy_by(answer.get_by_role("button", name="Copy", exact=True).last)


# The button says only for a moment that it copied, so the page notes that.
NOTE_COPIED = """() => {
  window.saidCopied = false;
  const observer = new MutationObserver(() => {
    window.saidCopied = document.querySelector("[aria-label=Copied]") !== null;
    if (window.saidCopied) observer.disconnect();
  });
  observer.observe(document.body, { subtree: true, childList: true, attributes: true });
  return navigator.clipboard.writeText("nothing yet");
}"""
COPIED = "() => window.saidCopied && navigator.clipboard.readText().then(text => text !== 'nothing yet')"


def copy_by(button: Locator) -> str:
    """Return the text that a button copies to the clipboard; it has to say that it did."""
    page = button.page
    page.evaluate(NOTE_COPIED)
    button.click()
    page.wait_for_function(COPIED)
    text = page.evaluate("() => navigator.clipboard.readText()")
    assert isinstance(text, str)
    return text


def model_button(place: Page | Locator) -> Locator:
    """The button that shows which model is chosen, and opens the list of models."""
    return place.get_by_role("button", name=re.compile("Model: ")).first


def choose_model(page: Page, name: str, place: Locator | None = None) -> None:
    """Choose a model by its name."""
    model_button(place or page).click()
    page.get_by_role("combobox", name="Search the models").fill(name)
    page.get_by_role("option", name=re.compile(f"^{re.escape(name)} ?[0-9(]")).first.click()
    expect(page.get_by_role("listbox")).to_have_count(0)


def figures_of(answer: Locator) -> Locator:
    """Open the figures of an answer, such as its tokens and times, and return their dialog."""
    answer.get_by_role("button", name=re.compile("Figures: ")).click()
    return answer.page.get_by_role("dialog", name="Figures of this answer")


def open_settings(page: Page) -> Locator:
    """The settings of the conversation."""
    button = page.get_by_role("button", name="Settings of this conversation")
    if button.get_attribute("aria-expanded") != "true":
        button.click()
    return page.get_by_label("Settings of this conversation").last


def set_up(page: Page, **fields: str) -> None:
    """Fill fields of the settings, by label with _ for a space."""
    open_settings(page)
    for label, value in fields.items():
        field = page.get_by_label(label.replace("_", " "), exact=True)
        if label == "List_of_tools" and not field.is_visible():
            page.get_by_text("Tools as JSON", exact=True).click()
        field.fill(value)
        field.blur()


# Firefox does not show the body of a request to listeners, so it is changed where it is sent.
ENDLESS = """() => {
  const send = window.fetch;
  window.own = { fetch: send };
  window.fetch = (path, options) => {
    if (!String(path).includes("/v1/chat/completions")) return send(path, options);
    const body = JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true, temperature: 1 });
    return send(path, { ...options, body });
  };
}"""


@contextmanager
def endless_answers(page: Page) -> Iterator[None]:
    """Have the server go on after the end of an answer, so that there is time to do something in the middle."""

    page.evaluate(ENDLESS)
    yield
    page.evaluate("() => { window.fetch = window.own?.fetch ?? window.fetch; }")


def answer_with(page: Page, *deltas: dict[str, object]) -> None:
    """Answer the next requests with these deltas, which no model here would make."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=_frames([*chunks, end])))


def have_called(page: Page, question: str, name: str, *arguments: object) -> None:
    """Make the model call a tool once for each of these arguments; what comes after that is its own."""
    calls = [
        {"index": at, "id": f"c{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(each)}}
        for at, each in enumerate(arguments)
    ]
    answer_with(page, {"tool_calls": calls})
    with page.expect_response(COMPLETIONS):  # earlier calls of the tool are shown as well, so they say nothing
        send(page, question)
    page.unroute(COMPLETIONS)
    expect(page.get_by_role("region", name=f"Call of {name}").last).to_be_visible()


@contextmanager
def next_answer(page: Page) -> Iterator[None]:
    """Wait until what is done here has had the model asked, and its answer is complete."""
    with page.expect_request(COMPLETIONS):
        yield
    wait_for_answer(page)


def _frames(chunks: Iterable[object]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
