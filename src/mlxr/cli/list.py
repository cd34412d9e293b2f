"""`mlxr list`: the models of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from mlxr.cli.flags import Json, RegistrySettings
from mlxr.cli.terminal import format_bytes, make_printable, print_json, print_note, print_table
from mlxr.registry import AdapterRecord, ModelRecord
from mlxr.service.catalogue import open_registry

_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def list_(settings: RegistrySettings, json: Json = False) -> None:
    """List the models here: those pulled or imported, and those that come with mlxr."""
    registry = open_registry(settings)
    records, adapters = registry.list(), registry.adapters.list()
    if json:
        print_json([describe(record) | {"adapters": name_adapters(record, adapters)} for record in records])
        return
    columns = ("NAME", "ID", " SIZE", " WEIGHTS", "TYPE", "MODIFIED")
    print_table(columns, [_row(record) for record in records])
    for record in records:
        if names := name_adapters(record, adapters):
            print_note(f"{record.short_name} has adapters: {', '.join(names)}")
        if record.problem is not None:
            print_note(make_printable(f"{record.short_name}: {record.problem}"))


def name_adapters(record: ModelRecord, adapters: Sequence[AdapterRecord]) -> list[str]:
    """The adapters that were added for a model."""
    return [one.name for one in adapters if one.base.lower() == record.short_name.lower()]


def describe(record: ModelRecord) -> dict[str, object]:
    """A record as JSON fields."""
    return {
        "name": record.name,
        "digest": record.digest,
        "path": str(record.path),
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


def _row(record: ModelRecord) -> tuple[str, ...]:
    return (
        record.short_name,
        record.digest[:12],
        format_bytes(record.size_bytes),
        record.parameter_size,
        make_printable(f"{record.architecture} {record.quantization}"),
        format_age((datetime.now(UTC) - record.modified_at).total_seconds()),
    )


def format_age(age_s: float) -> str:
    """How long ago, in the largest unit that fits."""
    for unit_s, unit in _AGES:
        if age_s >= unit_s:
            count = int(age_s / unit_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
