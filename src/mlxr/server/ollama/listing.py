"""What there is: /, /api/version, /api/tags, /api/ps, /api/show."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlxr.registry import ModelRecord
from mlxr.registry.modelfile import list_parameters, write_modelfile
from mlxr.registry.options import check_options
from mlxr.server.json_models import JsonObject, ReplyModel, optional
from mlxr.server.ollama.answers import Options, note_options
from mlxr.server.ollama.reply import ERRORS, NamedRequest, find_model, format_time
from mlxr.server.page_files import INDEX, find_page_file, wants_page
from mlxr.server.parts import parts_of
from mlxr.server.routes import Router, reply_json
from mlxr.server.work import look
from mlxr.service.catalogue import read_metadata
from mlxr.service.model_pool import RunningModel

INTERFACE_VERSION = "0.32.0"  # of Ollama, whose interface this is; clients ask for it to know what they may use
FOR_EVER = timedelta(days=100 * 365)
router = Router()


class Details(ReplyModel):
    """Says what kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class Version(ReplyModel):
    """The version of the interface."""

    version: str


class ListedModel(ReplyModel):
    """A model that is here. Ollama has no word for one that only continues text: `has_chat_template` says it."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]
    has_chat_template: bool


class Tags(ReplyModel):
    """All models that are here."""

    models: list[ListedModel]


class LoadedModel(ReplyModel):
    """A model in memory; `size` is what it takes now, `size_vram` the part of it on a GPU.

    Ollama has no words for the rest: weights, what the cache takes now and at most, and the other names of what is
    loaded, which takes its memory once.
    """

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int
    weights_bytes: int
    cache_in_use_bytes: int
    cache_max_bytes: int
    shared_with: list[str]


class Processes(ReplyModel):
    """All models in memory."""

    models: list[LoadedModel]


class ShowBody(NamedRequest):
    """Says which model to show; `verbose` adds long lists such as the vocabulary."""

    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Options = None


class TensorReply(ReplyModel):
    """A tensor of the model."""

    name: str
    type: str
    shape: list[int]


class ShowReply(ReplyModel):
    """All about a model. `template` is Jinja."""

    license: str | None = optional()
    modelfile: str
    parameters: str
    template: str
    system: str | None = optional()
    details: Details
    messages: list[dict[str, str]] | None = optional()
    model_info: JsonObject
    tensors: list[TensorReply]
    capabilities: list[str]
    modified_at: str


@router.get("/", response_class=PlainTextResponse)
async def say_running(request: Request) -> Response:
    """The page for a browser; for every other client the text by which it knows that the server is there."""
    if wants_page(request.headers.get("accept", "")):
        page = await find_page_file(request, INDEX)
        if page is not None:
            return page
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


@router.get("/api/version", response_model=Version)
async def version(_: Request) -> Version:
    """The version of Ollama's interface that this is."""
    return Version(version=INTERFACE_VERSION)


@router.get("/api/tags", response_model=Tags, responses=ERRORS)
async def tags(request: Request) -> Response:
    """The models that are here and can be used."""
    records = await look(request, parts_of(request).served.list)
    return reply_json(Tags(models=[_describe_listed(record) for record in records if record.problem is None]))


@router.get("/api/ps", response_model=Processes, responses=ERRORS)
async def ps(request: Request) -> Response:
    """The models that are loaded."""
    return reply_json(Processes(models=[_describe_loaded(model) for model in parts_of(request).pool.running()]))


@router.post("/api/show", response_model=ShowReply, responses=ERRORS)
async def show(request: Request, body: ShowBody) -> Response:
    """All about one model; `system`, `template` and `options` are shown as if they were the model's."""
    note_options(request, body.options)
    record = await find_model(request, body.wanted)
    metadata, tensors = await look(request, partial(read_metadata, record.path, with_arrays=bool(body.verbose)))
    options = {**record.parameters, **check_options(body.options or {})}
    return reply_json(
        ShowReply(
            license=record.license or None,
            modelfile=await look(request, _write_modelfile, request, record),
            parameters="\n".join(list_parameters(options)),
            template=body.template or record.template or record.own_template,
            system=body.system or record.system,
            details=describe(record),
            messages=[dict(message) for message in record.messages] or None,
            model_info={"general.parameter_count": record.parameters_count, **metadata},
            tensors=[TensorReply(name=name, type=kind, shape=list(shape)) for name, kind, shape in tensors],
            capabilities=list_capabilities(record),
            modified_at=format_time(record.modified_at),
        )
    )


def _write_modelfile(request: Request, record: ModelRecord) -> str:
    registry = parts_of(request).registry
    adapter = registry.find_adapter_of(record)
    return write_modelfile(record, None if adapter is None else adapter.path)


def describe(record: ModelRecord) -> Details:
    """The details of a record."""
    return Details(
        parent_model=record.from_name or "",
        format=record.format,
        family=record.architecture,
        families=[record.architecture],
        parameter_size=record.parameter_size,
        quantization_level=record.quantization,
        context_length=record.context_tokens,
        embedding_length=record.embedding_length,
    )


def list_capabilities(record: ModelRecord) -> list[str]:
    """Return what a model is for. Ollama says embedding of models that do nothing else; ours all do both."""
    names = record.capabilities - {"embedding"} if "completion" in record.capabilities else record.capabilities
    return sorted(names)


def _describe_listed(record: ModelRecord) -> ListedModel:
    return ListedModel(
        name=record.name,
        model=record.name,
        modified_at=format_time(record.modified_at),
        size=record.size_bytes,
        digest=record.digest,
        details=describe(record),
        capabilities=list_capabilities(record),
        has_chat_template=bool(record.template or record.own_template),
    )


def _describe_loaded(model: RunningModel) -> LoadedModel:
    cache, weights_bytes = model.session.measure_cache(), model.session.weight_bytes
    size_bytes = weights_bytes + cache.in_use_bytes
    return LoadedModel(
        name=model.name,
        model=model.name,
        size=size_bytes,
        digest=model.record.digest,
        details=describe(model.record),
        expires_at=format_time(model.expires_at or datetime.now(UTC) + FOR_EVER),
        size_vram=0 if model.session.is_on_host else size_bytes,
        context_length=model.context_tokens,
        weights_bytes=weights_bytes,
        cache_in_use_bytes=cache.in_use_bytes,
        cache_max_bytes=cache.max_bytes,
        shared_with=list(model.shared_with),
    )
