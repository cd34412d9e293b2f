"""Every control of every view is used by some flow, and the first view is there at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chatting import send, wait_for_answer
from playwright.sync_api import Page, expect

FLOWS = "\n".join(path.read_text() for path in Path(__file__).parent.glob("*.py") if path != Path(__file__))
VIEWS = ["Chat", "Compare", "Models", "Engine", "Settings"]
FIRST_VIEW_MS = 500
QUESTION = "Say hi"
OTHERWISE = {  # controls that flows use by another name
    QUESTION: "the link of a conversation in the list, which is opened by the title that the flow gave it",
    f"Actions for “{QUESTION}”": "the menu of that conversation",
    "How do I read a file line by line?": "the second one of the example questions, of which flows use the first",
}
CONTROLS = """() => {
  const seen = document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [role=button], [role=switch], [role=slider], [role=tab]");
  const name = (e) => (e.getAttribute("aria-label")
    || (e.labels && e.labels[0] && e.labels[0].innerText) || e.innerText || e.title || e.placeholder || "").trim();
  return [...seen].filter((e) => e.checkVisibility()).map((e) => [e.tagName.toLowerCase(), name(e).split("\\n")[0]]);
}"""


def list_controls(page: Page) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name in page.evaluate(CONTROLS)}


@pytest.mark.parametrize("view", VIEWS)
def test_every_control_has_a_name_and_is_used_by_a_flow(view: str, page: Page) -> None:
    send(page, QUESTION)
    wait_for_answer(page)
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view).click()
    expect(page.get_by_role("link", name=view, exact=True)).to_have_attribute("aria-current", "page")
    page.wait_for_load_state("networkidle") if view != "Engine" else page.wait_for_timeout(500)
    controls = list_controls(page)
    assert len(controls) > 5
    assert not [kind for kind, name in controls if not name], controls
    unused = {name for _, name in controls if not is_used(name)} - OTHERWISE.keys()
    assert not unused, f"no flow uses {sorted(unused)}"


def is_used(name: str) -> bool:
    """Whether a flow names a control; numbers in names differ from run to run."""
    words = re.sub(r"\d[\d,.]*", "", name).strip()
    return name in FLOWS or (len(words) > 3 and words in FLOWS)


def test_the_first_view_is_drawn_within_half_a_second(page: Page) -> None:
    times = []
    for _ in range(3):
        page.reload()
        expect(page.get_by_role("navigation", name="Views")).to_be_visible()
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
        times.append(page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    print(f"first view after {', '.join(f'{ms:.0f}' for ms in times)} ms")
    assert min(times) < FIRST_VIEW_MS, times
