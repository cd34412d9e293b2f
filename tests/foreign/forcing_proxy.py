"""A proxy between an agent and a server that makes a small model do what a test wants.

The first request that offers the tool gets a forced choice of it, and the tool's schema is narrowed so that only the
wanted arguments fit. All other requests get a schema that only `ANSWER` fits. Otherwise the server treats them as any
request. Requests and replies are recorded, and the agent reads exactly what the server wrote.
"""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
ANSWER = "The note was read."
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "accept-encoding"}


class ForcingProxy:
    """`requests` are the bodies as the agent sent them, `replies` the statuses and texts that it got."""

    def __init__(self, target: str, tool: str, arguments: Json) -> None:
        self.tool, self.arguments = tool, arguments
        self.requests: list[tuple[str, Json]] = []
        self.replies: list[tuple[str, int, str]] = []
        self._target = urlsplit(target)
        self._forced = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._pass(self, None)

            def do_POST(self) -> None:
                proxy._pass(self, self.rfile.read(int(self.headers.get("content-length", 0))))

            def do_HEAD(self) -> None:
                proxy._pass(self, None)

            def log_message(self, *words: object) -> None:
                """Keep standard error for failures."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for the agent."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def results(self) -> list[str]:
        """The results of the forced call that the agent sent back."""
        return [text for _, body in self.requests for text in list_results(body)]

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _pass(self, request: BaseHTTPRequestHandler, body: bytes | None) -> None:
        if body:
            body = self._change(request.path, body)
        connection = http.client.HTTPConnection(self._target.hostname or "", self._target.port or 80, timeout=300)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(request.command, request.path, body, headers)
        reply = connection.getresponse()
        request.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                request.send_header(name, value)
        request.send_header("transfer-encoding", "chunked")
        request.end_headers()
        text = b""
        if request.command != "HEAD":
            while piece := reply.read1(65536):
                text += piece
                request.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                request.wfile.flush()
            request.wfile.write(b"0\r\n\r\n")
        self.replies.append((request.path, reply.status, text.decode(errors="replace")))
        connection.close()

    def _change(self, path: str, raw: bytes) -> bytes:
        try:
            body = json.loads(raw)
        except ValueError:
            return raw
        self.requests.append((path, json.loads(raw)))
        if ("messages" not in body and "input" not in body) or "count_tokens" in path:
            return raw
        tool = next((tool for tool in body.get("tools") or [] if _name(tool) == self.tool), None)
        if tool is None or self._forced.is_set():
            _force_answer(path, body)
        else:
            self._forced.set()
            self._force_call(path, body, tool)
        return json.dumps(body).encode()

    def _force_call(self, path: str, body: Json, tool: Json) -> None:
        schema = {
            "type": "object",
            "properties": {name: {"const": value} for name, value in self.arguments.items()},
            "required": list(self.arguments),
            "additionalProperties": False,
        }
        if "/messages" in path:
            tool["input_schema"] = schema
            body["tool_choice"] = {"type": "tool", "name": self.tool, "disable_parallel_tool_use": True}
            body.pop("thinking", None)
        elif "input" in body:
            tool["parameters"] = schema
            body |= {"tool_choice": {"type": "function", "name": self.tool}, "parallel_tool_calls": False}
        else:
            tool["function"]["parameters"] = schema
            choice = {"type": "function", "function": {"name": self.tool}}
            body |= {"tool_choice": choice, "parallel_tool_calls": False}


def _force_answer(path: str, body: Json) -> None:
    form = {"type": "json_schema", "schema": {"const": ANSWER}}
    if "/messages" in path:
        body |= {"output_config": {"format": form}} | ({"tool_choice": {"type": "none"}} if body.get("tools") else {})
        body.pop("thinking", None)
    elif "input" in body:
        body |= {"text": {"format": form | {"name": "answer"}}, "tool_choice": "none"}
    else:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
        body |= {"response_format": form} | ({"tool_choice": "none"} if body.get("tools") else {})


def list_results(body: Json) -> list[str]:
    """Return the texts of all results of tools in a request of any dialect."""
    found = []
    for item in [*(body.get("messages") or []), *(body.get("input") if isinstance(body.get("input"), list) else [])]:
        if item.get("role") == "tool":
            found.append(json.dumps(item["content"]))
        elif item.get("type") in ("function_call_output", "custom_tool_call_output"):
            found.append(json.dumps(item["output"]))
        elif isinstance(item.get("content"), list):
            found += [json.dumps(part) for part in item["content"] if part.get("type") == "tool_result"]
    return found


def _name(tool: Json) -> str | None:
    return tool.get("name") or (tool.get("function") or {}).get("name")
