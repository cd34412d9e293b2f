"""What the states of recurrent layers take, as commands show it."""

from __future__ import annotations

from dataclasses import asdict

from mlxr.cli.terminal import format_bytes, format_count
from mlxr.service.state_use import StateUse


def describe_states(use: StateUse | None) -> dict[str, int] | None:
    """The numbers as JSON fields, None for a model without recurrent layers."""
    return None if use is None else {**asdict(use), "cached_bytes": use.cached_bytes}


def list_states(use: StateUse | None) -> list[tuple[str, str]]:
    """The rows of a table that name the bytes of a slot, of a snapshot, and of a conversation."""
    if use is None:
        return []
    snapshots = f"{use.snapshots} {'snapshot' if use.snapshots == 1 else 'snapshots'}"
    return [
        ("state", f"{format_bytes(use.slot_bytes)} each: {use.live_slots} slots of one that runs, and every snapshot"),
        (
            "conversation",
            f"of {format_count(use.tokens)} tokens: {format_bytes(use.page_bytes)} of pages and room for {snapshots} "
            f"of {format_bytes(use.slot_bytes)}, {format_bytes(use.cached_bytes)} in all",
        ),
    ]
