"""An index of prefixes tells which names came and went between two readings."""

from __future__ import annotations

import pytest

from mlxr.cache import prefix
from mlxr.cache.prefix import PrefixIndex


def test_what_came_and_went_in_between_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(linked=False)
    index.remove(index.add(b"unseen", b"", 9, 0))
    assert index.changes is None
    index.changes = {}
    kept = index.add(b"kept", b"", 0, 0)
    index.remove(index.add(b"gone", b"", 1, 0))
    assert index.changes == {b"kept": True}
    index.changes = {}
    index.remove(kept)
    assert index.changes == {b"kept": False}
    index.add(b"kept", b"", 0, 0)
    assert index.changes == {}
    monkeypatch.setattr(prefix, "MAX_CHANGES", 1)
    index.add(b"a", b"", 1, 0)
    index.add(b"b", b"", 2, 0)
    assert index.changes is None
