"""Code in the README and examples/ runs as it stands there, in an environment that has only the wheel."""

from __future__ import annotations

import re

from fake_hub import FakeHub
from model_folder import make_folder

from conftest import LIMIT_S, ROOT, Installed

README = (ROOT / "README.md").read_text()
DRAFT = (ROOT / "src/mlxr/assets/demo-draft.gguf").read_bytes()


def read_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_examples(installed: Installed) -> None:
    """Runs a third of them; tests/real/test_demo_numbers.py runs all."""
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
    """Runs those that need no server, each in a shell; tests/server/test_quickstart.py runs all in one process."""
    alone = ("mlxr run", "mlxr search", "mlxr pull", "mlxr convert", "mlxr validate")
    lines = [line for block in read_blocks("sh") for line in block.splitlines() if line.startswith(alone)]
    assert len(lines) > 5
    (installed.folder / "model.gguf").write_bytes(DRAFT)
    make_folder(installed.folder / "folder")
    hub.add("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", {"qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": DRAFT})
    reader = Installed(installed.environment, installed.folder, {"MLXR_HUB_URL": hub.url})
    for line in lines:
        with reader.start("/bin/sh", "-c", line) as process:
            output, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, (line, output, errors)
        assert output, line
        assert "Traceback" not in errors
