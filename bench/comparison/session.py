"""One model measured on both sides in turns: probe, ours, theirs, and again. Only one of them computes at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.cases import BUSY, MAX_TUNED_DEPTH, Case, Work, measure_work
from comparison.child import Child
from comparison.machine import Bystanders, hash_native, read_commit

SETTLE_S = 0.05  # until threads of the side that has just computed stop spinning
UNKNOWN: dict[str, Any] = {"peak_memory_bytes": None}  # until a side is closed
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sides:
    """The processes; `theirs` is None if only our engine is measured."""

    probe: Child
    ours: Child
    theirs: Child | None

    def list_all(self) -> list[Child]:
        """All of them that exist."""
        return [side for side in (self.probe, self.ours, self.theirs) if side is not None]


@dataclass
class Session:
    """A model opened on both sides."""

    sides: Sides
    path: Path
    threads: int
    settings: Mapping[str, object]
    pairs: int
    say: Say
    work: Work = field(init=False)
    opened: dict[str, Any] = field(init=False)
    chooses_once: bool = False  # choose llama.cpp's settings only once for each kind of case
    _options: dict[tuple[str, bool], dict[str, bool]] = field(default_factory=dict)  # the last choice by kind of case
    _started: tuple[int, int] | None = None  # context tokens and sequences of our engine
    _kv_bytes_per_token: int = 0

    def __post_init__(self) -> None:
        self.work = measure_work(self.path)
        self.open()

    def open(self) -> None:
        """Load the model on both sides."""
        theirs = self.sides.theirs
        self.opened = {
            "file_bytes": self.path.stat().st_size,
            "ours": _open_twice(self.sides.ours, self._describe("ours")),
            "theirs": None if theirs is None else _open_twice(theirs, self._describe("theirs")),
        }

    def _describe(self, name: str) -> dict[str, Any]:
        """Describe the model to a side, as fields of its first message."""
        model = {"model": str(self.path.resolve()), "threads": self.threads}
        return {**model, "settings": dict(self.settings)} if name == "ours" else model

    def measure(self, case: Case, timeout_s: float) -> dict[str, Any]:
        """Measure one case; returns all its figures, rates in tokens per second."""
        ours, theirs = self.sides.ours, self.sides.theirs
        begun_s = time.monotonic()
        kv_bytes = self._prepare_ours(case)
        option = None if theirs is None else self._choose_option(case, timeout_s)
        self._run(ours, case, timeout_s)  # untimed
        rounds = self._run_rounds(case, timeout_s)
        row = {
            "case": case.name,
            "kind": case.kind,
            "bystanders": max(rounds.pop("bystanders")),
            **rounds,
            "option": option,
            "kv_bytes_per_token": kv_bytes,
            "commit": read_commit(),
            "native": hash_native(),
            "seconds": time.monotonic() - begun_s,
        }
        return {**row, **self._judge(case, row)}

    def _run_rounds(self, case: Case, timeout_s: float) -> dict[str, list[float]]:
        """Measure `pairs` rounds with an otherwise idle machine, or the calmest of up to twice as many."""
        rounds: list[dict[str, float]] = []
        while len(rounds) < 2 * self.pairs and sum(one["bystanders"] <= BUSY for one in rounds) < self.pairs:
            bystanders = Bystanders(self.sides.list_all())
            one = self.sides.probe.ask("measure")
            one["ours"] = self._run(self.sides.ours, case, timeout_s)
            if self.sides.theirs is not None:
                one["theirs"] = self._run(self.sides.theirs, case, timeout_s)
            one["bystanders"] = bystanders.measure()
            rounds.append(one)
            against = f" against {one['theirs']:.1f}" if "theirs" in one else ""
            busy = f"; others used {one['bystanders']:.0%} of the machine" if one["bystanders"] > BUSY else ""
            self.say(f"{case.name} round {len(rounds)}: {one['ours']:.1f}{against} tokens/s{busy}")
        calmest = sorted(rounds, key=lambda one: one["bystanders"] if one["bystanders"] > BUSY else 0.0)[: self.pairs]
        names = ("ours", "theirs", "read_bytes_per_s", "int8_macs_per_s", "bystanders")
        return {name: [one[name] for one in calmest if name in one] for name in names}

    def _prepare_ours(self, case: Case) -> int:
        """Start an engine unless the last one fits, and hold the context; returns a position's bytes of K and V."""
        sizes = {"context_tokens": case.context_tokens, "sequences": case.sequences}
        if self._started != (case.context_tokens, case.sequences):
            started = self.sides.ours.ask("start", {**sizes, "option": None})
            self._kv_bytes_per_token = started["kv_bytes_per_token"]
            self._started = (case.context_tokens, case.sequences)
        self.sides.ours.ask("hold", {"sequences": case.sequences, "tokens": case.depth_tokens})
        return self._kv_bytes_per_token

    def _choose_option(self, case: Case, timeout_s: float) -> dict[str, bool]:
        """Try all settings of llama.cpp after a warm-up; returns the fastest, and leaves their context ready."""
        theirs = self.sides.theirs
        assert theirs is not None
        group = (case.kind, case.sequences > 1)
        options = case.options()
        is_deep = case.depth_tokens + case.tokens > MAX_TUNED_DEPTH + 512
        if group in self._options and (is_deep or self.chooses_once):
            options = [self._options[group]]
        rates = []
        for option in options:
            self._prepare_theirs(case, option, timeout_s)
            self._run(theirs, case, timeout_s)
            rates.append(self._run(theirs, case, timeout_s) if len(options) > 1 else 1.0)
        best = options[rates.index(max(rates))]
        if len(options) > 1:
            tried = ", ".join(f"{_spell(option)} {rate:.1f}" for option, rate in zip(options, rates, strict=True))
            self.say(f"{case.name}: llama.cpp with {tried} tokens/s")
        self._options[group] = best
        if best is not options[-1]:
            self._prepare_theirs(case, best, timeout_s)
        return best

    def _prepare_theirs(self, case: Case, option: dict[str, bool], timeout_s: float) -> None:
        theirs = self.sides.theirs
        assert theirs is not None
        sizes = {"context_tokens": case.context_tokens, "sequences": case.sequences}
        theirs.ask("start", {**sizes, "option": option})
        theirs.ask("hold", {"sequences": case.sequences, "tokens": case.depth_tokens}, timeout_s=timeout_s)

    def _run(self, side: Child, case: Case, timeout_s: float) -> float:
        """Measure once; returns tokens per second."""
        time.sleep(SETTLE_S)
        count = {"steps" if case.kind == "decode" else "tokens": case.tokens}
        seconds: float = side.ask(case.kind, count, timeout_s=timeout_s)
        return case.count_tokens() / seconds

    def _judge(self, case: Case, row: Mapping[str, Any]) -> dict[str, Any]:
        """Compute medians, ratios pair by pair, and the share of the probe's rate in the same rounds."""
        if case.kind == "decode":
            unit, limit = "bytes", row["read_bytes_per_s"]
            each = self.work.bytes_of_step(case, row["kv_bytes_per_token"]) / case.sequences
        else:
            unit, limit = "macs", row["int8_macs_per_s"]
            each = self.work.macs_of_token(case)
        judged: dict[str, Any] = {
            "ours_tokens_per_s": statistics.median(row["ours"]),
            f"{unit}_per_token": each,
            "probe_per_s": statistics.median(limit),
            "read_range": [min(row["read_bytes_per_s"]), max(row["read_bytes_per_s"])],
            "share": statistics.median(a * each / b for a, b in zip(row["ours"], limit, strict=True)),
            "theirs_tokens_per_s": None,
            "theirs_share": None,
            "ratio": None,
            "ratio_range": None,
        }
        if row["theirs"]:
            ratios = [a / b for a, b in zip(row["ours"], row["theirs"], strict=True)]
            judged["theirs_tokens_per_s"] = statistics.median(row["theirs"])
            judged["theirs_share"] = statistics.median(a * each / b for a, b in zip(row["theirs"], limit, strict=True))
            judged["ratio"] = statistics.median(ratios)
            judged["ratio_range"] = [min(ratios), max(ratios)]
        return judged

    def drop_contexts(self) -> None:
        """Let llama.cpp free the contexts of the cases so far."""
        if self.sides.theirs is not None:
            self.sides.theirs.ask("drop")

    def close(self) -> None:
        """Note the peak memory of both sides in `opened`."""
        for name in ("ours", "theirs"):
            side: Child | None = getattr(self.sides, name)
            if side is not None:
                self.opened[name] |= side.ask("close")


def _open_twice(side: Child, model: Mapping[str, object]) -> dict[str, Any]:
    """Load a model twice: the first time can wait for the disk, or for memory from a virtual machine's host."""
    first = side.ask("open", model)
    side.ask("close")
    return {**UNKNOWN, "first_load_s": first["load_s"], **side.ask("open", model)}


def _spell(option: Mapping[str, bool]) -> str:
    words = ["fused attention" if option["flash"] else "plain attention"]
    return ", ".join([*words, *(["one cache"] if option["unified"] else [])])
