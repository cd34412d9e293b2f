"""What commands print: JSON, tables, sizes, progress. Results go to stdout, everything about them to stderr."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

Progress = Callable[[int, int], None]
NARROWEST = 12  # characters of a column that is wrapped
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: object) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_fields(rows: Iterable[tuple[str, str]], title: str | None = None) -> None:
    """Print names and values in two columns."""
    print_table(("", ""), rows, title)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print rows in columns, with headings where there are any; a heading that begins with a space aligns right.

    On a terminal that is too narrow, the widest cells are wrapped between words.
    """
    if title is not None:
        print(f"{title}:")
    for line in format_table(columns, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        print(line)


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]], room: int | None = None) -> list[str]:
    """The lines of a table, at most `room` characters wide where its words allow."""
    lines = [[heading.strip() for heading in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    if room is not None:
        widths = _narrow(widths, columns, room)
    made = []
    for line in lines if any(columns) else lines[1:]:
        wrapped = [
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) if len(cell) > width else [cell]
            for cell, width in zip(line, widths, strict=True)
        ]
        for parts in zip_longest(*wrapped, fillvalue=""):
            cells = [
                cell.rjust(width) if heading.startswith(" ") else cell.ljust(width)
                for cell, width, heading in zip(parts, widths, columns, strict=True)
            ]
            made.append("  ".join(cells).rstrip())
    return made


def _narrow(widths: list[int], columns: Sequence[str], room: int) -> list[int]:
    """Widths that fit into `room` characters, the widest columns of text cut first, to no less than NARROWEST."""
    texts = [index for index, heading in enumerate(columns) if not heading.startswith(" ")]
    while sum(widths) + 2 * (len(widths) - 1) > room:
        widest = max(texts, key=lambda index: widths[index])
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return widths


def print_note(text: str) -> None:
    """Print a remark on stderr."""
    print(text, file=sys.stderr, flush=True)


def write_piece(text: str) -> None:
    """Write a piece of an answer to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_thought(text: str) -> None:
    """Write a piece of a model's reasoning, dimmed, where a person reads along; nothing goes into files and pipes."""
    if sys.stdout.isatty():
        write_piece(f"\x1b[2m{text}\x1b[22m")


@contextmanager
def show_progress(title: str, *, counts_bytes: bool = False) -> Iterator[Progress | None]:
    """A progress bar on stderr that goes away when done; None where stderr is no terminal.

    The function it gives takes (done, total), in bytes or pieces. With `counts_bytes` the bar also shows how many bytes
    have come, of how many, and how fast they come.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    sizes = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if counts_bytes else ()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *sizes, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def format_bytes(count: float) -> str:
    """A size in the largest unit that leaves at least 1 before the point."""
    for unit in _BYTE_UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_BYTE_UNITS[-1]}"


def format_count(count: int) -> str:
    """A number with thousands separated."""
    return f"{count:,}"


def make_printable(text: str) -> str:
    """`text` on one line, with control characters spelt out so that they cannot steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
