"""One model measured on both sides one after the other, if memory holds it only once.

In each turn our engine is started, measured in all cases and ended, and then llama.cpp. So the two rates of a pair are
minutes apart; the probe, measured with each, shows whether the machine was equally fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from comparison.cases import Case
from comparison.child import Child
from comparison.machine import Bystanders, hash_native, read_commit
from comparison.session import Session

Name = Literal["ours", "theirs"]
MEASURED = ("ours", "theirs", "read_bytes_per_s", "int8_macs_per_s", "bystanders")


@dataclass
class ApartSession(Session):
    """A session whose sides run in turn: `start` starts a side's process; until then `sides` has the probe there."""

    start: Callable[[Name], Child] | None = None
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def open(self) -> None:
        """Do nothing: a side loads its model in its turn."""
        self.chooses_once = True
        self.opened = {"file_bytes": self.path.stat().st_size, "ours": None, "theirs": None}

    def measure_all(self, cases: Sequence[Case], timeout_s: float) -> list[dict[str, Any]]:
        """Measure all cases, each as `measure` does."""
        names: tuple[Name, ...] = ("ours",) if self.sides.theirs is None else ("ours", "theirs")
        begun_s = time.monotonic()
        for turn in range(self.pairs):
            for name in names:
                self._take_turn(name, cases, timeout_s)
                self.say(f"turn {turn + 1} of {self.pairs}: {name} done")
        rows = []
        for case in cases:
            row = self._rows[case.name]
            row |= {"bystanders": max(row["bystanders"]), "commit": read_commit(), "native": hash_native()}
            row["seconds"] = (time.monotonic() - begun_s) / len(cases)
            rows.append({**row, **self._judge(case, row)})
        return rows

    def _take_turn(self, name: Name, cases: Sequence[Case], timeout_s: float) -> None:
        assert self.start is not None
        with self.start(name) as side:
            self.sides, self._started = replace(self.sides, **{name: side}), None
            opened = side.ask("open", self._describe(name), timeout_s=timeout_s)
            self.say(f"{name}: loaded in {opened['load_s']:.0f} s")
            for case in cases:
                self._measure_side(name, side, case, timeout_s)
            self.opened[name] = {**opened, "first_load_s": opened["load_s"], **side.ask("close")}

    def _measure_side(self, name: Name, side: Child, case: Case, timeout_s: float) -> None:
        empty = {"case": case.name, "kind": case.kind, "option": None, "theirs": []}
        row = self._rows.setdefault(case.name, {**empty, **{one: [] for one in MEASURED}})
        if name == "ours":
            row["kv_bytes_per_token"] = self._prepare_ours(case)
        else:
            row["option"] = self._choose_option(case, timeout_s)
        if name == "ours":  # choosing has warmed llama.cpp
            self._run(side, case, timeout_s)
        bystanders = Bystanders([self.sides.probe, side])
        probe = self.sides.probe.ask("measure")
        row[name].append(self._run(side, case, timeout_s))
        row["bystanders"].append(bystanders.measure())
        if name == "ours":
            for limit in ("read_bytes_per_s", "int8_macs_per_s"):
                row[limit].append(probe[limit])
        self.say(f"{case.name}: {name} {row[name][-1]:.1f} tokens/s, memory {probe['read_bytes_per_s'] / 1e9:.0f} GB/s")
