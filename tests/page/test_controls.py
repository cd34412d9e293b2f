"""Every control of every view, also in menus, dialogs and sheets, is used by a flow; the first view is there at once.

A control counts as used when a flow names it whole, by its role or its label: a word that merely contains its name
does not count. Tokens and their alternatives have names that the model makes; test_chat_tokens uses them by place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chatting import COMPLETIONS, answer_with, first_question, open_settings, send, set_up, wait_for_answer
from page_server import PageServer
from playwright.sync_api import Locator, Page, expect

from conftest import OpenTab

VIEWS = ["Chat", "Compare", "Models", "Engine", "Settings"]
DRAWN = {  # what each view has once all that it asks the server for has come
    "Chat": [("button", "What does itertools.chain do?"), ("button", "Add PDFs or text files")],
    "Compare": [("button", "Model: Demo: Python library only (default)"), ("button", "Ask all")],
    "Models": [("button", "Load demo-draft"), ("button", re.compile("^Pull ."))],
    "Engine": [("region", "Kernels"), ("region", "Roofline")],
    "Settings": [("link", "docs"), ("button", "Export all conversations")],
}
FIRST_VIEW_MS = 500
QUESTION = "Say hi"
OTHERWISE = {  # controls that flows use by another name
    ("link", QUESTION): "a conversation in the list, which flows open by the title that they gave it",
    ("link", "Engine"): "test_each_view_has_an_address opens every view by a variable",
    ("link", "demo"): "row_of finds the link of a model by a variable",
    ("link", "demo-draft"): "row_of finds the link of a model by a variable",
    ("button", "What does os.path.join do?"): "the first example question; its flow names it by a constant",
    ("button", "How do I read a file line by line?"): "the second example question; flows use the first and third",
    ("button", "Load demo"): "flows load and unload demo-draft",
    ("button", "Chat with demo"): "flows chat with demo-draft",
    ("button", "Unload demo"): "flows load and unload demo-draft",
    ("button", "Delete demo"): "flows delete a copy of it",
}
CONTROLS = """() => {
  const roles = { A: "link", BUTTON: "button", SELECT: "combobox", TEXTAREA: "textbox", SUMMARY: "summary" };
  const types = { checkbox: "checkbox", search: "searchbox", range: "slider", radio: "radio" };
  const role = (e) => e.getAttribute("role") || roles[e.tagName] || types[e.type] || "textbox";
  const seen = document.querySelectorAll("a[href], button, input, select, textarea, summary, "
    + "[role=button], [role=switch], [role=slider], [role=tab], [role=menuitem]");
  const name = (e) => (e.getAttribute("aria-label")
    || (e.labels && e.labels[0] && e.labels[0].innerText) || e.innerText || e.title || e.placeholder || "").trim();
  return [...seen].filter((e) => e.checkVisibility() && !e.matches("[data-token], [data-alternative]"))
    .map((e) => [role(e), name(e).split("\\n")[0]]);
}"""
Control = tuple[str, str]  # its role and its name


def list_controls(page: Page) -> set[Control]:
    return {(role, name) for role, name in page.evaluate(CONTROLS)}


def find_uses() -> Iterator[tuple[str | None, re.Pattern[str]]]:
    """Find the names by which flows find controls, each with its role, or None if only the label is named."""
    for path in Path(__file__).parent.glob("*.py"):
        if path == Path(__file__):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                yield from find_names(call)


def find_names(call: ast.Call) -> Iterator[tuple[str | None, re.Pattern[str]]]:
    """The names in one call of a locator, or of the helpers that stand for one."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function == "get_by_role" and isinstance(call.args[0], ast.Constant):
        role = str(call.args[0].value)
        yield from ((role, make_pattern(word.value)) for word in call.keywords if word.arg == "name")
    if function in ("get_by_label", "get_by_text") and call.args:
        yield (None if function == "get_by_label" else "summary"), make_pattern(call.args[0])
    if function == "set_up":
        yield from ((None, re.compile(re.escape(word.arg.replace("_", " ")))) for word in call.keywords if word.arg)
    if function == "choose":
        yield "menuitem", make_pattern(call.args[1])
        yield from (
            ("button", make_pattern(name)) for name in call.args[2:] or [ast.Constant("Import, export, select")]
        )


def make_pattern(name: ast.expr) -> re.Pattern[str]:
    """Return a pattern for a whole name in the source; the parts that are computed match anything."""
    if isinstance(name, ast.Constant):
        return re.compile(re.escape(str(name.value)))
    if isinstance(name, ast.JoinedStr):
        parts = (re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in name.values)
        return re.compile("".join(parts))
    if isinstance(name, ast.Call) and name.args and isinstance(name.args[0], ast.Constant):
        return re.compile(f"{name.args[0].value}.*")
    return re.compile("(?!)")  # a variable: its value is not known here


USES = list(find_uses())


def find_unused(controls: set[Control]) -> list[Control]:
    """The controls that no flow names."""
    assert not [role for role, name in controls if not name], controls
    return sorted(
        (role, name)
        for role, name in controls - OTHERWISE.keys()
        if not any(used in (role, None) and pattern.fullmatch(name) for used, pattern in USES)
    )


@pytest.mark.smoke
@pytest.mark.parametrize("view", VIEWS)
def test_every_control_has_a_name_and_is_used_by_a_flow(view: str, page: Page) -> None:
    send(page, QUESTION)
    wait_for_answer(page)
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view).click()
    expect(page.get_by_role("link", name=view, exact=True)).to_have_attribute("aria-current", "page")
    for role, name in DRAWN[view]:
        expect(page.get_by_role(role, name=name).first).to_be_visible()  # type: ignore[arg-type]
    controls = list_controls(page)
    assert len(controls) > 5
    unused = find_unused(controls)
    assert not unused, unused


def test_the_check_finds_a_control_that_no_flow_uses() -> None:
    assert find_unused({("button", "Clos"), ("menuitem", "Copy code")}) == [
        ("button", "Clos"),
        ("menuitem", "Copy code"),
    ]
    assert find_unused({("button", "Copy code")}) == []


def add(page: Page, found: set[Control], opened: Locator) -> None:
    """Note the controls of a layer, once it is open, and close it."""
    expect(opened.first).to_be_visible()
    before = len(found)
    found |= list_controls(page)
    assert len(found) > before, "the layer adds no control, so it was not open"
    page.keyboard.press("Escape")
    expect(opened).to_have_count(0)


def visit_menus(page: Page, found: set[Control]) -> None:
    menu = page.get_by_role("button", name=f"Actions for “{QUESTION}”").first
    for action in ("Rename", "Move to a folder", "View code"):
        menu.click()
        found |= list_controls(page)
        page.get_by_role("menuitem", name=action).click()
        add(page, found, page.get_by_role("dialog"))
    page.get_by_role("button", name="Import, export, select").click()
    add(page, found, page.get_by_role("menu"))
    page.get_by_role("button", name=re.compile("Model: ")).first.click()
    add(page, found, page.get_by_role("listbox"))


def visit_messages(page: Page, found: set[Control]) -> None:
    answer = page.get_by_role("article", name="Answer").last
    answer.get_by_role("button", name="Regenerate").click()
    expect(answer.get_by_text("2 of 2")).to_be_visible()
    wait_for_answer(page)
    for message in (first_question(page), answer):
        message.hover()
        message.get_by_role("button", name="Edit").click()
        add(page, found, message.get_by_role("textbox"))
    answer.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    found |= list_controls(page)


def visit_settings(page: Page, found: set[Control]) -> None:
    settings = open_settings(page)
    found |= list_controls(page)
    settings.get_by_label("Temperature").fill("0.33")
    settings.get_by_role("button", name="Save as a preset").click()
    add(page, found, page.get_by_role("dialog", name="Save as a preset"))


def visit_tools(page: Page, found: set[Control]) -> None:
    set_up(page, List_of_tools='[{"name": "get_weather", "parameters": {"type": "object", "properties": {}}}]')
    page.get_by_role("button", name="Edit get_weather").click()
    page.get_by_role("button", name="Add a parameter").click()
    add(page, found, page.get_by_role("dialog", name="Edit get_weather"))
    page.get_by_label("Address that answers get_weather").fill("http://127.0.0.1:9/tool")
    expect(page.get_by_label("Send calls there without asking me")).to_be_visible()
    found |= list_controls(page)
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    answer_with(page, {"reasoning_content": "Rain?"}, {"tool_calls": [call]})
    send(page, "What is the weather?")
    expect(wait_for_answer(page).get_by_label("Result of get_weather")).to_be_visible()
    found |= list_controls(page)


def visit_what_went_wrong(page: Page, found: set[Control]) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add PDFs or text files").click()
    chooser.value.set_files({"name": "code.py", "mimeType": "text/plain", "buffer": b"a"})
    expect(page.get_by_role("button", name="Remove code.py")).to_be_visible()
    found |= list_controls(page)
    page.route(COMPLETIONS, lambda route: route.fulfill(status=500, json={"error": {"message": "a fault"}}))
    send(page, "What went wrong?")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    found |= list_controls(page)
    page.get_by_role("link", name="Models", exact=True).click()
    page.route("**/api/pull", lambda route: route.fulfill(status=502, json={"error": "the hub does not answer"}))
    page.get_by_label("Pull a model").fill("hf.co/nobody/nothing")
    page.get_by_role("button", name="Pull", exact=True).click()
    expect(page.get_by_role("list", name="Pulls").get_by_role("button", name="Edit")).to_be_visible()
    found |= list_controls(page)


def visit_models(page: Page, found: set[Control]) -> None:
    page.get_by_role("link", name="Models", exact=True).click()
    for action in ("Copy", "Delete"):
        page.get_by_role("button", name="More for demo", exact=True).click()
        found |= list_controls(page)
        page.get_by_role("menuitem", name=action).click()
        add(page, found, page.get_by_role("dialog"))
    page.get_by_role("main").get_by_role("link", name="demo", exact=True).click()
    expect(page.get_by_label("Filter tensors")).to_be_visible()
    found |= list_controls(page)


def visit_others(page: Page, found: set[Control]) -> None:
    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_role("tab", name="16 times at once").click()
    expect(page.get_by_role("button", name="Ask it 16 times")).to_be_visible()
    found |= list_controls(page)
    page.get_by_role("link", name="Settings", exact=True).click()
    page.get_by_role("button", name="Enter a key").click()
    add(page, found, page.get_by_role("dialog").get_by_label("API key"))


LAYERS = [
    visit_menus,
    visit_messages,
    visit_settings,
    visit_tools,
    visit_what_went_wrong,
    visit_models,
    visit_others,
]


@pytest.mark.parametrize("visit_layers", LAYERS)
def test_every_control_of_a_layer_is_used_by_a_flow(
    visit_layers: Callable[[Page, set[Control]], None], page: Page
) -> None:
    send(page, QUESTION)
    wait_for_answer(page)
    found: set[Control] = set()
    visit_layers(page, found)
    unused = find_unused(found)
    assert not unused, unused


def test_every_control_of_the_sheets_of_a_phone_is_used_by_a_flow(server: PageServer, tab: OpenTab) -> None:
    page = tab(server, width=360, height=640).page
    found: set[Control] = set()
    for name in ("Conversations", "Settings of this conversation"):
        page.get_by_role("button", name=name, exact=True).click()
        add(page, found, page.get_by_role("dialog", name=name))
    assert ("button", "Close") in found
    unused = find_unused(found)
    assert not unused, unused


def test_the_first_view_is_drawn_within_half_a_second(page: Page) -> None:
    times: list[float] = []
    while len(times) < 3 or (len(times) < 10 and min(times) >= FIRST_VIEW_MS):  # others compute here, too
        page.reload()
        expect(page.get_by_role("navigation", name="Views")).to_be_visible()
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
        times.append(page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    print(f"first view after {', '.join(f'{ms:.0f}' for ms in times)} ms")
    assert min(times) < FIRST_VIEW_MS, times
