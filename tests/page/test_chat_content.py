"""Contents of answers and messages: Markdown, also hostile, thoughts, files, long texts, calls, schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from browsing import Visit, read_sent, saving
from chatting import (
    COMPLETIONS,
    answer_with,
    answers,
    ask,
    choose_model,
    composer,
    copy_by,
    figures_of,
    model_button,
    next_answer,
    open_settings,
    questions,
    send,
    set_up,
    start_chat,
    text_of,
    wait_for_answer,
)
from page_server import PageServer
from playwright.sync_api import Page, Route, expect

from conftest import MakePageServer, OpenTab

HOSTILE = """<script>window.hit = 1</script>

<img src="http://evil.example/a.png" onerror="window.hit = 2">

<iframe src="http://evil.example/"></iframe><style>body { display: none }</style>

[click me](javascript:window.hit=3) and [data](data:text/html,<script>window.hit=4</script>)

![a picture](http://evil.example/b.png)

[a page](https://good.example/page)

$$\\href{javascript:window.hit=5}{x}$$
"""

MARKDOWN = """## Heading

| name | use |
|------|-----|
| `join` | joins |

1. one
2. two

```python
def greet(name):
    return f"Hello {name}"
```

The area is \\(\\pi r^2\\), it costs $5.
"""

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
        "required": ["city"],
    },
}


@pytest.mark.smoke
def test_hostile_markdown_runs_nothing_and_fetches_nothing(visit: Visit) -> None:
    page = visit.page
    answer_with(page, {"content": HOSTILE})
    answer = ask(page, "Attack")
    expect(answer.locator("math")).to_have_count(1)
    expect(answer).to_contain_text("<script>window.hit = 1</script>")
    for tag in ("script", "img", "iframe", "style"):
        assert answer.locator(tag).count() == 0, tag
    links = answer.get_by_role("link")
    assert [link.get_attribute("href") for link in links.all()] == [
        "http://evil.example/b.png",
        "https://good.example/page",
    ]
    for link in links.all():
        assert "noopener" in (link.get_attribute("rel") or "")
    answer.get_by_text("click me").click()
    assert page.evaluate("() => window.hit") is None
    assert not visit.foreign_requests


@pytest.mark.smoke
def test_markdown_is_drawn_with_tables_colours_and_maths(page: Page) -> None:
    answer_with(page, {"content": MARKDOWN})
    answer = ask(page, "Show me")
    expect(answer.get_by_role("heading", name="Heading")).to_be_visible()
    expect(answer.get_by_role("cell", name="joins")).to_be_visible()
    expect(answer.get_by_role("listitem")).to_have_text(["one", "two"])
    expect(answer.locator("figcaption")).to_contain_text("python")
    expect(answer.locator(".hljs-keyword").first).to_have_text("def")
    expect(answer.locator("math")).to_have_count(1)
    page.wait_for_function("() => [...document.fonts].some((a) => /Math/.test(a.family) && a.status === 'loaded')")
    expect(answer).to_contain_text("it costs $5.")
    copied = copy_by(answer.get_by_role("button", name="Copy code"))
    assert copied == 'def greet(name):\n    return f"Hello {name}"'
    answer.get_by_role("button", name="Wrap lines").click()
    expect(answer.get_by_role("button", name="Wrap lines")).to_have_attribute("aria-pressed", "true")
    with saving(page) as saved:
        answer.get_by_role("button", name="Download code").click()
    assert saved.name == "code.py"


def test_long_code_is_folded_and_its_bar_stays_in_sight(page: Page) -> None:
    answer_with(page, {"content": "```python\n" + "".join(f"line_{number} = 1\n" for number in range(300)) + "```"})
    answer = ask(page, "Long")
    page.reload()
    expect(answer.locator("pre")).to_contain_text("line_39")
    expect(answer.locator("pre")).not_to_contain_text("line_40 ")
    answer.get_by_role("button", name="Show all 300 lines").click()
    expect(answer.locator("pre")).to_contain_text("line_299")
    answer.get_by_role("button", name="Show fewer lines").scroll_into_view_if_needed()
    expect(answer.get_by_role("button", name="Copy code")).to_be_in_viewport()


def test_a_text_from_right_to_left_begins_at_the_right(page: Page) -> None:
    answer_with(page, {"content": "مرحبا بالعالم\n\n- واحد\n- اثنان\n\nHello"})
    answer = ask(page, "قل مرحبا")
    sides = "nodes => nodes.map(node => getComputedStyle(node).direction)"
    assert answer.locator("p, ul").evaluate_all(sides)[:3] == ["rtl", "rtl", "ltr"]
    assert questions(page).locator("p").evaluate_all(sides) == ["rtl"]


def test_a_model_without_a_template_continues_the_text(page: Page) -> None:
    told = "base has no chat template, so it can continue text but not chat; use plain completion"
    page.route(COMPLETIONS, lambda route: route.fulfill(status=400, json={"error": {"message": told}}))
    set_up(page, Max_tokens="3")
    ask(page, "import os")
    expect(answers(page).last.get_by_role("alert")).to_contain_text("This is a base model")
    with page.expect_request("**/v1/completions") as waiting:
        page.get_by_role("button", name="Continue as text").click()
    assert read_sent(waiting.value)["prompt"] == "import os"
    expect(wait_for_answer(page)).not_to_be_empty()
    expect(answers(page).last.get_by_role("alert")).to_have_count(0)
    page.get_by_label("Continue as text, without the chat template").uncheck()


def test_thoughts_are_folded_with_their_time(page: Page) -> None:
    answer_with(page, {"reasoning_content": "First I think."}, {"content": "Then I say."})
    answer = ask(page, "Think")
    thought = answer.get_by_role("button", name=re.compile(r"Thought for [\d.]+ m?s"))
    expect(thought).to_have_attribute("aria-expanded", "false")
    expect(answer.get_by_text("First I think.")).to_have_count(0)
    thought.click()
    expect(answer.get_by_text("First I think.")).to_be_visible()
    page.reload()
    expect(answers(page).last.get_by_role("button", name=re.compile("Thought for"))).to_be_visible()


def test_a_quarter_of_a_megabyte_can_be_pasted(page: Page, server: PageServer) -> None:
    text = "All work and no play makes a long text. " * 6554
    assert len(text) > 256 * 1024
    page.evaluate("text => navigator.clipboard.writeText(text)", text)
    composer(page).press("Control+V")
    expect(composer(page)).to_have_value(text)
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"context length is 2048.*Shorten the message"))
    page.get_by_role("button", name="Send").click()
    expect(answers(page).last.get_by_role("alert")).to_contain_text(re.compile("2,?048"))
    expect(page.get_by_role("button", name=f"Show all {len(text):,} characters")).to_be_visible()
    assert len(questions(page).first.inner_text()) < 3000
    page.reload()
    expect(page.get_by_role("button", name=f"Show all {len(text):,} characters")).to_be_visible()


def test_dropped_text_files_become_part_of_the_message(page: Page) -> None:
    set_up(page, Max_tokens="5")
    _drop(page, [("notes.txt", "Remember the milk."), ("image.png", "\0\1\2")])
    expect(page.get_by_role("list", name="Files of the message")).to_contain_text("notes.txt")
    expect(page.get_by_role("alert")).to_contain_text("“image.png” is no text file")
    with page.expect_request("**/v1/chat/completions") as waiting:
        ask(page, "What do the notes say?")
    sent = read_sent(waiting.value)["messages"]
    assert sent == [
        {"role": "user", "content": "notes.txt:\n```txt\nRemember the milk.\n```\n\nWhat do the notes say?"}
    ]
    expect(questions(page).first).to_contain_text("notes.txt")


def test_chosen_files_can_be_removed_again(page: Page, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Add PDFs or text files").click()
    waiting.value.set_files(tmp_path / "code.py")
    expect(page.get_by_role("list", name="Files of the message")).to_contain_text("code.py")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_role("button", name="Remove code.py").click()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_an_answer_keeps_to_its_schema(page: Page) -> None:
    schema = {"type": "object", "properties": {"word": {"enum": ["yes", "no"]}}, "required": ["word"]}
    set_up(page, JSON_schema_of_the_answer='{"type":')
    expect(page.get_by_text("This is not JSON")).to_be_visible()
    send(page, "Is it so?")
    expect(answers(page).last.get_by_role("alert")).to_contain_text("The schema of this conversation is wrong.")
    set_up(page, JSON_schema_of_the_answer=json.dumps(schema))
    expect(page.get_by_text("This is not JSON")).to_have_count(1)
    with next_answer(page):
        page.get_by_role("button", name="Try again").click()
    assert json.loads(text_of(answers(page).last))["word"] in ("yes", "no")


def test_calls_are_shown_and_their_results_typed(page: Page) -> None:
    set_up(page, List_of_tools=json.dumps([TOOL]), Max_tokens="60", Temperature="0")
    page.get_by_label("Tool choice", exact=True).select_option("Required")
    send(page, "What is the weather in Rome?")
    call = page.get_by_role("region", name="Call of get_weather")
    expect(call).to_contain_text(re.compile('"city": "(Bern|Rome)"'))
    page.get_by_label("Tool choice", exact=True).select_option("Auto")
    field = page.get_by_role("textbox", name="Result of get_weather")
    expect(page.get_by_role("button", name="Send the result")).to_be_disabled()
    field.fill('{"sky": "blue"}')
    with page.expect_request("**/v1/chat/completions") as waiting:
        page.get_by_role("button", name="Send the result").click()
    sent = read_sent(waiting.value)["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[2]["content"] == '{"sky": "blue"}'
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
    expect(page.get_by_role("article", name="Result of get_weather")).to_contain_text("blue")
    expect(answers(page)).to_have_count(2)
    wait_for_answer(page)


def test_a_tool_is_made_by_a_form_and_changed(page: Page) -> None:
    settings = open_settings(page)
    settings.get_by_role("button", name="Add a tool").click()
    dialog = page.get_by_role("dialog", name="Add a tool")
    dialog.get_by_label("Name of the tool").fill("get weather")
    expect(dialog.get_by_role("alert")).to_contain_text("no space")
    dialog.get_by_label("Name of the tool").fill("get_weather")
    dialog.get_by_label("What it does").fill("The weather of a city")
    for number in (1, 2):
        dialog.get_by_role("button", name="Add a parameter").click()
        parameter = dialog.get_by_role("group", name=f"Parameter {number}")
        parameter.get_by_label("Name").fill(("city", "days")[number - 1])
    parameter.get_by_label("Type").select_option("integer")
    parameter.get_by_label("Description").fill("How many")
    parameter.get_by_label("Required").uncheck()
    dialog.get_by_role("button", name="Save the tool").click()
    page.get_by_text("Tools as JSON", exact=True).click()
    expect(page.get_by_label("List of tools")).to_have_value(re.compile("get_weather"))
    assert json.loads(page.get_by_label("List of tools").input_value()) == [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather of a city",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "description": "How many"}},
                    "required": ["city"],
                },
            },
        }
    ]
    settings.get_by_role("button", name="Edit get_weather").click()
    page.get_by_role("button", name=re.compile("Remove parameter ")).last.click()
    page.get_by_role("button", name="Save the tool").click()
    expect(page.get_by_label("List of tools")).not_to_have_value(re.compile("days"))
    settings.get_by_role("button", name="Remove get_weather").click()
    expect(page.get_by_label("List of tools")).to_have_value("")


def test_built_in_tools_answer_by_themselves(page: Page) -> None:
    settings = open_settings(page)
    settings.get_by_label("Current time (answered here)").check()
    settings.get_by_label("Calculator (answered here)").check()
    function = {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}
    answer_with(page, {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]})
    asked: list[dict[str, object]] = []

    def go_on(route: Route) -> None:
        asked.append(read_sent(route.request))
        if len(asked) == 1:
            route.fallback()
        else:
            route.continue_()

    page.route(COMPLETIONS, go_on)
    send(page, "What is 6 times 7?")
    expect(page.get_by_role("article", name="Result of calculate")).to_contain_text("42")
    expect(answers(page)).to_have_count(2)
    wait_for_answer(page)
    assert [tool["function"]["name"] for tool in asked[1]["tools"]] == ["get_time", "calculate"]  # type: ignore[index,attr-defined]
    assert asked[1]["messages"][-1]["content"] == "42"  # type: ignore[index]


class Weather(BaseHTTPRequestHandler):
    """A tool behind an address."""

    asked: ClassVar[list[str]] = []

    def do_OPTIONS(self) -> None:
        self._head(204)

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self._head(200)
        self.wfile.write(b'{"sky": "green"}')

    def _head(self, status: int) -> None:
        self.send_response(status)
        self.send_header("access-control-allow-origin", "*")
        self.send_header("access-control-allow-headers", "content-type")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def weather() -> Iterator[str]:
    """The address of a tool."""
    Weather.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Weather) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _call_weather(page: Page, address: str, *, automatic: bool) -> None:
    set_up(page, List_of_tools=json.dumps([TOOL]), Max_tokens="60", Temperature="0")
    page.get_by_label("Address that answers get_weather").fill(f"{address}/tool")
    if automatic:
        page.get_by_label("Send calls there without asking me").check()
    page.get_by_label("Tool choice", exact=True).select_option("Required")
    send(page, "What is the weather in Rome?")


def test_an_address_answers_calls_once_it_is_allowed(weather: str, make_server: MakePageServer, tab: OpenTab) -> None:
    visit = tab(make_server(page_tool_origins=weather))
    page = visit.page
    _call_weather(page, weather, automatic=False)
    button = page.get_by_role("button", name=f"Ask {weather}/tool")
    expect(button).to_be_visible()
    assert not Weather.asked
    page.get_by_label("Tool choice", exact=True).select_option("Auto")
    button.click()
    expect(page.get_by_role("textbox", name="Result of get_weather")).to_have_value('{"sky": "green"}')
    assert json.loads(Weather.asked[0])["city"] in ("Bern", "Rome")
    page.get_by_label("Send calls there without asking me").check()
    page.get_by_label("Tool choice", exact=True).select_option("Required")
    start_chat(page)
    _call_weather(page, weather, automatic=True)
    expect(page.get_by_role("article", name="Result of get_weather").first).to_contain_text("green")
    page.get_by_label("Tool choice", exact=True).select_option("None")
    wait_for_answer(page)
    visit.requests = [url for url in visit.requests if not url.startswith(weather)]


def test_an_address_that_the_server_does_not_allow_is_refused_in_words(weather: str, visit: Visit) -> None:
    page = visit.page
    _call_weather(page, weather, automatic=False)
    page.get_by_role("button", name=f"Ask {weather}/tool").click()
    expect(page.get_by_role("alert")).to_contain_text(f"--page-tool-origins {weather}")
    assert not Weather.asked
    assert all("Content Security Policy" in fault for fault in visit.faults)
    visit.faults.clear()
    visit.requests = [url for url in visit.requests if not url.startswith(weather)]


def test_the_context_meter_tells_what_was_used_and_cached(page: Page) -> None:
    ask(page)
    ask(page, "And os.path.split?")
    meter = page.get_by_role("button", name=re.compile(r"Context: \d+ % used"))
    meter.click()
    details = page.get_by_role("dialog")
    expect(details).to_contain_text(re.compile(r"Used\d+ of 2,048"))
    expect(details).to_contain_text(re.compile(r"of it from the cache[1-9]\d*"))


def test_presets_are_chosen_saved_and_deleted(page: Page) -> None:
    settings = open_settings(page)
    preset = settings.get_by_label("Preset", exact=True)
    preset.select_option("Deterministic")
    expect(settings.get_by_label("Temperature")).to_have_value("0")
    set_up(page, System_prompt="Be brief.", Seed="5")
    expect(preset).to_have_value("")
    page.get_by_role("button", name="Save as a preset").click()
    page.get_by_role("textbox", name="Name").fill("Brief")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(preset).to_have_value("Brief")
    preset.select_option("Default")
    expect(settings.get_by_label("System prompt")).to_have_value("")
    page.reload()
    preset.select_option("Brief")
    expect(settings.get_by_label("System prompt")).to_have_value("Be brief.")
    with page.expect_request("**/v1/chat/completions") as waiting:
        ask(page)
    sent = read_sent(waiting.value)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["seed"]) == (0, 5)
    page.get_by_role("button", name="Delete the preset “Brief”").click()
    expect(preset.get_by_role("option", name="Brief")).to_have_count(0)


@pytest.mark.smoke
def test_every_setting_reaches_the_server(page: Page) -> None:
    set_up(page, Temperature="0", Top_p="0.9", Top_k="40", Min_p="0.02", Seed="7", Max_tokens="24")
    set_up(page, Repetition_penalty="1.1", Presence_penalty="0.1", Frequency_penalty="0.2")
    page.get_by_label("Thinking", exact=True).select_option("Low")
    with page.expect_response("**/v1/chat/completions") as waiting:
        whole = text_of(ask(page))
    assert waiting.value.ok
    sent = read_sent(waiting.value.request)
    wanted = {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 7, "max_tokens": 24}
    wanted |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    assert {name: sent.get(name) for name in wanted} == wanted
    assert sent["reasoning_effort"] == "low"
    word = whole.split()[2]
    set_up(page, Stop_sequences=word)
    answers(page).last.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last.get_by_text("2 of 2")).to_be_visible()
    assert text_of(wait_for_answer(page)) == whole[: whole.index(word)]


def test_wrong_numbers_are_told_and_not_sent(page: Page) -> None:
    settings = open_settings(page)
    settings.get_by_label("Temperature").fill("hot")
    expect(settings.get_by_role("alert")).to_have_text("Temperature is a number.")
    with page.expect_request("**/v1/chat/completions") as waiting:
        ask(page)
    assert read_sent(waiting.value)["temperature"] == 0  # the usual one of this model


def test_the_model_is_chosen_for_each_conversation(page: Page) -> None:
    expect(model_button(page)).to_have_accessible_name("Model: Demo: Python library only (default)")
    model_button(page).click()
    search = page.get_by_role("combobox", name="Search the models")
    search.fill("nobody's")
    expect(page.get_by_text("No model has “nobody's” in its name.")).to_be_visible()
    search.fill("draft")
    expect(page.get_by_role("option")).to_contain_text(["demo-draft"])
    expect(page.get_by_role("option").first).to_contain_text(re.compile(r"MiB · Q8_0 · 2,048 context"))
    search.press("Enter")
    expect(model_button(page)).to_have_accessible_name("Model: demo-draft")
    assert_model(page, "demo-draft")
    start_chat(page)
    expect(model_button(page)).to_have_attribute("data-value", "demo-draft")
    choose_model(page, "Demo: Python library only")
    page.get_by_role("navigation", name="Conversations").get_by_role("link").first.click()
    expect(model_button(page)).to_have_attribute("data-value", "demo-draft")
    model_button(page).click()
    page.get_by_role("link", name="Manage models").click()
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()


def assert_model(page: Page, name: str) -> None:
    """The next answer is that model's."""
    expect(figures_of(ask(page))).to_contain_text(f"Model{name}")
    page.keyboard.press("Escape")


DROP = """([target, files]) => {
  const data = new DataTransfer();
  for (const [name, text] of files) data.items.add(new File([text], name));
  for (const type of ["dragenter", "dragover", "drop"])
    target.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: data }));
}"""


def _drop(page: Page, files: list[tuple[str, str]]) -> None:
    target = composer(page).element_handle()
    page.evaluate(DROP, [target, files])
