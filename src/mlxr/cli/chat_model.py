"""The model that a chat talks with: opened here or at a server, what is known of it, and how it is saved anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from mlxr.cli.remote import Answerer, name_default, open_model
from mlxr.cli.server_client import ask_parameters, ask_server
from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.settings import Settings
from mlxr.loading import NAMED_MODELS
from mlxr.registry import Changes, ModelRecord
from mlxr.registry.modelfile import list_parameters, write_modelfile
from mlxr.service.catalogue import open_registry, recommend
from mlxr.service.opening import find_own_adapter, find_record, note_use, split_adapter

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Holds what `/show` shows of a model; `parameters` are lines of name and value."""

    info: Mapping[str, str] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    system: str = ""
    template: str = ""
    modelfile: str = ""
    license: str = ""


class ChatModel:
    """One model at a time. `name` None is the default model, of this machine or the server's.

    `parameters` and `messages` are what the model brings along (see `mlxr create`). At a server there are no messages,
    since the server adds them itself.
    """

    def __init__(self, name: str | None, settings: Settings, url: str | None) -> None:
        self.name = name_default(settings) if name is None and url is None else name
        self._settings, self._url = settings, url
        self._stack = ExitStack()
        self.answerer: Answerer = self._open()

    @property
    def title(self) -> str:
        """Return the name that people use for the model."""
        return self.name or self._url or ""

    @property
    def parameters(self) -> Mapping[str, object]:
        """Sampling parameters under Ollama's names."""
        if self._url is not None:
            return ask_parameters(self._settings, self._url, self.name)
        return {**recommend(self._record.path), **self._record.parameters}

    @property
    def messages(self) -> list[Message]:
        """Messages that every conversation begins with."""
        return list(self._record.messages) if self._url is None else []

    def load(self, name: str) -> None:
        """Talk with another model from now on. The one before is closed first, so that there is memory for the other.

        When the other cannot be opened, the one before comes back, and MlxrError says why.
        """
        before = self.name
        if self._url is None:
            self._find_record(name)  # a wrong name is told before anything is closed
        self._stack.close()
        self.name = name
        try:
            self.answerer = self._open()
        except MlxrError:
            self.name = before
            self.answerer = self._open()
            raise

    def save(
        self,
        name: str,
        system: str | None,
        parameters: Mapping[str, object],
        messages: list[Message],
        *,
        replaces: bool = False,
    ) -> None:
        """Make the model `name` of this one, with a system message, parameters under Ollama's names and messages.

        Raises NameTaken, or what the server says, where another model has the name, unless this one `replaces` it.
        """
        if self._url is None:
            changes = Changes(system=system, parameters=parameters, messages=messages or None)
            open_registry(self._settings).derive(name, self._record, changes, replaces=replaces)
            return
        body: dict[str, object] = {"model": name, "from": self._require_name(), "stream": False, "replace": replaces}
        body |= {"system": system, "parameters": dict(parameters), "messages": list(map(dict, messages))}
        ask_server(self._settings, self._url, "/api/create", body, timeout_s=None)

    def describe(self) -> ModelCard:
        """Return the details of the model; raises MlxrError."""
        if self._url is not None:
            return self._ask_card(self._url)
        record = self._record
        info = {
            "architecture": record.architecture,
            "parameters": record.parameter_size,
            "quantization": record.quantization,
            "context length": f"{record.context_tokens} tokens",
            "embedding length": str(record.embedding_length),
        }
        return ModelCard(
            info,
            list_parameters(record.parameters),
            record.system or "",
            record.template or record.own_template,
            self._write_modelfile(record),
            record.license,
        )

    def _write_modelfile(self, record: ModelRecord) -> str:
        adapter = find_own_adapter(record, self._settings)
        return write_modelfile(record, None if adapter is None else adapter.path)

    def _ask_card(self, url: str) -> ModelCard:
        reply = ask_server(self._settings, url, "/api/show", {"model": self._require_name()})
        details = reply.get("details") or {}
        info = {
            "architecture": details.get("family", ""),
            "parameters": details.get("parameter_size", ""),
            "quantization": details.get("quantization_level", ""),
        }
        texts = {name: reply.get(name) or "" for name in ("system", "template", "modelfile", "license")}
        return ModelCard(info, (reply.get("parameters") or "").splitlines(), **texts)

    def _open(self) -> Answerer:
        if self._url is None:
            assert self.name is not None
            self._record = self._find_record(self.name)
            note_use(self._record, self._settings)
        model = open_model(self.name, self._settings, self._url, needs_chat_template=True)
        return self._stack.enter_context(model)

    def _find_record(self, name: str) -> ModelRecord:
        name = str(split_adapter(name, self._settings)[0])
        record = find_record(name, self._settings)
        if record is not None:
            return record
        path = name if name in NAMED_MODELS else str(Path(name).expanduser().absolute())
        return open_registry(self._settings).find(path)

    def _require_name(self) -> str:
        if self.name is None:
            raise InvalidRequest("MODEL", "is needed for this; name the model: `mlxr chat MODEL --url ...`")
        return self.name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
