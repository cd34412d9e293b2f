"""Imports point downwards only: reads every source file, imports inside functions included."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "mlxr"

# What each part may import besides core and itself. Parts not named here may not exist.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "kernels": {"_native"},
    "formats": set(),
    "templates": set(),
    "pictures": set(),
    "tokenizers": {"templates"},
    "registry": set(),
    "cache": {"kernels"},
    "models": {"kernels", "cache"},
    "model_files": {"formats", "tokenizers", "models", "kernels"},
    "loading": {"model_files", "formats", "tokenizers", "models", "kernels"},
    "conversion": {"formats", "loading", "models", "kernels"},
    "engine": {"kernels", "cache", "models"},
    "service": {"engine", "pictures", "loading", "conversion", "templates", "tokenizers", "registry"},
    "server": {"service", "registry"},
    "cluster": {"server", "service", "engine", "cache"},
    "llm": {"service", "loading"},
    "cli": {"llm", "service", "server", "cluster", "registry", "loading", "conversion", "formats"},
    "__init__": {"llm"},
    "__main__": {"cli"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def module_of(path: Path) -> str:
    names = ["mlxr", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(names[:-1] if names[-1] == "__init__" and len(names) > 2 else names)


def imports_of(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of all that `source` imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if is_package and node.level == 1 else -node.level or None]
            base = ".".join([*parents, node.module or ""] if node.level else [node.module or ""]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base == "mlxr")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    part = part_of(module)
    allowed = ALLOWED[part] | {"core", part} if part != "core" else {"core"}
    found = []
    for name in imports_of(source, module, is_package):
        root = name.split(".")[0]
        if root == "mlxr" and len(name.split(".")) > 1 and part_of(name) not in allowed and name != "mlxr.__version__":
            found.append(f"{module} imports {name}")
        if part == "core" and root not in sys.stdlib_module_names | {"mlxr"}:
            found.append(f"{module} imports {name}: core is standard library only")
        if part == "models" and root in {"numpy", "mlx"}:
            found.append(f"{module} imports {name}: models are written against the operators alone")
    return found


def test_the_design_lists_the_same_layers() -> None:
    text = (PACKAGE.parents[1] / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| ([a-z_, ]+) \| (.+) \|$", text.split("\n## ")[1], re.MULTILINE)
    listed = {part: set(re.findall(r"\w+", parts)) for names, parts in rows for part in names.split(", ")}
    nothing = {"nothing", "of", "ours", "no", "NumPy"}
    wanted = {part: parts - {"_native"} for part, parts in ALLOWED.items() if not part.startswith("__")}
    assert {part: parts - nothing for part, parts in listed.items() if part != "package"} == wanted


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    module = module_of(path)
    assert part_of(module) in ALLOWED, f"{path} is in no layer: add it to the table and to the design"
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from mlxr.engine import engine", "mlxr.cache.page_table"),
        ("def f():\n    import mlxr.service", "mlxr.models.decoder"),
        ("from mlxr import llm", "mlxr.engine.engine"),
        ("from ..formats import gguf", "mlxr.kernels.linear"),
        ("import numpy", "mlxr.core.types"),
        ("import numpy as np", "mlxr.models.decoder"),
        ("import importlib\nimportlib.import_module('mlxr.cli.main')", "mlxr.service.chat"),
    ],
)
def test_the_test_catches(source: str, module: str) -> None:
    assert violations(source, module)


def test_every_file_is_read() -> None:
    assert len(FILES) > 30
