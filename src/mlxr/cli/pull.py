"""`mlxr pull`: fetch a model from the hub."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Annotated

import typer

from mlxr.cli.flags import Force, PullSettings
from mlxr.cli.terminal import Progress, format_bytes, print_fields, print_note, show_progress
from mlxr.core.errors import NotFound
from mlxr.core.settings import Settings
from mlxr.registry import ModelRecord, library
from mlxr.registry.pull import PullProgress
from mlxr.registry.pull import pull as pull_model
from mlxr.service.catalogue import find_models_folder, open_registry

LINE_S = 10.0  # between two lines about one file, where there is no bar
Reference = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that `mlxr search` lists, or hf.co/OWNER/REPO, with :FILE or :QUANT if it has several models.",
    ),
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="What to call it here; default: MODEL.")]


def pull(model: Reference, settings: PullSettings, name: Name = None, force: Force = False) -> None:
    """Fetch a model from Hugging Face. A pull that was interrupted continues where it stopped.

    A newer state takes the place of an older one; a --name that another model has needs --force.
    """
    record = fetch(model, settings, name, force=force)
    print_fields([("pulled", record.short_name), ("size", format_bytes(record.size_bytes)), ("id", record.digest[:12])])


def fetch(model: str, settings: Settings, name: str | None = None, *, force: bool = False) -> ModelRecord:
    """Pull a model and show how far it is."""
    with show_progress(f"pulling {model}", counts_bytes=True) as bar:
        report = _Report(bar)
        registry = open_registry(settings)
        return pull_model(registry, model, endpoint=settings.hub_url, name=name, report=report, replaces=force)


def offer(model: str, settings: Settings, missing: NotFound) -> None:
    """Fetch a well-known model that is not here, if whoever sits at the terminal wants it; else raise NotFound.

    `missing` is the error that says that it is not here.
    """
    folder = find_models_folder(settings)
    known = library.find(model, folder)
    if known is None:
        near = library.suggest(model, folder)
        hint = f"; `mlxr pull {near[0]}` would fetch a model of that name" if near else ""
        raise NotFound(f"{missing}; `mlxr list` shows what is here, `mlxr search` what can be fetched{hint}")
    what = f"{model} is not here; it is {known.reference}, about {format_bytes(known.size_bytes)}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotFound(f"{what}; `mlxr pull {model}` fetches it")
    if not typer.confirm(f"{what}. Fetch it now?", default=True, err=True):
        raise NotFound(f"{model} was not fetched")
    fetch(model, settings)


class _Report:
    """Shows how far a pull is: as a bar, or where stderr is no terminal in lines that say bytes and speed."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._file = ""
        self._started_s = self._shown_s = 0.0
        self._first_bytes = 0

    def __call__(self, progress: PullProgress) -> None:
        if progress.stage != "fetching":
            return
        if self._bar is not None:
            self._bar(progress.done_bytes, progress.total_bytes)
            return
        now_s = monotonic()
        if progress.file != self._file:
            self._file, self._started_s, self._first_bytes = progress.file, now_s, progress.done_bytes
        elif progress.done_bytes < progress.total_bytes and now_s - self._shown_s < LINE_S:
            return
        self._shown_s = now_s
        print_note(self._describe(progress, now_s - self._started_s))

    def _describe(self, progress: PullProgress, elapsed_s: float) -> str:
        done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
        fetched_bytes = progress.done_bytes - self._first_bytes
        speed = f", {format_bytes(fetched_bytes / elapsed_s)}/s" if fetched_bytes and elapsed_s else ""
        return f"{progress.file}: {done} of {total}{speed}"
