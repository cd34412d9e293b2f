"""A model that fails to open leaves nothing open: no file, no thread, no other process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxr import llm
from mlxr.core.errors import MlxrError
from mlxr.core.settings import Settings
from mlxr.loading import ASSETS
from mlxr.service import model_pool, opening, session, tensor_parallel
from mlxr.service.opening import open_model

DEMO = str(ASSETS / "demo.gguf")
SETTINGS = Settings(threads=1, arena_bytes=2**22)


class Group:
    """A stand-in for the processes of other GPUs, which can be closed."""

    failure = None
    free_bytes = None

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """The group of every model that `_load` opens."""
    made, load = Group(), opening._load
    monkeypatch.setattr(opening, "_load", lambda *arguments: replace(load(*arguments), group=made))
    return made


def fail(*_: Any, **__: Any) -> Any:
    raise MlxrError("it failed")


def list_engines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mlxr-engine"}


def open_llm() -> object:
    return llm.LLM(DEMO, threads=1, arena_bytes=2**22)


def open_session() -> object:
    return session.Session(open_model(DEMO, SETTINGS), SETTINGS)


@pytest.mark.parametrize("open_one", [open_llm, open_session])
@pytest.mark.parametrize("part", ["SessionAdapters", "build_engine", "warm_up", "PreparingThreads", "Preparation"])
def test_a_model_that_cannot_be_opened_is_closed(
    part: str, open_one: Callable[[], object], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = list_engines()  # those of other tests may end meanwhile
    monkeypatch.setattr(session, part, fail)
    with pytest.raises(MlxrError, match="it failed"):
        open_one()
    assert group.closed == 1
    assert list_engines() <= engines


def test_an_adapter_that_is_none_closes_the_model(group: Group, tmp_path: Path) -> None:
    with pytest.raises(MlxrError):
        llm.LLM(DEMO, threads=1, arena_bytes=2**22, adapter=tmp_path)
    assert group.closed == 1


@pytest.mark.parametrize("part", ["find_draft_path", "_add_head"])
def test_a_draft_model_that_cannot_be_had_closes_the_model(
    part: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, part, fail)
    path = ASSETS / "demo-draft.gguf"
    with pytest.raises(MlxrError, match="it failed"):
        open_model(path, SETTINGS, needs_draft=True)
    assert group.closed == 1


def test_a_template_that_is_none_closes_the_model(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "make_template", fail)
    monkeypatch.setattr(model_pool, "find_own_adapter", lambda *_: None)
    states = {"path": Path(DEMO), "template": "x", "short_name": "demo", "system": None, "tower": None}
    record: Any = type("Record", (), states)
    opens: list[Callable[[], object]] = [
        lambda: opening.open_record(record, SETTINGS),
        lambda: model_pool.open_session(record, SETTINGS, 2**22),
    ]
    for number, open_again in enumerate(opens):
        with pytest.raises(MlxrError, match="it failed"):
            open_again()
        assert group.closed == number + 1


def test_ranks_that_fail_to_load_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Ranks(Group):
        ctx = None
        wait_ready = fail

        def close(self) -> None:
            closed.append("ranks")

    loaded: Any = type("Loaded", (), {"close": lambda self: closed.append("model")})()
    monkeypatch.setattr(opening, "start_group", lambda *_: Ranks())
    monkeypatch.setattr(opening, "load", lambda *_, **__: loaded)
    with pytest.raises(MlxrError, match="it failed"):
        open_model(DEMO, replace(SETTINGS, gpus=2))
    assert sorted(closed) == ["model", "ranks"]


def test_ranks_that_were_started_end_when_another_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []

    def start(rank: int, *_: object) -> Any:
        if rank == 2:
            raise OSError("no more processes")
        return type("Process", (), {"rank": rank, "stop": lambda self: stopped.append(rank)})()

    monkeypatch.setattr(tensor_parallel, "open_first", lambda *_: None)
    monkeypatch.setattr(tensor_parallel, "RankProcess", start)
    with pytest.raises(MlxrError):
        tensor_parallel.start_group(Path(DEMO), "emulated", replace(SETTINGS, gpus=3))
    assert stopped == [1]
