"""What the README and examples/ show runs as it stands there, in an environment that has only the wheel."""

from __future__ import annotations

import re
import socket
import subprocess
import time

from fake_hub import FakeHub
from model_folder import make_folder

from conftest import LIMIT_S, ROOT, Installed

README = (ROOT / "README.md").read_text()
DRAFT = (ROOT / "src/mlxr/assets/demo-draft.gguf").read_bytes()


def read_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_examples(installed: Installed) -> None:
    """A third of them; tests/real/test_demo_numbers.py runs all."""
    for path in sorted((ROOT / "examples").glob("*.py"))[::3]:
        output = installed.run("python", "-W", "error", path)
        assert output
        assert "equal: False" not in output


def test_the_readmes_python(installed: Installed) -> None:
    blocks = read_blocks("python")
    assert blocks
    for block in blocks:
        assert "os.path.join" in installed.run("python", "-c", block)


def test_the_readmes_commands(installed: Installed, hub: FakeHub) -> None:
    """Each line in a shell, with the files it names; `serve` stays until the last one has run."""
    lines = [line for block in read_blocks("sh") for line in block.splitlines() if line.startswith(".venv/bin/mlxr")]
    assert len(lines) > 6
    (installed.folder / ".venv").symlink_to(installed.environment)
    (installed.folder / "model.gguf").write_bytes(DRAFT)
    make_folder(installed.folder / "folder")
    hub.add("owner/repo", {"model.Q4_K_M.gguf": DRAFT})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MLXR_HUB_URL": hub.url, "MLXR_PORT": str(port)}
    with_port = Installed(installed.environment, installed.folder, variables)
    servers: list[subprocess.Popen[str]] = []
    try:
        for line in lines:
            words = line.replace("11434", str(port)).replace("convert folder/ model.gguf", "convert folder/ new.gguf")
            is_server = " serve" in words.partition("#")[0]
            process = with_port.start("/bin/sh", "-c", f"exec {words}" if is_server else words, stdin=subprocess.PIPE)
            if is_server:
                servers.append(process)
                wait_for_port(port, process)
                continue
            output, errors = process.communicate("What does os.path.join do?\n", timeout=LIMIT_S)
            assert process.returncode == 0, (line, output, errors)
            assert "Traceback" not in errors
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=LIMIT_S)


def wait_for_port(port: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(process.communicate())
