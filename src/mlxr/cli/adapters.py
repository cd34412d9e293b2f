"""`mlxr adapters`: the low-rank adapters (LoRA) that have a name."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Force, Json, RegistrySettings
from mlxr.cli.list import format_age
from mlxr.cli.terminal import format_bytes, make_printable, print_fields, print_json, print_note, print_table
from mlxr.core.errors import InvalidRequest
from mlxr.registry import AdapterRecord, Registry
from mlxr.service.catalogue import choose_default, open_registry


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
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="What the adapter is called.")]
File = Annotated[
    Path | None,
    typer.Argument(metavar="[PATH]", help="A folder as PEFT writes it, or a GGUF file. It stays where it is."),
]
Base = Annotated[
    str | None,
    typer.Option("--model", help="The model that it is for, which it is checked against; default: as for `mlxr run`."),
]


def adapters(
    settings: RegistrySettings,
    action: What = Action.LIST,
    name: Name = None,
    path: File = None,
    model: Base = None,
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


def describe(record: AdapterRecord) -> dict[str, object]:
    """A record as JSON fields."""
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
        print_json([describe(record) for record in records])
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
    print_table(("NAME", "MODEL", "ID", " SIZE", " RANK", "ADDED"), rows)
    for record in records:
        if record.problem is not None:
            print_note(make_printable(f"{record.name}: {record.problem}"))


def _show(record: AdapterRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(describe(record))
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
