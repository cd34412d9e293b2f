"""Commands report recurrent layers: the bytes of a slot, of a snapshot, and of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from mlxr.core.settings import Settings
from mlxr.loading import load
from mlxr.models.components import ShortConv
from mlxr.service.opening import build_engine

Run = Callable[..., str]
LAYERS, HIDDEN, KV_HEADS, HEAD_DIM = 3, 256, 2, 64
SLOT_BYTES = 2 * 2 * HIDDEN * 4  # two layers keep two columns in f32
PAGE_BYTES = 2 * KV_HEADS * HEAD_DIM * 32 * 2  # one layer keeps keys and values of 32 tokens in bf16


@pytest.fixture(scope="module")
def hybrid_gguf(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic Q4_K_M file of two short convolutions and one layer of attention."""
    path = tmp_path_factory.mktemp("models") / "tiny-lfm2.gguf"
    shape = synthetic.SHAPES["lfm2-1.2b"]
    changes = {**shape.changes, "recurrence": ShortConv(HIDDEN, 3), "recurrent_layers": (True, False, True)}
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "kv_heads": KV_HEADS, "ffn": 512}
    tiny = replace(shape, **sizes, vocab_size=512, context_length=512, changes=changes)
    synthetic.write_model(path, tiny, "q4_k_m", 0, lambda *_: None)
    return path


def test_show_tells_what_a_conversation_takes(hybrid_gguf: Path, gguf: Path, mlxr: Run) -> None:
    states = json.loads(mlxr("show", hybrid_gguf, "--json"))["states"]
    assert states == {
        "tokens": 512,
        "page_bytes": 16 * PAGE_BYTES,
        "slot_bytes": SLOT_BYTES,
        "live_slots": 2,
        "snapshots": 16,
        "cached_bytes": 16 * (PAGE_BYTES + SLOT_BYTES),
    }
    text = mlxr("show", hybrid_gguf)
    assert "4.0 KiB each: 2 slots of one that runs, and every snapshot" in text
    assert "of 512 tokens: 256.0 KiB of pages and room for 16 snapshots of 4.0 KiB, 320.0 KiB in all" in text
    assert json.loads(mlxr("show", gguf, "--json"))["states"] is None
    assert "snapshot" not in mlxr("show", gguf)


def test_validate_tells_the_same(hybrid_gguf: Path, mlxr: Run) -> None:
    sizes = ("--threads", 1, "--snapshot-percent", 10)
    states = json.loads(mlxr("validate", hybrid_gguf, *sizes, "--json"))["cache"]["states"]
    assert states["page_bytes"] == 16 * PAGE_BYTES
    assert states["snapshots"] == 6  # one for every three pages, each of which takes four times as much
    assert "room for 6 snapshots" in mlxr("validate", hybrid_gguf, *sizes)


def test_the_cache_is_made_of_what_is_told(hybrid_gguf: Path, mlxr: Run) -> None:
    states = json.loads(mlxr("show", hybrid_gguf, "--json"))["states"]
    with load(hybrid_gguf) as loaded:
        engine = build_engine(loaded, Settings(arena_bytes=1 << 20))
        pages, slots = engine.stats().cache.groups
        engine.close()
    assert slots.page_bytes == states["slot_bytes"]
    assert 16 * pages.page_bytes == states["page_bytes"]
