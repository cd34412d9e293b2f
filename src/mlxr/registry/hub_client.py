"""Requests to a hub that end: when somebody says stop, and when the hub takes too long to begin an answer.

The HTTP library bounds each single read; a hub that sends one byte every second would never exceed that. So the time of
a whole head is bounded here, and the sockets of a request are known, so that another thread can shut them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from mlxr.core.errors import HubError
from mlxr.core.work_threads import Stop

READ_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 15.0
HEAD_TIMEOUT_S = 30.0  # from the request until the head of its answer is whole, redirections included


class PullStopped(HubError):
    """Somebody stopped the pull; what has come so far is kept."""

    def __init__(self) -> None:
        super().__init__("the pull was stopped; pull again to go on from there")


class HubClient:
    """An HTTP client with the user's token for the hub, a context manager; `stop` ends what it waits for."""

    def __init__(self, stop: Stop, head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self.stop, self._head_timeout_s = stop, head_timeout_s
        headers = {name: str(value) for name, value in build_hf_headers(library_name="mlxr").items()}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.Client(headers=headers, timeout=timeout, follow_redirects=True)
        self._sockets: set[socket.socket] = set()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        """The answer to a request, whose body is yet to be read. Raises PullStopped, and what the HTTP library does."""
        request = self._client.build_request("GET", url, headers=headers, extensions={"trace": self._note})
        with self.stop.cutting(self._cut):
            try:
                response = self._send(request)
                try:
                    yield response
                finally:
                    response.close()
            except httpx.HTTPError as error:
                if self.stop.is_set():
                    raise PullStopped from error
                raise

    def _send(self, request: httpx.Request) -> httpx.Response:
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._cut()

        timer = threading.Timer(self._head_timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            return self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            if is_late.is_set():
                text = f"no whole head of an answer came within {self._head_timeout_s:g} s"
                raise httpx.ReadTimeout(text, request=request) from error
            raise
        finally:
            timer.cancel()

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the sockets that the HTTP library opens; it calls this for each step of a request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            opened = info["return_value"].get_extra_info("socket")
            if opened is not None:
                self._sockets.add(opened)
                if self.stop.is_set():
                    self._cut()

    def _cut(self) -> None:
        """Shut all sockets, which ends the reads of other threads; to close them would not."""
        for opened in list(self._sockets):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(opened, socket.SHUT_RDWR)  # of a TLS socket, too, the one below
