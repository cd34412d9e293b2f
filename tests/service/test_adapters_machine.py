"""Adapters of an open model: memory counts adapters that answers still use, and no adapter in use is unloaded."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxr.core.errors import AdaptersBusy, InvalidRequest
from mlxr.loading import Adapter
from mlxr.models.adapter import AdapterPart
from mlxr.service.adapters import Adapters

PART_BYTES = 4 * 4 * 2  # a and b of 4 numbers each


def read(path: str | Path) -> Adapter:
    """Return an adapter with as many parts as the digit at the end of its file's name."""
    name = Path(path).name
    updates: Any = SimpleNamespace(nbytes=int(name[-1]) * PART_BYTES)
    return Adapter(name, name.encode(), (AdapterPart(updates),))


def measure(path: str | Path) -> int:
    return int(Path(path).name[-1]) * PART_BYTES


def make(parts: int) -> Adapters:
    return Adapters(read, parts * PART_BYTES, measure)


def test_an_adapter_in_use_is_not_unloaded() -> None:
    adapters = make(4)
    adapters.load("a1")
    held = adapters.find("a1")
    with pytest.raises(InvalidRequest, match="a1 is in use"):
        adapters.unload("a1")
    assert adapters.find("a1") is held
    del held
    adapters.unload("a1")
    assert (adapters.names, adapters.held_bytes) == ([], 0)


def test_one_that_is_gone_counts_until_nobody_has_it() -> None:
    adapters, gone = make(2), []
    held = adapters.provide("one", Path("a2"), "1")
    adapters.release("one", lambda: gone.append("one"))
    assert (adapters.names, adapters.held_bytes, gone) == ([], 2 * PART_BYTES, [])
    with pytest.raises(AdaptersBusy, match="try again"):
        adapters.provide("two", Path("b1"), "1")
    del held
    assert (adapters.held_bytes, gone) == (0, ["one"])
    adapters.provide("two", Path("b1"), "1")
    adapters.release("two", lambda: gone.append("two"))
    adapters.release("nobody", lambda: gone.append("nobody"))
    assert gone == ["one", "two", "nobody"]


def test_several_are_added_in_their_order_and_all_of_them_are_in_use() -> None:
    adapters = make(4)
    adapters.load("a1")
    adapters.load("b2")
    one, other = (adapters.choose(shares) for shares in ({"a1": 0.5, "b2": 1.0}, {"b2": 1.0, "a1": 0.5}))
    assert one is not None
    assert other is not None
    assert ([part.factor for part in one.parts], [part.factor for part in other.parts]) == ([0.5, 1.0], [1.0, 0.5])
    assert len({one.digest, other.digest, adapters.find("a1").digest, adapters.find("b2").digest}) == 4
    assert adapters.choose({}) is None
    with pytest.raises(InvalidRequest, match="b2 is in use"):
        adapters.unload("b2")
    del one, other
    adapters.unload("b2")
    for wrong in (float("nan"), 1e7, "1", True):
        with pytest.raises(InvalidRequest, match="must have a number"):
            adapters.choose({"a1": wrong})  # type: ignore[dict-item]


def test_another_version_takes_the_place_of_the_first() -> None:
    adapters = make(4)
    first = adapters.provide("one", Path("a1"), "1")
    second = adapters.provide("one", Path("b2"), "2")
    assert (first.digest, second.digest) == (b"a1", b"b2")
    assert adapters.held_bytes == 3 * PART_BYTES
    del first
    assert adapters.held_bytes == 2 * PART_BYTES
    assert adapters.peek("one", "1") is None


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_hold_what_is_counted(seed: int) -> None:
    """Requests begin and end, adapters are loaded, replaced and unloaded: the counted bytes are those in use."""
    chance, adapters = random.Random(seed), make(6)
    answers: list[Adapter] = []
    pinned: set[str] = set()
    leaving: dict[str, int] = {}
    for _ in range(200):
        name = chance.choice("abcde") + chance.choice("123")
        match chance.randrange(6):
            case 0 | 1:
                try:
                    answers.append(adapters.provide(name, Path(name), str(chance.randrange(2))))
                except InvalidRequest as error:
                    assert isinstance(error, AdaptersBusy) or pinned  # noqa: PT017
            case 2 if f"p{name}" not in adapters.names:
                try:
                    pinned.add(adapters.load(f"p{name}"))
                except InvalidRequest:
                    assert adapters.held_bytes > 3 * PART_BYTES
            case 3 if adapters.names:
                name = chance.choice(adapters.names)
                in_use = any(one.name == name and one is adapters.find(name) for one in answers)
                try:
                    adapters.unload(name)
                    assert not in_use
                    pinned.discard(name)
                except InvalidRequest:
                    assert in_use
            case 4:
                leaving[name] = leaving.get(name, 0) + 1

                def on_gone(name: str = name) -> None:
                    leaving[name] -= 1

                adapters.release(name, on_gone)
                pinned.discard(name)
            case _ if answers:
                answers.pop(chance.randrange(len(answers)))
        check(adapters, answers, pinned)
    answers.clear()
    assert all(count == 0 for count in leaving.values())


def check(adapters: Adapters, answers: list[Adapter], pinned: set[str]) -> None:
    """Check that all that is counted is alive, within its bound, and that pinned adapters are still there."""
    uses = {use.name: use for use in adapters.measure().uses}
    sources = {id(source): source for answer in answers for source in answer.sources}
    named = sum(use.size_bytes for use in uses.values())
    unnamed = [one for one in sources.values() if all(one is not adapters.find(name).sources[0] for name in uses)]
    assert adapters.held_bytes == named + sum(one.nbytes for one in unnamed) <= 6 * PART_BYTES
    assert pinned <= set(uses)
    for name, use in uses.items():
        assert use.is_in_use == any(answer is adapters.find(name) for answer in answers)


def test_nothing_waits_for_the_collector() -> None:
    gc.disable()
    try:
        adapters = make(2)
        for number in range(50):
            adapters.provide(f"n{number}", Path("a2"), "1")
            assert adapters.held_bytes == 2 * PART_BYTES
    finally:
        gc.enable()
