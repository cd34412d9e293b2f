"""The registry of the settings, which learns from the loader what model files hold."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import platformdirs

from mlxr import loading
from mlxr.core.errors import Busy, Unavailable
from mlxr.core.frozen import frozen
from mlxr.core.sampling import EVERYDAY, read_file_defaults
from mlxr.core.settings import Settings
from mlxr.core.work_threads import WorkThreads
from mlxr.loading import (
    ASSETS,
    NAMED_MODELS,
    find_model,
    find_tower,
    is_for_text,
    list_files,
    name_quantization,
    open_source,
    read_gguf_pooling,
    takes_pictures,
)
from mlxr.registry import ModelFacts, Registry
from mlxr.registry.catalogue import BUSY_TIMEOUT_S
from mlxr.registry.record import AdapterFacts
from mlxr.service.reasoning import EFFORT, SWITCHES, find_tags
from mlxr.service.tools import TOOLS_VARIABLE, find_format
from mlxr.templates.workers import template_workers

MAX_LICENSE_CHARACTERS = 1 << 16
BUILTIN_DEFAULT = "demo"


@frozen
class DefaultModel:
    """The model that answers if a request names none, and the reason, as part of a sentence.

    `is_set` is true if a setting names it; `is_own` is false for the model that comes with mlxr.
    """

    name: str
    reason: str
    is_set: bool = False
    is_own: bool = True


def open_registry(settings: Settings, wait_s: float = BUSY_TIMEOUT_S) -> Registry:
    """Open the registry in the folder of the settings, with the models that come with mlxr.

    Waits up to `wait_s` for another process that holds its catalogue.
    """
    builtin = {name: ASSETS / file_name for name, file_name in NAMED_MODELS.items()}
    folder = find_models_folder(settings)
    return Registry(folder, inspect=inspect_model, inspect_adapter=inspect_adapter, builtin=builtin, wait_s=wait_s)


def recommend(path: Path) -> Mapping[str, object]:
    """Return sampling parameters for answers that people read, under Ollama's names; the model's own override them.

    Models that come with mlxr know one subject, and their likeliest answer is the right one.
    """
    return {**EVERYDAY, "temperature": 0} if path.parent == ASSETS else EVERYDAY


def choose_default(registry: Registry, settings: Settings) -> DefaultModel:
    """Choose the default model: the setting `default_model`, else the model in the catalogue that was used last, or
    was added last if none was ever used, else the demo. Models that are made for vectors are left out: a lookup in a
    folder uses one before each answer.
    """
    if settings.default_model is not None:
        return DefaultModel(settings.default_model, "it is set", is_set=True)
    own = [
        record
        for record in registry.list()
        if record.files and record.problem is None and "completion" in record.capabilities
    ]
    used = [record for record in own if record.last_used_at is not None]
    if own:
        latest = max(used or own, key=lambda record: record.last_used_at or record.modified_at)
        return DefaultModel(latest.short_name, "it was used last" if used else "it was added last")
    return DefaultModel(BUILTIN_DEFAULT, "there is no model but those that come with mlxr", is_own=False)


def find_models_folder(settings: Settings) -> Path:
    """Return the folder of models: that of the settings, or one in the user's data folder."""
    if settings.models_folder is not None:
        return Path(settings.models_folder).expanduser()
    return platformdirs.user_data_path("mlxr", appauthor=False) / "models"


def inspect_model(path: Path, tower: Path | None = None, /) -> ModelFacts:
    """Read the facts about a model from its files; raises as `loading.load` does if it could not be loaded.

    `tower` is the file of its vision or audio encoder, if the name of that file does not tell.
    """
    source = open_source(find_model(path))
    with source.file:
        seen_by, _ = find_tower(path, source.file, source.config, recorded=tower)
        beside: tuple[Path, ...] = ()
        if seen_by is not None:
            seen_by.close()
            beside = () if seen_by.beside is None else (seen_by.path,)
        template = source.metadata.get("tokenizer.chat_template")
        license_text = source.metadata.get("general.license")
        template_text = template if isinstance(template, str) else ""
        return ModelFacts(
            format="safetensors" if path.is_dir() else "gguf",
            architecture=source.config.architecture,
            parameters=sum(math.prod(tensor.shape) for tensor in source.tensors.values()),
            quantization=name_quantization(source),
            context_tokens=source.config.context_length,
            embedding_length=source.config.hidden,
            template=template_text,
            capabilities=find_capabilities(
                template_text,
                writes=is_for_text(source.config, read_gguf_pooling(source.metadata)),
                sees=seen_by is not None,
                hears=seen_by is not None and seen_by.ear is not None,
            ),
            files=list_files(source) + beside,
            license=license_text[:MAX_LICENSE_CHARACTERS] if isinstance(license_text, str) else "",
            sampling=read_file_defaults(source.metadata),
            takes_tower=path.is_file() and takes_pictures(source.config),
        )


def inspect_adapter(path: Path, base: Path) -> AdapterFacts:
    """Read the facts of an adapter for the model at `base`. Raises as the loader does if it is none of that model's."""
    summary = loading.inspect_adapter(path, base)
    return AdapterFacts(summary.format, summary.rank, summary.weights, summary.files)


SHORT_LIST = 16  # entries; longer lists are told only if asked for


def read_metadata(
    path: Path, *, with_arrays: bool = False
) -> tuple[dict[str, object], list[tuple[str, str, tuple[int, ...]]]]:
    """Read a model's metadata, under GGUF's keys, and the name, type and shape of each of its tensors.

    Lists of more than `SHORT_LIST` entries, such as the vocabulary, are None unless they are asked for.
    """
    source = open_source(find_model(path))
    with source.file:
        metadata = {key: _to_json(value, with_arrays) for key, value in source.metadata.items()}
        tensors = [(tensor.name, tensor.type_name, tensor.shape) for tensor in source.tensors.values()]
    return metadata, tensors


def _to_json(value: object, with_arrays: bool) -> object:
    if isinstance(value, np.ndarray | list):
        return (
            [_to_json(item, True) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
            if with_arrays or len(value) <= SHORT_LIST
            else None
        )
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def find_capabilities(
    template_source: str, *, writes: bool = True, sees: bool = False, hears: bool = False
) -> frozenset[str]:
    """Return the capabilities of a model: of "completion", "embedding", "tools", "thinking", "vision" and "audio".

    A model that is not made to write makes vectors only. Every model that can chat can be told of tools; a model thinks
    if its template has tags around thoughts.
    """
    if not writes:
        return frozenset({"embedding"})
    found = {"completion", "embedding"}
    if template_source:
        found |= {"tools"} | ({"vision"} if sees else set()) | ({"audio"} if hears else set())
        if find_tags(template_source) is not None:
            found.add("thinking")
    return frozenset(found)


def describe_template(template_source: str) -> dict[str, str]:
    """Return what a chat template tells of its model: the format of tool calls, the tags around thoughts, and the
    variables that switch thinking. Empty without a template.
    """
    if not template_source:
        return {}
    variables = template_workers.find_variables(template_source)
    takes_tools = bool({"tools", TOOLS_VARIABLE} & variables)
    tool_format, tags = find_format(template_source, takes_tools=takes_tools), find_tags(template_source)
    switches = [name for name in SWITCHES if name in variables]
    if EFFORT in variables:
        levels = "" if tags is None or not tags.levels else f" ({', '.join(tags.levels)})"
        switches.append(f"{EFFORT}{levels}")
    return {
        "tool calls": type(tool_format).__name__.removesuffix("Format").lower(),
        "thoughts": "" if tags is None else f"{tags.open} ... {tags.close}",
        "switches": ", ".join(switches if tags is not None else ()),
    }


V = TypeVar("V")
FRESH_S = 1.0  # how long an answer is taken for granted
GRACE_S = 0.05  # how long a look may take before the last answer is used instead
MAX_NAMES = 1000  # clients make up names


class Remembered(Generic[V]):
    """Answers of `look(name)`, which runs on `threads`. Belongs to one event loop, but for `forget`."""

    def __init__(self, look: Callable[[str], V], threads: WorkThreads, clock: Callable[[], float]) -> None:
        self._look, self._threads, self._clock = look, threads, clock
        self._known: dict[str, tuple[float, V]] = {}
        self._looking: dict[str, tuple[float, asyncio.Task[V]]] = {}
        self._changes = 0  # of the data that `look` reads

    async def find(self, name: str) -> V:
        """Return what `look` returns. Raises what `look` raises, but not Unavailable or Busy if an answer is known."""
        known = self._known.get(name)
        if known is not None and self._clock() - known[0] <= FRESH_S:
            return known[1]
        since_s, task = self._begin(name)
        if known is not None:
            await asyncio.wait({task}, timeout=max(0.0, since_s + GRACE_S - asyncio.get_running_loop().time()))
            if not task.done() or isinstance(task.exception(), Unavailable | Busy):
                return known[1]
        return await asyncio.shield(task)

    def forget(self) -> None:
        """Ask again for every name; called, from any thread, after a change of the data that `look` reads."""
        self._changes += 1
        self._known.clear()
        self._looking.clear()

    def _begin(self, name: str) -> tuple[float, asyncio.Task[V]]:
        """Return the start time and the task of the running look for `name`; begins one if none is running."""
        found = self._looking.get(name)
        if found is None:
            task = asyncio.create_task(self._ask(name, self._changes))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody awaits it
            found = self._looking[name] = asyncio.get_running_loop().time(), task
        return found

    async def _ask(self, name: str, changes: int) -> V:
        try:
            value = await self._threads.run(self._look, name)
        except (Unavailable, Busy):
            known = self._known.get(name)
            if known is not None and changes == self._changes:
                self._known[name] = self._clock(), known[1]  # so that not every request asks in vain
            raise
        except Exception:
            if changes == self._changes:
                self._known.pop(name, None)
            raise
        else:
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            if changes == self._changes:
                self._known[name] = self._clock(), value
            return value
        finally:
            if changes == self._changes:
                self._looking.pop(name, None)
