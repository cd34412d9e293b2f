"""Opens the model that settings and a name mean, and builds the engine of a loaded model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import platformdirs

from mlxr.core.errors import InvalidRequest, MlxrError, ModelError, NotFound, SettingError
from mlxr.core.model_settings import DRAFT_WORDS
from mlxr.core.settings import Settings
from mlxr.engine.engine import Engine
from mlxr.engine.memory_plan import bound_free_bytes
from mlxr.engine.pictures import ROWS_BYTES, TOGETHER_SHARE, TOGETHER_TOKENS, Encoder
from mlxr.engine.runner import Model, ModelShape
from mlxr.engine.speculative.planner import HOST_DEVICES, DraftSource, HeadSource
from mlxr.loading import (
    LoadedModel,
    Progress,
    TowerFile,
    check_vocabulary,
    choose_device,
    find_draft,
    find_model,
    load,
    open_source,
    read_eagle,
    read_footprint,
)
from mlxr.registry import AdapterRecord, ModelRecord
from mlxr.service.catalogue import open_registry
from mlxr.service.chat_templates import find_source, make_template
from mlxr.service.tensor_parallel import RankGroup, start_group
from mlxr.tokenizers import ChatTemplate

logger = logging.getLogger(__name__)


def find_record(path_or_name: str | Path, settings: Settings) -> ModelRecord | None:
    """Return the registry's record of a name; None for a path or a model that comes with mlxr.

    Raises NotFound, with similar names, if there is no such model at all.
    """
    try:
        find_model(path_or_name)
    except NotFound as error:
        try:
            return open_registry(settings).get(str(path_or_name))
        except (NotFound, InvalidRequest):
            raise error from None
    return None


def note_use(record: ModelRecord, settings: Settings) -> None:
    """Note that a model was used now, if the catalogue has it and can be written."""
    if record.files:
        with suppress(MlxrError):
            open_registry(settings).touch(record.name)


def find_own_adapter(record: ModelRecord, settings: Settings) -> AdapterRecord | None:
    """Return the adapter that a model was made with, None for most; raises RegistryError if it is gone or changed."""
    return None if record.adapter is None else open_registry(settings).find_adapter_of(record)


def split_adapter(path_or_name: str | Path, settings: Settings) -> tuple[str | Path, str | None]:
    """Split `base:adapter`, or an adapter's name alone, into model and adapter; a model of that whole name goes first.

    Raises NotFound if it is neither.
    """
    try:
        find_record(path_or_name, settings)
    except NotFound as error:
        head, _, tail = str(path_or_name).rpartition(":")
        try:
            found = open_registry(settings).adapters.get(tail)
        except MlxrError:
            raise error from None
        return head or found.base, found.name
    return path_or_name, None


def find_adapter_path(path_or_name: str | Path, settings: Settings) -> Path:
    """Return the path of an adapter's files: the path itself, or that of a name in `mlxr adapters list`."""
    path = Path(os.path.expanduser(path_or_name))
    if path.exists():
        return path
    try:
        return open_registry(settings).adapters.get(str(path_or_name)).path
    except NotFound:
        raise NotFound(f"{path}: no such adapter; `mlxr adapters list` shows those that have a name") from None


def open_model(
    path_or_name: str | Path,
    settings: Settings,
    progress: Progress | None = None,
    *,
    needs_chat_template: bool = False,
    needs_draft: bool = False,
) -> LoadedModel:
    """Load a model (`loading.load`) with the device, threads and instruction set of the settings; takes the registry's
    names, too. With `needs_draft` it gets the draft model that the settings name.
    """
    record = find_record(path_or_name, settings)
    if record is None:
        source = find_source(settings)
        loaded = _load(path_or_name, settings, progress, needs_chat_template and source is None)
        with closing_on_failure(loaded):
            loaded = replace(loaded, chat_template=find_template(None, loaded, settings))
        return add_draft(loaded, settings) if needs_draft else loaded
    return open_record(record, settings, progress, needs_chat_template=needs_chat_template, needs_draft=needs_draft)


def open_record(
    record: ModelRecord,
    settings: Settings,
    progress: Progress | None = None,
    *,
    needs_chat_template: bool = False,
    needs_draft: bool = False,
) -> LoadedModel:
    """Load the model of a record, under its name and with the chat template that it is used with."""
    loaded = open_files(record, settings, progress, needs_chat_template=needs_chat_template, needs_draft=needs_draft)
    with closing_on_failure(loaded):
        return replace(loaded, chat_template=find_template(record, loaded, settings))


def open_files(
    record: ModelRecord,
    settings: Settings,
    progress: Progress | None = None,
    *,
    needs_chat_template: bool = False,
    needs_draft: bool = False,
) -> LoadedModel:
    """Load the model of a record, with the chat template of its files."""
    source = find_source(settings) or record.template
    loaded = _load(record.path, settings, progress, needs_chat_template and source is None, record.tower)
    loaded = replace(loaded, name=record.short_name)
    return add_draft(loaded, settings) if needs_draft else loaded


def find_template(record: ModelRecord | None, loaded: LoadedModel, settings: Settings) -> ChatTemplate | None:
    """Return the chat template of a model whose files are loaded: that of the settings, else of its record, else of the
    files. Raises TemplateError or SettingError.
    """
    source = find_source(settings) or (None if record is None else record.template)
    return make_template(source, loaded.chat_template, settings, loaded.tokenizer)


@contextmanager
def closing_on_failure(*opened: LoadedModel | None) -> Iterator[None]:
    """Close the models `opened` if the code inside this context fails."""
    try:
        yield
    except BaseException:
        for loaded in opened:
            if loaded is not None:
                loaded.close()
        raise


def add_draft(loaded: LoadedModel, settings: Settings) -> LoadedModel:
    """Return the model with the draft model that the settings name, or that belongs to it, on the same threads.

    On a GPU the draft model has its own context. Raises SettingError, with `loaded` closed, if the draft model cannot
    be loaded or has other tokens.
    """
    with closing_on_failure(loaded):
        path = find_draft_path(loaded.path, settings)
        if loaded.ctx.device not in HOST_DEVICES and (path is None or settings.draft == "auto"):
            return loaded
        if path is None:
            return _add_head(loaded, settings)
        try:
            if read_eagle(path) is not None:
                head = loaded.load_eagle(path)
                return replace(loaded, head=head, weight_bytes=loaded.weight_bytes + head.weight_bytes)
            draft = _load_draft(loaded, path, settings)
        except MlxrError as error:
            raise SettingError(f"draft: {error}") from error
        return replace(loaded, draft=draft, weight_bytes=loaded.weight_bytes + draft.weight_bytes)


def _load_draft(loaded: LoadedModel, path: Path, settings: Settings) -> LoadedModel:
    shared = loaded.ctx if loaded.ctx.gpu is None else None
    draft = load(path, context_tokens=None, device=loaded.ctx.device, ctx=shared)
    with closing_on_failure(draft):
        draft = replace(draft, name=draft.name if settings.draft == "auto" else settings.draft)
        check_vocabulary(loaded, draft)
    return draft


def _add_head(loaded: LoadedModel, settings: Settings) -> LoadedModel:
    """Return the model with its own drafting layer; one that does not fit is left out if no setting asks for it."""
    if settings.draft not in ("auto", "mtp"):
        return loaded
    try:
        head = loaded.load_head()
    except ModelError as error:
        if settings.draft == "mtp":
            raise SettingError(f"draft: {error}") from error
        logger.warning("%s; answers go on without it", error)
        return loaded
    return loaded if head is None else replace(loaded, head=head, weight_bytes=loaded.weight_bytes + head.weight_bytes)


def find_draft_path(path: Path, settings: Settings) -> Path | None:
    """Return the path of the draft model that the settings give to the model at `path`; None without one.

    Raises SettingError if there is no such model.
    """
    if settings.draft == "auto":
        name = find_draft(path)
        return None if name is None else find_model(name)
    if settings.draft in DRAFT_WORDS:
        return None
    try:
        record = find_record(settings.draft, settings)
        return find_model(settings.draft) if record is None else record.path
    except MlxrError as error:
        raise SettingError(f"draft: {error}") from error


def _load(
    path_or_name: str | Path,
    settings: Settings,
    progress: Progress | None,
    needs_chat_template: bool,
    tower: Path | None = None,
) -> LoadedModel:
    group = None if settings.gpus == 1 else start_group(find_model(path_or_name), find_device(settings), settings)
    try:
        loaded = _load_on(path_or_name, settings, progress, needs_chat_template, group, tower)
        if group is not None:
            with closing_on_failure(loaded):
                group.wait_ready()
    except BaseException:
        if group is not None:
            group.close()
        raise
    if group is None:
        return loaded
    blind = "several GPUs as one read no pictures; use one, or --device cpu"
    return replace(loaded, group=group, tower=None, blind=blind)


def _load_on(
    path_or_name: str | Path,
    settings: Settings,
    progress: Progress | None,
    needs_chat_template: bool,
    group: RankGroup | None,
    tower: Path | None,
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
        ctx=None if group is None else group.ctx,
        mmproj=settings.mmproj,
        tower=tower,
    )


def find_draft_config(path: Path, settings: Settings) -> ModelShape | None:
    """Read the configuration of the draft model, or of the model's own drafting layer; None without either.

    Raises as loading it does.
    """
    draft = find_draft_path(path, settings)
    on_host = find_device(settings) in HOST_DEVICES
    if (settings.draft == "auto" and not on_host) or (draft is None and settings.draft not in ("auto", "mtp")):
        return None
    eagle = None if draft is None else read_eagle(draft)
    if eagle is not None:
        return eagle
    source = open_source(draft or path)
    source.file.close()
    return source.head_config if draft is None else source.config


def build_engine(
    loaded: LoadedModel, settings: Settings, model: Model | None = None, *, memory_bytes: int | None = None
) -> Engine:
    """Build an engine for a loaded model; `model` takes its place if calls are to be watched.

    If no draft model is loaded, a draft model in the settings counts as auto: the results are the same. If the settings
    give no size of the arena, at most `memory_bytes` of memory count as free.
    """
    draft: DraftSource | HeadSource | None = None
    if loaded.draft is not None:
        draft = DraftSource(loaded.draft.model, loaded.draft.fingerprint, loaded.draft.ctx)
    elif loaded.head is not None:
        draft = HeadSource(loaded.head, loaded.fingerprint + b"head")
    # a head that reads states between the first layers does not see what pictures add there
    taps = draft.head.taps if isinstance(draft, HeadSource) else None
    has_taps = bool(loaded.config.picture_layers) and taps is not None
    names_draft = settings.draft not in DRAFT_WORDS
    settings = replace(settings, draft="auto") if names_draft and draft is None else settings
    model, fingerprint = model or loaded.model, loaded.fingerprint
    if isinstance(loaded.group, RankGroup):
        model, fingerprint = loaded.group.lead(model), b""  # each rank has shares of pages, useless to others
        known = [one for one in (memory_bytes, loaded.group.free_bytes) if one is not None]
        memory_bytes = min(known, default=None)
    sees = loaded.tower is not None and not has_taps
    together = 0
    if loaded.tower is not None and sees:  # it is loaded with the first picture, but its memory is reserved now
        free_bytes = bound_free_bytes(loaded.ctx, memory_bytes)
        together = 0 if loaded.ctx.gpu is None else _choose_together(loaded.tower, loaded.ctx.device, free_bytes)
        tokens = max(settings.image_tokens, together)
        work_bytes = loaded.tower.count_work_bytes(tokens, on_gpu=together > 0)
        rows_bytes = ROWS_BYTES if loaded.ctx.uses_host_memory else 0
        tower_bytes = loaded.tower.weight_bytes + work_bytes + rows_bytes
        memory_bytes = None if free_bytes is None else max(0, free_bytes - tower_bytes)
    return Engine(
        model,
        loaded.ctx,
        replace(settings, store_folder=str(find_store_folder(settings)), kv_type=settings.kv_type or loaded.kv_type),
        draft=draft,
        encoder=_make_encoder(loaded, together) if sees else None,
        eos_ids=loaded.tokenizer.eos_ids,
        memory_bytes=memory_bytes,
        fingerprint=fingerprint,
    )


def _choose_together(tower: TowerFile, device: str, free_bytes: int | None) -> int:
    """Return the tokens of pictures that a GPU encodes at once: many if that is quick and memory suffices."""
    most, fewest = TOGETHER_TOKENS
    if device != "cuda" or free_bytes is None:
        return fewest
    return most if tower.count_work_bytes(most, on_gpu=True) <= TOGETHER_SHARE * free_bytes else fewest


def _make_encoder(loaded: LoadedModel, together: int) -> Encoder:
    config = loaded.config
    turns, is_whole = config.turns_pictures, config.sees_whole_pictures
    return Encoder(loaded.open_tower(), turns=turns, is_whole=is_whole, together=together)


def warm_up(
    engine: Engine, device: str, settings: Settings, max_sequences: int | None = None, progress: Progress | None = None
) -> None:
    """Let a GPU compile kernels for the first requests, if the settings want that; see `engine.warm_up`.

    Metal compiles in every process, and small GPUs take long for a prompt, so there it is for one answer by default.
    """
    if settings.warm_up == "off" or (settings.warm_up == "auto" and device not in ("cuda", "metal")):
        return
    start_s = time.perf_counter()
    is_brief = settings.warm_up == "auto" and device == "metal"
    steps = engine.warm_up.run(max_sequences, progress, is_brief=is_brief)
    if steps:
        logger.info("%d steps are ready after %.1f s", steps, time.perf_counter() - start_s)


def report_warm_up(done: int, total: int) -> None:
    """Log every eighth of a warm-up."""
    if done * 8 // total > (done - 1) * 8 // total:
        logger.info("kernels are compiled: %d of %d steps", done, total)


def find_device(settings: Settings) -> str:
    """Return the device that models run on: that of the settings, or the machine's own."""
    return choose_device(settings.device)


def find_store_folder(settings: Settings) -> Path:
    """Return the folder of cache pages on disk: that of the settings, or one in the user's cache folder."""
    if settings.store_folder is not None:
        return Path(settings.store_folder).expanduser()
    return platformdirs.user_cache_path("mlxr", appauthor=False) / "pages"


def measure_weights(record: ModelRecord, settings: Settings) -> int:
    """Return the bytes that a model's weights will take: those of its files, without experts that stay on disk, and
    those of its draft model.
    """
    size_bytes = record.size_bytes // settings.gpus + _measure_draft(record, settings)
    if settings.expert_bytes is None:
        return size_bytes
    try:
        expert_bytes = read_footprint(record.path).expert_bytes
    except MlxrError:  # loading it will tell why
        return size_bytes
    return size_bytes - max(0, expert_bytes - settings.expert_bytes)


def _measure_draft(record: ModelRecord, settings: Settings) -> int:
    """Return the bytes of the draft model's files."""
    try:
        path = find_draft_path(record.path, settings)
    except MlxrError:  # as above
        return 0
    if path is None or (settings.draft == "auto" and find_device(settings) not in HOST_DEVICES):
        return 0
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
