"""Models behind a running server, with the methods of `LLM` and the same events, over HTTP.

Speaks the server's OpenAI dialect, as any other client would. For commands that take `--url`, `open_model` opens a
model here or at a server. `mlxr ps` and `mlxr stop` ask Ollama's routes.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self, overload
from urllib.parse import quote

import typer

from mlxr.cli.flags import Json, complete_models
from mlxr.cli.terminal import (
    format_bytes,
    make_printable,
    print_fields,
    print_json,
    print_note,
    print_table,
    show_progress,
)
from mlxr.core.errors import ContextFull, InvalidRequest, MlxrError, NotFound, SettingError
from mlxr.core.sampling import EVERYDAY
from mlxr.core.settings import Settings, resolve
from mlxr.core.types import (
    PARAMETERS,
    Closes,
    Event,
    Finish,
    FinishReason,
    Grammar,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    Timings,
    Usage,
)
from mlxr.service.sight import spell_pictures

if TYPE_CHECKING:
    import httpx


TIMEOUT_S = 10.0
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The server (http://host:port); default: the host and port of the settings."
    ),
]


def ask_server(
    settings: Settings,
    url: str | None,
    path: str,
    body: dict[str, object] | None = None,
    *,
    timeout_s: float | None = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the server's answer to a POST with `body`, or to a GET without one; None as `timeout_s` waits for ever.

    `url` is the server's address, None that of the settings. Raises MlxrError with the server's message, or if no
    server answers.
    """
    import httpx

    url = spell_url(url)
    socket = settings.unix_socket if url is None else None
    if url is not None and url.startswith("unix:"):
        socket, url = url.removeprefix("unix:"), None
    base_url = url or ("http://localhost" if socket else address_of(settings))
    key = find_own_key(settings)
    headers = EXACT if key is None else {**EXACT, "Authorization": f"Bearer {key}"}
    if socket is not None and not Path(socket).is_socket():
        raise _explain_silence(socket, "there is no socket")
    transport = None if socket is None else httpx.HTTPTransport(uds=socket)
    base_url = base_url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base_url, transport=transport, headers=headers, timeout=timeout_s) as client:
            response = client.get(path) if body is None else client.post(path, json=body)
            reply: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise _explain_silence(socket or base_url, error) from error
    if response.status_code == 401:
        raise MlxrError(f"{socket or base_url}: {WANTS_KEY}")
    if response.status_code != 200:
        raise MlxrError(f"{socket or base_url}: {_read_error(reply) or f'HTTP status {response.status_code}'}")
    return reply


_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")


@overload
def spell_url(url: str) -> str: ...
@overload
def spell_url(url: None) -> None: ...
def spell_url(url: str | None) -> str | None:
    """Return the address with its scheme, which people leave out, as in `localhost:8080`."""
    return f"http://{url}" if url is not None and _HOST_AND_PORT.fullmatch(url) else url


def address_of(settings: Settings, port: int | None = None) -> str:
    """Return the address of a server with these settings, as seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port or settings.port}"


def _explain_silence(address: str, reason: Exception | str) -> MlxrError:
    """Return the error for an address where no server of ours answers, with a remedy."""
    import httpx

    if isinstance(reason, httpx.TimeoutException):
        return MlxrError(f"{address}: the server does not answer in time; it may be busy or loading a model: try again")
    if isinstance(reason, ValueError) and not isinstance(reason, httpx.InvalidURL):
        return MlxrError(f"{address}: another program answers there; name mlxr's server with --url or --port")
    told = "nothing listens there" if "Connection refused" in str(reason) else str(reason) or type(reason).__name__
    remedy = "`mlxr serve` starts one, --url names another"
    return MlxrError(f"{address}: no mlxr server answers: {told}; {remedy}")


def ask_parameters(settings: Settings, url: str, model: str | None) -> Mapping[str, object]:
    """Ask for the parameters that were set on a server's model (None: its default model), under Ollama's names.

    If the server does not say, returns `EVERYDAY`.
    """
    try:
        model = model or str(ask_server(settings, url, "/v1/admin/info").get("default_model"))
        text = ask_server(settings, url, "/api/show", {"model": model}).get("parameters")
    except MlxrError:  # asking for an answer will tell the reason
        return EVERYDAY
    found = dict(_ask_sampling(settings, url, model))
    for line in str(text or "").splitlines():
        name, _, value = line.partition(" ")
        parsed = json.loads(value)
        earlier = found.get(name, [])
        found[name] = [*earlier, parsed] if isinstance(earlier, list) and isinstance(parsed, str) else parsed
    return found


def _ask_sampling(settings: Settings, url: str, model: str) -> Mapping[str, object]:
    """Return the sampling that the server states for answers that people read; nothing if the server is not ours."""
    try:
        values = ask_server(settings, url, f"/v1/admin/models/{quote(model, safe='')}/sampling")
    except MlxrError:
        return EVERYDAY
    return {name: values[name] for name in EVERYDAY if name in values}


def _read_error(reply: object) -> str | None:
    """Return the message of an error in OpenAI's or Ollama's form."""
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


WANTS_KEY = "the server wants a valid API key; MLXR_API_KEYS=KEY, or MLXR_API_KEYS_FILE=FILE, gives it"
EXACT = {"x-mlxr-exact-model": "true"}  # no other model may answer for a name that the server does not know
ALL_TOKENS = 2**31 - 1  # as far as the context reaches
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Ask the server at this address (http://host:port or unix:/path) instead of loading a model. "
        "The first of the setting api_keys is sent as its key.",
    ),
]


class AnswerStream(Protocol):
    """Events that end with a Finish."""

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> None:
        """End the answer soon; a Finish still comes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Answerer(Protocol):
    """A model as commands use it, here or at a server."""

    @property
    def can_chat(self) -> bool:
        """True if the model answers conversations."""

    @property
    def context_tokens(self) -> int | None:
        """The most tokens of a prompt and its answer together; None if unknown."""

    @property
    def blind(self) -> str:
        """The reason why the model sees no pictures; empty if it does, or if that is unknown."""

    def stream(self, prompt: str, params: SamplingParams, /) -> AnswerStream:
        """Continue a text; returns the answer as a stream of events."""

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams,
        /,
        *,
        think: bool | str | None = None,
        grammar: Grammar | None = None,
    ) -> AnswerStream:
        """Answer a conversation; see `LLM.chat`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_model(
    model: str | None,
    settings: Settings,
    url: str | None,
    *,
    needs_chat_template: bool = False,
    adapter: str | Path | None = None,
) -> Answerer:
    """Open a model on this machine (default: that of `choose_default`), or of the server at `url` (default: its own).

    With `needs_chat_template`, a model on this machine that has none is refused with TemplateError, before its weights
    are read. `adapter` is a low-rank adapter for it, by its files or its name. A server reports itself that a model
    cannot chat.
    """
    if url is not None:
        refuse_model_settings(settings)
        return RemoteModel(url, model, find_own_key(settings))
    from mlxr.llm import LLM

    with show_progress("loading") as progress:
        return LLM(
            model or name_default(settings),
            **settings.select("model"),
            needs_chat_template=needs_chat_template,
            progress=progress,
            adapter=adapter,
        )


def find_here(model: str, settings: Settings) -> tuple[str | Path, str | None]:
    """Find a model on this machine, and the adapter in its name; a well-known model may be fetched first."""
    from mlxr.service.opening import split_adapter

    try:
        return split_adapter(model, settings)
    except NotFound as error:
        from mlxr.cli.pull import offer

        offer(model, settings, error)
        return split_adapter(model, settings)


def name_default(settings: Settings) -> str:
    """Return the name of the model that answers on this machine if none is named."""
    from mlxr.service.catalogue import choose_default, open_registry

    return choose_default(open_registry(settings), settings).name


def refuse_model_settings(settings: Settings) -> None:
    """Raise SettingError for the first flag for models that are loaded here, as a server would ignore it."""
    usual = resolve().select("model")
    for name, value in settings.select("model").items():
        if value != usual[name]:
            raise SettingError(f"--url: the server has settings of its own; leave out --{name.replace('_', '-')}")


def find_own_key(settings: Settings) -> str | None:
    """Return the key to send: the first of the settings, or of their file."""
    if settings.api_keys or settings.api_keys_file is None:
        return next(iter(settings.api_keys), None)
    from mlxr.server.access import read_keys_file

    return read_keys_file(Path(settings.api_keys_file))[0]


class RemoteModel(Closes):
    """The model `model` of the server at `url`; None is that server's default model."""

    can_chat = True  # a server refuses conversations itself
    context_tokens = None  # the server refuses prompts that are too long

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        import httpx

        url = spell_url(url)
        self._url, self._model = url, model
        path = url.removeprefix("unix:") if url.startswith("unix:") else None
        base_url = "http://localhost" if path is not None else url.rstrip("/").removesuffix("/v1")
        if not base_url.startswith(("http://", "https://")):
            raise InvalidRequest("--url", f"must begin with http://, https:// or unix:, got {url}")
        if path is not None and not Path(path).is_socket():
            raise InvalidRequest("--url", f"{url}: there is no socket")
        headers = EXACT if key is None else {**EXACT, "Authorization": f"Bearer {key}"}
        transport = None if path is None else httpx.HTTPTransport(uds=path)
        try:
            self._client = httpx.Client(base_url=base_url, headers=headers, timeout=None, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest("--url", f"{url}: {error}") from error

    def list_names(self) -> list[str]:
        """Return the names of the server's models; raises MlxrError."""
        import httpx

        try:
            response = self._client.get("/v1/models")
            if response.status_code != 200:
                raise read_refusal(response, self._url)
            return [str(model["id"]) for model in response.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise _explain_silence(self._url, error) from error

    @property
    def blind(self) -> str:
        """The reason in `/props` why the model sees no pictures; a server without that route refuses them itself."""
        import httpx

        try:
            reply = self._client.get("/props", params={} if self._model is None else {"model": self._model})
            sees = reply.json()["modalities"]["vision"] is not False
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""
        return "" if sees else f"{self._url} says so; /load one that sees, or put the vision tower beside it there"

    def stream(self, prompt: str, params: SamplingParams) -> RemoteStream:
        """Continue a text; returns the answer as a stream of events."""
        return self._start("/v1/completions", {"prompt": prompt}, params)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams,
        *,
        think: bool | str | None = None,
        grammar: Grammar | None = None,
    ) -> RemoteStream:
        """Answer a conversation. The only grammar that can be sent is that of any JSON object."""
        question: dict[str, object] = {"messages": spell_pictures(messages)}
        if isinstance(think, str):
            question["reasoning_effort"] = think
        elif think is not None:
            question["reasoning"] = {"enabled": think}
        if grammar is not None:
            question["response_format"] = {"type": grammar.kind}
        return self._start("/v1/chat/completions", question, params)

    def _start(self, path: str, question: dict[str, object], params: SamplingParams) -> RemoteStream:
        import httpx

        body = {**question, **describe_params(params), "stream": True, "stream_options": {"include_usage": True}}
        if self._model is not None:
            body["model"] = self._model
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        elif path == "/v1/completions":
            body["max_tokens"] = ALL_TOKENS  # the dialect's own default is 16
        try:
            response = self._client.send(self._client.build_request("POST", path, json=body), stream=True)
            if response.status_code != 200:
                raise read_refusal(response, self._url)
        except httpx.HTTPError as error:
            raise _explain_silence(self._url, error) from error
        return RemoteStream(response)

    def close(self) -> None:
        """Close the connection to the server."""
        self._client.close()


def describe_params(params: SamplingParams) -> dict[str, object]:
    """Return the fields of the dialect; all are given, since its defaults are not ours."""
    values = {row.name: getattr(params, row.name) for row in PARAMETERS if row.name != "max_tokens"}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return values if values["stop"] else {**values, "stop": None}


def read_refusal(response: httpx.Response, url: str) -> MlxrError:
    """Return the error of a response: the server's message, or the status without one."""
    response.read()
    if response.status_code == 401:
        return MlxrError(f"{url}: {WANTS_KEY}")
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return MlxrError(f"{url}: HTTP status {response.status_code}")
    return ContextFull(url, message) if code == "context_length_exceeded" else MlxrError(f"{url}: {message}")


class RemoteStream(Closes):
    """The events of one answer. Closing it early closes the connection, which tells the server."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._is_cancelled = False
        self._events = self._read()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def cancel(self) -> None:
        """Stop the answer; a Finish(CANCELLED) ends the events. Fit for signal handlers: a waiting read returns."""
        self._is_cancelled = True
        stream = self._response.extensions.get("network_stream")
        connection = None if stream is None else stream.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection to the server."""
        self._events.close()
        self._response.close()

    def _read(self) -> Generator[Event, None, None]:
        import httpx

        fold = _Chunks()
        try:
            for line in self._response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from fold.push(json.loads(line.removeprefix("data: ")))
        except (httpx.HTTPError, ValueError) as error:
            fold.error = fold.error or f"the connection broke: {error}"
        yield fold.finish(is_cancelled=self._is_cancelled)


class _Chunks:
    """Turns the chunks of both routes into events; gathers the facts about the end for the Finish."""

    def __init__(self) -> None:
        self.error: str | None = None
        self._reason: str | None = None
        self._usage = Usage(0, 0)
        self._timings: Timings | None = None

    def push(self, chunk: dict[str, object]) -> Iterator[Event]:
        failure = chunk.get("error")
        if isinstance(failure, dict):
            self.error = str(failure.get("message"))
        self._note_numbers(chunk.get("usage"), chunk.get("timings"))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            delta = choice.get("delta") or choice
            if delta.get("reasoning_content"):
                yield ReasoningDelta(delta["reasoning_content"])
            text = delta.get("content") or delta.get("text")
            if text:
                yield TextDelta(text)
            self._reason = choice.get("finish_reason") or self._reason

    def _note_numbers(self, usage: object, timings: object) -> None:
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            cached_tokens = details.get("cached_tokens", 0)
            thought_tokens = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
            self._usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached_tokens, thought_tokens)
        if isinstance(timings, dict):
            milliseconds = [timings.get(name, 0.0) for name in ("queue_ms", "prompt_ms", "predicted_ms")]
            self._timings = Timings(*(value / 1000 for value in milliseconds))

    def finish(self, *, is_cancelled: bool) -> Finish:
        """Return the last event. A stream that ends without a reason has broken."""
        if is_cancelled:
            return Finish(FinishReason.CANCELLED, self._usage)
        if self.error is not None or self._reason is None:
            return Finish(FinishReason.ERROR, self._usage, self.error or "the connection broke")
        return Finish(FinishReason(self._reason), self._usage, timings=self._timings)


Port = Annotated[
    int | None, typer.Option("--port", metavar="NUMBER", help="The server's port on this machine.", min=1, max=65535)
]


def list_loaded(settings: Settings, url: str | None) -> Sequence[Mapping[str, Any]]:
    """Return the models that a server has loaded, from Ollama's route; raises MlxrError."""
    models: Sequence[Mapping[str, Any]] = ask_server(settings, url, "/api/ps").get("models", [])
    return models


def choose_url(settings: Settings, url: str | None, port: int | None) -> str | None:
    """Return the address of --url or --port, None if neither is given; raises InvalidRequest for both."""
    if url is not None and port is not None:
        raise InvalidRequest("--port", "is part of --url; give one of them")
    return url if port is None else address_of(settings, port)


def ps(url: ServerUrl = None, port: Port = None, json: Json = False) -> None:
    """Show the models that a server has loaded, and the memory that they take.

    SIZE is what a model takes now: its weights, and the part of its cache that
    is in use. CACHE is that part, and the most that it may become.
    """
    settings = resolve()
    models = list_loaded(settings, choose_url(settings, url, port))
    if json:
        print_json(models)
    elif not models:
        print_note("no model is loaded")
    else:
        print_table(("NAME", "ID", " SIZE", " CACHE", " CONTEXT", "SEES", "UNTIL"), [_row(model) for model in models])


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    left_s = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    until = "for ever" if left_s > 10 * 365 * 86400 else f"{left_s / 60:.0f} minutes from now"
    size, sees = format_bytes(int(model["size"])), "yes" if "vision" in model.get("capabilities", ()) else "no"
    name, digest = make_printable(model["name"]), str(model["digest"])[:12]
    return name, digest, size, _tell_cache(model), str(model["context_length"]), sees, until


def _tell_cache(model: Mapping[str, Any]) -> str:
    """Return the bytes that the cache takes and may take, or that it is shared; blank if the server does not say."""
    if "cache_max_bytes" not in model:
        return "-"
    cache = f"{format_bytes(model['cache_in_use_bytes'])} of {format_bytes(model['cache_max_bytes'])}"
    return f"{cache}, shared" if model["shared_with"] else cache


Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model.", autocompletion=complete_models)]


def stop(model: Model, url: ServerUrl = None, port: Port = None, json: Json = False) -> None:
    """Unload a model from a server. Answers in progress end first; the next request loads it again."""
    settings = resolve()
    url = choose_url(settings, url, port)
    before = [str(row["name"]) for row in list_loaded(settings, url)]
    ask_server(settings, url, "/api/generate", {"model": model, "keep_alive": 0, "stream": False}, timeout_s=None)
    known = {spelling.lower() for name in before for spelling in (name, name.removesuffix(":latest"))}
    if model.lower() not in known and before == [str(row["name"]) for row in list_loaded(settings, url)]:  # no alias
        raise NotFound(make_printable(f"{model} is not loaded; loaded: {', '.join(before) or 'none'}"))
    print_json({"stopped": model}) if json else print_fields([("stopped", model)])
