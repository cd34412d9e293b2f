"""`sample` on a GPU: only ids and log-probabilities come back to the host.

The kernel knows temperature, top_k, top_p and min_p; sums are in f32. Rows with masks, penalties or biases, or of which
best tokens are wanted, are computed on the host, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from mlxr.core.errors import DeviceError
from mlxr.core.types import SamplingParams
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.mlx import Mlx
from mlxr.kernels.gpu.recording import Buffer
from mlxr.kernels.gpu.steps import DRAW, NUMBERS, launch_draw, split_drawn
from mlxr.kernels.sample import SampleResult, SampleRow, drops_likeliest, sample_one_place, takes_likeliest
from mlxr.kernels.tensor import DeviceArray, FloatArray

KERNELS = (DRAW,)
Numbers = npt.NDArray[np.float32]
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def sample(ctx: Context, logits: DeviceArray, rows: Sequence[SampleRow], goes_on: bool) -> list[SampleResult] | None:
    """Choose the token of each row; None if `takes_rows` is False. If it `goes_on`, the next step may begin."""
    if isinstance(logits, np.ndarray) or not takes_rows(ctx, rows):
        return None
    gpu, numbers = ctx.gpu, _collect_numbers(rows)
    if gpu.steps.has(logits):
        ids, logprobs = gpu.steps.draw(numbers, _collect_following(rows, numbers) if goes_on else ...)
    elif gpu.launcher is not None:
        drawn = launch_draw(gpu.mx, gpu.launcher, logits, None if numbers is None else gpu.mx.array(numbers))
        ids, logprobs = split_drawn(np.array(drawn), len(rows))
    else:
        largest = gpu.watch.run_mlx("sample", "greedy", lambda: _take_largest(gpu.mx, logits), logits)
        gpu.mx.eval(*largest)
        ids, logprobs = map(np.asarray, largest)
    return _list_results(gpu, ids, logprobs)


def sample_chain(ctx: Context, logits: FloatArray, places: int) -> list[list[SampleResult]]:
    """Return the likeliest token of each row, and those of the steps that follow on these; see `Steps.draw_chain`.

    There is only one place if `logits` are not those of the recorded step that runs.
    """
    if places < 2 or not ctx.gpu.steps.has(logits):
        return sample_one_place(ctx, logits, places)
    return [_list_results(ctx.gpu, ids, logprobs) for ids, logprobs in ctx.gpu.steps.draw_chain(places)]


def _list_results(gpu: Gpu, ids: npt.NDArray[np.int32], logprobs: Numbers) -> list[SampleResult]:
    """Return a result for each row; raises ValueError if logits were not numbers, DeviceError if another GPU failed."""
    broken = np.flatnonzero(~np.isfinite(logprobs))
    if broken.size and gpu.ranks is not None and gpu.ranks.has_failed:
        raise DeviceError("another GPU of the model ended")
    if broken.size:
        refuse("sample", f"logits of row {broken[0]}", "not all numbers, or none of them finite", "numbers")
    return [SampleResult(i, p, []) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _take_largest(mx: Mlx, logits: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    wide = logits.astype(mx.float32)
    return mx.argmax(wide, axis=1), mx.max(wide, axis=1) - mx.logsumexp(wide, axis=1)


def takes_rows(ctx: Context, rows: Sequence[SampleRow]) -> bool:
    """Return True if the kernel can draw for all rows: from unchanged logits, with the rules that it knows."""
    draws = ctx.gpu.launcher is not None
    return all(_is_plain(row) and (draws or row.params.temperature == 0) for row in rows)


def fetch_logits(ctx: Context, logits: DeviceArray) -> FloatArray:
    """Return the logits on the host, as f32."""
    logits = settle(logits)
    if isinstance(logits, Buffer):
        return np.asarray(logits)
    return np.ascontiguousarray(np.asarray(logits.astype(ctx.gpu.mx.float32)))


def _is_plain(row: SampleRow) -> bool:
    """Return True if the row needs nothing but temperature, top_k, top_p and min_p."""
    params = row.params
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    unchanged = (penalties == (1.0, 0.0, 0.0) or not row.history_ids.shape[0]) and not row.dry_ids.shape[0]
    unchanged = unchanged and row.mask is None and not row.top_logprobs and not row.bias_ids.shape[0]
    return unchanged and (takes_likeliest(params) or not _has_other_rules(params))


def _has_other_rules(params: SamplingParams) -> bool:
    comes_late = params.temperature_last and params.temperature != 1 and (params.top_p < 1 or params.min_p > 0)
    others = params.mirostat or params.dynatemp_range > 0 or params.top_n_sigma > 0 or drops_likeliest(params)
    return bool(comes_late or others)


def _collect_numbers(rows: Sequence[SampleRow]) -> Numbers | None:
    """Return the numbers by which the kernel draws; None if it takes the largest logits."""
    if all(row.params.temperature == 0 for row in rows):
        return None
    numbers = np.zeros((len(rows), NUMBERS), np.float32)
    numbers[:, :5] = [
        (row.params.temperature, row.params.top_p, row.params.min_p, row.uniform, min(row.params.top_k, 1 << 24))
        for row in rows
    ]
    np.minimum(numbers[:, 3], _BELOW_ONE, out=numbers[:, 3])
    return numbers


def _collect_following(rows: Sequence[SampleRow], numbers: Numbers | None) -> Numbers | EllipsisType | None:
    """Return the same for the tokens after these; ... if a row does not know its next random number."""
    if numbers is None:
        return None
    uniforms = [0.0 if row.params.temperature == 0 else row.following_uniform for row in rows]
    if None in uniforms:
        return ...
    following = numbers.copy()
    following[:, 3] = np.minimum(np.array(uniforms, np.float32), _BELOW_ONE)
    return following
