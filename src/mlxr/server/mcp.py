"""Servers of tools that speak the Model Context Protocol, for conversations of the page: list tools, call one.

The owner allows them: `mcp_commands` are programs that are started and asked over their standard input and output,
`mcp_urls` addresses that are asked by HTTP. The protocol is JSON-RPC 2.0 in its revision of 18 June 2025
(https://modelcontextprotocol.io/specification/2025-06-18, transports `stdio` and `Streamable HTTP`). Servers are
untrusted: the size of messages, the number of tools and the time are bounded. A program ends with this process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import signal
import socket
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request

import mlxr
from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings
from mlxr.server.errors import ServerError
from mlxr.server.parts import parts_of
from mlxr.server.routes import JsonObject, ReplyModel, RequestModel, Router
from mlxr.server.streaming import until_disconnected
from mlxr.server.work import check_parts
from mlxr.service.sight import is_public

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
router = Router(prefix="/v1/admin/mcp", tags=["admin"])
VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05", "2025-11-25")  # we ask for the first and accept the others
OPEN_S = 60.0  # a program may be fetched first, as npx and uvx do
CALL_S = 120.0
END_S = 2.0  # until a program that was asked to end is killed
MAX_MESSAGE_BYTES = 4 << 20
MAX_OPEN = 16  # servers that are kept open; the least recently used one closes first
MAX_TOOLS, MAX_TOOLS_CHARACTERS = 128, 1 << 18
MAX_RESULT_CHARACTERS = 200_000
MAX_COMPLAINT_BYTES = 2000  # of a program's error output; errors quote its last line
_INLINE_BYTES = 1 << 16
_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_NOT_SUPPORTED = -32601  # JSON-RPC's code for an unknown method


class McpFailure(ServerError):
    """A server of tools cannot be used; the message names it."""

    def __init__(self, name: str, reason: str, status: int = 502) -> None:
        code = {403: "forbidden", 404: "not_found"}.get(status, "unavailable")
        super().__init__(status, code, f"{name}: {reason}", "server")


class Connection(ABC):
    """One server of tools, from its handshake on; several calls may run at a time."""

    def __init__(self, name: str) -> None:
        self.name, self.is_closed, self._last_id = name, False, 0

    async def open(self) -> None:
        """Connect and agree on a revision. Raises McpFailure."""
        me = {"name": "mlxr", "version": str(mlxr.__version__)}
        asked: JsonObject = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": me}
        reply = await self.request("initialize", asked, OPEN_S)
        version = reply.get("protocolVersion")
        if version not in VERSIONS:
            raise McpFailure(self.name, f"speaks MCP {str(version)[:40]!r}; known are {', '.join(VERSIONS)}")
        self.agree(str(version))
        await self.notify("notifications/initialized", {})

    async def list_tools(self) -> list[Tool]:
        """Return all tools, from all pages of the list. Raises McpFailure."""
        tools, cursor = list[Tool](), None
        while True:
            reply = await self.request("tools/list", {} if cursor is None else {"cursor": cursor}, CALL_S)
            found = reply.get("tools")
            tools += [_read_tool(self.name, one) for one in (found if isinstance(found, list) else [])[: MAX_TOOLS + 1]]
            if len(tools) > MAX_TOOLS or sum(map(_measure, tools)) > MAX_TOOLS_CHARACTERS:
                most = f"{MAX_TOOLS} tools, or {MAX_TOOLS_CHARACTERS} characters of them"
                raise McpFailure(self.name, f"has more than {most}")
            before, cursor = cursor, reply.get("nextCursor")
            if not isinstance(cursor, str) or cursor == before or not found:
                return tools

    async def call(self, tool: str, arguments: JsonObject) -> CallReply:
        """Call a tool and return its answer as text. Raises McpFailure."""
        reply = await self.request("tools/call", {"name": tool, "arguments": arguments}, CALL_S)
        text = _read_content(reply)
        if len(text) > MAX_RESULT_CHARACTERS:
            text = f"{text[:MAX_RESULT_CHARACTERS]}\n… (cut)"
        return CallReply(text=text, is_error=reply.get("isError") is True)

    async def request(self, method: str, params: JsonObject, patience_s: float) -> JsonObject:
        """Return the result of a method. Raises McpFailure if the server has none within `patience_s`."""
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        try:
            async with asyncio.timeout(patience_s):
                reply = await self.exchange(message)
        except (TimeoutError, asyncio.CancelledError) as error:
            with suppress(Exception):
                await asyncio.wait_for(self.notify("notifications/cancelled", {"requestId": message["id"]}), END_S)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise McpFailure(self.name, f"did not answer {method} within {patience_s:g} s") from None
        failed = reply.get("error")
        if failed is not None:
            words = failed.get("message") if isinstance(failed, dict) else failed
            raise McpFailure(self.name, f"refuses {method}: {_shorten(words)}")
        result = reply.get("result")
        if not isinstance(result, dict):
            raise McpFailure(self.name, f"answers {method} without a result")
        return result

    async def notify(self, method: str, params: JsonObject) -> None:
        """Send the server a message that it does not answer."""
        await self.send({"jsonrpc": "2.0", "method": method, "params": params})

    async def answer(self, message: JsonObject) -> None:
        """Answer a request of the server: a ping with a result, any other with an error."""
        reply: JsonObject = {"jsonrpc": "2.0", "id": message["id"]}
        failed = {"code": _NOT_SUPPORTED, "message": "not supported"}
        await self.send(reply | ({"result": {}} if message.get("method") == "ping" else {"error": failed}))

    def agree(self, version: str) -> None:  # noqa: B027 - only HTTP has to say it again
        """Keep the revision that both speak."""

    @abstractmethod
    async def exchange(self, message: JsonObject) -> JsonObject:
        """Send a request, and return its answer."""

    @abstractmethod
    async def send(self, message: JsonObject) -> None:
        """Send a message that has no answer."""

    @abstractmethod
    async def close(self) -> None:
        """End the connection, and everything that was started for it."""


class Program(Connection):
    """A server that is a program: a message is a line of its standard input or output."""

    def __init__(self, name: str, command: tuple[str, ...]) -> None:
        super().__init__(name)
        self._command, self._complaint = command, b""
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[object, asyncio.Future[JsonObject]] = {}
        self._readers: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start the program, without environment variables that may hold our secrets."""
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                limit=MAX_MESSAGE_BYTES,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise McpFailure(self.name, f"{self._command[0]} cannot be started: {error}") from None
        self._readers = [asyncio.create_task(self._read()), asyncio.create_task(self._listen_to_complaints())]
        await super().open()

    async def exchange(self, message: JsonObject) -> JsonObject:
        """Send a request, and return its answer. Raises McpFailure if the program ends before."""
        reply: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda done: done.cancelled() or done.exception())  # `send` may have failed first
        self._waiting[message["id"]] = reply
        try:
            await self.send(message)
            return await reply
        finally:
            del self._waiting[message["id"]]

    async def send(self, message: JsonObject) -> None:
        """Write a line to its input. Raises McpFailure if it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self.is_closed:
            raise McpFailure(self.name, await self._explain_end())
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except (OSError, RuntimeError):
            raise McpFailure(self.name, await self._explain_end()) from None

    async def close(self) -> None:
        """Close its input, as the protocol says; a program that does not end is killed with all that it started."""
        self.is_closed = True
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
            with suppress(ProcessLookupError, PermissionError):  # no process of the group is left
                os.killpg(process.pid, sign)
        await process.wait()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self) -> None:
        """Read lines until the output ends; then fail the calls that still wait."""
        assert self._process is not None
        assert self._process.stdout is not None
        reason = None
        try:
            while line := await self._process.stdout.readline():
                message = await _parse(line)
                if message is not None:
                    await self._take(message)
        except ValueError:
            reason = f"sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB, and was ended"
        except McpFailure:
            pass  # it ended while we answered
        self.is_closed = True
        if reason is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        failure = McpFailure(self.name, reason or await self._explain_end())
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(failure)

    async def _take(self, message: JsonObject) -> None:
        if "method" in message:
            if "id" in message:
                await self.answer(message)
            return
        number = message.get("id")
        reply = self._waiting.get(number) if isinstance(number, int | str) else None
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def _listen_to_complaints(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(4096):
            self._complaint = (self._complaint + piece)[-MAX_COMPLAINT_BYTES:]

    async def _explain_end(self) -> str:
        assert self._process is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        with suppress(TimeoutError):  # for the last of its error output
            await asyncio.wait_for(asyncio.shield(self._readers[1]), END_S)
        code = self._process.returncode
        how = "closed its output" if code is None else f"ended with code {code}"
        lines = self._complaint.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}{f' after {_shorten(last)!r}' if last else ''}"


class Address(Connection):
    """A server at an address: a message is the body of a POST, its answer JSON or a stream of events."""

    def __init__(self, url: str, key: str | None, *, is_listed: bool) -> None:
        import httpx

        super().__init__(url)
        self._url, self._is_listed, self._session = httpx.URL(url), is_listed, None
        self._headers = {"accept": "application/json, text/event-stream", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(CALL_S, connect=10.0), trust_env=False)

    def agree(self, version: str) -> None:
        """Send the revision with each request from now on."""
        self._headers["mcp-protocol-version"] = version

    async def exchange(self, message: JsonObject) -> JsonObject:
        """Send a request, and return its answer; other messages before it are read, requests among them answered."""
        async with aclosing(self._post(message)) as messages:
            async for one in messages:
                if "method" in one and "id" in one:
                    await self.answer(one)
                elif one.get("id") == message["id"]:
                    return one
        raise McpFailure(self.name, "ended its answer before the result")

    async def send(self, message: JsonObject) -> None:
        """Send a message that has no answer."""
        async for _ in self._post(message):
            pass

    async def close(self) -> None:
        """End the session and the connections."""
        self.is_closed = True
        with suppress(Exception):
            if self._session is not None:
                request = await self._make_request("DELETE", None)
                async with asyncio.timeout(END_S):
                    await self._client.send(request)
        await self._client.aclose()

    async def _post(self, message: JsonObject) -> AsyncGenerator[JsonObject, None]:
        import httpx

        try:
            response = await self._client.send(await self._make_request("POST", message), stream=True)
            try:
                self._check(response)
                if message.get("method") == "initialize":
                    self._session = response.headers.get("mcp-session-id")
                kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind == "text/event-stream":
                    async for one in self._read_events(response):
                        yield one
                elif kind == "application/json":
                    whole = await _parse(b"".join([piece async for piece in self._read(response)]))
                    if whole is not None:
                        yield whole
                elif "id" in message and "method" in message:
                    raise McpFailure(self.name, f"answers with {kind[:60] or 'nothing'}, not with JSON or events")
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise McpFailure(self.name, f"cannot be reached: {_shorten(error) or type(error).__name__}") from None

    async def _make_request(self, method: str, message: JsonObject | None) -> httpx.Request:
        """Make the request. Unless the address itself is listed, it goes only to a public IP address."""
        url, headers, more = self._url, dict(self._headers), {}
        if self._session is not None:
            headers["mcp-session-id"] = self._session
        if not self._is_listed:
            address = await _find_public(self.name, url.host, url.port or (443 if url.scheme == "https" else 80))
            headers["host"] = url.netloc.decode("ascii")
            url, more = url.copy_with(host=address), {"sni_hostname": self._url.host}
        return self._client.build_request(method, url, headers=headers, json=message, extensions=more)

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.is_success:
            return
        if status == 404 and self._session is not None:
            self.is_closed = True
            raise McpFailure(self.name, "has forgotten the session; try again")
        if response.is_redirect:
            raise McpFailure(self.name, f"redirects to {response.headers.get('location', '')[:200]}; give that address")
        words = {
            401: "wants a key, or another one",
            403: "forbids it",
            405: "takes no POST; the protocol's older transport, HTTP with SSE, is not supported",
        }
        raise McpFailure(self.name, f"answers with status {status}{f': {words[status]}' if status in words else ''}")

    async def _read(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in response.aiter_raw():
            size += len(piece)
            if size > MAX_MESSAGE_BYTES:
                raise McpFailure(self.name, f"sent more than {MAX_MESSAGE_BYTES >> 20} MiB")
            yield piece

    async def _read_events(self, response: httpx.Response) -> AsyncGenerator[JsonObject, None]:
        """Yield the messages of a stream: an event is lines up to an empty one, its message follows `data:`."""
        rest, data = b"", list[bytes]()
        async for piece in self._read(response):
            *lines, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    one = await _parse(b"\n".join(data))
                    data = []
                    if one is not None:
                        yield one


class ToolServers:
    """The servers that the settings allow, opened at their first use. Belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.commands = dict(map(_read_command, settings.mcp_commands))
        self.urls = tuple(map(_read_listed, settings.mcp_urls))
        self._open: OrderedDict[tuple[str, str | None], asyncio.Task[Connection]] = OrderedDict()

    async def connect(self, server: str, key: str | None = None) -> Connection:
        """Return the connection to a server: a name of `mcp_commands`, or an address. Raises McpFailure."""
        place = (server, key)
        opening = self._open.get(place)
        if opening is not None and opening.done() and (opening.exception() or opening.result().is_closed):
            await self._close(self._open.pop(place))
            opening = self._open.get(place)  # another request may have been quicker
        if opening is None:
            opening = self._open[place] = asyncio.create_task(_open(self._make(server, key)))
        self._open.move_to_end(place)
        while len(self._open) > MAX_OPEN:
            await self._close(self._open.popitem(last=False)[1])
        return await asyncio.shield(opening)

    async def stop(self) -> None:
        """End all connections to servers."""
        await asyncio.gather(*map(self._close, self._open.values()))

    async def _close(self, opening: asyncio.Task[Connection]) -> None:
        opening.cancel()
        with suppress(ServerError, asyncio.CancelledError):
            await (await opening).close()

    def _make(self, server: str, key: str | None) -> Connection:
        if server in self.commands:
            return Program(server, self.commands[server])
        if "://" not in server:
            known = ", ".join(self.commands) or "none"
            raise McpFailure(server[:100], f"the setting mcp_commands has no such name; it has {known}", 404)
        url = _read_url(server)
        if url is None:
            raise McpFailure(server[:200], "is no address such as https://host/mcp", 404)
        plain = str(url)  # without .. and the like
        is_listed = any(plain == one or plain.startswith(one.rstrip("/") + "/") for one in self.urls)
        if not is_listed and "*" not in self.urls:
            raise McpFailure(server[:200], "is not allowed; the owner can add it to the setting mcp_urls", 403)
        return Address(plain, key, is_listed=is_listed)


async def _open(connection: Connection) -> Connection:
    try:
        await connection.open()
    except BaseException:
        await connection.close()
        raise
    logger.info("tools of %s can be called", connection.name)
    return connection


def _read_command(text: str) -> tuple[str, tuple[str, ...]]:
    name, sign, command = text.partition("=")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise SettingError(f"mcp_commands: {text!r}: {error}") from None
    if not sign or not _NAME.fullmatch(name) or not words:
        raise SettingError(f"mcp_commands: {text!r} must be NAME=COMMAND, as in files=npx -y some-server /home/me")
    return name, words


def _read_listed(text: str) -> str:
    url = None if text == "*" else _read_url(text)
    if text != "*" and url is None:
        raise SettingError(f"mcp_urls: {text!r} is no address such as http://localhost:9000/mcp, nor *")
    return text if url is None else str(url)


def _read_url(text: str) -> httpx.URL | None:
    """Return the address; None if it is none, has a name and password, or leads up a folder."""
    import httpx

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return None
    is_plain = not url.userinfo and not url.fragment and ".." not in url.path
    return url if url.scheme in ("http", "https") and url.host and is_plain and len(text) <= 2000 else None


async def _find_public(name: str, host: str, port: int) -> str:
    """Return an IP address of `host` to connect to. Raises McpFailure if one of its addresses is not public."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise McpFailure(name, f"its name cannot be resolved: {error}") from None
    addresses = [str(row[4][0]) for row in found]
    if not addresses or not all(map(is_public, addresses)):
        raise McpFailure(name, "is no public address; the owner can add it to the setting mcp_urls", 403)
    return addresses[0]


async def _parse(data: bytes) -> JsonObject | None:
    """Return the message; None for other lines, which some programs print. Long ones are parsed on a thread."""
    return _parse_now(data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(_parse_now, data)


def _parse_now(data: bytes) -> JsonObject | None:
    try:
        check_parts(data)
        value = json.loads(data)
    except (ValueError, RecursionError, ServerError):
        return None
    return value if isinstance(value, dict) else None


def _read_tool(name: str, value: object) -> Tool:
    row: Mapping[str, Any] = value if isinstance(value, dict) else {}
    if not isinstance(row.get("name"), str) or not row["name"] or len(row["name"]) > 200:
        raise McpFailure(name, "lists a tool without a name, or with one of more than 200 characters")
    schema, about = row.get("inputSchema"), row.get("description")
    return Tool(
        name=row["name"],
        description=about if isinstance(about, str) else "",
        parameters=schema if isinstance(schema, dict) else {"type": "object", "properties": {}},
    )


def _measure(tool: Tool) -> int:
    return len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters))


def _read_content(reply: JsonObject) -> str:
    """Return the text of a result; other kinds are only named; structured content alone is written as JSON."""
    content, parts = reply.get("content"), list[str]()
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        inner = part.get("resource") if kind == "resource" else part
        if isinstance(inner, dict) and isinstance(inner.get("text"), str):
            parts.append(inner["text"])
        elif isinstance(inner, dict) and kind is not None:
            parts.append(f"[{kind} {inner.get('mimeType', '')} {inner.get('uri', '')}".rstrip()[:500] + ": not shown]")
    if not parts and reply.get("structuredContent") is not None:
        parts.append(json.dumps(reply["structuredContent"], ensure_ascii=False))
    return "\n".join(parts)


def _shorten(words: object) -> str:
    return " ".join(str(words).split())[:300]


class McpList(ReplyModel):
    """The servers of tools that the owner allows: names of programs, and addresses; `*` is every public address."""

    commands: list[str]
    urls: list[str]


Words = Annotated[str, Field(min_length=1, max_length=2000)]


class ServerBody(RequestModel):
    """A server of tools: a name of `mcp_commands` or an address, and the key that goes to that address."""

    server: Words
    key: Words | None = None


class CallBody(ServerBody):
    """A call of a tool."""

    tool: Words
    arguments: JsonObject = Field(default_factory=dict)


class Tool(ReplyModel):
    """A tool; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: JsonObject


class ToolList(ReplyModel):
    """The tools of a server."""

    tools: list[Tool]


class CallReply(ReplyModel):
    """A tool's answer; `is_error` says that it failed, `text` then tells why."""

    text: str
    is_error: bool


@router.get("")
async def list_servers(request: Request) -> McpList:
    """Return the servers of tools that conversations may use."""
    servers = parts_of(request).tool_servers
    return McpList(commands=list(servers.commands), urls=list(servers.urls))


@router.post("/tools")
async def list_tools(request: Request, body: ServerBody) -> ToolList:
    """Return the tools of a server; starts or connects it if need be."""

    async def work() -> list[Tool]:
        connection = await parts_of(request).tool_servers.connect(body.server, body.key)
        return await connection.list_tools()

    return ToolList(tools=await until_disconnected(request, work()))


@router.post("/call")
async def call_tool(request: Request, body: CallBody) -> CallReply:
    """Call a tool. If the client goes, the call is cancelled at the tool's server."""

    async def work() -> CallReply:
        connection = await parts_of(request).tool_servers.connect(body.server, body.key)
        return await connection.call(body.tool, body.arguments)

    return await until_disconnected(request, work())
