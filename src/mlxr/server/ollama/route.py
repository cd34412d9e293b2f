"""What the routes of the Ollama dialect share: errors, times, and a name that may come under two keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.requests import Request

from mlxr.core.errors import InvalidRequest
from mlxr.registry import ModelRecord
from mlxr.server.errors import ServerError
from mlxr.server.json_models import JsonObject, ReplyModel, RequestModel, Text
from mlxr.server.routes import describe_errors, describe_stream
from mlxr.server.streaming import ndjson
from mlxr.server.work import look

if TYPE_CHECKING:
    from mlxr.server.served import ServedModels


class ErrorReply(ReplyModel):
    """The body of every error on Ollama's routes."""

    error: str


ERRORS = describe_errors(ErrorReply, "the text begins with")
STREAMED = describe_stream(
    "One JSON object on each line; with `stream` false a single one.", "application/x-ndjson", ERRORS
)


class NamedRequest(RequestModel):
    """A request about one model. Older clients say `name` for `model`."""

    model: Text | None = None
    name: Text | None = None

    @property
    def wanted(self) -> str:
        """The model's name; raises InvalidRequest when there is none."""
        found = self.model or self.name
        if found is None:
            raise InvalidRequest("model", "is missing")
        return found


def render_error(error: ServerError, _request_id: str = "") -> JsonObject:
    """The body of an error."""
    if error.code == "context_length_exceeded":  # clients look for these words
        return {"error": f"{error.message}: the input length exceeds the context length"}
    return {"error": error.message}


def error_frame(error: ServerError) -> bytes:
    """The last line of a stream that fails."""
    return ndjson(render_error(error))


def format_time(moment: datetime) -> str:
    """A time as Ollama writes it."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def now() -> str:
    """The time of a reply."""
    return format_time(datetime.now(UTC))


async def find_model(request: Request, name: str) -> ModelRecord:
    """The record of a model, or of the one that an adapter is for; raises NotFound."""
    served: ServedModels = request.app.state.served
    return await look(request, served.find_base, name)
