"""`mlxr pull`: fetch a model from the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from mlxr.cli.flags import PullSettings
from mlxr.cli.terminal import Progress, format_bytes, print_fields, print_note, show_progress
from mlxr.registry.pull import PullProgress
from mlxr.registry.pull import pull as pull_model
from mlxr.service.catalogue import open_registry

Reference = Annotated[
    str, typer.Argument(metavar="MODEL", help="hf.co/OWNER/REPO, with :FILE or :QUANT where it has several models.")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="What to call it here; default: MODEL.")]


def pull(model: Reference, settings: PullSettings, name: Name = None) -> None:
    """Fetch a model from Hugging Face. Interrupted, it goes on where it stopped when called again."""
    registry = open_registry(settings)
    with show_progress(f"pulling {model}") as bar:
        record = pull_model(registry, model, endpoint=settings.hub_url, name=name, report=_show(bar))
    print_fields([("pulled", record.short_name), ("size", format_bytes(record.size_bytes)), ("id", record.digest[:12])])


def _show(bar: Progress | None) -> Callable[[PullProgress], None]:
    """Progress as a bar, and each file as a line where stderr is no terminal."""
    last_file = ""

    def show(progress: PullProgress) -> None:
        nonlocal last_file
        if progress.stage != "fetching":
            return
        if bar is not None:
            bar(progress.done_bytes, progress.total_bytes)
        elif progress.file != last_file:
            print_note(f"{progress.file}: {format_bytes(progress.total_bytes)}")
        last_file = progress.file

    return show
