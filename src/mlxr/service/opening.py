"""From settings to a loaded model, and from a loaded model to its engine and session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import platformdirs

from mlxr.core.errors import InvalidRequest, NotFound
from mlxr.core.settings import Settings
from mlxr.engine.engine import Engine
from mlxr.engine.runner import Model
from mlxr.loading import LoadedModel, Progress, choose_device, find_model, load
from mlxr.registry import ModelRecord
from mlxr.service.catalogue import open_registry
from mlxr.service.session import Session
from mlxr.tokenizers import chat_template_from_source


def find_record(path_or_name: str | Path, settings: Settings) -> ModelRecord | None:
    """What the registry has under a name, None for a path or a model that comes with mlxr.

    Raises NotFound, with what is near, when there is nothing at all.
    """
    try:
        find_model(path_or_name)
    except NotFound as error:
        try:
            return open_registry(settings).get(str(path_or_name))
        except (NotFound, InvalidRequest):
            raise error from None
    return None


def open_model(
    path_or_name: str | Path,
    settings: Settings,
    progress: Progress | None = None,
    *,
    needs_chat_template: bool = False,
) -> LoadedModel:
    """`loading.load` with the device, threads and instruction set of the settings; names may be the registry's too."""
    record = find_record(path_or_name, settings)
    if record is None:
        return _load(path_or_name, settings, progress, needs_chat_template)
    return open_record(record, settings, progress, needs_chat_template=needs_chat_template)


def open_record(
    record: ModelRecord, settings: Settings, progress: Progress | None = None, *, needs_chat_template: bool = False
) -> LoadedModel:
    """The model of a record, under its name and with the record's chat template where it has one."""
    needs_own_template = needs_chat_template and record.template is None
    loaded = replace(_load(record.path, settings, progress, needs_own_template), name=record.short_name)
    if record.template is None:
        return loaded
    template = chat_template_from_source(record.template, loaded.tokenizer, loaded.chat_template)
    return replace(loaded, chat_template=template)


def _load(
    path_or_name: str | Path, settings: Settings, progress: Progress | None, needs_chat_template: bool
) -> LoadedModel:
    return load(
        path_or_name,
        device=settings.device,
        threads=settings.threads,
        isa=settings.isa,
        context_tokens=settings.context_tokens,
        expert_bytes=settings.expert_bytes,
        needs_chat_template=needs_chat_template,
        progress=progress,
    )


def build_engine(
    loaded: LoadedModel, settings: Settings, model: Model | None = None, *, memory_bytes: int | None = None
) -> Engine:
    """An engine for a loaded model; `model` stands in for it where calls are to be watched.

    Where the settings do not say what the arena takes, at most `memory_bytes` of the free memory count as such.
    """
    return Engine(
        model or loaded.model,
        loaded.ctx,
        replace(settings, store_folder=str(find_store_folder(settings))),
        eos_ids=loaded.tokenizer.eos_ids,
        memory_bytes=memory_bytes,
        fingerprint=loaded.fingerprint,
        inbox_bytes=settings.fetch_bytes,
    )


def find_device(settings: Settings) -> str:
    """The device that models run on: that of the settings, or what this machine has."""
    return choose_device(settings.device)


def find_store_folder(settings: Settings) -> Path:
    """Where cache pages are kept on disk: the folder of the settings, or one in the user's cache folder."""
    if settings.store_folder is not None:
        return Path(settings.store_folder).expanduser()
    return platformdirs.user_cache_path("mlxr", appauthor=False) / "pages"


def build_session(loaded: LoadedModel, engine: Engine, system: str | None = None) -> Session:
    """A session for texts and conversations with a loaded model; `system` is for conversations that have none."""
    return Session(
        engine,
        loaded.tokenizer,
        loaded.chat_template,
        vocab_size=loaded.config.vocab_size,
        model_name=loaded.name,
        system=system,
        host=loaded.ctx,
    )
