"""`mlxr top`: the activity of a server, from its own figures: a view that renews itself, a snapshot, or JSON.

Speeds are differences of counters between two looks. Nothing is measured for it, and the server does no more work than
for its web page.
"""

from __future__ import annotations

import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from mlxr.cli.flags import Json
from mlxr.cli.remote import Port, ServerUrl, address_of, ask_server, choose_url
from mlxr.cli.terminal import (
    change_keys,
    format_bytes,
    format_count,
    format_table,
    make_printable,
    print_json,
    write_piece,
)
from mlxr.core.errors import MlxrError
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings, resolve

Row = Mapping[str, Any]
OWN_PATHS = "/v1/admin/"  # requests of watchers, which are not listed
BAR_CELLS = 30
OLD_S = 1.5  # the view shows the age of older figures
SAME_S = 0.05  # figures whose times differ by less are the same
FRESH_SCREEN, OLD_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"

Interval = Annotated[
    float, typer.Option("--interval", "-d", metavar="SECONDS", help="Between two looks.", min=0.1, max=3600)
]


@frozen
class Look:
    """A server's figures at one time: its `info`, the rows of its loaded models, of their caches, and of requests."""

    time_s: float
    info: Row
    models: Sequence[Row]
    caches: Mapping[str, Row]  # by model; names that share a cache are there once
    requests: Sequence[Row]


def top(url: ServerUrl = None, port: Port = None, interval: Interval = 1.0, json: Json = False) -> None:
    """Show live what a server does: its models, requests, tokens, pages and memory.

    `q` or Ctrl-C ends. Through a pipe, and with --json, it looks twice, an --interval
    apart, and tells once.
    """
    settings = resolve()
    url = choose_url(settings, url, port)
    address = url or settings.unix_socket or address_of(settings)
    before = look(settings, url)
    if json or not sys.stdout.isatty():
        time.sleep(interval)
        now = look(settings, url)
        if json:
            print_json(describe(now, before))
        else:
            print("\n".join(render(now, before, address)))
        return
    with _screen():
        _follow(before, address, interval, lambda: look(settings, url))


def look(settings: Settings, url: str | None) -> Look:
    """Ask a server for its figures; raises MlxrError."""

    def ask(name: str) -> dict[str, Any]:
        return ask_server(settings, url, f"{OWN_PATHS}{name}")

    caches = {row["model"]: row for row in ask("cache")["caches"]}
    time_s = time.monotonic()
    requests = [row for row in ask("requests")["requests"] if not row["path"].startswith(OWN_PATHS)]
    return Look(time_s, ask("info"), ask("models")["models"], caches, requests)


def describe(now: Look, before: Look) -> dict[str, object]:
    """Return all figures as JSON fields; speeds are tokens per second since the look `before`."""
    models = []
    for row in now.models:
        engine = _engine(now, row)
        models.append(
            {
                "name": row["name"],
                "age_s": now.caches.get(row["name"], {}).get("age_s"),
                "device": now.caches.get(row["name"], {}).get("device"),
                "weights_bytes": row["weights_bytes"],
                "cache_in_use_bytes": row["cache_in_use_bytes"],
                "cache_max_bytes": row["cache_max_bytes"],
                "shared_with": row["shared_with"],
                "expires_at": row["expires_at"],
                "pages": engine.get("pages"),
                "used_pages": engine.get("used_pages"),
                "cached_pages": engine.get("cached_pages"),
                "running": engine.get("running_sequences"),
                "waiting": engine.get("waiting_sequences"),
                "tokens_per_s": _speed(now, before, row, "decode_tokens"),
                "prompt_tokens_per_s": _speed(now, before, row, "prefill_tokens"),
            }
        )
    memory = sum(row["size_bytes"] for row in _once(now.models))
    return {
        "version": now.info["version"],
        "device": now.info["device"],
        "memory_in_use_bytes": memory,
        "models_memory_bytes": now.info["models_memory_bytes"],
        "tokens_per_s": sum(_speed(now, before, row, "decode_tokens") or 0.0 for row in now.models),
        "prompt_tokens_per_s": sum(_speed(now, before, row, "prefill_tokens") or 0.0 for row in now.models),
        "models": models,
        "requests": [dict(row) for row in now.requests],
    }


def render(now: Look, before: Look, address: str, width: int | None = None) -> list[str]:
    """Return the lines of the view, at most `width` characters wide if words allow."""
    told = describe(now, before)
    memory, budget = sum(row["size_bytes"] for row in _once(now.models)), int(now.info["models_memory_bytes"])
    filled = min(BAR_CELLS, round(BAR_CELLS * memory / max(budget, 1)))
    lines = [
        f"mlxr {now.info['version']} at {address}, {now.info['device']}",
        f"memory  {format_bytes(memory)} of {format_bytes(budget)}  [{'|' * filled}{' ' * (BAR_CELLS - filled)}]",
        f"tokens  {told['tokens_per_s']:.1f}/s of answers, {told['prompt_tokens_per_s']:.1f}/s of prompts",
        "",
    ]
    columns = ("MODEL", " WEIGHTS", " CACHE", " OF", " PAGES", " RUN", " WAIT", " TOK/S", " PROMPT/S")
    lines += format_table(columns, [_model_row(row, now, before) for row in now.models], width)
    lines += [] if now.models else ["no model is loaded"]
    lines += [_tell_age(name, row["age_s"]) for name, row in sorted(now.caches.items()) if row.get("age_s", 0) >= OLD_S]
    headings = ("REQUEST", "MODEL", "CLIENT", " AGE", " PROMPT", " TOKENS", " TOK/S")
    lines += ["", *format_table(headings, [_request_row(row) for row in now.requests], width)]
    return lines if now.requests else [*lines[:-1], "no request is in flight"]


def _tell_age(model: str, age_s: float) -> str:
    name = make_printable(model.removesuffix(":latest"))
    return f"the engine of {name} computes a long step; its figures are {age_s:.0f} s old"


def _model_row(row: Row, now: Look, before: Look) -> tuple[str, ...]:
    engine = _engine(now, row)
    speeds = [_speed(now, before, row, name) for name in ("decode_tokens", "prefill_tokens")]
    pages = f"{format_count(engine['used_pages'])}/{format_count(engine['pages'])}" if engine else "shared"
    return (
        make_printable(row["name"].removesuffix(":latest")),
        format_bytes(row["weights_bytes"]),
        format_bytes(row["cache_in_use_bytes"]),
        format_bytes(row["cache_max_bytes"]),
        pages,
        str(engine.get("running_sequences", "")),
        str(engine.get("waiting_sequences", "")),
        *("" if speed is None else f"{speed:.1f}" for speed in speeds),
    )


def _request_row(row: Row) -> tuple[str, ...]:
    speed = row["generated_tokens"] / row["seconds"] if row["seconds"] else 0.0
    is_reading = 0 < row.get("read_tokens", 0) < row["prompt_tokens"] and not row["generated_tokens"]
    read = f"{format_count(row['read_tokens'])}/" if is_reading else ""
    return (
        make_printable(row["path"][:40]),
        make_printable(str(row["model"] or "")[:40].removesuffix(":latest")),
        make_printable(str(row["client"])[:40]),
        f"{row['seconds']:.0f} s",
        read + format_count(row["prompt_tokens"]),
        format_count(row["generated_tokens"]),
        f"{speed:.1f}",
    )


def _engine(now: Look, row: Row) -> Row:
    """Return the counters of a model's engine; empty for a name that shares another one's."""
    engine: Row = now.caches.get(row["name"], {}).get("engine", {})
    return engine


def _once(models: Sequence[Row]) -> list[Row]:
    """Return the models whose memory counts: of names that share weights and cache, the first."""
    return [row for row in models if all(row["name"] < other for other in row["shared_with"])]


def _speed(now: Look, before: Look, row: Row, name: str) -> float | None:
    """Return a counter's tokens per second; None if the model was not there before, was loaded anew, or has no new
    figures.
    """
    counts = [_engine(look, row).get(name) for look in (now, before)]
    count, earlier = (-1 if one is None else int(one) for one in counts)
    if min(count, earlier) < 0 or count < earlier:
        return None
    times = [look.time_s - look.caches[row["name"]].get("age_s", 0) for look in (now, before)]
    seconds = times[0] - times[1]
    return round((count - earlier) / seconds, 1) if seconds >= SAME_S else None


def _follow(before: Look, address: str, interval_s: float, take: Callable[[], Look]) -> None:
    """Renew the view until `q` or Ctrl-C. If the server does not answer, show the error and ask again."""
    lines = [f"mlxr at {address}"]
    while not _is_ended(interval_s):
        size = shutil.get_terminal_size()
        try:
            now = take()
            lines = render(now, before, address, size.columns)
            before = before if any(row.get("age_s", 0) >= OLD_S for row in now.caches.values()) else now
            shown = [*lines, "", "q ends"]
        except MlxrError as error:
            shown = [*lines, "", make_printable(str(error))]
        fitting = [line[: size.columns] for line in shown[: size.lines - 1]]
        write_piece("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in fitting) + "\x1b[J")


def _is_ended(seconds: float) -> bool:
    """Wait; returns True if `q` was typed meanwhile."""
    try:
        if sys.stdin.isatty() and select.select([sys.stdin], [], [], seconds)[0]:
            return sys.stdin.read(1) in ("q", "Q", "")
    except (KeyboardInterrupt, OSError, ValueError):
        return True
    if not sys.stdin.isatty():
        time.sleep(seconds)
    return False


@contextmanager
def _screen() -> Iterator[None]:
    """Switch to a separate screen and to reading single keys; restores both at the end."""
    import tty

    with change_keys(tty.setcbreak):
        write_piece(FRESH_SCREEN)
        try:
            yield
        finally:
            write_piece(OLD_SCREEN)
