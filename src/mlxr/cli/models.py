"""The models and adapters of this machine: `mlxr list`, `import`, `create`, `cp`, `rm` and `adapters`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Force, Json, RegistrySettings, complete_models
from mlxr.cli.pull import offer
from mlxr.cli.terminal import (
    format_bytes,
    make_printable,
    print_fields,
    print_json,
    print_note,
    print_table,
    show_progress,
)
from mlxr.core.errors import InvalidRequest, MlxrError, NameTaken, NotFound
from mlxr.loading import find_model
from mlxr.registry import AdapterRecord, ModelRecord, Registry
from mlxr.registry.library import PLACES, Foreign
from mlxr.registry.modelfile import decode_modelfile, parse_modelfile
from mlxr.registry.record import name_for
from mlxr.service.catalogue import choose_default, open_registry
from mlxr.service.creation import create_model

_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def list_(settings: RegistrySettings, json: Json = False) -> None:
    """List the models here: those pulled or imported, and those that come with mlxr."""
    registry = open_registry(settings)
    records, adapters = registry.list(), registry.adapters.list()
    if json:
        print_json([describe_model(record) | {"adapters": name_adapters(record, adapters)} for record in records])
        return
    columns = ("NAME", "ID", " SIZE", " WEIGHTS", "TYPE", "MODIFIED")
    print_table(columns, [_model_row(record) for record in records])
    for record in records:
        if names := name_adapters(record, adapters):
            print_note(f"{record.short_name} has adapters: {', '.join(names)}")
        if record.problem is not None:
            print_note(make_printable(f"{record.short_name}: {record.problem}"))


def name_adapters(record: ModelRecord, adapters: Sequence[AdapterRecord]) -> list[str]:
    """Return the names of the adapters that were added for a model."""
    return [one.name for one in adapters if one.base.lower() == record.short_name.lower()]


def describe_model(record: ModelRecord) -> dict[str, object]:
    """Return a record as JSON fields."""
    return {
        "name": record.name,
        "digest": record.digest,
        "path": str(record.path),
        "tower": None if record.tower is None else str(record.tower),
        "is_owned": record.is_owned,
        "size_bytes": record.size_bytes,
        "format": record.format,
        "architecture": record.architecture,
        "parameters": record.parameters_count,
        "quantization": record.quantization,
        "context_tokens": record.context_tokens,
        "capabilities": sorted(record.capabilities),
        "from": record.from_name,
        "adapter": None if record.adapter is None else record.adapter.digest,
        "modified_at": record.modified_at.isoformat(),
        "last_used_at": None if record.last_used_at is None else record.last_used_at.isoformat(),
        "problem": record.problem,
    }


def _model_row(record: ModelRecord) -> tuple[str, ...]:
    return (
        record.short_name,
        record.digest[:12],
        format_bytes(record.size_bytes),
        record.parameter_size,
        make_printable(f"{record.architecture} {record.quantization}") + ", vision" * ("vision" in record.capabilities),
        format_age((datetime.now(UTC) - record.modified_at).total_seconds()),
    )


def format_age(age_s: float) -> str:
    """Return an age as text, in the largest unit that fits."""
    for unit_s, unit in _AGES:
        if age_s >= unit_s:
            count = int(age_s / unit_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


ImportFile = Annotated[
    Path | None, typer.Argument(metavar="[PATH]", help="A .gguf file or a Hugging Face folder. It stays where it is.")
]
ImportName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="What to call it; default: its file name.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="|".join(PLACES), help="Give names to all models that this program has here."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --from: only list them.")]


def import_(
    settings: RegistrySettings,
    path: ImportFile = None,
    name: ImportName = None,
    source: From = None,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Give a model on disk a name. Its files stay where they are and are not copied.

    A name that another model has needs --force; the same file may be imported again.
    """
    if (path is None) == (source is None):
        raise InvalidRequest("PATH", "give a file or folder, or --from with the program whose models to take")
    registry = open_registry(settings)
    if path is not None:
        place = find_model(path)
        with show_progress(f"reading {place.name}") as progress:
            record = registry.import_file(place, name, progress=progress, replaces=force)
        print_fields(
            [("imported", record.short_name), ("from", str(record.path)), ("size", format_bytes(record.size_bytes))]
        )
        return
    models = _find_elsewhere(source or "")
    if dry_run:
        print_table(
            ("NAME", " SIZE", "PATH"), [(one.name, format_bytes(one.size_bytes), str(one.path)) for one in models]
        )
        return
    refused = 0
    for one in models:
        try:
            with show_progress(f"reading {one.name}") as progress:
                record = registry.import_file(one.path, one.name, progress=progress, replaces=force, tower=one.tower)
            print_fields([("imported", f"{record.short_name}  {format_bytes(record.size_bytes)}")])
        except NameTaken:
            print_note(f"{one.name} is here already; --force replaces it")
        except MlxrError as error:
            refused += 1
            print_note(make_printable(f"{one.name} is left out: {error}"))
    if refused:
        raise typer.Exit(1)


def _find_elsewhere(source: str) -> list[Foreign]:
    if source not in PLACES:
        raise InvalidRequest("--from", f"{source!r} is not known; known are {', '.join(PLACES)}")
    models = PLACES[source]()
    if not models:
        raise NotFound(f"{source}: no models of it are on this disk")
    return [
        replace(one, name=one.name if {"/", ":"} & {*one.name} else name_for(Path(one.name)).short) for one in models
    ]


Name = Annotated[str, typer.Argument(metavar="NAME", help="What to call the new model.")]
File = Annotated[
    Path,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="The Modelfile: FROM, ADAPTER, PARAMETER, SYSTEM, ...; - reads it from a pipe.",
    ),
]

Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize", "-q", metavar="TYPE", help="Convert the weights to a type of `mlxr convert`, such as q4_K_M."
    ),
]


def create(
    name: Name,
    settings: RegistrySettings,
    file: File = Path("Modelfile"),
    quantize: Quantize = None,
    force: Force = False,
) -> None:
    """Make a model from another one with a Modelfile, which names that model after FROM and says what to change."""
    data, folder = _read(file)
    place = "stdin" if str(file) == "-" else str(file)
    try:
        modelfile = parse_modelfile(decode_modelfile(data))
    except InvalidRequest as error:
        raise error.rename(place) if error.field == "Modelfile" else error from None
    registry = open_registry(settings)
    try:
        source = _find_source(registry, modelfile.source, folder)
    except NotFound as error:
        try:
            offer(modelfile.source, settings, error)
        except NotFound as refusal:
            raise NotFound(f"{place}: line {modelfile.source_line}: FROM {refusal}") from None
        source = registry.find(modelfile.source)
    adapter = None if modelfile.adapter is None else find_adapter(registry, modelfile.adapter, folder)
    with show_progress(f"quantising {modelfile.source}", counts_bytes=True) as progress:
        record = create_model(
            registry,
            name,
            source,
            modelfile.changes,
            quantize=quantize,
            progress=progress,
            adapter=adapter,
            replaces=force,
            renderer=modelfile.hints.get("RENDERER"),
        )
    if modelfile.hints:
        idle = ", ".join(f"{name} {value}" for name, value in modelfile.hints.items())
        print_note(make_printable(f"without effect here, where the model's own template writes prompts: {idle}"))
    rows = [("created", record.short_name), ("from", modelfile.source), ("adapter", modelfile.adapter or "")]
    print_fields([(key, value) for key, value in [*rows, ("id", record.digest[:12])] if value])


def _find_source(registry: Registry, source: str, folder: Path) -> ModelRecord:
    """Return the model or path that FROM names; a path is relative to the Modelfile."""
    try:
        return registry.find(source)
    except NotFound:
        return registry.find(folder / os.path.expanduser(source))


def find_adapter(registry: Registry, source: str, folder: Path) -> AdapterRecord | Path:
    """Find the adapter that ADAPTER names: one of the registry, or a path relative to the Modelfile."""
    try:
        return registry.adapters.get(source)
    except NotFound:
        return (folder / os.path.expanduser(source)).absolute()


def _read(file: Path) -> tuple[bytes, Path]:
    """Read the Modelfile; also returns the folder that its paths start from: its own, or the current one for a pipe."""
    place = Path(os.path.expanduser(file))
    if str(file) == "-":
        return sys.stdin.buffer.read(), Path()
    if not place.exists() or place.is_dir():
        here = "in this folder" if str(file) == "Modelfile" else f"at {file}"
        raise NotFound(f"there is no Modelfile {here}; -f FILE names another one")
    return place.read_bytes(), place.parent if place.is_file() else Path()


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The model.", autocompletion=complete_models)]
Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Its other name.")]


def cp(
    source: Source, destination: Destination, settings: RegistrySettings, force: Force = False, json: Json = False
) -> None:
    """Give a model a second name. No file is copied. A name that another model has needs --force."""
    record = open_registry(settings).copy(source, destination, replaces=force)
    print_json({"copied": record.short_name}) if json else print_fields([("copied", record.short_name)])


Names = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="The models to remove.", autocompletion=complete_models)
]


def rm(names: Names, settings: RegistrySettings, json: Json = False) -> None:
    """Remove models. A pulled file is deleted with the last model that uses it; imported files stay."""
    registry = open_registry(settings)
    for name in names:
        record = registry.remove(name)
        rows = [("removed", record.short_name)]
        if not record.is_owned and record.path.exists():
            rows.append(("still there", str(record.path)))
        print_json(dict(rows)) if json else print_fields(rows)


class Action(StrEnum):
    """The verbs of `mlxr adapters`."""

    LIST = "list"
    ADD = "add"
    REMOVE = "remove"
    SHOW = "show"


What = Annotated[
    Action,
    typer.Argument(
        metavar="ACTION",
        help="list: all of them. add NAME PATH: give the adapter of a model a name. remove NAME: forget it, its files "
        "stay. show NAME: tell what it is.",
    ),
]
AdapterName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="What the adapter is called.")]
AdapterFile = Annotated[
    Path | None,
    typer.Argument(metavar="[PATH]", help="A folder as PEFT writes it, or a GGUF file. It stays where it is."),
]
AdapterBase = Annotated[
    str | None,
    typer.Option("--model", help="The model that it is for, which it is checked against; default: as for `mlxr run`."),
]


def adapters(
    settings: RegistrySettings,
    action: What = Action.LIST,
    name: AdapterName = None,
    path: AdapterFile = None,
    model: AdapterBase = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """List the adapters (LoRA) here, add or remove one."""
    registry = open_registry(settings)
    if action is Action.LIST:
        _list(registry, as_json=json)
        return
    if name is None or (path is None) == (action is Action.ADD):
        wanted = "NAME PATH" if action is Action.ADD else "NAME"
        raise InvalidRequest("adapters", f"{action} takes {wanted}")
    if path is not None:
        base = registry.find(model or choose_default(registry, settings).name)
        record = registry.adapters.add(name, path, base, replaces=force)
        print_fields([("added", record.name), ("model", record.base), ("from", str(record.path))])
    elif action is Action.REMOVE:
        record = registry.remove_adapter(name)
        print_fields([("removed", record.name), *([] if record.is_owned else [("still there", str(record.path))])])
    else:
        _show(registry.adapters.get(name), as_json=json)


def describe_adapter(record: AdapterRecord) -> dict[str, object]:
    """Return a record as JSON fields."""
    return {
        "name": record.name,
        "model": record.base,
        "digest": record.digest,
        "path": str(record.path),
        "is_owned": record.is_owned,
        "size_bytes": record.size_bytes,
        "format": record.format,
        "rank": record.rank,
        "weights": record.weights,
        "modified_at": record.modified_at.isoformat(),
        "problem": record.problem,
    }


def _list(registry: Registry, *, as_json: bool) -> None:
    records = registry.adapters.list()
    if as_json:
        print_json([describe_adapter(record) for record in records])
        return
    now = datetime.now(UTC)
    rows = [
        (
            record.name,
            make_printable(record.base),
            record.digest[:12],
            format_bytes(record.size_bytes),
            str(record.rank),
            format_age((now - record.modified_at).total_seconds()),
        )
        for record in records
    ]
    if not rows:
        print_note("no adapter has a name here; `mlxr adapters add NAME PATH` gives one")
        return
    print_table(("NAME", "MODEL", "ID", " SIZE", " RANK", "ADDED"), rows)
    for record in records:
        if record.problem is not None:
            print_note(make_printable(f"{record.name}: {record.problem}"))


def _show(record: AdapterRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(describe_adapter(record))
        return
    print_fields(
        [
            ("name", record.name),
            ("model", make_printable(record.base)),
            ("id", record.digest),
            ("path", make_printable(str(record.path))),
            ("size", format_bytes(record.size_bytes)),
            ("rank", f"{record.rank}, of {record.weights} weights"),
        ]
    )
