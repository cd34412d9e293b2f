"""A cluster as a process of its own, `mlxr cluster serve`, and the processes of its replicas, to watch and to kill.

Replicas are found among the descendants of the process in /proc, so this is for Linux.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import Request, urlopen

import mlxr
from mlxr.core.errors import MlxrError

SOURCE = Path(mlxr.__file__).parents[1]
READY_S = 120.0
END_S = 60.0
ENGINE = b"ServeReplica:mlxr-engines"


class ClusterProcess:
    """A cluster of `replicas` engines once all of them take requests; it ends with the block.

    `flags` go to `mlxr cluster serve`, and `variables` to its environment; `key` is an API key that it takes. `url` is
    its address, and `ray_address` tells it from other clusters of this machine.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        replicas: int,
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        own = {"MLXR_MODELS_FOLDER": str(folder / "models"), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(SOURCE)}
        words = ["cluster", "serve", model, "--replicas", str(replicas), "--port", "0", *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxr", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, **(variables or {})},
        )
        self._reading: threading.Thread | None = None
        try:
            self.url, self.ray_address = self._read_addresses()
            self.wait_for_replicas(replicas)
        except BaseException:
            self.end()
            raise

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    def find_replicas(self) -> list[int]:
        """The process ids of the running engines."""
        return sorted(pid for pid in list_descendants(self.process.pid) if ENGINE in read_title(pid))

    def read(self, path: str) -> str:
        """Return the body of the answer to a GET."""
        with urlopen(Request(self.url + path, headers=self._headers), timeout=30) as response:
            text: str = response.read().decode()
        return text

    def count_replicas(self) -> int:
        """The number of replicas that take requests, according to the front."""
        try:
            found = re.search(r'"replicas":\s*(\d+)', self.read("/health"))
        except (URLError, OSError):
            return 0
        return int(found[1]) if found else 0

    def wait_for_replicas(self, count: int) -> None:
        """Return when so many replicas take requests."""
        wait_until(lambda: self.count_replicas() == count, f"there are never {count} replicas")

    def count(self, sample: str) -> list[float]:
        """The values of the metrics whose lines match `sample` from their start."""
        lines = self.read("/metrics").splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(sample, line)]

    def end(self) -> None:
        """Stop the cluster by a signal; returns when none of its processes is left."""
        descendants = list_descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._reading is not None:
            self._reading.join(END_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        wait_until(lambda: not any(map(read_title, descendants)), "processes of the cluster are left")

    def __enter__(self) -> ClusterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _read_addresses(self) -> tuple[str, str]:
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if line.startswith("ready"):
                break
        self._reading = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reading.start()
        found = re.search(r"(http://127\.0\.0\.1:\d+).*\nray: (\S+)", "".join(lines))
        if found is None:
            raise MlxrError(f"the cluster does not start: {''.join(lines)}")
        return found[1], found[2]


def read_title(pid: int) -> bytes:
    """The command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def list_descendants(root: int) -> set[int]:
    """The process ids of all descendants of a process whose parents are still alive."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, size = {root}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


def wait_until(happened: Callable[[], bool], otherwise: str = "it never happened") -> None:
    """Wait until `happened()` is true; raises MlxrError after `READY_S`."""
    end_s = time.monotonic() + READY_S
    while not happened():
        if time.monotonic() > end_s:
            raise MlxrError(otherwise)
        time.sleep(0.05)
