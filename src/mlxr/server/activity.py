"""The requests in flight, one row each, and their log lines and traces.

A row is made when a request arrives and lives in its scope. Everything that the request borrows or starts is on the
row's exit stack, which is closed when the request ends, in whatever way. The log has one line for each request with its
id, in a form for people or as JSON. Prompts and answers are never logged, unless the setting `log_prompts` asks for it
(`log_prompt` is the one place). Spans go to OpenTelemetry if the setting asks for them and the library is installed,
with the exporter of the environment (`OTEL_EXPORTER_OTLP_ENDPOINT` and so on). Otherwise a span does nothing and costs
nothing. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from ipaddress import ip_address
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from starlette.requests import HTTPConnection
from starlette.types import Scope

from mlxr.core.errors import SettingError, name_install
from mlxr.core.settings import Settings
from mlxr.core.types import Finish, PromptProgress
from mlxr.server.access import OPEN_PATHS
from mlxr.server.errors import ServerError
from mlxr.server.page_files import ASSET_PATH, ROOT_PATHS

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan


@dataclass(slots=True)
class InFlight:
    """One request, from its arrival to its end."""

    id: str  # in the log, and in the header x-request-id
    method: str
    path: str
    client: str  # an address
    stack: AsyncExitStack  # closed when the request ends, with what it borrowed or started
    arrived_s: float = field(default_factory=monotonic)  # by the monotonic clock, as all times here
    route: str = "unknown"  # the template of the path
    peer: str = ""  # the client for fair shares of the engine, see `_name_peer`
    key_id: str | None = None  # of the key that it brought
    model: str | None = None  # that it borrowed
    adapter: str | None = None
    prompt_tokens: int = 0
    read_tokens: int = 0  # of the prompt, computed or from the cache so far
    generated_tokens: int = 0
    told_s: float | None = None  # the time of the last log line about reading its prompt
    first_token_s: float | None = None
    ignored: list[str] = field(default_factory=list)  # fields of its body that have no effect, see `note_ignored`
    failure: ServerError | None = None  # the reason if it was refused or failed
    is_gone: bool = False  # the client closed the connection before it had its answer
    cancels: list[Callable[[], None]] = field(default_factory=list)  # end its answers at the next step
    thought_ends: list[Callable[[], None]] = field(default_factory=list)  # close the thoughts of its answers
    reply_id: str | None = None  # the id in the reply
    task: asyncio.Task[object] | None = None  # serves it
    is_cut_off: bool = False  # by a server that stops

    def cancel(self) -> None:
        """End all unfinished answers."""
        for cancel in self.cancels:
            cancel()

    def cut_off(self) -> None:
        """End the request for a server that stops: its answers, or else its wait."""
        if self.cancels:
            self.cancel()
        elif self.task is not None:
            self.is_cut_off = True
            self.task.cancel()


class Activity:
    """All requests in flight by id."""

    def __init__(self) -> None:
        self._rows: dict[str, InFlight] = {}

    def __iter__(self) -> Iterator[InFlight]:
        return iter(list(self._rows.values()))

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, scope: Scope, wanted_id: str | None, stack: AsyncExitStack) -> InFlight:
        """Make the row of a new request, also in its scope; its id is `wanted_id` if that is free and plain."""
        request_id = wanted_id if wanted_id and self._is_usable(wanted_id) else f"{random.getrandbits(64):016x}"
        client = scope.get("client")
        row = InFlight(request_id, scope["method"], scope["path"], client[0] if client else "local", stack)
        row.peer = _name_peer(client, request_id)
        row.task = asyncio.current_task()
        self._rows[request_id] = row
        scope.setdefault("state", {})["in_flight"] = row
        return row

    def close(self, row: InFlight) -> None:
        """Remove the row of a request that has ended."""
        self._rows.pop(row.id, None)

    def find(self, request_id: str) -> InFlight | None:
        """Return the row of a request, by its id or by that of its reply; None if there is none."""
        found = self._rows.get(request_id)
        return found or next((row for row in self if row.reply_id == request_id), None)

    def end_thoughts(self, request_id: str, key_id: str | None, field: str) -> None:
        """Close the thoughts of a request that came with the same key, so that the model answers.

        Raises ServerError naming `field` if there are none.
        """
        row = self.find(request_id)
        if row is None or row.key_id != key_id:
            raise ServerError(404, "not_found", f"there is no request {request_id[:100]} in flight", field)
        if not row.thought_ends:
            reason = f"the answers to {request_id[:100]} have no thoughts to end"
            raise ServerError(400, "invalid_request", f"{field}: {reason}", field)
        for end in row.thought_ends:
            end()

    def cut_off_all(self) -> None:
        """End all requests for a server that stops."""
        for row in self:
            row.cut_off()

    def _is_usable(self, request_id: str) -> bool:
        plain = request_id.isascii() and request_id.replace("-", "").replace("_", "").isalnum()
        return plain and len(request_id) <= 64 and request_id not in self._rows


def in_flight(connection: HTTPConnection) -> InFlight:
    """Return the row of the request that is being served."""
    row = connection.scope["state"]["in_flight"]
    assert isinstance(row, InFlight)
    return row


def _name_peer(client: tuple[str, int] | None, request_id: str) -> str:
    """Return a name for the client: its address, or its connection if it is on this machine, where all share one."""
    if client is None:
        return request_id  # a Unix socket, whose connections have no names
    address, port = client
    try:
        is_shared = ip_address(address).is_loopback
    except ValueError:
        is_shared = True
    return f"{address}:{port}" if is_shared else address


access = logging.getLogger("mlxr.access")
prompts = logging.getLogger("mlxr.prompts")
bodies = logging.getLogger("mlxr.bodies")
models = logging.getLogger("mlxr.models")
_FIELDS = "fields"
MAX_REASON_CHARACTERS = 300
MAX_NAME_CHARACTERS = 80
READING_S = 10.0  # of reading a prompt before the log tells the progress, and between two such lines
QUIET_ROUTES = OPEN_PATHS | ROOT_PATHS | {"/metrics", ASSET_PATH}


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, the record's own fields, and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line of JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Formats a record as one line for people; control characters are spelt out, so that no line can be forged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and any traceback after it."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, _FIELDS, {}).items())
        text = f"{time} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start_logging(settings: Settings, stream: TextIO | None = None) -> logging.Handler:
    """Send the logs of mlxr and uvicorn to `stream` (default stderr); returns the handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    for name in ("mlxr", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("mlxr").setLevel(settings.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(
        "WARNING" if settings.log_level == "info" else settings.log_level.upper()
    )
    return handler


def log_request(row: InFlight, status: int, seconds: float) -> None:
    """Log a request that has ended, in one line, with the reason if it was refused or failed.

    Requests that only watch the server, and those for files of the page, are logged on the level debug.
    """
    level = logging.DEBUG if row.route in QUIET_ROUTES else logging.INFO
    if not access.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "request_id": row.id,
        "method": row.method,
        "path": row.path,
        "status": status,
        "ms": round(1000 * seconds, 1),
        "client": row.client,
    }
    if row.key_id is not None:
        fields["key"] = row.key_id
    if row.model is not None:
        adapter = {} if row.adapter is None else {"adapter": row.adapter}
        fields |= {"model": row.model, **adapter, "prompt_tokens": row.prompt_tokens, "tokens": row.generated_tokens}
    if row.first_token_s is not None:
        fields["first_token_ms"] = round(1000 * (row.first_token_s - row.arrived_s), 1)
    if row.failure is not None:
        fields |= {"error": row.failure.code, "reason": row.failure.reason[:MAX_REASON_CHARACTERS]}
    access.log(level, "request", extra={_FIELDS: fields})


def log_ignored(row: InFlight, names: str) -> None:
    """Log the fields of a request's body that have no effect, on the level debug."""
    bodies.debug("ignored fields", extra={_FIELDS: {"request_id": row.id, "fields": names}})


def log_stand_in(row: InFlight, wanted: str, model: str) -> None:
    """Log the model that answers for a name that no model has."""
    fields = {"request_id": row.id, "wanted": wanted[:MAX_NAME_CHARACTERS], "model": model}
    models.info("another model answers, as there is none of that name", extra={_FIELDS: fields})


def log_reading(row: InFlight, progress: PromptProgress) -> None:
    """Log the progress of reading a long prompt, at most every READING_S seconds for one request."""
    now_s, left = monotonic(), progress.prompt_tokens - progress.read_tokens
    is_early = progress.seconds < READING_S or (row.told_s is not None and now_s - row.told_s < READING_S)
    if is_early or not left:
        return
    row.told_s = now_s
    rate = (progress.read_tokens - progress.cached_tokens) / max(progress.seconds, 1e-3)
    fields: dict[str, object] = {"request_id": row.id, "model": row.model, "read_tokens": progress.read_tokens}
    fields |= {"prompt_tokens": progress.prompt_tokens, "tokens_per_s": round(rate, 1)}
    if rate:
        fields["rest_s"] = round(left / rate)
    prompts.info("reading the prompt", extra={_FIELDS: fields})


def log_prompt(row: InFlight, prompt: object) -> None:
    """Log the prompt; called only if the setting `log_prompts` is on."""
    prompts.info("prompt", extra={_FIELDS: {"request_id": row.id, "prompt": prompt}})


class Span:
    """One span, or nothing."""

    def __init__(self, span: OtelSpan | None = None) -> None:
        self._span = span

    def note(self, row: InFlight, operation: str, finish: Finish) -> None:
        """Set attributes about an answer that has ended, under the names of the conventions for generative AI."""
        if self._span is None:
            return
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "mlxr",
                "gen_ai.request.model": row.model or "",
                "gen_ai.usage.input_tokens": finish.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": finish.usage.completion_tokens,
                "gen_ai.response.finish_reasons": [finish.reason.value],
                "mlxr.request_id": row.id,
                "mlxr.cached_tokens": finish.usage.cached_tokens,
            }
        )


NO_SPAN = Span()


@contextmanager
def start_span(name: str, headers: Mapping[str, str], *, wanted: bool) -> Iterator[Span]:
    """Start a span around the block; its parent is the one that the request's headers name, if any."""
    if not wanted:
        yield NO_SPAN
        return
    from opentelemetry import propagate, trace

    # Not the current span of the context: it may end in another task than it began in.
    span = trace.get_tracer("mlxr").start_span(name, context=propagate.extract(headers))
    try:
        yield Span(span)
    finally:
        span.end()


def start_tracing() -> None:
    """Send spans to the exporter of the environment; raises SettingError if the library is not installed."""
    if not find_spec("opentelemetry") or not find_spec("opentelemetry.sdk"):
        raise SettingError(f"tracing: needs OpenTelemetry: {name_install('tracing')}")
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "mlxr"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
