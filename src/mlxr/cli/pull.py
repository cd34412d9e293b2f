"""`mlxr search` and `mlxr pull`: find a model that fits this machine, well known or on the hub, and fetch it."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from mlxr.cli.flags import Force, Json, PullSettings
from mlxr.cli.terminal import (
    Progress,
    format_bytes,
    format_count,
    make_printable,
    print_fields,
    print_json,
    print_note,
    print_table,
    show_progress,
)
from mlxr.core.errors import HubError, NotFound
from mlxr.core.settings import Settings
from mlxr.core.work_threads import Stop
from mlxr.loading import find_model, find_near
from mlxr.registry import ModelRecord, library
from mlxr.registry.hub import Found, HubClient, choose_files, list_files, parse_reference, search_hub
from mlxr.registry.pull import PullProgress
from mlxr.registry.pull import pull as pull_model
from mlxr.service.catalogue import find_models_folder, open_registry
from mlxr.service.machine_limits import find_read_rate, find_room_bytes, judge_fits, judge_speed

LINE_S = 10.0  # between two lines about one file, if there is no bar
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
    """Pull a model and show the progress."""
    with show_progress(f"pulling {model}", counts_bytes=True) as bar:
        report = _Report(bar)
        registry = open_registry(settings)
        return pull_model(
            registry,
            model,
            endpoint=settings.hub_url,
            name=name,
            report=report,
            replaces=force,
            room_bytes=find_room_bytes(),
        )


def offer(model: str, settings: Settings, missing: NotFound) -> None:
    """Fetch a well-known model that is not here, if the user at the terminal agrees; else raise NotFound.

    `missing` is the error that says that it is not here.
    """
    folder = find_models_folder(settings)
    known = library.find(model, folder)
    if known is None:
        if len(Path(model).parts) != 1 or model.endswith(".gguf"):
            find_model(model)  # its error names similar models
            raise missing
        names = {record.short_name.lower(): record.short_name for record in open_registry(settings).list()}
        near = [*dict.fromkeys([*map(names.get, get_close_matches(model.lower(), names)), *find_near(Path(model))])]
        hints = [f"did you mean {' or '.join(map(str, near))}?"] if near else []
        hints += [f"`mlxr pull {name}` fetches a model of that name" for name in library.suggest(model, folder)[:1]]
        shown = make_printable(model[:200])
        hint = "".join(f"; {text}" for text in hints)
        raise NotFound(f"{shown} is not here{hint}; `mlxr list` shows what is, `mlxr search` what can be fetched")
    what = f"{model} is not here; it is {known.reference}, about {format_bytes(known.size_bytes)}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotFound(f"{what}; `mlxr pull {model}` fetches it")
    if not typer.confirm(f"{what}. Fetch it now?", default=True, err=True):
        raise NotFound(f"{model} was not fetched")
    fetch(model, settings)


class _Report:
    """Shows the progress of a pull: as a bar, or, if stderr is no terminal, in lines with bytes and speed."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._file = ""
        self._started_s = self._shown_s = 0.0
        self._first_bytes = 0

    def __call__(self, progress: PullProgress) -> None:
        if progress.stage == "choosing":
            print_note(make_printable(progress.why))
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


Words = Annotated[list[str] | None, typer.Argument(metavar="[WORDS]", help="Words of a name; default: all.")]
Offline = Annotated[bool, typer.Option("--offline", help="Ask only the table that is here, not the hub.")]
ORDER_NOTE = (
    "a family's first size is what its name alone means, the others follow by size; FITS: tight fits but leaves little "
    "for a conversation, slow fits for less than a token a second"
)
Refresh = Annotated[bool, typer.Option("--refresh", help="Ask the hub for the sizes of the table's models.")]


def search(
    settings: PullSettings, words: Words = None, offline: Offline = False, refresh: Refresh = False, json: Json = False
) -> None:
    """Find a model, and whether it fits this machine.

    Names in the first table are what `mlxr pull` and `mlxr run` take. FITS
    compares the files with this machine's memory (tight: they fit, and leave
    little for a conversation; slow: they fit, for less than a token a second),
    SPEED is what reading the weights of a token takes, where `mlxr doctor` has
    measured the memory.
    """
    text = " ".join(words or [])
    folder = find_models_folder(settings)
    if refresh:
        _refresh(settings)
    rate = find_read_rate(settings)
    models = library.search(text, folder)
    fits = judge_fits([model.size_bytes for model in models])
    known = [(model, judge_speed(fit, model.speed(rate))) for model, fit in zip(models, fits, strict=True)]
    found: list[Found] = []
    if text and not offline:
        try:
            with HubClient(Stop()) as client:
                found = search_hub(text, settings.hub_url, client)
        except HubError as error:
            print_note(f"only the table of mlxr was searched: {error}")
    if json:
        rows = [_describe(model, fit, rate) for model, fit in known]
        print_json({"known": rows, "hub": [{"name": one.reference, "downloads": one.downloads} for one in found]})
        return
    if known:
        columns = ("NAME", " SIZE", "FITS", " SPEED", "ABOUT")
        print_table(columns, [_row(model, fit, rate) for model, fit in known])
        print_note(ORDER_NOTE)
        if rate is None:
            print_note("`mlxr doctor` measures this machine's memory, from which SPEED follows")
    if found:
        rows_found = [(make_printable(one.reference), format_count(one.downloads)) for one in found]
        print_table(("ON THE HUB", " DOWNLOADS"), rows_found)
    if not known and not found:
        print_note(f"nothing is called {make_printable(text)!r}")
        raise typer.Exit(1)


def _refresh(settings: PullSettings) -> None:
    """Ask the hub for all sizes; a model that the hub does not have keeps the size of the table."""
    with HubClient(Stop()) as client:

        def ask_size(model: library.LibraryModel) -> int:
            reference = parse_reference(model.reference)
            return sum(
                file.size_bytes for file in choose_files(reference, list_files(reference, settings.hub_url, client))
            )

        changed, failed = library.refresh(find_models_folder(settings), ask_size)
    print_note(f"{changed} sizes changed" + (f"; the hub has no {', '.join(failed)}" if failed else ""))


def _row(model: library.LibraryModel, fit: str, rate: float | None) -> tuple[str, ...]:
    speed = model.speed(rate)
    shown = "" if speed is None else f"{speed:.{int(speed < 1)}f} tok/s"
    return model.name, format_bytes(model.size_bytes), fit, shown, model.about


def _describe(model: library.LibraryModel, fit: str, rate: float | None) -> dict[str, object]:
    speed = model.speed(rate)
    return {
        "name": model.name,
        "reference": model.reference,
        "size_bytes": model.size_bytes,
        "fits": fit,
        "tokens_per_s": None if speed is None else round(speed, 1),
        "about": model.about,
    }
