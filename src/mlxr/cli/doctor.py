"""`mlxr doctor`: say of each part of the machine and the installation whether it is well, with the remedy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mlxr.cli.flags import Json, ServerSettings
from mlxr.cli.terminal import make_printable, print_json, print_note

MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
Offline = Annotated[bool, typer.Option("--offline", help="Do not ask the hub.")]


def doctor(settings: ServerSettings, offline: Offline = False, json: Json = False) -> None:
    """Look at processor, memory, GPU, disk, port, hub and models. Exit code 1 when something keeps mlxr from working.

    Measures how fast memory is, which takes a second.
    """
    from mlxr.service.doctor import examine

    checks = examine(settings, asks_hub=not offline)
    if json:
        print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{MARKS[check.verdict]}  {check.name.ljust(width)}  {make_printable(check.found)}")
            if check.remedy:
                print(f"{' ' * (len(MARKS['ok']) + width + 4)}{check.remedy}")
    problems = sum(check.verdict == "problem" for check in checks)
    if problems:
        if not json:
            print_note(f"{problems} {'problem keeps' if problems == 1 else 'problems keep'} mlxr from working fully")
        raise typer.Exit(1)
