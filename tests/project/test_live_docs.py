"""The live stream is described once: Python's types, those of the page, and docs/page-live.md name the same fields."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mlxr.core import stats
from mlxr.server import live

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "page-live.md").read_text()
SOURCE = (ROOT / "web" / "src" / "api" / "live.ts").read_text()
SENT = [
    *(live.GroupState, live.GroupChange, stats.TablePart, stats.SequenceRow, stats.Queue, stats.StepSum),
    *(stats.Counters, stats.Dispatch, stats.StoreState, stats.MachineLimits, stats.LogEntry, stats.WatchedModel),
    *(live.Snapshot, live.Change, live.PageDetails),
]
IS_NUMBER = {"int": "number", "float": "number", "str": "string"}


def find_interface(name: str) -> dict[str, str]:
    """Return the fields of a TypeScript interface with their types; a `?` belongs to the name."""
    body = re.search(rf"^export interface {name} {{\n(.*?)^}}", SOURCE, re.MULTILINE | re.DOTALL)
    assert body is not None, f"web/src/api/live.ts has no interface {name}"
    return dict(re.findall(r"^  (\w+\??): (.*);$", body[1], re.MULTILINE))


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_the_page_knows_the_same_fields(kind: Any) -> None:
    fields = {row.name: row for row in dataclasses.fields(kind)}
    known = find_interface(kind.__name__)
    assert {name.rstrip("?") for name in known} == fields.keys()
    for name, type_name in known.items():
        assert name.endswith("?") == (kind is live.Change and name not in ("time", "seconds"))
        written = str(fields[name.rstrip("?")].type)
        if written in IS_NUMBER and not type_name.startswith('"'):
            assert type_name == IS_NUMBER[written]


@pytest.mark.parametrize(
    ("literal", "kind", "name"),
    [(stats.Phase, "SequenceRow", "phase"), (stats.Kind, "LogEntry", "kind")],
)
def test_the_page_knows_the_same_words(literal: Any, kind: str, name: str) -> None:
    assert re.findall(r'"(\w+)"', find_interface(kind)[name]) == list(get_args(literal))


@pytest.mark.parametrize("name", [*get_args(stats.Kind), *(row.name for row in dataclasses.fields(stats.Counters))])
def test_the_document_names_it(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_examples_have_these_fields() -> None:
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    snapshot, change, page = examples
    check_example(snapshot, live.Snapshot)
    check_example(change, live.Change)
    check_example(page, live.PageDetails)


def check_example(value: dict[str, Any], kind: Any) -> None:
    """Check that `value` has the fields of the dataclass `kind`; in Change, fields with a default may be missing."""
    hints = get_type_hints(kind)
    assert value.keys() <= hints.keys()
    if kind is not live.Change:
        missing = hints.keys() - value.keys()
        assert not missing or (kind is stats.Counters and "..." in str(value)), missing
    for name, inner in value.items():
        for item in inner if isinstance(inner, list) else [inner]:
            nested = [arg for arg in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(arg)]
            if nested and isinstance(item, dict) and "..." not in item:
                check_example(item, nested[0])


def test_bounds() -> None:
    assert f"At most {stats.MAX_LOG} entries" in TEXT
