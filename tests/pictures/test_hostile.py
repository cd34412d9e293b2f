"""Hostile pictures become pixels, or are refused with a reason; the process for pictures does not die."""

from __future__ import annotations

import sys
from pathlib import Path

import amounts
import pytest

from mlxr.core.errors import InvalidRequest

pytest.importorskip("PIL")
sys.path.append(str(Path(__file__).parents[2] / "bench"))

from test_decoding import decode

from hostile_pictures import make_picture

PICTURES = 500


def test_hostile_pictures_are_seen_or_refused_by_name() -> None:
    errors: dict[tuple[int, str], InvalidRequest] = {}
    count = PICTURES if amounts.is_exhaustive else 20 if amounts.is_thorough else 4
    for index in range(count):
        kind, data = make_picture(index)
        try:
            decode(data)
        except InvalidRequest as error:
            errors[index, kind] = error
    for which, error in errors.items():
        assert error.field == "picture 0", which
        assert "its process" not in error.reason, (which, error.reason)
    assert errors
    assert len(errors) < count or not amounts.is_thorough
