"""POST /api/pull: a model from the hub, its progress line by line. /api/push is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from mlxr.core.errors import NotFound
from mlxr.core.work_threads import Stop
from mlxr.registry import Registry
from mlxr.registry.pull import PullProgress
from mlxr.registry.pull import pull as pull_model
from mlxr.server.errors import ServerError
from mlxr.server.json_models import JsonObject, ReplyModel, optional
from mlxr.server.ollama.lines import Lines
from mlxr.server.ollama.route import ERRORS, STREAMED, NamedRequest, error_frame, find_model
from mlxr.server.routes import Router, reply_json
from mlxr.server.streaming import NDJSON, EventStream, ndjson, until_disconnected
from mlxr.server.work import start_pull

_STATUS = {"listing": "pulling manifest", "checking": "verifying sha256 digest", "adding": "writing manifest"}
router = Router()


class PullBody(NamedRequest):
    """What to pull: hf.co/owner/repo[:file or quant]."""

    stream: bool | None = None


class PullReply(ReplyModel):
    """How far it is; `digest`, `total` and `completed` are of one file, in bytes."""

    status: str
    digest: str | None = optional()
    total: int | None = optional()
    completed: int | None = optional()


@router.post("/api/pull", response_model=PullReply, responses=STREAMED)
async def pull(request: Request, body: PullBody) -> Response:
    """Pull a model. When the client goes away it stops; pulled again, it goes on from there."""
    pulling = Pulling(request, body.wanted)
    task = await pulling.start()
    if body.stream is not False:
        return EventStream(request, pulling.write_frames(task), media_type=NDJSON, on_error=error_frame)
    await until_disconnected(request, task)
    return reply_json(PullReply(status="success"))


@router.post("/api/push", responses=ERRORS)
async def push(_: Request) -> Response:
    """Refuse the request: models are not sent anywhere."""
    raise ServerError(400, "unsupported", "push is not supported: models are not sent anywhere")


class Pulling:
    """One pull, on a thread of its own."""

    def __init__(self, request: Request, name: str) -> None:
        self._request, self._name = request, name
        self._lines = Lines()

    async def start(self) -> asyncio.Task[None]:
        """Begin to pull; the task ends when the model is there. Cancelled, it stops at once. Raises Busy."""
        if await self._is_here():
            return asyncio.create_task(asyncio.sleep(0))
        state = self._request.app.state

        def work(registry: Registry, stop: Stop) -> None:
            pull_model(registry, self._name, endpoint=state.settings.hub_url, report=self._report, stop=stop)

        task = start_pull(self._request, work)
        task.add_done_callback(lambda _: state.pool.refresh())
        return task

    async def write_frames(self, task: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        """Lines of progress, and the last one: success."""
        async for frame in self._lines.follow(task):
            yield frame
        yield ndjson({"status": "success"})

    async def _is_here(self) -> bool:
        """Whether the name is that of a model which did not come from a hub, so that there is nothing to ask for."""
        if "hf.co/" in self._name or "huggingface.co/" in self._name:
            return False
        try:
            await find_model(self._request, self._name)
        except NotFound:
            return False
        return True

    def _report(self, progress: PullProgress) -> None:
        """Called on the thread that pulls."""
        self._lines.report(_describe(progress), is_piece=0 < progress.done_bytes < progress.total_bytes)


def _describe(progress: PullProgress) -> JsonObject:
    if progress.stage != "fetching":
        return {"status": _STATUS[progress.stage]}
    return {
        "status": f"pulling {progress.digest[:12]}",
        "digest": f"sha256:{progress.digest}",
        "total": progress.total_bytes,
        "completed": progress.done_bytes,
    }
