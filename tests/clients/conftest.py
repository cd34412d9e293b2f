"""Client libraries against a running server. They live in an environment of their own, without mlxr.

`mlxr serve` is started from `MLXR_COMMAND`, by default the one of `.venv`. The model is the demo; with `--real` it is
Qwen2.5 Coder 0.5B out of the folder that `MLXR_REAL_MODELS` names. With `--cluster N`, `mlxr cluster serve` with N
replicas takes the place of `mlxr serve`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import Served

ROOT = Path(__file__).parents[2]
COMMAND = os.environ.get("MLXR_COMMAND", str(ROOT / ".venv" / "bin" / "mlxr"))
WRITER = ROOT / ".venv" / "bin" / "python"  # writes models, for which it has the test tools
REAL = "qwen2.5-coder-0.5b"
WAIT_S = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", action="store_true", help=f"serve {REAL} from MLXR_REAL_MODELS instead of the demo")
    parser.addoption("--cluster", type=int, metavar="N", help="let a cluster of N replicas answer")


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of the session."""
    is_real = bool(request.config.getoption("--real"))
    arguments = [str(find_real_model())] if is_real else []
    adapters = "" if is_real else write_adapters(tmp_path_factory.mktemp("adapters"))
    own = {"MLXR_ADAPTERS": f"one={adapters}/one.gguf", "MLXR_IMPORT_FOLDERS": adapters} if adapters else {}
    replicas = request.config.getoption("--cluster")
    words = ["cluster", "serve", "--replicas", str(replicas)] if replicas else ["serve"]
    with start([*words, *arguments], tmp_path_factory.mktemp("home"), own) as url:
        yield Served(url, REAL if is_real else "demo", is_real, adapters)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a tiny model that sees, which the environment that has mlxr writes."""
    folder = tmp_path_factory.mktemp("seeing") / "eyes"
    paths = [str(ROOT / "tests" / name) for name in ("models", "shared")]
    program = f"import sys; from pathlib import Path; sys.path[:0] = {paths}; from vision_models import *; "
    program += f"write_chat_folder(Path({str(folder)!r}), 'qwen3vl')"
    subprocess.run([WRITER, "-c", program], check=True)
    with start(["serve", str(folder)], tmp_path_factory.mktemp("home"), {}) as url:
        yield Served(url, str(folder), is_real=False)


@contextmanager
def start(words: list[str], home: Path, own: dict[str, str]) -> Iterator[str]:
    """Start an `mlxr` command that serves, until the context ends; yields its address."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLXR_")}
    own = {"HOME": str(home), "MLXR_MODELS_FOLDER": str(home / "models"), "MLXR_ARENA_BYTES": "256M", **own}
    command = [COMMAND, *words, "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=inherited | own)
    try:
        yield read_address(process)
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def write_adapters(folder: Path) -> str:
    """Adapters of the demo, written by the environment that has mlxr."""
    subprocess.run([WRITER, ROOT / "tests" / "shared" / "demo_adapters.py", folder], check=True)
    return str(folder)


def find_real_model() -> Path:
    folder = os.environ.get("MLXR_REAL_MODELS")
    if not folder:
        pytest.skip(f"MLXR_REAL_MODELS is not set: it names the folder with {REAL}.gguf")
    path = Path(folder).expanduser() / f"{REAL}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there, which MLXR_REAL_MODELS promises")
    return path


def read_address(process: subprocess.Popen[str]) -> str:
    """Return the server's address, read from its output until it is ready."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready"):
            found = re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))
            assert found, lines
            return found[0]
    raise AssertionError(f"the server does not start: {lines}")
