"""Contents of the sdist, the wheel and the environment."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from conftest import Installed, list_members

PAGE = "src/mlxr/server/page/index.html"
CLIENTS = {"anthropic", "langchain-openai", "litellm", "ollama", "openai", "pytest"}


def test_the_sdist_holds_the_sources(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--wheel"):
        pytest.skip("a wheel was given, so no sdist is built")
    members = list_members(request.getfixturevalue("sdist"))
    for path in ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "src/mlxr/assets/demo.gguf", PAGE):
        assert path in members
    assert not [
        path
        for path in members
        if path.endswith((".so", ".pyc")) or path.startswith((".ci", ".venv", "build/", "web/node_modules"))
    ]


def test_the_wheel_holds_what_runs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for path in ("mlxr/py.typed", "mlxr/assets/demo.gguf", "mlxr/assets/demo-draft.gguf", PAGE.removeprefix("src/")):
        assert path in names
    assert [name for name in names if name.startswith("mlxr/_native.")]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/src/mlxr/server/page/licenses.txt") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert {top.partition("-")[0] for top in tops} == {"mlxr"}, "nothing but the package and its metadata"


def test_the_wheel_is_for_all_processors(installed: Installed) -> None:
    assert installed.run("python", "-c", "from mlxr import _native; print(_native.left_out_isas())") == "[]\n"


def test_the_environment_is_a_users(installed: Installed) -> None:
    listed = json.loads(installed.run("python", "-m", "pip", "list", "--format=json").partition("\n")[0])
    packages = {package["name"].lower().replace("_", "-"): package["version"] for package in listed}
    assert "mlxr" in packages
    assert not CLIENTS & set(packages)
    assert "No broken requirements" in installed.run("python", "-m", "pip", "check")


def test_nothing_is_imported_from_the_checkout(installed: Installed) -> None:
    where = installed.run("python", "-c", "import mlxr, mlxr._native; print(mlxr.__file__, mlxr._native.__file__)")
    assert all(path.startswith(str(installed.environment)) for path in where.split())
    assert (
        installed.run("python", "-c", "import shutil; print(shutil.which('cc'), shutil.which('c++'))") == "None None\n"
    )
