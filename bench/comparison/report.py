"""Results as a Markdown table, as the sections of lab/cpu-figures.md, and as plots."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.cases import BUSY, BY_NAME, CURVE_TOKENS, STEADY, TABLE, TARGETS
from mlxr.core.errors import MlxrError
from plot import Bar, Line, Panel, draw_bars, draw_panels

Results = Mapping[str, Any]
Row = Mapping[str, Any]
DOCUMENT = Path("lab") / "cpu-figures.md"
IMAGES = Path("docs") / "img"
BEGIN, END = "<!-- figures of {name}: begin -->", "<!-- figures of {name}: end -->"
GIB = 2**30
TWO_STATES = 1.5  # memory had two states if it read so many times faster in some rounds than in others


def format_table(results: Results) -> str:
    """The machine, one line per case, loading and memory, and cost over context."""
    rows = rows_of(results, TABLE)
    parts = [describe(results), "", *format_rows(results["shape"], rows)]
    if states := format_states(rows):
        parts += ["", *states]
    if curve := format_curve(results):
        parts += ["", *curve]
    return "\n".join([*parts, "", *format_models(results)])


def rows_of(results: Results, names: Sequence[str]) -> list[Row]:
    """The rows of the named cases in that order, types in the order of measurement."""
    types = list(dict.fromkeys(row["type"] for row in results["rows"]))
    by_key = {(row["type"], row["case"]): row for row in results["rows"]}
    return [by_key[key] for kind in types for name in names if (key := (kind, name)) in by_key]


def describe(results: Results) -> str:
    """The machine, the date and the versions."""
    machine, versions = results["machine"], results["versions"]
    commits = ", ".join(sorted({row["commit"] or f"module {row['native']}" for row in results["rows"]}))
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"Shape of {results['shape']}, random weights, {results['threads']} threads of {machine['cores']} cores of "
        f"{machine['processor']}, {machine['memory_bytes'] / GIB:.0f} GiB; {said} ({commits}); "
        f"{results['made'][:10]}. Medians of {format_rounds(results['rows'])} rounds in turns; in brackets the lowest "
        "and the highest ratio of a round."
    )


def format_rounds(rows: Sequence[Row]) -> str:
    """The number of rounds of the cases."""
    rounds = sorted(len(row["ours"]) for row in rows)
    return str(rounds[0]) if rounds[0] == rounds[-1] else f"{rounds[0]} to {rounds[-1]}"


def format_states(rows: Sequence[Row]) -> list[str]:
    """Decoding of one sequence while memory was slow and while it was fast; empty if it was only one of them."""
    lines = []
    for row in rows:
        low, high = row["read_range"]
        if row["case"] != "decode-128" or high <= TWO_STATES * low:
            continue
        middle = (low * high) ** 0.5
        for name, chosen in (
            ("slow", [i for i, read in enumerate(row["read_bytes_per_s"]) if read < middle]),
            ("fast", [i for i, read in enumerate(row["read_bytes_per_s"]) if read >= middle]),
        ):
            ours, reads = [row["ours"][i] for i in chosen], [row["read_bytes_per_s"][i] for i in chosen]
            share = statistics.median(
                row["ours"][i] * row["bytes_per_token"] / row["read_bytes_per_s"][i] for i in chosen
            )
            ratio = [row["ours"][i] / row["theirs"][i] for i in chosen] if row["theirs"] else []
            cells = [
                row["type"],
                name,
                str(len(chosen)),
                f"{statistics.median(ours):.1f}",
                f"{statistics.median(ratio):.2f} ×" if ratio else "",
                f"{share:.0%} of {statistics.median(reads) / 1e9:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    head = "| decode at 128 tokens, by rounds | memory | rounds | mlxr, tokens/s | ratio | of the probe |"
    return [head, "|---|---|---:|---:|---:|---:|", *lines]


def format_rows(shape: str, rows: Sequence[Row]) -> list[str]:
    """The table; `of the probe` counts GB/s of weights, keys and values in decoding, GMAC/s of weights in a prompt."""
    lines = [
        "| work | type | mlxr, tokens/s | llama.cpp | ratio | wanted | mlxr uses | of the probe | llama.cpp |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        unit = "GB/s" if row["kind"] == "decode" else "GMAC/s"
        rate = row["share"] * row["probe_per_s"] / 1e9
        theirs = row["theirs_tokens_per_s"]
        doubt = "".join(f" ({reason})" for reason in list_doubts(row))
        cells = [
            BY_NAME[row["case"]].title + doubt,
            row["type"],
            f"{row['ours_tokens_per_s']:.1f}",
            "" if theirs is None else f"{theirs:.1f}",
            "" if theirs is None else "{:.2f} × ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_range"]),
            format_target(shape, row),
            f"{rate:.1f} {unit}",
            f"{row['share']:.0%} of {row['probe_per_s'] / 1e9:.0f}",
            "" if theirs is None else f"{row['theirs_share']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def list_doubts(row: Row) -> list[str]:
    """The reasons to doubt a row: other processes used the machine, or its memory's rate differed between rounds."""
    low, high = row["read_range"]
    doubts = ["busy machine"] if row["bystanders"] > BUSY else []
    return doubts + ([f"memory read {low / 1e9:.0f} to {high / 1e9:.0f} GB/s"] if high > STEADY * low else [])


def format_target(shape: str, row: Row) -> str:
    """The target, empty if there is none."""
    target = TARGETS.get((shape, row["type"], row["case"]))
    if target is None:
        return ""
    return f"≥ {target.ratio:g} ×" + ("" if target.share is None else f", ≥ {target.share:.0%}")


def find_misses(results: Results) -> list[str]:
    """The targets that the figures miss; a ratio that was not measured misses none."""
    misses = []
    for row in results["rows"]:
        target = TARGETS.get((results["shape"], row["type"], row["case"]))
        if target is None:
            continue
        name = f"{row['type']}/{row['case']}"
        if row["ratio"] is not None and row["ratio"] < target.ratio:
            misses.append(f"{name}: {row['ratio']:.2f} × llama.cpp, wanted {target.ratio:g} ×")
        if target.share is not None and row["share"] < target.share:
            misses.append(f"{name}: {row['share']:.1%} of the probe, wanted {target.share:.0%}")
    return misses


def format_models(results: Results) -> list[str]:
    """Loading times and peak memory of each file."""
    lines = [
        "| file | size | mlxr loads in, then again in | llama.cpp | mlxr peak memory | llama.cpp |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, model in results["models"].items():
        cells = [name, f"{model['file_bytes'] / GIB:.2f} GiB"]
        sides = [model["ours"], model["theirs"]]
        cells += ["" if side is None else f"{side['first_load_s']:.1f}, {side['load_s']:.1f} s" for side in sides]
        peaks = [None if side is None else side["peak_memory_bytes"] for side in sides]
        cells += ["" if peak is None else f"{peak / GIB:.2f} GiB" for peak in peaks]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def format_curve(results: Results) -> list[str]:
    """The cost over context as a table, empty if it was not measured."""
    by_case = {row["case"]: row for row in results["rows"]}
    lines = [
        "| tokens of context | decode, ms/token | llama.cpp | prefill, tokens/s | llama.cpp |",
        "|---:|---:|---:|---:|---:|",
    ]
    for tokens in CURVE_TOKENS:
        decode, prefill = (by_case.get(f"context-{tokens}-{kind}") for kind in ("decode", "prefill"))
        if decode is None or prefill is None:
            continue
        cells = [f"{tokens:,}"]
        cells += ["" if (rate := decode[f"{side}_tokens_per_s"]) is None else f"{1000 / rate:.1f}" for side in SIDES]
        cells += ["" if (rate := prefill[f"{side}_tokens_per_s"]) is None else f"{rate:.0f}" for side in SIDES]
        lines.append("| " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


SIDES: Mapping[str, str] = {"ours": "mlxr", "theirs": "llama.cpp"}


def draw_speed(results: Results) -> str:
    """Both engines in each case of the table, each pair of bars to the scale of the faster."""
    bars = [
        Bar(
            f"{BY_NAME[row['case']].title}, {row['type'].upper()}",
            row["ours_tokens_per_s"],
            row["theirs_tokens_per_s"],
        )
        for row in rows_of(results, TABLE)
        if row["theirs_tokens_per_s"] is not None
    ]
    subtitle = f"tokens/s, {results['shape']}, {results['threads']} threads, {results['machine']['processor']}"
    return draw_bars(bars, ("mlxr", "llama.cpp"), subtitle)


def draw_context(results: Results) -> str:
    """Milliseconds per decoded token and prefill tokens per second over the tokens of context."""
    by_case = {row["case"]: row for row in results["rows"]}

    def line(side: str, kind: str) -> Line:
        points = []
        for tokens in CURVE_TOKENS:
            row = by_case.get(f"context-{tokens}-{kind}")
            if row is not None and (rate := row[f"{side}_tokens_per_s"]) is not None:
                points.append((float(tokens), 1000 / rate if kind == "decode" else rate))
        return Line(SIDES[side], points)

    panels = [
        Panel(title, "tokens of context", [one for side in SIDES if (one := line(side, kind)).points])
        for title, kind in (("decode, ms per token", "decode"), ("prefill, tokens/s", "prefill"))
    ]
    return draw_panels([panel for panel in panels if panel.lines])


def write_docs(root: Path, files: Mapping[str, Results]) -> None:
    """Put tables between their marks in the document, and write the plots. Raises MlxrError without marks."""
    text = (root / DOCUMENT).read_text()
    (root / IMAGES).mkdir(exist_ok=True)
    for name, results in files.items():
        text = replace_figures(text, name, results)
        suffix = name.replace("/", "-")
        if any(row["ratio"] is not None for row in rows_of(results, TABLE)):
            (root / IMAGES / f"cpu-speed-{suffix}.svg").write_text(draw_speed(results))
        if format_curve(results):
            (root / IMAGES / f"cpu-context-{suffix}.svg").write_text(draw_context(results))
    (root / DOCUMENT).write_text(text)


def replace_figures(text: str, name: str, results: Results) -> str:
    """Return `text` with the figures between the marks of that name. Raises MlxrError if these are missing."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise MlxrError(f"{DOCUMENT} has no lines {begin} and {end}; add them where the figures belong")
    return f"{head}{begin}\n\n{format_table(results)}\n\n{end}{tail}"
