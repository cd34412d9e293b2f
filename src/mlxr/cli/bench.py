"""`mlxr bench`, `profile` and `kernels`: a model's speed, a profile of its time, and the source of GPU kernels."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlxr.cli.flags import Json, Model
from mlxr.cli.show import describe_experts, describe_routing, format_reading, list_experts
from mlxr.cli.terminal import format_bytes, print_fields, print_json, print_note, print_table, show_progress
from mlxr.core.errors import DeviceError, InvalidRequest
from mlxr.core.settings import Settings
from mlxr.core.stats import KernelTime, MachineLimits
from mlxr.loading import KERNEL_TARGETS, LoadedModel, list_kernel_sources
from mlxr.service.machine_limits import KeptLimits, measure_limits
from mlxr.service.measures import (
    DraftSpeed,
    Load,
    PhaseProfile,
    Spread,
    make_trace,
    measure_drafts,
    measure_speed,
    profile_model,
    read_peak_memory_bytes,
    summarise,
)
from mlxr.service.opening import open_model

PromptTokens = Annotated[int, typer.Option("--prompt-tokens", help="Random tokens of each prompt.")]
GenerateTokens = Annotated[int, typer.Option("--generate-tokens", help="Tokens decoded for each prompt.")]
Batch = Annotated[int, typer.Option("--batch", help="Requests that run side by side.")]
Repeat = Annotated[int, typer.Option("--repeat", help="How often to measure, after a short warm-up.")]
Probe = Annotated[
    bool, typer.Option("--probe", help="Also measure what the machine can do, in the same run, and keep it.")
]


def bench(
    model: Model,
    settings: Settings,
    prompt_tokens: PromptTokens = 512,
    generate_tokens: GenerateTokens = 64,
    batch: Batch = 1,
    repeat: Repeat = 3,
    probe: Probe = False,
    json: Json = False,
) -> None:
    """Measure prefill and decode speed, in tokens per second of the whole batch.

    With --draft, also compare the speed without and with drafts, in turns, with answers that continue a text.
    """
    load = Load(prompt_tokens, generate_tokens, batch)
    with show_progress("loading") as progress:
        loaded = open_model(model, settings, progress, needs_draft=settings.draft != "auto")
    with loaded, show_progress("measuring") as progress:
        speed = measure_speed(loaded, settings, load, repeat=repeat, progress=progress)
        drafts = None
        if settings.draft not in ("auto", "off"):
            drafts = measure_drafts(loaded, settings, load, repeat=repeat, progress=progress)
        peak_memory_bytes = read_peak_memory_bytes()  # before the probe takes its buffer
        kept = KeptLimits(settings)
        probed = measure_limits(loaded) if probe else None
        if probed is not None:
            kept.keep(loaded.ctx.isa, loaded.ctx.threads, probed)
        limits = probed or kept.find(loaded)
    prefill, decode = summarise(speed.prefill_tokens_per_s), summarise(speed.decode_tokens_per_s)
    step_bytes = loaded.model.work.count_weight_bytes(batch)
    bandwidth = decode.median / batch * step_bytes
    fields = {
        "model": model,
        **asdict(load),
        "repeat": repeat,
        "prefill_tokens_per_s": asdict(prefill),
        "decode_tokens_per_s": asdict(decode),
        "decode_bandwidth_bytes_per_s": bandwidth,
        "decode_bandwidth_share": None if limits is None else bandwidth / limits.read_bytes_per_s,
        "load_s": loaded.load_s,
        "peak_memory_bytes": peak_memory_bytes,
        "weight_bytes": loaded.weight_bytes,
        "active_bytes": loaded.model.step_bytes,
        "step_bytes": step_bytes,
        "experts": describe_experts(loaded.experts),
        **describe_routing(loaded),
        "file_bytes": loaded.file_bytes,
        "threads": loaded.ctx.threads,
        "device": loaded.ctx.device,
        "isa": loaded.ctx.isa,
    }
    if drafts is not None:
        fields |= describe_drafts(drafts)
    if probed is not None:
        fields |= {"probe_read_bytes_per_s": probed.read_bytes_per_s, "probe_int8_macs_per_s": probed.int8_macs_per_s}
    if json:
        print_json(fields)
        return
    print_fields(
        [
            ("prefill", f"{format_spread(prefill)} tokens/s, {batch} × {prompt_tokens} tokens"),
            ("decode", f"{format_spread(decode)} tokens/s, {batch} × {generate_tokens} tokens"),
            *list_drafts(drafts),
            *list_experts(loaded),
            ("weights", format_reading(loaded, bandwidth, batch, None)),
            *format_limits(limits, bandwidth),
            ("loaded in", f"{loaded.load_s:.2f} s"),
            ("peak memory", format_bytes(peak_memory_bytes)),
            ("device", f"{loaded.ctx.device} ({loaded.ctx.isa}), {loaded.ctx.threads} threads"),
        ]
    )


def describe_drafts(drafts: DraftSpeed) -> dict[str, object]:
    """Return both speeds and the numbers of drafted and accepted tokens, for JSON."""
    return {
        "text_tokens_per_s": asdict(summarise(drafts.plain_tokens_per_s)),
        "draft_tokens_per_s": asdict(summarise(drafts.tokens_per_s)),
        "drafted_tokens": drafts.drafted_tokens,
        "accepted_tokens": drafts.accepted_tokens,
    }


def list_drafts(drafts: DraftSpeed | None) -> list[tuple[str, str]]:
    """List both speeds, their ratio and the share of right tokens as lines of the table; none without drafts."""
    if drafts is None:
        return []
    plain, fast = summarise(drafts.plain_tokens_per_s), summarise(drafts.tokens_per_s)
    share = drafts.accepted_tokens / max(1, drafts.drafted_tokens)
    return [
        ("text", f"{format_spread(plain)} tokens/s without drafts"),
        (
            "drafts",
            f"{format_spread(fast)} tokens/s: {fast.median / plain.median:.2f} times; {share:.0%} of "
            f"{drafts.drafted_tokens} drafted tokens were right",
        ),
    ]


def format_limits(limits: MachineLimits | None, bandwidth: float) -> list[tuple[str, str]]:
    """Return the row with the machine's limits, as measured now or earlier, and the share that decoding used."""
    if limits is None:
        return []
    return [
        (
            "machine",
            f"reads {format_bytes(limits.read_bytes_per_s)}/s ({bandwidth / limits.read_bytes_per_s:.0%} of it used "
            f"while decoding), multiplies {limits.int8_macs_per_s / 1e9:.0f} G int8 pairs/s",
        )
    ]


def format_spread(spread: Spread) -> str:
    """Return the median, with the smallest and the largest value in brackets."""
    return f"{spread.median:.1f} ({spread.min:.1f} to {spread.max:.1f})"


NOTHING = "-"
COLUMNS = ("operator", "kernel", " calls", " ms", " share", " bytes", " GB/s", " GMAC/s", " of machine")
GPU_COLUMNS = (*COLUMNS[:-1], " threadgroups", " threads")

Sequences = Annotated[int, typer.Option("--sequences", help="Requests that run side by side.")]
Steps = Annotated[int, typer.Option("--steps", help="Steps of decoding after the prompts.")]
JsonFile = Annotated[Path | None, typer.Option("--json-file", metavar="FILE", help="Also write all numbers as JSON.")]
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
    every kernel timed. On a GPU the timing waits for each launch, so these steps are
    slower, and kernels that usually overlap do not.
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
    rates = [rate(row, phase, limits) for phase in phases for row in phase.profile.kernels]
    if max((rate[name] or 0 for rate in rates for name in ("read_share", "macs_share")), default=0) > 1:
        print_note(
            f"over 100 %: caches, or a machine that was busy when probed; `mlxr bench {model} --probe` measures it"
        )


def find_limits(loaded: LoadedModel, settings: Settings) -> MachineLimits | None:
    """Return the machine's limits, measured now if never before; None if that is impossible."""
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
    """Return the limits that shares of the machine refer to, as text."""
    if limits is None:
        return ""
    return (
        f"; the machine reads {format_bytes(limits.read_bytes_per_s)}/s and multiplies "
        f"{limits.int8_macs_per_s / 1e9:.0f} G int8 pairs/s"
    )


def write_json(path: Path, value: object) -> None:
    """Write one JSON document; raises InvalidRequest if the file cannot be written."""
    try:
        path.write_text(json_format.dumps(value, allow_nan=False))
    except OSError as error:
        raise InvalidRequest("FILE", f"{path} cannot be written: {error.strerror}") from error


def describe_run(
    model: str, loaded: LoadedModel, load: Load, phases: Sequence[PhaseProfile], limits: MachineLimits | None
) -> dict[str, object]:
    """Return all numbers of a profile, for JSON."""
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
    """Return a kernel's share of its phase and its work per second; None for unknown values."""
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
    """Print the table of one phase."""
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
    """Return one row of the table."""
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


KernelTarget = Annotated[
    str, typer.Option("--target", help=f"The target to print it for: {', '.join(KERNEL_TARGETS)}.")
]
KernelName = Annotated[str | None, typer.Option("--name", help="Only this kernel.")]


def kernels(target: KernelTarget = "metal", name: KernelName = None) -> None:
    """Print the source of the GPU kernels: the prelude of the target, the kernel's own headers, and its body.

    MLX writes the function around the body, with the types of the arrays and the
    constants of a launch.
    """
    if target not in KERNEL_TARGETS:
        raise InvalidRequest("target", f"must be one of {', '.join(KERNEL_TARGETS)}; got {target}")
    sources = list_kernel_sources(target)
    if name is not None and name not in sources:
        raise InvalidRequest("name", f"must be one of {', '.join(sources)}; got {name}")
    for kernel, text in sources.items():
        if name in (None, kernel):
            typer.echo(f"// ---- {kernel} ({target}) ----\n{text}")
