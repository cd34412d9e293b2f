"""bench/cluster_sim.py on a small cluster: the router finds what the oracle finds and more than the others."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def sim() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("cluster_sim")
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.parametrize("trace", ["chat", "agents", "rag"])
def test_the_router_is_near_the_oracle_and_above_the_rest(
    sim: ModuleType, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    sim.main(["--nodes", "8", "--requests", "60", "--trace", trace, "--json", str(path)])
    (result,) = json.loads(path.read_text())["results"]
    rows = result["policies"]
    assert f"{trace}: 8 nodes" in capsys.readouterr().out
    assert set(rows) == {"mlxr", "random", "round-robin", "sticky", "oracle"}
    ours = rows["mlxr"]
    assert rows["oracle"]["hit_rate"] - 0.05 < ours["hit_rate"] <= result["ideal_hit_rate"]
    assert all(ours["hit_rate"] > rows[name]["hit_rate"] + 0.1 for name in ("random", "round-robin"))
    assert all(ours["p99_s"] < rows[name]["p99_s"] for name in ("random", "round-robin", "sticky"))
    assert 0 < ours["delta_bytes_per_s"] < 1e6
    assert ours["choice_us"] > 0
    assert ours["fetches_per_request"] > 0
    assert rows["random"]["fetches_per_request"] == 0
    assert 1 <= ours["spread"] < ours["chance"]


def test_a_slow_link_carries_nothing(sim: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    words = ["--nodes", "8", "--requests", "40", "--trace", "chat", "--policy", "mlxr", "oracle", "--json", str(path)]
    found = {}
    for speed in ("0", "100000", "350e6"):
        sim.main([*words, "--link-bytes-per-s", speed])
        (result,) = json.loads(path.read_text())["results"]
        found[speed] = {name: row["fetches_per_request"] for name, row in result["policies"].items()}
    assert found["0"] == found["100000"] == {"mlxr": 0, "oracle": 0}
    assert min(found["350e6"].values()) > 0


def test_a_fetch_brings_what_its_bounds_allow(sim: ModuleType) -> None:
    nodes = sys.modules["cluster_nodes"]
    machine = replace(sim.MACHINES["cpu-1b"], page_bytes=1000, link_bytes_per_s=10_000.0)
    keys = [bytes([number]) * 8 for number in range(40)]
    request = sim.Request(0.0, 1, keys, 40 * sim.PAGE_TOKENS, 1)
    full, empty, other = (nodes.Node(name, machine) for name in "abc")
    full.cache.use(keys)
    until_s, pages = empty.fetch(request, full, 0.0)
    assert (until_s, pages) == (pytest.approx(3.0, abs=0.15), 29)  # as many as come within the time
    assert other.fetch(request, full, 0.0)[1] == 0  # the link is taken
    assert full.fetch(request, empty, 5.0) == (5.0, 40)


def test_the_same_seed_gives_the_same_requests(sim: ModuleType) -> None:
    traces = [sim.make_trace("mix", seed, 4, 200, 15.0) for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]
    spread = sim.spread(traces[0], 1, 10.0, 0.4)
    assert [request.at_s for request in spread] == sorted(request.at_s for request in spread)


def test_a_cache_keeps_what_pages_go_on_from(sim: ModuleType) -> None:
    cache = sys.modules["cluster_nodes"].Cache(4)
    cache.use([b"a", b"b", b"c"])
    cache.use([b"a", b"d", b"e"])
    assert set(cache.pages) == {b"a", b"b", b"d", b"e"}
    added, dropped = cache.take_changes()
    assert (set(added), dropped) == (set(cache.pages), [])
    cache.use([b"f", b"g", b"h", b"i"])
    added, dropped = cache.take_changes()
    assert set(added) == {b"f", b"g", b"h", b"i"}
    assert set(dropped) == {b"a", b"b", b"d", b"e"}
