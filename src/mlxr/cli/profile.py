"""`mlxr profile`: where the time of a model's steps goes."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Model
from mlxr.cli.terminal import format_bytes, print_note, print_table, show_progress
from mlxr.core.errors import DeviceError, InvalidRequest
from mlxr.core.settings import Settings
from mlxr.core.stats import KernelTime, MachineLimits
from mlxr.loading import LoadedModel
from mlxr.service.machine_limits import KeptLimits, measure_limits
from mlxr.service.opening import open_model
from mlxr.service.profiling import PhaseProfile, make_trace, profile_model
from mlxr.service.speed import Load

NOTHING = "-"
COLUMNS = ("operator", "kernel", " calls", " ms", " share", " bytes", " GB/s", " GMAC/s", " of machine")
GPU_COLUMNS = (*COLUMNS[:-1], " threadgroups", " threads")

PromptTokens = Annotated[int, typer.Option("--prompt-tokens", help="Random tokens of each prompt.")]
Sequences = Annotated[int, typer.Option("--sequences", help="Requests that run side by side.")]
Steps = Annotated[int, typer.Option("--steps", help="Steps of decoding after the prompts.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all numbers as JSON.")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Also write each call, as a trace for Perfetto or chrome://tracing."),
]


def profile(
    model: Model,
    settings: Settings,
    prompt_tokens: PromptTokens = 512,
    sequences: Sequences = 1,
    steps: Steps = 32,
    json: JsonFile = None,
    trace: TraceFile = None,
) -> None:
    """Show where the time of a model's steps goes, kernel by kernel.

    The prompts are computed and some tokens decoded, once as always and once with
    every kernel timed. On a GPU each launch is waited for while it is timed, so its
    steps are slower then, and what usually overlaps does not.
    """
    load = Load(prompt_tokens, steps, sequences)
    with show_progress("loading") as progress:
        loaded = open_model(model, settings, progress)
    with loaded, show_progress("profiling"):
        phases = profile_model(loaded, settings, load)
        limits = find_limits(loaded, settings)
    if json is not None:
        write_json(json, describe_run(model, loaded, load, phases, limits))
    if trace is not None:
        write_json(trace, make_trace(phases))
    for phase in phases:
        print_phase(phase, limits, is_gpu=loaded.ctx.gpu is not None)
    print(f"on {loaded.ctx.device} ({loaded.ctx.isa}), {loaded.ctx.threads} threads{describe_limits(limits)}")


def find_limits(loaded: LoadedModel, settings: Settings) -> MachineLimits | None:
    """What the probe measured of this machine, now if never before; None where it cannot."""
    if loaded.ctx.device != "cpu":
        return None
    kept = KeptLimits(settings)
    try:
        limits = kept.find(loaded)
        if limits is None:
            limits = measure_limits(loaded)
            kept.keep(loaded.ctx.isa, loaded.ctx.threads, limits)
    except DeviceError as error:
        print_note(f"without shares of the machine: {error}")
        return None
    return limits


def describe_limits(limits: MachineLimits | None) -> str:
    """What shares of the machine are shares of."""
    if limits is None:
        return ""
    return (
        f"; the machine reads {format_bytes(limits.read_bytes_per_s)}/s and multiplies "
        f"{limits.int8_macs_per_s / 1e9:.0f} G int8 pairs/s"
    )


def write_json(path: Path, value: object) -> None:
    """Write one JSON document; raises InvalidRequest where the file cannot be written."""
    try:
        path.write_text(json_format.dumps(value, allow_nan=False))
    except OSError as error:
        raise InvalidRequest("FILE", f"{path} cannot be written: {error.strerror}") from error


def describe_run(
    model: str, loaded: LoadedModel, load: Load, phases: Sequence[PhaseProfile], limits: MachineLimits | None
) -> dict[str, object]:
    """All numbers of a profile, for JSON."""
    return {
        "model": model,
        **asdict(load),
        "device": loaded.ctx.device,
        "isa": loaded.ctx.isa,
        "threads": loaded.ctx.threads,
        "limits": None if limits is None else asdict(limits),
        "phases": [
            {
                "name": phase.name,
                "tokens": phase.tokens,
                "steps": len(phase.steps),
                "seconds": phase.seconds,
                "plain_seconds": phase.plain_seconds,
                "kernel_seconds": phase.profile.seconds,
                "kernels": [asdict(row) | rate(row, phase, limits) for row in phase.profile.kernels],
            }
            for phase in phases
        ],
    }


def rate(row: KernelTime, phase: PhaseProfile, limits: MachineLimits | None) -> dict[str, float | None]:
    """A kernel's share of its phase and what it did in a second; None for what is not known."""
    timed = row.seconds > 0
    read = row.nbytes / row.seconds if timed and row.nbytes else None
    macs = row.macs / row.seconds if timed and row.macs else None
    return {
        "share": row.seconds / phase.seconds if timed else None,
        "bytes_per_s": read,
        "macs_per_s": macs,
        "read_share": None if limits is None or read is None else read / limits.read_bytes_per_s,
        "macs_share": None if limits is None or macs is None else macs / limits.int8_macs_per_s,
    }


def print_phase(phase: PhaseProfile, limits: MachineLimits | None, *, is_gpu: bool) -> None:
    """The table of one phase."""
    rows = [format_kernel(row, phase, limits, is_gpu=is_gpu) for row in phase.profile.kernels]
    between_s = max(0.0, phase.seconds - phase.profile.seconds)
    columns = GPU_COLUMNS if is_gpu else COLUMNS
    between = ["between kernels", "", "", f"{1000 * between_s:.2f}", f"{between_s / phase.seconds:.1%}"]
    rows.append(between + [""] * (len(columns) - len(between)))
    steps = len(phase.steps)
    title = (
        f"{phase.name}, {phase.tokens} tokens in {steps} step{'s' * (steps > 1)}, {1000 * phase.seconds:.1f} ms "
        f"({1000 * phase.plain_seconds:.1f} ms without profiling)"
    )
    print_table(columns, rows, title)
    print()


def format_kernel(row: KernelTime, phase: PhaseProfile, limits: MachineLimits | None, *, is_gpu: bool) -> list[str]:
    """One line of a table."""
    rates = rate(row, phase, limits)
    cells = [row.operator, row.variant if row.implementation != "mlx" else f"mlx {row.variant}", f"{row.calls}"]
    cells += [f"{1000 * row.seconds:.2f}" if row.seconds else NOTHING, _format_share(rates["share"])]
    cells += [format_bytes(row.nbytes) if row.nbytes else NOTHING]
    cells += [_format_giga(rates["bytes_per_s"]), _format_giga(rates["macs_per_s"])]
    if is_gpu:
        return [*cells, "x".join(map(str, row.grid or ())) or NOTHING, str(row.threads or NOTHING)]
    shares = [share for share in (rates["read_share"], rates["macs_share"]) if share is not None]
    return [*cells, _format_share(max(shares, default=None))]


def _format_share(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def _format_giga(number: float | None) -> str:
    return NOTHING if number is None else f"{number / 1e9:.1f}"
