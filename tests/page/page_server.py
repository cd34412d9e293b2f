"""A real `mlxr serve` in a process of its own, which tests of the page can kill and start again at the same address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from free_ports import find_port

READY_S = 300.0  # on a machine that has much else to do
SMALL = {"arena_bytes": "64M", "threads": 2, "log_level": "info"}


@dataclass
class PageServer:
    """The server: its address, the folder with its models and its log, and its settings beside those of `SMALL`.

    `restart` and `kill` leave the address as it is, so that an open page finds the next one there.
    """

    folder: Path
    settings: dict[str, object] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        if not self.port:
            self.port = find_port()

    @property
    def url(self) -> str:
        """The server's address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All that it has printed, also before a restart."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> PageServer:
        """Start it, and return when its models are loaded."""
        values = {**SMALL, "models_folder": self.folder / "models", "port": self.port, **self.settings}
        own = {f"MLXR_{name.upper()}": str(value) for name, value in values.items() if value != ""}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLXR_")}
        environment |= own | {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder)}
        with (self.folder / "log").open("ab") as log:
            default = str(self.settings.get("default_model", "demo"))  # "" leaves the choice to the server
            command = [sys.executable, "-m", "mlxr", "serve", *([default] if default else [])]
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            wait_until(lambda: self._is_ready(), READY_S)
        except AssertionError:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill it without warning."""
        self._end(signal.SIGKILL)

    def client(self, key: str | None = None) -> httpx.Client:
        """An HTTP client of this server."""
        return httpx.Client(base_url=self.url, headers={"x-api-key": key} if key else {}, timeout=60)

    def used_pages(self, key: str | None = None) -> int:
        """Pages of the cache that running answers hold."""
        with self.client(key) as client:
            caches = client.get("/v1/admin/cache").json()["caches"]
        return sum(cache["engine"]["used_pages"] for cache in caches)

    def answers_in_flight(self, key: str | None = None) -> int:
        """Requests for answers that have not ended."""
        with self.client(key) as client:
            rows = client.get("/v1/admin/requests").json()["requests"]
        return sum(row["model"] is not None for row in rows)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(READY_S)
            self.process = None


def wait_until(happened: Callable[[], bool], seconds: float = READY_S) -> None:
    """Wait until it has happened."""
    end_s = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.02)


def seconds_in(text: str) -> float:
    """The first number of seconds in a text, such as 0.4 in "400 ms"."""
    found = re.search(r"([\d.]+) (ms|s)\b", text)
    assert found is not None, text
    return float(found[1]) / (1000 if found[2] == "ms" else 1)
