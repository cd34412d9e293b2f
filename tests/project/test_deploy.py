"""deploy/ and .github/: files for other programs are well-formed, and the installer refuses what it must."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def find_tool(name: str) -> str:
    """Find a program of this environment; skip the test if its registry has none for this machine."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return str(path)


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.compose-spec", [DEPLOY / "compose.yaml"]),
    ],
    ids=["workflows", "forms", "compose"],
)
def test_the_schema(schema: str, files: list[Path]) -> None:
    assert files
    check([find_tool("check-jsonschema"), "--builtin-schema", schema, *map(str, files)])


def test_the_dockerfile_and_the_scripts_pass_their_linters() -> None:
    check([find_tool("hadolint"), str(DEPLOY / "Dockerfile")])
    check([find_tool("shellcheck"), *(str(ROOT / name) for name in ("deploy/install.sh", ".ci/run", "tools/arm.sh"))])


def check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_workflows_call_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text()
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
        assert all((ROOT / name).exists() for name in re.findall(r"\b(?:deploy|\.ci)/[\w.]*\w", text))
        for line in re.findall(r"uses: (\S+)", text):
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", line), line


def test_the_dockerfile_copies_what_the_context_has() -> None:
    shown = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert sorted(copied) == sorted(shown)
    assert all((ROOT / name).exists() for name in copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    used = re.findall(r"\[(\w+)\]", text + (DEPLOY / "compose.yaml").read_text().replace("[ALL]", ""))
    assert {"cuda", "ray"} <= extras.keys() & set(used)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "no release is published yet; give a wheel or a folder with the sources"),
        (["nowhere.whl"], "there is no nowhere.whl"),
        (["http://127.0.0.1/mlxr.whl"], "is not fetched without TLS"),
        ([__file__, "0" * 64], "nothing was installed"),
    ],
    ids=["nothing", "no file", "no TLS", "another sum"],
)
def test_the_installer_refuses(arguments: list[str], error: str, tmp_path: Path) -> None:
    done = run_installer(tmp_path, *arguments)
    assert done.returncode == 1
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_failed_installation_leaves_the_old_one_and_removal_takes_all(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "old").touch()
    (tmp_path / "python3.13").write_text(f'#!/bin/sh\n[ "$2" != venv ] && exec {sys.executable} "$@"\n')
    (tmp_path / "python3.13").chmod(0o755)
    assert run_installer(tmp_path, __file__).returncode == 1
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["old"]
    assert run_installer(tmp_path, "--remove").returncode == 0
    assert not (tmp_path / "home").exists()


def run_installer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run deploy/install.sh with its places in `folder`; programs there come before those of the machine."""
    shell = shutil.which("sh")
    assert shell
    own = {"MLXR_HOME": str(folder / "home"), "MLXR_BIN": str(folder / "bin")}
    command = [shell, str(DEPLOY / "install.sh"), *arguments]
    own["PATH"] = f"{folder}:/usr/local/bin:/usr/bin:/bin"
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False)
