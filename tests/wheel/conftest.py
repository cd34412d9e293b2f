"""The wheel as a user installs it: built from the sdist, alone in a new environment, with no compiler in reach."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "registry"), str(ROOT / "tests" / "cli")]

from fake_hub import FakeHub  # noqa: E402

SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
LIMIT_S = 120


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel. Commands run in `folder`, which is also their home, and find nothing else."""

    environment: Path
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def bin(self) -> Path:
        """The folder of `mlxr` and `python`, the only one in PATH."""
        return self.environment / "bin"

    def start(self, *command: object, **options: object) -> subprocess.Popen[str]:
        """Start a program of the environment, or of the machine if its whole path is given."""
        own = {
            "PATH": str(self.bin),
            "HOME": str(self.folder),
            "CC": "/bin/false",
            "CXX": "/bin/false",
            "MLXR_MODELS_FOLDER": str(self.folder / "models"),
            "MLXR_ARENA_BYTES": "64M",
        }
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        words = [str(self.bin / str(command[0])), *map(str, command[1:])]
        return subprocess.Popen(words, cwd=self.folder, env=own | self.variables, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def run(self, *command: object, code: int = 0, text: str | None = None) -> str:
        """Run a program of the environment; return stdout and then stderr. It must end with the exit status `code`."""
        with self.start(*command, stdin=subprocess.PIPE) as process:
            output, errors = process.communicate(text, timeout=LIMIT_S)
        assert process.returncode == code, (command, output, errors)
        assert "Traceback" not in errors, errors
        return output + errors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", help="use this wheel instead of building one from an sdist")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    built = subprocess.run(
        [sys.executable, "-c", SDIST, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return folder / built.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as `pip install` of it does, in a folder that ccache knows."""
    given = request.config.getoption("--wheel")
    if given:
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    sdist: Path = request.getfixturevalue("sdist")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)]
    run_pip(command, {**os.environ, "CCACHE_BASEDIR": str(source)})
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its dependencies only, made by deploy/install.sh."""
    folder = tmp_path_factory.mktemp("environment")
    own = {"MLXR_HOME": str(folder / "mlxr"), "MLXR_BIN": str(folder / "bin"), "PIP_ONLY_BINARY": ":all:"}
    without_compiler = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", **own}
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    run_pip(["sh", str(ROOT / "deploy" / "install.sh"), str(wheel), checksum], without_compiler)
    assert (folder / "bin" / "mlxr").resolve() == (folder / "mlxr" / "bin" / "mlxr").resolve()
    return folder / "mlxr"


def run_pip(command: list[str], environment: dict[str, str]) -> None:
    """Run pip; show its output if it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Installed:
    """The environment, with an empty folder to work in."""
    return Installed(environment, tmp_path)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub of models on this machine."""
    with FakeHub() as fake:
        yield fake


def list_members(sdist: Path) -> list[str]:
    """List the paths in the sdist, below its one folder."""
    with tarfile.open(sdist) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]
