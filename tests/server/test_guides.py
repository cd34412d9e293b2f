"""The commands of docs/index.md, its neighbours and docs/guides/ run as they stand, and print what the pages show.

Blocks of `bash` and `python` run in the order of their page, in one shell of a process group of its own, with a server
for the port that pages name. A block of `text` behind one is what it prints; `…` stands for anything.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_adapters import write_gguf_adapter
from free_ports import find_port

from mlxr.loading import ASSETS

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
sys.path.append(str(TESTS / "registry"))
from fake_hub import FakeHub  # noqa: E402

PAGES = [
    *(DOCS / name for name in ("index.md", "which-model.md", "troubleshooting.md")),
    *(DOCS / "guides").glob("*.md"),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "-- block --"
REPOSITORY = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
START_S, PAGE_S = 60, 120


def read_steps(text: str) -> list[tuple[str, str | None]]:
    """Return a shell command for each block that runs, with the output that its page shows, if any."""
    steps: list[tuple[str, str | None]] = []
    for language, body in BLOCK.findall(text):
        if language == "text":
            steps[-1] = (steps[-1][0], body)
        elif language == "python":
            steps.append((f"python - <<'PYTHON'\n{body}PYTHON\n", None))
        elif language == "bash":
            ports = re.findall(r"serve .*--port (\d+).*&$", body, re.MULTILINE)
            waits = [f"until (: </dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done\n" for port in ports]
            steps.append((body + "".join(waits), None))
    return steps


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a reader: commands on the path, a home and a hub of their own."""
    folder = tmp_path_factory.mktemp("reader")
    with FakeHub() as hub:
        hub.add(REPOSITORY, {"qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (ASSETS / "demo-draft.gguf").read_bytes()})
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLXR_", "OPENAI_"))}
        yield kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "MLXR_HUB_URL": hub.url,
            "MLXR_MODELS_FOLDER": str(folder / "models"),
            "MLXR_ARENA_BYTES": "64M",
            "MLXR_THREADS": "2",
        }


@pytest.fixture(scope="module")
def port(surroundings: dict[str, str]) -> Iterator[int]:
    """The port of a server as step 3 of the first page starts it."""
    port = find_port()
    command = [sys.executable, "-m", "mlxr", "serve", "demo", "--port", str(port)]
    server = subprocess.Popen(command, env=surroundings, stderr=subprocess.DEVNULL, start_new_session=True)
    ends = time.monotonic() + START_S
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)) and time.monotonic() < ends and server.poll() is None:
            time.sleep(0.05)
    yield port
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(START_S)


def run_page(text: str, folder: Path, environment: dict[str, str], port: int) -> list[tuple[str, str | None, str]]:
    """Run the blocks of a page; each with what it should print and what it printed."""
    steps = read_steps(text)
    script = "".join(f"{step}\necho; echo '{MARK}'\n" for step, _ in steps)
    script = re.sub(r"^mlxr serve demo &$", ":", script, flags=re.MULTILINE)  # it is already running
    script = script.replace("11434", str(port)).replace("11435", str(find_port()))
    output = b""
    ends = time.monotonic() + PAGE_S
    with (
        (folder / "stderr").open("wb") as errors,
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment | {"MLXR_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as shell,
    ):
        try:
            while output.count(MARK.encode()) < len(steps) and time.monotonic() < ends:  # a server keeps the pipe open
                assert shell.stdout
                piece = os.read(shell.stdout.fileno(), 1 << 16)
                output += piece
                if not piece:
                    break
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    parts = output.decode().split(f"\n{MARK}\n")[:-1]
    done = len(parts)
    assert done == len(steps), f"{steps[done][0]}\n{output.decode()[-2000:]}\n{(folder / 'stderr').read_text()[-2000:]}"
    shown = [part.replace(str(port), "11434") for part in parts]
    return [(step, expected, part) for (step, expected), part in zip(steps, shown, strict=True)]


def fits(expected: str, printed: str) -> bool:
    """Tell whether a page shows what was printed."""
    return re.fullmatch(".*".join(map(re.escape, expected.strip().split("…"))), printed.strip(), re.DOTALL) is not None


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem == "tools" else pytest.mark.slow, id=page.stem)
        for page in sorted(PAGES)
    ],
)
def test_the_commands_of_a_page(page: Path, tmp_path: Path, surroundings: dict[str, str], port: int) -> None:
    text = page.read_text()
    if page.stem == "cluster" and importlib.util.find_spec("ray") is None:
        pytest.skip("the extra `ray` is not installed")
    write_gguf_adapter(tmp_path / "own.gguf", 1)
    for step, expected, printed in run_page(text, tmp_path, surroundings, port):
        assert expected is None or fits(expected, printed), f"{step}\nprinted\n{printed}\nthe page shows\n{expected}"


def test_no_command_of_a_guide_is_left_out() -> None:
    for page in PAGES:
        assert not {language for language, _ in BLOCK.findall(page.read_text())} - {"bash", "python", "text"}, page
    assert len([page for page in PAGES if read_steps(page.read_text())]) == len(PAGES) - 1  # the list of guides
