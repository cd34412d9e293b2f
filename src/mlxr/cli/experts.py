"""The experts of a model, as commands show them."""

from __future__ import annotations

from dataclasses import asdict

from mlxr.cli.terminal import format_bytes, format_count
from mlxr.core.stats import MachineLimits
from mlxr.loading import ExpertsSummary, LoadedModel


def describe_experts(experts: ExpertsSummary | None) -> dict[str, int] | None:
    """Their numbers as JSON fields, None for a model without."""
    return None if experts is None else asdict(experts)


def format_experts(experts: ExpertsSummary) -> str:
    """How many there are, how many a token uses, and what all tokens share."""
    shared = f", and a block of {format_count(experts.shared_features)} features of all tokens"
    return (
        f"{experts.experts} of {format_count(experts.features)} features in {experts.layers} layers, {experts.used} "
        f"of them for each token{shared if experts.shared_features else ''}"
    )


def list_experts(loaded: LoadedModel) -> list[tuple[str, str]]:
    """The row of a table that names the experts of a model that has some, and how many bytes of them are in memory."""
    if loaded.experts is None:
        return []
    held, total = loaded.model.expert_memory
    resident = f"; {format_bytes(held)} of {format_bytes(total)} resident" if held < total else ""
    return [("experts", format_experts(loaded.experts) + resident)]


def describe_routing(loaded: LoadedModel) -> dict[str, object]:
    """What of the experts is in memory, and what was sent to them, as JSON fields."""
    held, total = loaded.model.expert_memory
    routing = loaded.model.read_routing()
    return {
        "expert_bytes": total,
        "resident_expert_bytes": held,
        "routing": None if routing is None else asdict(routing),
    }


def format_reading(loaded: LoadedModel, bytes_per_s: float, tokens: int, limits: MachineLimits | None) -> str:
    """The weights, what of them a step of `tokens` tokens reads, and how fast, of what the machine can."""
    read_bytes = loaded.model.work.count_weight_bytes(tokens)
    about, of_machine = "about " if loaded.experts is not None and tokens > 1 else "", ""
    if limits is not None:
        of_machine = f", {bytes_per_s / limits.read_bytes_per_s:.0%} of what the machine reads"
    step = "token" if tokens == 1 else f"step of {tokens} tokens"
    return (
        f"{format_bytes(loaded.weight_bytes)}; {about}{format_bytes(read_bytes)} of them read for each {step}, at "
        f"{format_bytes(bytes_per_s)}/s{of_machine}"
    )
