"""`mlxr search`: find a model that fits this machine, in the table of well-known ones and on the hub."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxr.cli.flags import Json, PullSettings
from mlxr.cli.terminal import format_bytes, format_count, make_printable, print_json, print_note, print_table
from mlxr.core.errors import HubError
from mlxr.core.work_threads import Stop
from mlxr.registry import library
from mlxr.registry.hub import Found, HubClient, choose_files, list_files, parse_reference, search_hub
from mlxr.service.catalogue import find_models_folder
from mlxr.service.machine_limits import find_read_rate, judge_fit

Words = Annotated[list[str] | None, typer.Argument(metavar="[WORDS]", help="Words of a name; default: all.")]
Offline = Annotated[bool, typer.Option("--offline", help="Ask only the table that is here, not the hub.")]
Refresh = Annotated[bool, typer.Option("--refresh", help="Ask the hub for the sizes of the table's models.")]


def search(
    settings: PullSettings, words: Words = None, offline: Offline = False, refresh: Refresh = False, json: Json = False
) -> None:
    """Find a model. Names in the first table are what `mlxr pull` and `mlxr run` take, with their size here.

    FITS compares the files with this machine's memory, SPEED is what reading
    the weights of a token takes, where `mlxr doctor` has measured the memory.
    """
    text = " ".join(words or [])
    folder = find_models_folder(settings)
    if refresh:
        _refresh(settings)
    rate = find_read_rate(settings)
    known = [(model, judge_fit(model.size_bytes)) for model in library.search(text, folder)]
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


def _speed(model: library.LibraryModel, rate: float | None) -> float | None:
    """Tokens a second of one answer, about: the weights that a token reads, at the memory's measured rate."""
    return None if rate is None else rate / (model.size_bytes * model.active)


def _row(model: library.LibraryModel, fit: str, rate: float | None) -> tuple[str, ...]:
    speed = _speed(model, rate)
    return (model.name, format_bytes(model.size_bytes), fit, "" if speed is None else f"{speed:.0f} tok/s", model.about)


def _describe(model: library.LibraryModel, fit: str, rate: float | None) -> dict[str, object]:
    speed = _speed(model, rate)
    return {
        "name": model.name,
        "reference": model.reference,
        "size_bytes": model.size_bytes,
        "fits": fit,
        "tokens_per_s": None if speed is None else round(speed, 1),
        "about": model.about,
    }
