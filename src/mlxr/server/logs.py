"""The server's log: one line for each request with its id, in a form for people or as JSON.

Prompts and answers are logged by nobody, unless the setting `log_prompts` asks for it (`log_prompt` is the one place).
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from mlxr.core.settings import Settings
from mlxr.server.access import OPEN_PATHS
from mlxr.server.activity import InFlight
from mlxr.server.page_files import ASSET_PATH, ROOT_PATHS

access = logging.getLogger("mlxr.access")
prompts = logging.getLogger("mlxr.prompts")
bodies = logging.getLogger("mlxr.bodies")
models = logging.getLogger("mlxr.models")
_FIELDS = "fields"
MAX_REASON_CHARACTERS = 300
MAX_NAME_CHARACTERS = 80
QUIET_ROUTES = OPEN_PATHS | ROOT_PATHS | {"/metrics", ASSET_PATH}


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, the record's own fields, and any traceback."""

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
    """A record as one line for people; control characters are spelt out, so nobody can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and any traceback after it."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, _FIELDS, {}).items())
        text = f"{time} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def start_logging(settings: Settings, stream: TextIO | None = None) -> logging.Handler:
    """Send what mlxr and uvicorn log to `stream` (default stderr); returns the handler."""
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
    """One line for a request that has ended, with the reason if it was refused or failed.

    What only watches the server, and the files that the page is made of, are told on the level debug.
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
    """Log which fields of a request's body have no effect, on the level debug."""
    bodies.debug("ignored fields", extra={_FIELDS: {"request_id": row.id, "fields": names}})


def log_stand_in(row: InFlight, wanted: str, model: str) -> None:
    """Log which model answers for a name that no model has."""
    fields = {"request_id": row.id, "wanted": wanted[:MAX_NAME_CHARACTERS], "model": model}
    models.info("another model answers, as there is none of that name", extra={_FIELDS: fields})


def log_prompt(row: InFlight, prompt: object) -> None:
    """Log what was asked; called only where the setting `log_prompts` is on."""
    prompts.info("prompt", extra={_FIELDS: {"request_id": row.id, "prompt": prompt}})
