"""The client libraries, from their own environment, against the server of the environment that has only the wheel."""

from __future__ import annotations

import os
import subprocess

from conftest import ROOT, Installed

PYTHON = ROOT / ".venv-clients" / "bin" / "python"


def test_clients(installed: Installed) -> None:
    assert PYTHON.exists(), "make test-wheel installs the client libraries in .venv-clients"
    command = [PYTHON, "-m", "pytest", "--confcutdir=tests/clients", "-W", "ignore", "tests/clients"]
    command.append("--ignore=tests/clients/test_pictures.py")  # the wheel alone decodes no pictures
    without_compiler = {**os.environ, "PATH": str(installed.bin), "MLXR_COMMAND": str(installed.bin / "mlxr")}
    run = subprocess.run(command, cwd=ROOT, env=without_compiler, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
