"""Heads into pages and attention over them on the GPU, against the reference: every shape, mixed batches, windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu_cases import REFERENCE, Scene, note_launches, play, relative_error

from mlxr.cache.arena import Arena
from mlxr.kernels.attend import gpu as attend_gpu
from mlxr.kernels.attend import pages
from mlxr.kernels.attend.pages import DEVICES
from mlxr.kernels.context import Context

EXACT = 3e-6
NARROW = 6e-3  # products of 16-bit numbers

DECODE = {
    "plain": Scene(4, 4, 64, 16, (5, 33), (1, 1), kv_type="f32"),
    "grouped": Scene(8, 2, 128, 8, (70, 1, 64), (1, 1, 1), kv_type="f16"),
    "seven heads to one": Scene(14, 2, 64, 24, (40,), (1,), interleaved=True),
    "one key head": Scene(8, 1, 96, 16, (19, 48), (1, 1), rot_dim=48),
    "head of 80, normed": Scene(6, 3, 80, 8, (9, 20), (1, 1), normed=True),
    "head of 256": Scene(4, 1, 256, 16, (50,), (1,), interleaved=True),
    # In f32, GPUs may round a key that lies between two bf16 numbers in different directions.
    "head of 512": Scene(4, 2, 512, 16, (37, 4), (1, 1), rot_dim=512, sunk=True, kv_type="f32"),
    "window": Scene(4, 2, 64, 8, (100, 10), (1, 1), window=37),
    "shares": Scene(4, 2, 64, 32, (1100, 3), (1, 1), kv_type="f32"),
    "shares and window": Scene(4, 2, 128, 40, (1400, 700), (1, 1), window=600, kv_type="f16"),
    "capped": Scene(6, 2, 80, 8, (9, 20), (1, 1), softcap=0.5),
    "sinks": Scene(6, 2, 256, 8, (9, 20), (1, 1), window=11, sunk=True),
    "capped, sinks, shares": Scene(4, 2, 64, 32, (1100, 3), (1, 1), softcap=0.4, sunk=True, kv_type="f32"),
}
TILES = {
    "plain": Scene(4, 4, 64, 16, (5, 33), (1, 1)),
    "grouped": Scene(8, 2, 128, 32, (70, 1, 64), (1, 1, 1), kv_type="f16"),
    "seven heads to one": Scene(14, 2, 64, 16, (40,), (1,), interleaved=True),
    "twenty heads to one": Scene(40, 2, 64, 16, (40, 17), (1, 4)),
    "window": Scene(4, 2, 64, 16, (100, 10), (1, 1), window=37),
    "shares": Scene(4, 2, 64, 32, (1100, 3), (1, 1)),
    "shares and window": Scene(2, 1, 128, 32, (700, 30), (1, 1), window=530, kv_type="f16"),
    "prompts": Scene(4, 2, 64, 16, (40, 7, 21), (40, 7, 21)),
    "chunks of prompts": Scene(6, 2, 128, 16, (70, 33), (20, 33)),
    "many heads, chunks": Scene(8, 8, 64, 16, (70, 90), (20, 37), kv_type="f16"),
    "mixed": Scene(4, 2, 64, 16, (30, 50, 20, 64), (1, 1, 20, 1)),
    "chunks and window": Scene(4, 2, 64, 16, (90, 40), (30, 11), window=21),
    "chunks in shares": Scene(4, 1, 64, 16, (700, 530), (9, 3)),
    "capped": Scene(4, 2, 64, 16, (100, 10, 40), (1, 1, 33), window=37, softcap=0.7),
    "sinks": Scene(14, 2, 64, 16, (40, 12), (1, 9), sunk=True, kv_type="f16"),
    "capped, sinks, shares": Scene(4, 1, 128, 32, (700, 30), (1, 1), window=530, softcap=0.5, sunk=True),
    "chunks, capped, sinks, shares": Scene(4, 1, 64, 16, (700, 530), (9, 3), softcap=0.5, sunk=True),
    "chunks in shares and window": Scene(4, 1, 64, 16, (700, 900), (9, 40), window=560),
}
PANELS = {
    "prompts": Scene(4, 2, 64, 16, (40, 7, 150), (40, 7, 150)),
    "chunks, seven heads to one": Scene(14, 2, 128, 32, (170, 33, 9), (45, 33, 1)),
    "f16, one head to one": Scene(2, 2, 128, 16, (200, 140), (140, 3), kv_type="f16"),
    "window": Scene(4, 1, 64, 16, (330, 40), (70, 11), window=100, kv_type="f16"),
    "head of 256, sinks": Scene(4, 2, 256, 16, (150, 70), (40, 70), sunk=True),
    "capped, sinks, window": Scene(4, 2, 128, 16, (290, 40), (60, 33), window=37, softcap=0.7, sunk=True),
}
BOTH_WAYS = {  # texts of encoders, and pictures in prompts
    "texts": Scene(4, 4, 64, 16, (40, 1, 150, 33), (40, 1, 150, 33), symmetric=True, kv_type="f16"),
    "texts, heads of 32": Scene(4, 4, 32, 16, (40, 1, 90), (40, 1, 90), symmetric=True, kv_type="f16"),
    "texts, groups, window": Scene(6, 2, 64, 16, (40, 9, 150), (40, 9, 150), window=21, symmetric=True),
    "texts, heads of 256": Scene(2, 1, 256, 16, (70, 33), (70, 33), symmetric=True),
    "texts, head of 20": Scene(2, 2, 20, 16, (40, 5), (40, 5), symmetric=True),
    "pictures": Scene(4, 2, 64, 16, (150, 70, 9), (150, 20, 1), picture=(20, 65)),
    "pictures, window, heads of 256": Scene(4, 2, 256, 16, (150, 70), (130, 60), window=33, picture=(40, 70)),
    "pictures, gathered": Scene(4, 2, 96, 16, (150, 70), (130, 20), window=33, picture=(55, 66), kv_type="f32"),
}
MIXED = {
    "capped prefill": Scene(4, 2, 96, 8, (40, 12), (40, 12), softcap=0.5),
    "capped chunk, window": Scene(4, 2, 96, 16, (90, 40), (30, 1), window=21, softcap=0.5, sunk=True, kv_type="f32"),
    "prefill, sinks": Scene(6, 2, 20, 16, (33,), (33,), rot_dim=10, sunk=True),
    "chunk, window, sinks": Scene(4, 2, 96, 16, (90, 40), (30, 11), window=21, sunk=True, kv_type="f32"),
    "prefill": Scene(4, 2, 64, 8, (40,), (40,)),
    "chunk": Scene(4, 2, 64, 8, (70, 33), (20, 33)),
    "mixed": Scene(4, 2, 96, 16, (30, 50, 20, 64), (1, 1, 20, 1)),
    "window": Scene(4, 2, 64, 16, (90, 40), (30, 1), window=21, kv_type="f32"),
    "head of 512": Scene(4, 2, 512, 16, (37, 4), (1, 1), rot_dim=512, sunk=True),
    "odd head": Scene(4, 2, 20, 16, (30, 12), (1, 12), rot_dim=10),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", TILES)
def test_tiles_read_their_pages(gpu: Context, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(attend_gpu, "MAX_TILED_PAIRS", 2**40)
    gpu.ledger.reset()
    result = play(gpu, TILES[name])
    assert relative_error(result, play(REFERENCE, TILES[name])) < (6e-4 if TILES[name].kv_type == "f16" else NARROW)
    if takes_tiles(gpu):
        assert gpu.ledger.snapshot().copied_bytes == 0


@pytest.mark.parametrize("name", ["grouped", "shares and window", "mixed"])
def test_many_sequences_take_small_threadgroups(gpu: Context, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    few, many = pages.choose_simd_groups(128, 512), pages.choose_simd_groups(128, 513)
    assert (few, many) == (2, 1)
    monkeypatch.setattr(pages, "MANY_GROUPS", 0)
    assert relative_error(play(gpu, TILES[name]), play(REFERENCE, TILES[name])) < NARROW


@pytest.mark.smoke
@pytest.mark.parametrize("name", PANELS)
def test_panels_read_their_pages(gpu: Context, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(attend_gpu, "MAX_TILED_PAIRS", 0)
    gpu.ledger.reset()
    result = play(gpu, PANELS[name])
    assert relative_error(result, play(REFERENCE, PANELS[name])) < (6e-4 if PANELS[name].kv_type == "f16" else NARROW)
    if takes_panels(gpu, PANELS[name]):
        assert gpu.ledger.snapshot().copied_bytes == 0


@pytest.mark.parametrize("tiled_pairs", [0, 2**40])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_what_follows_is_seen(gpu: Context, monkeypatch: pytest.MonkeyPatch, name: str, tiled_pairs: int) -> None:
    """Panels and tiles both see it, and copy nothing if they can take the heads."""
    scene = BOTH_WAYS[name]
    monkeypatch.setattr(attend_gpu, "MAX_TILED_PAIRS", tiled_pairs)
    gpu.ledger.reset()
    assert relative_error(play(gpu, scene), play(REFERENCE, scene)) < NARROW
    if scene.symmetric and scene.head_dim in (32, 64) and takes_tiles(gpu):
        assert gpu.ledger.snapshot().copied_bytes == 0


@pytest.mark.parametrize("by_panels", [True, False])
def test_long_prompts_beside_short_ones(gpu: Context, monkeypatch: pytest.MonkeyPatch, by_panels: bool) -> None:
    """One launch takes a few queries beside many; very many are gathered, and without panels all long prompts are."""
    monkeypatch.setattr(attend_gpu, "MAX_TILED_PAIRS", 128)
    monkeypatch.setattr(attend_gpu, "MAX_PANEL_PAIRS", 650)
    if not by_panels:
        monkeypatch.setattr(attend_gpu, "takes_panels", lambda *_: False)
    scene = Scene(4, 2, 64, 16, (30, 9, 40, 60, 12, 1), (30, 9, 5, 17, 12, 1))
    gpu.ledger.reset()
    launched = note_launches(gpu, monkeypatch)
    assert relative_error(play(gpu, scene), play(REFERENCE, scene)) < NARROW
    if takes_panels(gpu, scene):
        kinds = [name for name in launched if name.startswith("attend_")]
        lone = ["attend_gather", "attend_tiles", "attend_gather", "attend_gather", "attend_tiles"]
        wanted = ["attend_panels", "attend_gather", "attend_panels"] if by_panels else lone
        assert kinds[-len(wanted) - 1 :] == [*wanted, "attend_stream"]


def test_lengths_are_planned_in_steps(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_gpu, "MAX_TILED_PAIRS", 0)
    shapes, mx = set(), gpu.gpu.mx
    attention = mx.fast.scaled_dot_product_attention

    def watch(q: object, keys: object, *rest: object, **named: object) -> object:
        shapes.add((q.shape[2], keys.shape[2]))  # type: ignore[attr-defined]
        return attention(q, keys, *rest, **named)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watch)
    for context, queries in ((300, 20), (310, 35), (512, 256), (290, 40)):  # the last begins before 256
        scene = Scene(2, 1, 64, 16, (context,), (queries,), kv_type="f32")
        assert relative_error(play(gpu, scene), play(REFERENCE, scene)) < NARROW
    steps = attend_gpu.LENGTH_STEP
    assert {length % steps for shape in shapes for length in shape} == {0}
    assert shapes == {(256, 512), (512, 512), (256, 256)}


def takes_panels(ctx: Context, scene: Scene) -> bool:
    """Return True if prompts of a scene read their pages by matrix units that read the threadgroup's memory."""
    pool: Any = Arena(ctx, 1, 1, scene.kv_heads, scene.page_size, scene.head_dim, scene.kv_type).k_pools[0]
    return pages.takes_panels(ctx, pool)


def takes_tiles(ctx: Context) -> bool:
    """Return True if the device runs the kernel of matrix units."""
    return ctx.device in DEVICES


@pytest.mark.smoke
@pytest.mark.parametrize("name", DECODE)
def test_single_tokens_read_their_pages(gpu: Context, name: str) -> None:
    scene = DECODE[name]
    gpu.ledger.reset()
    result = play(gpu, scene)
    filled = gpu.ledger.snapshot().copied_bytes
    assert relative_error(result, play(REFERENCE, scene)) < EXACT
    gpu.ledger.reset()
    play(gpu, Scene(4, 4, 64, 16, (1, 1), (1, 1)))
    assert gpu.ledger.snapshot().copied_bytes == 0
    # the batch that filled the cache gathered its own pages
    assert filled > 0 or takes_panels(gpu, scene) or gpu.gpu.has_squares


def allow(ctx: Context) -> float:
    """Return the error allowed for prompts, which are attended in 16 bits on some devices and in f32 on others."""
    return NARROW if ctx.gpu.narrow or ctx.gpu.has_squares else EXACT


@pytest.mark.parametrize("name", MIXED)
def test_runs_of_queries(gpu: Context, name: str) -> None:
    scene = MIXED[name]
    assert relative_error(play(gpu, scene), play(REFERENCE, scene)) < allow(gpu)


@pytest.mark.parametrize("change", [{"softcap": 0.5}, {"softcap": None}, {"sunk": False}])
@pytest.mark.parametrize("scene", [DECODE["capped, sinks, shares"], TILES["capped, sinks, shares"]])
def test_a_changed_cap_or_sink_is_noticed(gpu: Context, scene: Scene, change: dict[str, Any]) -> None:
    other = replace(scene, softcap=0.45)
    assert relative_error(play(gpu, other), play(REFERENCE, replace(other, **change))) > 2 * NARROW


def test_capped_scores_of_long_prompts_are_made_a_few_queries_at_a_time(
    gpu: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_gpu, "MAX_SCORES", 4 * 256 * 7)
    for name in ("capped prefill", "capped chunk, window"):
        assert relative_error(play(gpu, MIXED[name]), play(REFERENCE, MIXED[name])) < allow(gpu)


@pytest.mark.smoke
def test_slots_and_pages_outside_the_pools_are_refused(gpu: Context) -> None:
    with pytest.raises(ValueError, match="slots"):
        play(gpu, _Broken(4, 2, 64, 16, (20,), (1,), what="slots"))
    with pytest.raises(ValueError, match="page_table"):
        play(gpu, _Broken(4, 2, 64, 16, (20,), (1,), what="page_table"))


class _Broken(Scene):
    """A scene whose batches name pages and slots that do not exist."""

    def __init__(self, *arguments: object, what: str) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        object.__setattr__(self, "what", what)

    def batches(self):  # type: ignore[no-untyped-def]
        batches = super().batches()
        for batch in batches:
            getattr(batch, self.what)[...] = 10_000  # type: ignore[attr-defined]
        return batches
