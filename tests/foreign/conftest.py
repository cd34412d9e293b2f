"""Agents and suites that others wrote, against `mlxr serve` with a demo that may read long prompts.

`MLXR_AGENTS` names the folder with their `node_modules`. What is not in it is skipped, with the reason.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forcing_proxy import ForcingProxy, Json
from long_demo import write_long_demo

ROOT = Path(__file__).parents[2]
COMMAND = os.environ.get("MLXR_COMMAND", str(ROOT / ".venv" / "bin" / "mlxr"))
AGENTS = Path(os.environ.get("MLXR_AGENTS", str(ROOT / ".venv-agents")))
MODEL = "long"
WAIT_S = 60
MakeProxy = Callable[[str, Json], ForcingProxy]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server for all tests."""
    folder = tmp_path_factory.mktemp("server")
    recipe = folder / "Modelfile"  # most suites state no temperature, and drawn arguments may run to the last token
    recipe.write_text(f"FROM {write_long_demo(folder / 'demo.gguf')}\nPARAMETER temperature 0\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLXR_")}
    own = {"HOME": str(folder), "MLXR_MODELS_FOLDER": str(folder / "models"), "MLXR_ARENA_BYTES": "1G"}
    environment = inherited | own
    subprocess.run([COMMAND, "create", MODEL, "-f", recipe], env=environment, check=True, stdout=subprocess.DEVNULL)
    command = [COMMAND, "serve", MODEL, "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if "listens on" in line or "http://" in line:
                address = address or "http://" + line.split("http://", 1)[1].split(maxsplit=1)[0].rstrip(":")
            if line.startswith("ready"):
                break
        assert address, "the server did not start"
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


@pytest.fixture
def make_proxy(url: str) -> Iterator[MakeProxy]:
    """Make a proxy that forces a call of `tool` with `arguments`."""
    made: list[ForcingProxy] = []

    def make(tool: str, arguments: Json) -> ForcingProxy:
        made.append(ForcingProxy(url, tool, arguments))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


def find_program(name: str) -> Path:
    """Return the path of an agent's program; skip the test where it is not installed."""
    path = AGENTS / "node_modules" / ".bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed in {AGENTS}: the npm registry may lack it")
    return path
