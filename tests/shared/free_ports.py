"""Ports for servers that tests start in processes of their own."""

from __future__ import annotations

import random
import socket


def find_port() -> int:
    """A free port below those that systems give to outgoing connections, so that none of these takes it meanwhile."""
    while True:
        port = random.randrange(18_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
