"""The number of pictures that a GPU encodes at once follows from its kind and its free memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mlxr.engine.pictures import TOGETHER_TOKENS
from mlxr.service.opening import _choose_together


@dataclass
class FakeTower:
    """A tower whose work is a thousand bytes a token."""

    def count_work_bytes(self, tokens: int, *, on_gpu: bool) -> int:
        assert on_gpu
        return 1000 * tokens


@pytest.mark.parametrize(
    ("device", "free_bytes", "place"),
    [("cuda", 16 * 4096 * 1000, 0), ("cuda", 16 * 4096 * 1000 - 16, 1), ("cuda", None, 1), ("metal", 1 << 40, 1)],
)
def test_many_pictures_at_once_need_room(device: str, free_bytes: int | None, place: int) -> None:
    tower: Any = FakeTower()
    assert _choose_together(tower, device, free_bytes) == TOGETHER_TOKENS[place]
