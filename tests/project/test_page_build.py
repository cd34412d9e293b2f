"""The served page was built from the sources in web/; digests tell, so no Node is needed."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
REMEDY = "run `make page` and commit src/mlxr/server/page"
MAX_FIRST_KB = 250  # compressed, of all files before the first view is drawn


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_sources", ROOT / "tools" / "page_sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
INDEX = TOOL.BUILT / "index.html"
pytestmark = pytest.mark.skipif(not INDEX.exists(), reason=f"the page is not built: {REMEDY}")


def test_the_page_is_not_older_than_its_sources() -> None:
    recorded = json.loads(TOOL.RECORD.read_text()) if TOOL.RECORD.exists() else {}
    now = TOOL.describe_build()
    assert recorded.get("sources") == now["sources"], f"web/ has changed since the page was built: {REMEDY}"
    assert recorded["built"] == now["built"], f"files of the page are missing or changed: {REMEDY}"


def test_a_change_of_a_source_is_noticed(tmp_path: Path) -> None:
    for name in ("a.ts", "b.ts"):
        (tmp_path / name).write_text(name)
    files = sorted(tmp_path.iterdir())
    before = TOOL.hash_files(files, tmp_path)
    (tmp_path / "a.ts").write_text("a.ts ")
    changed = TOOL.hash_files(files, tmp_path)
    (tmp_path / "a.ts").write_text("a.ts")
    (tmp_path / "b.ts").rename(tmp_path / "c.ts")
    assert len({before, changed, TOOL.hash_files(sorted(tmp_path.iterdir()), tmp_path)}) == 3


def test_tests_are_no_sources() -> None:
    names = [path.name for path in TOOL.list_sources()]
    assert {"index.html", "package-lock.json", "main.tsx"} <= set(names)
    assert not [name for name in names if ".test." in name]


def test_nothing_is_fetched_from_elsewhere_and_nothing_stands_inline() -> None:
    text = INDEX.read_text()
    addresses = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(addresses) >= 3
    assert all(address.startswith("./") for address in addresses)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_the_first_view_is_small() -> None:
    first = re.findall(r'(?:src|href)="\./([^"]*\.(?:js|css|svg|webmanifest))"', INDEX.read_text())
    assert {Path(name).suffix for name in first} == {".js", ".css", ".svg", ".webmanifest"}
    size = sum(len(gzip.compress((TOOL.BUILT / name).read_bytes(), 9)) for name in ["index.html", *first])
    print(f"the first view: {size} bytes, compressed")
    assert size <= MAX_FIRST_KB * 1000, size


def test_each_package_of_the_page_has_its_licence_beside_it() -> None:
    text = (TOOL.BUILT / "licenses.txt").read_text()
    for name in json.loads((TOOL.WEB / "package.json").read_text())["dependencies"]:
        inside = "@radix-ui/react-popover" if name == "radix-ui" else name  # that only hands on others
        assert re.search(rf"(?m)(^|, ){re.escape(inside)} \d", text), name
    assert text.count("Permission is hereby granted, free of charge") > 3
