"""The other ranks of a model, as the first one sees them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mlxr.core.errors import DeviceError
from mlxr.engine.tensor_parallel import Kind, Ranks


@dataclass
class Dying:
    """A process that was killed: nothing can be sent to it, and its exit status is known a moment later."""

    rank: int = 1
    is_sent: threading.Event = field(default_factory=threading.Event)

    @property
    def link(self) -> Any:
        return self

    def sendall(self, frame: bytes) -> None:
        self.is_sent.set()
        raise BrokenPipeError

    def wait(self) -> str:
        self.is_sent.wait(60)
        return "signal 9"

    def stop(self) -> None:
        """Nothing to stop: the process has ended."""


def test_who_cannot_be_told_anything_is_said_to_have_ended() -> None:
    kernels = SimpleNamespace(has_failed=False, give_up=lambda: None)
    gpu = SimpleNamespace(own_ranks=kernels, steps=SimpleNamespace(listener=None))
    ranks = Ranks(SimpleNamespace(gpu=gpu), [Dying()])  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"the process of GPU 1 ended \(signal 9\)"):
        ranks.tell(Kind.DRAW, [])
