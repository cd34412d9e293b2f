"""Which requests are answers that a cluster routes by their prompts, and which it cannot do."""

from __future__ import annotations

GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/completion",
        "/completions",
        "/infill",
    }
)
STORED = ("/v1/responses/", "/responses/")  # what one replica has kept, whichever it is
ONE_MACHINE = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/", "/v1/admin/models/")


def is_refused(method: str, path: str) -> bool:
    """Whether a request would change one machine's models, which the others would not have then."""
    return method not in ("GET", "HEAD", "OPTIONS") and path.startswith(ONE_MACHINE)
