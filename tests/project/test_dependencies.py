"""Every package that mlxr imports is declared as a dependency, and every declared one is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"opentelemetry", "PIL", "ray"}  # imported only where the extras `tracing`, `images` and `ray` are installed


def canonical(requirement: str) -> str:
    """`Some_Package[extra]>=1; marker` as the index spells it: some-package."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def imported_modules() -> dict[str, str]:
    """Top-level modules that src/mlxr imports, at any depth of its functions, with a file that does."""
    modules: dict[str, str] = {}
    for path in sorted((ROOT / "src/mlxr").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            modules |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return {name: path for name, path in modules.items() if name not in sys.stdlib_module_names and name != "mlxr"}


def test_imports_are_declared() -> None:
    declared = {canonical(requirement) for requirement in PROJECT["dependencies"]}
    owners = packages_distributions()
    used = set()
    for module, path in imported_modules().items():
        packages = {canonical(name) for name in owners.get(module, [module])}
        used |= packages
        assert packages & declared or module in EXTRAS, f"{path} imports {module}: pyproject.toml does not declare it"
    unused = declared - used - {"mlx"}  # imported by name, where it is installed
    assert not unused, f"pyproject.toml declares {unused}, which nothing imports"
