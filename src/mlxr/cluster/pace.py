"""How fast a replica computes, from the counts of its reports: what the router weighs replicas by."""

from __future__ import annotations

from mlxr.cluster.router import Load
from mlxr.engine.stats import EngineReport

WEIGHT = 0.3  # of the newest measurement


class Pace:
    """Tokens of prompts per second and seconds per step, each an average over the reports in which there was such."""

    def __init__(self) -> None:
        self._before: EngineReport | None = None
        self._at_s = 0.0
        self._prefill_per_s = self._step_s = 0.0

    def note(self, report: EngineReport, now_s: float) -> Load:
        """Take in the next report, read at `now_s`, and tell the load with the speeds so far."""
        before, seconds = self._before, now_s - self._at_s
        if before is not None and seconds > 0:
            steps = report.steps - before.steps
            if steps > 0 and before.running and report.running:
                self._step_s = _blend(self._step_s, seconds / steps)
            tokens = report.prefill_tokens - before.prefill_tokens
            if tokens > 0 and before.waiting_tokens and report.waiting_tokens:  # it had prompts all the while
                self._prefill_per_s = _blend(self._prefill_per_s, tokens / seconds)
        self._before, self._at_s = report, now_s
        return Load(report.waiting_tokens, report.running, self._prefill_per_s, self._step_s)


def _blend(known: float, new: float) -> float:
    return new if known == 0 else (1 - WEIGHT) * known + WEIGHT * new
