"""A server as a process of its own, ours or llama.cpp's, from its start until it is no longer needed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

import mlxr
from mlxr.core.errors import MlxrError

SOURCE = Path(mlxr.__file__).parents[1]
READY_S = 120.0


class ServerProcess:
    """Runs `command` with a free port put in for PORT; ready when `path` answers. Its output goes to `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        path: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.name, self._log = name, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [word.replace("PORT", str(self.port)) for word in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self._wait(path, ready_s)

    @property
    def process_id(self) -> int:
        """The number of the process."""
        return self._process.pid

    def read(self, path: str) -> str:
        """Return the body of the answer to a GET."""
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            text: str = response.read().decode()
        return text

    def read_processor_s(self) -> float:
        """The processor time of all threads of the process, in seconds; Linux only."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9

    def _wait(self, path: str, ready_s: float) -> None:
        end_s = time.monotonic() + ready_s
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                break
            try:
                self.read(path)
                return
            except (URLError, OSError):
                time.sleep(0.05)
        self._process.kill()
        raise MlxrError(f"{self.name}: does not get ready; its output is in {self._log}")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def start_own(
    folder: Path, model: str, *flags: str, open_files: int | None = None, ready_s: float = READY_S
) -> ServerProcess:
    """Start `mlxr serve` with a registry in `folder` and at most `open_files` descriptors."""
    command = [
        sys.executable,
        "-m",
        "mlxr",
        "serve",
        model,
        "--port",
        "PORT",
        "--models-folder",
        str(folder / "models"),
    ]
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", *command]
    environment = {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    log = folder / "mlxr.log"
    return ServerProcess("mlxr", [*command, "--log-level", "warning", *flags], "/health", log, environment, ready_s)


def start_peer(folder: Path, python: Path, model: Path, threads: int, *flags: str) -> ServerProcess:
    """Start llama_cpp.server with all threads, and such that a new request does not abort the one before."""
    command = [str(python), "-m", "llama_cpp.server", "--model", str(model), "--host", "127.0.0.1", "--port", "PORT"]
    best = ["--interrupt_requests", "false", "--logits_all", "false", "--verbose", "false"]
    own = ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    return ServerProcess("llama_cpp.server", [*command, *best, *own, *flags], "/v1/models", folder / "peer.log")


def start_llama_server(folder: Path, binary: Path, model: Path, *flags: str) -> ServerProcess:
    """llama.cpp's own server with 16 slots and flash attention, and a context that gives each slot 1,024 tokens.

    By default the model's context is divided among the slots, which would leave 128 of TinyLlama's 2,048 tokens.
    """
    command = [str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", "PORT"]
    slots = ["-np", "16", "-fa", "on", "-c", str(16 * 1024)]
    return ServerProcess("llama-server", [*command, *slots, *flags], "/health", folder / "llama-server.log")
