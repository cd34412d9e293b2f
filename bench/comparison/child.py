"""The script's handle to a side of a comparison: a process that stays loaded and computes only when asked."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlxr
from mlxr.core.errors import MlxrError

BENCH = Path(__file__).parents[1]


# Runs a module of the working folder with the packages of PYTHONPATH, even if others are installed as editable.
RUN_APART = (
    "import runpy, sys; "
    "sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != 'ScikitBuildRedirectingFinder']; "
    "runpy.run_module(sys.argv[1], run_name='__main__')"
)


class Child:
    """A running `python -m module`, started in bench. Its stderr goes to `log`.

    With `tree`, another checkout with its built native module, module and package are taken from there.
    """

    def __init__(self, name: str, python: Path, module: str, log: Path, tree: Path | None = None) -> None:
        self.name = name
        self._log_path = log
        self._log = log.open("wb")
        try:
            self._process = subprocess.Popen(
                [python, "-m", module] if tree is None else [python, "-c", RUN_APART, module],
                cwd=BENCH if tree is None else tree / "bench",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(self._list_folders(tree))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            self._log.close()
            raise MlxrError(
                f"{name}: cannot run {python}: {error.strerror}; name an interpreter that exists"
            ) from error

    @staticmethod
    def _list_folders(tree: Path | None) -> list[str]:
        """Return the module path with which the child runs the tree's package, or the one that runs here."""
        if tree is not None:
            return [str(tree / "src")]
        given = os.environ.get("PYTHONPATH")
        return [str(Path(mlxr.__file__).parents[1]), *([given] if given else [])]

    def ask(self, action: str, arguments: Mapping[str, object] | None = None, *, timeout_s: float = 900.0) -> Any:
        """Return an action's result. Raises MlxrError if it fails or no answer comes in time (the process ends)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps({"action": action, "arguments": dict(arguments or {})}) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            raise MlxrError(f"{self.name}: ended during {action!r} (after {timeout_s:.0f} s it is ended){self._tell()}")
        answer = json.loads(line)
        if "error" in answer:
            raise MlxrError(f"{self.name}: {action}: {answer['error']}{self._tell()}")
        return answer["result"]

    @property
    def cpu_s(self) -> float:
        """The processor time used so far, 0 if the system does not tell."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _tell(self) -> str:
        return f"; see {self._log_path}"

    def close(self) -> None:
        """End the process: its input is closed, and it is killed if it does not end by itself."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it had ended, and the last request is still in the buffer
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
