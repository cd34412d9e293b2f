"""A server of tools that speaks the Model Context Protocol, for tests: as a program, and over HTTP.

`python tool_server.py` reads a message a line. Its tools: `echo`, `add`, `environment` (its variables), `fail`,
`slow` (which never answers), `long` (more than a message may have), `end` (which ends the program).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [
    {"name": "echo", "description": "Says a text again", "inputSchema": TEXT},
    {"name": "add", "description": "Adds two numbers", "inputSchema": NUMBERS},
    *({"name": name, "inputSchema": {"type": "object"}} for name in ("environment", "fail", "slow", "long", "end")),
]


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message, or None if it has none."""
    if "id" not in message or "method" not in message:
        return None
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        info = {"name": "tools", "version": "1"}
        return reply | {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":  # in two parts
        at = int(params.get("cursor", 0))
        more = {"nextCursor": "4"} if at == 0 else {}
        return reply | {"result": {"tools": TOOLS[at : at + 4], **more}}
    if method != "tools/call":
        return reply | {"error": {"code": -32601, "message": "no such method"}}
    name, given = params["name"], params.get("arguments", {})
    if name == "slow":
        return None
    if name == "end":
        print("out of paper", file=sys.stderr, flush=True)
        os._exit(3)
    texts = {
        "echo": lambda: str(given["text"]),
        "add": lambda: str(given["a"] + given["b"]),
        "environment": lambda: " ".join(sorted(os.environ)),
        "fail": lambda: "the printer burns",
        "long": lambda: "x" * (5 << 20),
    }
    if name not in texts:
        return reply | {"error": {"code": -32602, "message": f"no tool is called {name}"}}
    content = [{"type": "text", "text": texts[name]()}, {"type": "image", "data": "AAAA", "mimeType": "image/png"}]
    return reply | {"result": {"content": content[: 2 if name == "echo" else 1], "isError": name == "fail"}}


class Handler(BaseHTTPRequestHandler):
    """The same over HTTP: calls are answered by a stream of events, all else by JSON. Wants the key `secret`."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012 - a record for all connections

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((message.get("method", ""), {k.lower(): v for k, v in self.headers.items()}))
        if self.path == "/moved":
            self._reply(307, b"", location="http://127.0.0.1:1/mcp")
        elif self.path == "/old":
            self._reply(405, b"")
        elif self.headers.get("authorization") != "Bearer secret":
            self._reply(401, b"")
        elif (reply := answer(message)) is None:
            self._reply(202, b"")
        elif message["method"] == "tools/call":
            ping = {"jsonrpc": "2.0", "id": "p", "method": "ping"}
            events = "".join(f"event: message\r\ndata: {json.dumps(one)}\r\n\r\n" for one in (ping, reply))
            self._reply(200, events.encode(), content_type="text/event-stream")
        else:
            self._reply(200, json.dumps(reply).encode(), content_type="application/json", mcp_session_id="s1")

    def do_DELETE(self) -> None:
        self.asked.append(("DELETE", {k.lower(): v for k, v in self.headers.items()}))
        self._reply(200, b"")

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[str]:
    """Such a server on this machine; yields its address."""
    Handler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


if __name__ == "__main__":
    print("this line is no message", flush=True)
    for line in sys.stdin:
        reply = answer(json.loads(line))
        if reply is not None:
            print(json.dumps(reply), flush=True)
