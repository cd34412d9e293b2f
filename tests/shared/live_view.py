"""A watcher's view of the live stream, built from events alone as docs/page-live.md explains."""

from __future__ import annotations

from collections import Counter
from typing import Any

Json = dict[str, Any]


class LiveView:
    """The state that a watcher builds from events alone: the codes of all pages, the rows of all sequences, totals."""

    def __init__(self) -> None:
        self.snapshot: Json = {}
        self.codes: dict[int, list[int]] = {}
        self.short_tokens: Counter[int] = Counter()
        self.rows: dict[tuple[int, int], Json] = {}
        self.counters: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.queue: Json = {}
        self.store: Json | None = None
        self.steps: list[Json] = []
        self.log: list[Json] = []
        self.evicted = self.copied = 0

    @classmethod
    def of(cls, snapshot: Json) -> LiveView:
        """Return the view after one snapshot."""
        view = cls()
        view.apply("snapshot", snapshot)
        return view

    def apply(self, event: str, data: Json) -> None:
        """Take in one event."""
        if event == "snapshot":
            self._replace(data)
        else:
            assert event == "change", event
            self._change(data)

    def pages_of(self, group: int) -> list[list[int]]:
        """The pages of each sequence in one group."""
        return [table["pages"] for row in self.rows.values() for table in row["tables"] if table["group"] == group]

    def _replace(self, data: Json) -> None:
        self.__init__()  # type: ignore[misc]
        self.snapshot = data
        for group in data["groups"]:
            codes = self.codes[group["group"]] = [-1] * group["pages"]
            _write_runs(codes, group["runs"])
            assert -1 not in codes, "the runs of a snapshot cover all pages"
            self.short_tokens[group["group"]] = group["short_tokens"]
        self.rows = {(row["request"], row["index"]): row for row in data["sequences"]}
        self.counters = Counter(data["counters"])
        self._add_calls(data["kernels"])
        self.queue, self.store = data["queue"], data["store"]

    def _change(self, data: Json) -> None:
        for group in data.get("groups", []):
            _write_runs(self.codes[group["group"]], group["runs"])
            self.short_tokens[group["group"]] += group["short_tokens"]
            self.evicted += len(group["evicted"])
            self.copied += len(group["copied"])
        for row in data.get("sequences", []):
            self._change_row(row)
        for request, index in data.get("gone", []):
            del self.rows[request, index]
        self.counters.update(data.get("counters", {}))
        self._add_calls(data.get("kernels", []))
        self.queue, self.store = data.get("queue", self.queue), data.get("store", self.store)
        self.steps += data.get("steps", [])
        self.log += data.get("log", [])

    def _change_row(self, row: Json) -> None:
        key = row["request"], row["index"]
        known = {table["group"]: table["pages"] for table in self.rows.get(key, {"tables": []})["tables"]}
        for table in row["tables"]:
            known[table["group"]] = known.get(table["group"], [])[: table["start"]] + table["pages"]
            assert len(known[table["group"]]) == table["start"] + len(table["pages"])
        tables = [{"group": group, "start": 0, "pages": pages} for group, pages in known.items()]
        self.rows[key] = {**row, "tables": tables}

    def _add_calls(self, kernels: list[Json]) -> None:
        for row in kernels:
            self.calls[row["operator"], row["implementation"], row["variant"]] += row["count"]


def _write_runs(codes: list[int], runs: list[list[int]]) -> None:
    for first, count, code in runs:
        assert count > 0
        codes[first : first + count] = [code] * count
