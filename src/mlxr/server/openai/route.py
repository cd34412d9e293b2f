"""What the routes of the OpenAI dialect share: the head of a reply, and what the document says of errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlette.requests import Request

from mlxr.server.errors import ServerError
from mlxr.server.ignored import note_ignored
from mlxr.server.json_models import JsonObject, make_id
from mlxr.server.openai.errors import ErrorReply, render_error
from mlxr.server.openai.replies import TokenBytes
from mlxr.server.routes import describe_errors, describe_stream
from mlxr.server.streaming import sse
from mlxr.service.identity import read_clock
from mlxr.service.model_pool import ModelLease
from mlxr.service.requests import ChatRequest

ERRORS = describe_errors(ErrorReply, "`param` names")
STREAMED = describe_stream(
    "The whole answer, or, with `stream`, server-sent events that it is the sum of.", "text/event-stream", ERRORS
)


@dataclass(frozen=True, slots=True)
class Head:
    """What identifies a reply. `model` is the name that the model was asked for by, as clients expect to see it."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def make(cls, prefix: str, lease: ModelLease, model: str | None) -> Head:
        """The head of a new reply."""
        created = int(read_clock())
        name = model or lease.record.short_name
        return cls(make_id(prefix), created, name, f"fp_{lease.record.digest[:12]}")

    def to_chunk(self, kind: str) -> JsonObject:
        """What the chunks of a stream begin with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def token_bytes_if(wanted: bool, lease: ModelLease) -> TokenBytes | None:
    """How tokens are spelt, where log-probabilities were asked for."""
    return lease.session.tokenizer.token_bytes if wanted else None


def fit_effort(request: Request, lease: ModelLease, wanted: ChatRequest, field: str) -> ChatRequest:
    """The request with an effort that the model knows; to one that has no levels, an effort stands for a budget.

    A model that does not think answers without, and `field`, where the effort stands, has no effect. To one that has
    levels and always thinks, none means the lowest. A template that the request brings says itself what it knows.
    """
    if wanted.chat_template is not None:
        return wanted
    if wanted.think is False:
        return replace(wanted, think=lease.session.fit_think(False) or False)
    if wanted.think is None:
        return wanted
    if "thinking" not in lease.session.capabilities:
        note_ignored(request, [field])
        return replace(wanted, think=None)
    return replace(wanted, think=lease.session.fit_think(wanted.think))


def error_frame(error: ServerError) -> bytes:
    """The last event of a stream that fails."""
    return sse(render_error(error))
