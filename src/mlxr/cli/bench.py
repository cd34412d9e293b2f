"""`mlxr bench`: prefill and decode speed of a model on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mlxr.cli.experts import describe_experts, describe_routing, format_reading, list_experts
from mlxr.cli.flags import Json, Model
from mlxr.cli.terminal import format_bytes, print_fields, print_json, show_progress
from mlxr.core.settings import Settings
from mlxr.core.stats import MachineLimits
from mlxr.service.machine_limits import KeptLimits, measure_limits
from mlxr.service.opening import open_model
from mlxr.service.speed import (
    DraftSpeed,
    Load,
    Spread,
    measure_drafts,
    measure_speed,
    read_peak_memory_bytes,
    summarise,
)

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

    With --draft, also what drafts bring where text goes on: the same answers come without and with them, in turns.
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
        fields |= {
            "probe_read_bytes_per_s": probed.read_bytes_per_s,
            "probe_int8_macs_per_s": probed.int8_macs_per_s,
        }
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
    """What the probe measured, now or earlier, and the share of it that decoding used."""
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
    """The median, with the smallest and the largest value in brackets."""
    return f"{spread.median:.1f} ({spread.min:.1f} to {spread.max:.1f})"
