"""Results as a Markdown table, as a section of lab/gpu-figures.md, and as a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_comparison.cases import LLAMA_CPP, MLX_LM, MLX_LM_4BIT, OURS, TARGETS, TRANSFORMERS, Case, Target
from mlxr.core.errors import MlxrError
from plot import Bar, draw_bars

Results = Mapping[str, Any]
Row = Mapping[str, Any]
DOCUMENT = Path("lab") / "gpu-figures.md"
PLOT = Path("docs") / "img" / "gpu-speed.svg"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
GIB = 2**30
PEERS = (MLX_LM, LLAMA_CPP, TRANSFORMERS)


def read_results(path: Path) -> dict[str, Any]:
    """Read a file of results. Raises MlxrError if engines were not alone on the device."""
    results: dict[str, Any] = json.loads(path.read_text())
    if any("turns" not in row for row in results.setdefault("rows", [])):
        raise MlxrError(f"{path} has rows of engines that were not alone on the device; measure them again")
    return results


def format_table(results: Results) -> str:
    """The device, and a line for each case."""
    lines = [
        describe(results),
        "",
        f"| work | mlxr, tokens/s | mlx-lm | ratio | wanted | {LLAMA_CPP} | {TRANSFORMERS} | mlxr reads | "
        "of the copy rate | peak memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(format_line(results, case) for case in list_cases(results))])


def describe(results: Results) -> str:
    """The device, the date and the versions."""
    rounds = tell_range([len(row["rounds"]) for row in results["rows"]], "round")
    turns = tell_range([row["turns"] for row in results["rows"]], "turn")
    said = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['device']}, {results['made'][:10]}; random weights; {said}. A copy on the device reads and writes "
        f"{results['copy_bytes_per_s'] / 1e9:,.0f} GB/s. Medians of {rounds} in {turns}, each engine's process "
        "alone on the device; in brackets the lowest and the highest ratio of a round."
        f"{''.join(tell_absence(results, name) for name in PEERS)}"
    )


def tell_range(counts: list[int], what: str) -> str:
    """A range in words, such as "3 to 6 rounds"."""
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{high} {what}{'' if high == 1 else 's'}" if low == high else f"{low} to {high} {what}s"


def tell_absence(results: Results, name: str) -> str:
    """The number of cases in which a peer was measured, if not all; the reason, if in none."""
    cases = {row["case"] for row in results["rows"]}
    measured = {row["case"] for row in results["rows"] if row["engine"].partition(" ")[0] == name}
    if measured == cases or (name == LLAMA_CPP and not measured and name not in results["skipped"]):
        return ""
    if measured:
        return f" {name} was measured in {len(measured)} of {len(cases)} cases."
    return f" Without {name}: {results['skipped'].get(name, 'it has no such cases, or failed')}."


def list_cases(results: Results) -> list[Case]:
    """The cases in the order of measurement."""
    return [Case.parse(name) for name in dict.fromkeys(row["case"] for row in results["rows"])]


def find_row(results: Results, case: Case, engine: str) -> Row | None:
    """The row of a case and an engine, None if it was not measured."""
    rows = (row for row in results["rows"] if (row["case"], row["engine"]) == (case.name, engine))
    return next(rows, None)


def find_target(case: Case) -> Target:
    """The target of a case; without one, a target of 0 against the usual peer."""
    own = MLX_LM if case.type_name in ("bf16", "f16", "f32") else MLX_LM_4BIT
    return TARGETS.get(case.name, Target(own, 0.0))


def compare(results: Results, case: Case) -> tuple[float, float, float] | None:
    """Median, lowest and highest ratio to the case's peer, between n-th rounds; None if one was not measured."""
    ours, theirs = find_row(results, case, OURS), find_row(results, case, find_target(case).peer)
    if ours is None or theirs is None:
        return None
    ratios = [a / b for a, b in zip(ours["rounds"], theirs["rounds"], strict=False)]  # one of them may have fewer turns
    return statistics.median(ratios), min(ratios), max(ratios)


def find_share(results: Results, case: Case) -> float | None:
    """The weights' bytes per second of decoding, as a share of the copy rate."""
    row = find_row(results, case, OURS)
    if row is None or case.kind == "prefill" or not results["copy_bytes_per_s"]:
        return None
    share: float = row["weight_bytes"] * row["tokens_per_s"] / case.batch / results["copy_bytes_per_s"]
    return share


def format_line(results: Results, case: Case) -> str:
    """One line of the table."""
    ours, target = find_row(results, case, OURS), find_target(case)
    found, share = compare(results, case), find_share(results, case)
    cells = [case.title, format_speed(ours), format_speed(find_row(results, case, target.peer))]
    cells.append("" if found is None else "{:.2f} × ({:.2f} to {:.2f})".format(*found))
    wanted = f"≥ {target.ratio:g} ×" if target.ratio else ""
    cells.append(wanted + ("" if target.share is None else f", ≥ {target.share:.0%}"))
    cells += [format_speed(find_row(results, case, engine)) for engine in (LLAMA_CPP, TRANSFORMERS)]
    if ours is None or case.kind == "prefill":
        cells += ["", ""]
    else:
        steps = ours["tokens_per_s"] / case.batch
        cells.append(f"{steps * (ours['weight_bytes'] + ours['cache_bytes']) / 1e9:,.0f} GB/s")
        cells.append("" if share is None else f"weights {share:.0%}")
    cells.append("" if ours is None else f"{ours['peak_bytes'] / GIB:.1f} GiB")
    return "| " + " | ".join(cells) + " |"


def format_speed(row: Row | None) -> str:
    """The tokens per second, and notes on them."""
    if row is None:
        return ""
    return f"{row['tokens_per_s']:,.0f}" + (f" ({row['note']})" if row["note"] else "")


def find_misses(results: Results) -> list[str]:
    """The targets that the figures miss; a case that was not measured misses none."""
    misses = []
    for case in list_cases(results):
        target, found, share = find_target(case), compare(results, case), find_share(results, case)
        if found is not None and found[0] < target.ratio:
            misses.append(f"{case.name}: {found[0]:.2f} × {target.peer}, wanted {target.ratio:g} ×")
        if share is not None and target.share is not None and share < target.share:
            misses.append(f"{case.name}: weights at {share:.1%} of the copy rate, wanted {target.share:.0%}")
    return misses


def draw_speed(results: Results) -> str:
    """Both engines in each case, each pair of bars to the scale of the faster."""
    bars = []
    for case in list_cases(results):
        ours, theirs = find_row(results, case, OURS), find_row(results, case, find_target(case).peer)
        if ours is not None and theirs is not None:
            bars.append(Bar(case.title, ours["tokens_per_s"], theirs["tokens_per_s"]))
    subtitle = f"tokens/s, {results['device']}; against Q4_K_M stands mlx-lm's own 4 bits"
    return draw_bars(bars, (OURS, MLX_LM), subtitle)


def write_docs(root: Path, results: Results) -> None:
    """Put the table between its marks in the document, and write the plot. Raises MlxrError without marks."""
    path = root / DOCUMENT
    path.write_text(replace_figures(path.read_text(), results))
    if any(compare(results, case) is not None for case in list_cases(results)):
        (root / PLOT).parent.mkdir(parents=True, exist_ok=True)
        (root / PLOT).write_text(draw_speed(results))


def replace_figures(text: str, results: Results) -> str:
    """Return `text` with the figures between its marks. Raises MlxrError if the marks are missing."""
    head, found, rest = text.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not found or not closed:
        raise MlxrError(f"{DOCUMENT} has no lines {BEGIN} and {END}; add them where the figures belong")
    return f"{head}{BEGIN}\n\n{format_table(results)}\n\n{END}{tail}"
