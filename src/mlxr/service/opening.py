"""From settings to a loaded model, and from a loaded model to its engine and session."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from mlxr.core.settings import Settings
from mlxr.engine.engine import Engine
from mlxr.engine.runner import Model
from mlxr.loading import LoadedModel, Progress, load
from mlxr.service.session import Session


def open_model(path_or_name: str | Path, settings: Settings, progress: Progress | None = None) -> LoadedModel:
    """`loading.load` with the device, threads and instruction set of the settings."""
    return load(path_or_name, device=settings.device, threads=settings.threads, isa=settings.isa, progress=progress)


def build_engine(
    loaded: LoadedModel, settings: Settings, model: Model | None = None, *, memory_bytes: int | None = None
) -> Engine:
    """An engine for a loaded model; `model` stands in for it where calls are to be watched.

    Where the settings do not say what the arena takes, at most `memory_bytes` of the free memory count as such.
    """
    return Engine(
        model or loaded.model,
        loaded.ctx,
        eos_ids=loaded.tokenizer.eos_ids,
        arena_bytes=settings.arena_bytes,
        arena_percent=settings.arena_percent,
        memory_bytes=memory_bytes,
        kv_cache=settings.kv_cache,
        fingerprint=loaded.fingerprint,
        store_bytes=settings.store_bytes,
        store_folder=find_store_folder(settings),
        page_size=settings.page_size,
        kv_type=settings.kv_type,
        context_tokens=settings.context_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_waiting=settings.max_waiting,
    )


def find_store_folder(settings: Settings) -> Path:
    """Where cache pages are kept on disk: the folder of the settings, or one in the user's cache folder."""
    if settings.store_folder is not None:
        return Path(settings.store_folder).expanduser()
    return platformdirs.user_cache_path("mlxr", appauthor=False) / "pages"


def build_session(loaded: LoadedModel, engine: Engine) -> Session:
    """A session for texts and conversations with a loaded model."""
    return Session(
        engine,
        loaded.tokenizer,
        loaded.chat_template,
        vocab_size=loaded.config.vocab_size,
        model_name=loaded.name,
    )
