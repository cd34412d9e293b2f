"""Attention with capped scores as MLX's operations: its own attention cannot cap them.

Scores are made in f32, some queries at a time, so that their memory is bounded.
"""

from __future__ import annotations

from typing import Any

from mlxr.kernels.attend.scores import Scores

MAX_SCORES = 2**24  # at a time: 64 MiB


def attend_composed(mx: Any, q: Any, keys: Any, values: Any, mask: Any, scores: Scores, sinks: Any) -> Any:
    """Queries (heads, queries, head_dim), keys and values (kv_heads, positions, head_dim); the shape of the queries.

    `mask` (queries, positions) is added to capped scores, or is "causal": the last query sees all positions. `sinks`
    are those of the scores on the device, or None.
    """
    (heads, queries, head_dim), (kv_heads, positions, _) = q.shape, keys.shape
    group = heads // kv_heads
    assert scores.softcap is not None
    grouped = (q * (scores.scale / scores.softcap)).astype(mx.float32).reshape(kv_heads, group, queries, head_dim)
    turned, values = keys.astype(mx.float32)[:, None].swapaxes(2, 3), values.astype(mx.float32)[:, None]
    step, parts = max(1, MAX_SCORES // (heads * positions)), []
    for first in range(0, queries, step):
        last = min(first + step, queries)
        capped = scores.softcap * mx.tanh(grouped[:, :, first:last] @ turned)
        if isinstance(mask, str):
            seen = mx.arange(positions)[None] <= mx.arange(first, last)[:, None] + (positions - queries)
            capped = mx.where(seen, capped, mx.array(-mx.inf))
        else:
            capped = capped + mask[first:last]
        if sinks is not None:
            column = mx.broadcast_to(sinks.reshape(kv_heads, group, 1, 1), (kv_heads, group, last - first, 1))
            capped = mx.concatenate([capped, column], axis=-1)
        weights = mx.softmax(capped, axis=-1, precise=True)[..., :positions]
        parts.append((weights @ values).reshape(heads, last - first, head_dim))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
