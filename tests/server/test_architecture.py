"""ARCHITECTURE.md names files that exist, and its drawings of a request and of a load show the real calls."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import pytest
from running_server import MakeServer

import mlxr
from mlxr.loading import load

ROOT = Path(__file__).parents[2]
PACKAGE = Path(mlxr.__file__).parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
STOP = re.compile(r"^ ([\w/]+\.py) +([\w.]+)", re.MULTILINE)
MAX_STOPS = 35

Stop = tuple[str, str]  # file, and qualified name of the function


def read_drawing(title: str) -> list[Stop]:
    section = PAGE.split(f"## {title}")[1].split("\n## ")[0]
    return [(match[1], match[2]) for match in STOP.finditer(section.split("```")[1])]


@contextmanager
def note_calls(into: dict[Stop, None]) -> Iterator[None]:
    """Note each function of mlxr when it is called first, on this thread and on those that begin meanwhile."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            stop = (frame.f_code.co_filename[len(str(PACKAGE)) + 1 :], frame.f_code.co_qualname)
            into.setdefault(stop)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def check_order(drawing: list[Stop], noted: dict[Stop, None]) -> None:
    calls = list(noted)
    assert [stop for stop in drawing if stop not in calls] == [], "the drawing has stops where nothing passes"
    places = [calls.index(stop) for stop in drawing]
    assert [drawing[at] for at in range(1, len(places)) if places[at] < places[at - 1]] == [], "they come earlier"


def test_a_request_passes_the_stops_that_are_drawn(make_server: MakeServer) -> None:
    drawing, calls = read_drawing("A request"), dict[Stop, None]()
    assert len({file for file, _ in drawing}) <= MAX_STOPS
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "What is json.dumps?"}], "stream": True,
        "max_tokens": 4, "temperature": 0.5, "seed": 1,
    }  # fmt: skip
    with note_calls(calls):
        running = make_server(draft="off")
        calls.clear()
        assert "[DONE]" in httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).text
        running.stop()
    check_order(drawing, calls)


def test_a_load_passes_the_stops_that_are_drawn() -> None:
    drawing, calls = read_drawing("A load"), dict[Stop, None]()
    demo = PACKAGE / "assets" / "demo.gguf"
    with note_calls(calls):
        load(demo, device="cpu", threads=1).close()
    check_order(drawing, calls)


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`([\w./]+/[\w./]*)`", PAGE))))
def test_what_is_named_is_there(named: str) -> None:
    assert (PACKAGE / named).exists() or (ROOT / named).exists()
