"""Heads on the GPU: their norms, the source of their values, and rotation by their positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_cases import REFERENCE, Scene, play, random_floats, relative_error

from mlxr.cache.arena import Arena
from mlxr.kernels.context import Context
from mlxr.kernels.rope import QueryTemperature
from mlxr.kernels.rope_and_write_kv import rope_and_write_kv

EXACT = 3e-6
PLAIN = Scene(6, 3, 80, 8, (9, 20, 31), (1, 1, 17), kv_type="f32")
TEMPERED = QueryTemperature(0.6, 7, 1)
SCENES = {
    "joint norms": replace(PLAIN, normed=True, head_norms="joint"),
    "joint norms of wide heads": Scene(8, 1, 256, 8, (9,), (1,), normed=True, head_norms="joint", interleaved=True),
    "values normed": replace(PLAIN, normed=True, values_normed=True),
    "joint norms, values normed": replace(PLAIN, normed=True, head_norms="joint", values_normed=True, rot_dim=40),
    "layer norms": replace(PLAIN, normed=True, head_norms="layer"),
    "layer norms, values normed": replace(PLAIN, normed=True, head_norms="layer", values_normed=True, interleaved=True),
    "turned norms": replace(PLAIN, normed=True, head_norms="turned"),
    "turned norms of neighbours": replace(PLAIN, normed=True, head_norms="turned", rot_dim=40, interleaved=True),
    "turned norms, values are keys": replace(
        PLAIN, projected="qk", normed=True, head_norms="turned", values_normed=True
    ),
    "values are keys": replace(PLAIN, projected="qk"),
    "values are keys, normed": replace(PLAIN, projected="qk", normed=True, values_normed=True, interleaved=True),
    "values are keys, keys normed": replace(PLAIN, projected="qk", normed=True, rot_dim=20),
    "no rotation": replace(PLAIN, rot_dim=-1, normed=True),
    "temperature": replace(PLAIN, temperature=TEMPERED),
    "temperature alone": replace(PLAIN, rot_dim=-1, temperature=TEMPERED),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCENES)
def test_heads_are_those_of_the_reference_and_no_others(gpu: Context, name: str) -> None:
    allowed = 6e-3 if gpu.gpu.narrow else EXACT  # MLX attends to the prompt
    result = play(gpu, SCENES[name])
    assert relative_error(result, play(REFERENCE, SCENES[name])) < allowed
    for other in SCENES.values():
        fits = other.heads == SCENES[name].heads and other.projected == SCENES[name].projected
        if fits and other is not SCENES[name]:
            assert relative_error(result, play(REFERENCE, other)) > 0.01


@pytest.mark.parametrize(
    "name", ["joint norms, values normed", "layer norms", "values are keys, normed", "temperature alone"]
)
def test_heads_stay_within_their_arrays(sanitized: Context, name: str) -> None:
    assert relative_error(play(sanitized, SCENES[name]), play(REFERENCE, SCENES[name])) < EXACT


@pytest.mark.parametrize("normed", [False, True])
def test_queries_alone_write_nothing(gpu: Context, normed: bool) -> None:
    scene = replace(PLAIN, projected="q", normed=normed, temperature=TEMPERED)
    batch, queries = scene.batches()[-1], random_floats(1, 19, 6 * 80)

    def run(ctx: Context, array: Any) -> Any:
        arena = Arena(ctx, 1, 12, 3, 8, 80, "f32")
        pools = arena.k_pools[0], arena.v_pools[0]
        q = rope_and_write_kv(ctx, array, 6, batch, scene.table(), *pools, scene.norms(), projected="q")
        if ctx.gpu is not None:
            ctx.gpu.submit(q)
        for pool in pools:
            assert not np.asarray(pool if ctx.gpu is None else pool.array).any()
        return np.asarray(q)

    assert relative_error(run(gpu, gpu.gpu.mx.array(queries)), run(REFERENCE, queries)) < EXACT
