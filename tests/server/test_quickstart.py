"""docs/quickstart.md and the README: their commands and programs run, and the settings and flags in them exist."""

from __future__ import annotations

import http.client
import io
import json
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from demo_adapters import write_gguf_adapter
from running_server import RunningServer, start_server
from starlette.applications import Starlette

from mlxr.cli.main import main
from mlxr.core.settings import BY_NAME, SETTINGS, Settings
from mlxr.core.types import PARAMETERS
from mlxr.loading import ASSETS
from mlxr.server.listen import Server
from mlxr.server.parts import Lifecycle

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "registry"), str(TESTS / "cli")]
from fake_hub import FakeHub  # noqa: E402
from model_folder import make_folder  # noqa: E402

TEXT = (TESTS.parent / "docs" / "quickstart.md").read_text()
DRAFT = ASSETS / "demo-draft.gguf"
REPOSITORY = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"


def cells() -> list[list[str]]:
    """The rows of all tables, cell by cell."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("| "))] for row in rows]


def read_commands() -> list[str]:
    """Return the commands of the page, in its order."""
    found = []
    for line in TEXT.splitlines():
        spans = re.findall(r"`([^`]+)`", line) if line.startswith("| ") else [line.strip()]
        found += [span for span in spans if span.startswith(("mlxr ", "curl http://127.0.0.1"))]
    return found


COMMANDS = read_commands()
README = (TESTS.parent / "README.md").read_text()
README_LINES = [
    part.strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    for part in line.partition(" #")[0].split(" && ")
]
OTHERS = ("npm ", "pip ", "claude", "codex ", "python ", "mkdir ", "echo ")  # programs of others
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Keyboard(io.TextIOWrapper):
    """Standard input at which somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files that the page's commands name, a hub with the repository it pulls, and a home without settings."""
    for name in ("model.gguf", "f16.gguf", "home/.ollama/models/blobs/sha256-74701a8c35f6"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(DRAFT)
    manifest = tmp_path / "home/.ollama/models/manifests/registry.ollama.ai/library/llama3.2/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:74701a8c35f6"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "base.gguf").symlink_to(ASSETS / "demo.gguf")
    write_gguf_adapter(tmp_path / "own.gguf", 1)
    make_folder(tmp_path / "folder")
    (tmp_path / "question.txt").write_text("What is json?\n")
    (tmp_path / "text.txt").write_text("import os\nprint(os.path.join('a', 'b'))\n")
    (tmp_path / "Modelfile").write_text("FROM coder\nSYSTEM Answer in one sentence.\nPARAMETER temperature 0.2\n")
    with FakeHub() as hub:
        hub.add(REPOSITORY, {"qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": DRAFT.read_bytes()})
        monkeypatch.chdir(tmp_path)
        for name, value in {
            "HOME": tmp_path / "home",
            "MLXR_HUB_URL": hub.url,
            "MLXR_MODELS_FOLDER": tmp_path / "server" / "models",
            "MLXR_ARENA_BYTES": "64M",
            "MLXR_DEFAULT_MODEL": "demo-draft",
        }.items():
            monkeypatch.setenv(name, str(value))
        yield tmp_path


@pytest.fixture
def running(place: Path) -> Iterator[RunningServer]:
    """A server with the model that the page calls coder, over the registry that the commands change."""
    assert main(["import", str(DRAFT), "coder"]) == 0
    server = start_server(place / "server", default_model="coder")
    yield server
    server.stop()


@pytest.fixture
def run(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs a reader's command for the server of the test instead of one on the page's port; returns the output."""
    address = running.url.removeprefix("http://")
    port = address.rpartition(":")[2]
    monkeypatch.setattr("mlxr.cli.serve.serve_app", serve_once)
    monkeypatch.setattr("mlxr.cli.serve.start_logging", lambda settings: None)  # it would outlive the test

    def run(command: str) -> str:
        words = shlex.split(re.sub(r"127\.0\.0\.1:(11434|8080)", address, command))
        if words[0] == "curl":
            return subprocess.run([words[0], "-sf", *words[1:]], capture_output=True, text=True, check=True).stdout
        stdin: io.TextIOWrapper = Keyboard(io.BytesIO(b"What is json?\n/bye\n"))
        if "<" in words:
            stdin = io.TextIOWrapper(io.BytesIO(Path(words.pop()).read_bytes()))
            words.pop()
        serves = words[1] == "serve"
        words = [str(Path(word).expanduser()) if word.startswith("~") else word for word in words]
        words = ["0" if serves and word == "8080" else word for word in words]
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setenv("MLXR_PORT", "0" if serves else port)
        capsys.readouterr()
        assert main(words[1:]) == 0, capsys.readouterr().err
        output = capsys.readouterr()
        return output.err if serves else output.out

    return run


def serve_once(
    app: Starlette, settings: Settings, listeners: Sequence[socket.socket], on_ready: Callable[[Lifecycle], None]
) -> None:
    """Stand in for `mlxr serve`: run the server until its models are loaded and it has answered one request."""
    ready = threading.Event()

    def note(lifecycle: Lifecycle) -> None:
        on_ready(lifecycle)
        ready.set()

    server = Server(app, settings, note)
    thread = threading.Thread(target=server.run, args=(listeners,), daemon=True)
    thread.start()
    assert ready.wait(60)
    connection = http.client.HTTPConnection("127.0.0.1", listeners[0].getsockname()[1])
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_every_command(run: Callable[[str], str]) -> None:
    assert len(COMMANDS) > 35
    outputs = {command: run(command) for command in COMMANDS}
    silent = [command for command, output in outputs.items() if not output.strip()]
    assert not silent
    assert "coder" in outputs["mlxr list"]
    assert "helper" in outputs["mlxr rm helper"]
    assert all("ready: " in output for command, output in outputs.items() if command.startswith("mlxr serve"))
    assert "ready: model\n" in outputs["mlxr serve model.gguf --port 8080"]
    assert outputs["mlxr run coder < question.txt"].strip()


@pytest.mark.slow
def test_every_command_of_the_readme(run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    lines = [re.sub(r'^eval "\$\((.*)\)"$', r"\1", line) for line in README_LINES if not line.startswith(OTHERS)]
    assert len(lines) > 12
    outputs = {line: run(line) for line in lines}
    assert not [line for line, output in outputs.items() if not output.strip() and "--write" not in line]
    assert "os.path.join" in outputs['mlxr run demo "What does os.path.join do?"']
    assert "export OPENAI_BASE_URL=" in outputs["mlxr connect openai"]
    subprocess.run(["bash", "-ec", outputs["mlxr connect openai"] + 'test -n "$OPENAI_API_KEY"'], check=True)
    assert opened
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(program, {})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.split()[1])
def test_every_program(program: str, running: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(program.replace("http://127.0.0.1:11434", running.url), names)
    assert capsys.readouterr().out.strip()
    getattr(names["client"], "_client", names["client"]).close()


def test_settings_and_flags_exist() -> None:
    settings = [row[1] for row in cells() if row[0].startswith("`OLLAMA_")]
    assert len(settings) > 8
    assert all(set(re.findall(r"`(\w+)`", cell)) <= BY_NAME.keys() for cell in settings)
    flags = {setting.flag for setting in SETTINGS} | {row.flag for row in PARAMETERS}
    ours = [row[1] for row in cells() if row[0].startswith("`-")]
    assert len(ours) > 10
    assert all(flag in flags for cell in ours for flag in re.findall(r"--[a-z-]+", cell))
