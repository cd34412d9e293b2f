"""Reference of `sample`: one row after another in float64, the rules that leave candidates out, and the draw.

Candidates are logits in falling order; a rule takes those that are left and returns those that it leaves, in the same
order. Sources: typical_p, Meister et al. 2022; Mirostat, Basu et al. 2021, version 2 as in its authors' code;
top_n_sigma, Tang et al. 2024; min_p, Nguyen et al. 2024; order and details as in llama.cpp.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.kernels.checks import refuse
from mlxr.kernels.context import Context
from mlxr.kernels.sample import NO_TOKEN, SampleResult, SampleRow, takes_likeliest
from mlxr.kernels.tensor import FloatArray

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
MIROSTAT_CANDIDATES = 100  # from which the first version estimates the shape of the distribution
# A bias of +inf means "this token": as large as float32 goes, so that the softmax stays defined.
_LARGEST = float(np.finfo(np.float32).max)


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """Choose the token of each row by itself."""
    return [_sample_row(index, logits[index], row) for index, row in enumerate(rows)]


def _sample_row(index: int, logits: FloatArray, row: SampleRow) -> SampleResult:
    broken = np.flatnonzero(np.isnan(logits))
    if broken.size:
        refuse("sample", f"logits of row {index}", f"not a number at id {broken[0]}", "numbers")
    adjusted = _adjust(logits, row)
    if not np.isfinite(adjusted.max()):
        return SampleResult(NO_TOKEN, -math.inf, [])
    order = np.lexsort((np.arange(adjusted.shape[0]), -adjusted))  # falling logit, then rising id
    logprobs = adjusted - adjusted.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    possible = order[np.isfinite(adjusted[order])]
    place, surprise = choose(adjusted[possible], row)
    token_id = int(possible[place])
    top = [TokenLogprob(int(i), float(logprobs[i])) for i in order[: row.top_logprobs]]
    return SampleResult(token_id, float(logprobs[token_id]), top, surprise)


def _adjust(logits: FloatArray, row: SampleRow) -> Doubles:
    """Mask, logit bias, then penalties; a bias of +inf on a logit of -inf leaves the token impossible."""
    adjusted, params = logits.astype(np.float64), row.params
    if row.mask is not None:
        allowed = np.unpackbits(row.mask.astype("<u4").view(np.uint8), count=adjusted.shape[0], bitorder="little")
        adjusted[allowed == 0] = -np.inf
    with np.errstate(invalid="ignore"):  # inf - inf
        adjusted[row.bias_ids] += row.bias_values
    adjusted = np.minimum(np.where(np.isnan(adjusted), -np.inf, adjusted), _LARGEST)
    seen = adjusted[row.history_ids]
    seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    seen -= params.presence_penalty * (row.history_counts > 0) + params.frequency_penalty * row.history_counts
    adjusted[row.history_ids] = seen
    adjusted[row.dry_ids] -= row.dry_penalties
    return np.minimum(adjusted, _LARGEST)


def choose(logits: Doubles, row: SampleRow) -> tuple[int, float]:
    """The place of the chosen one among `logits`, which fall and are finite, and Mirostat's surprise in bits."""
    params = row.params
    if takes_likeliest(params):
        return 0, 0.0
    if params.mirostat and params.temperature > 0:
        return _choose_by_mirostat(logits, row)
    places = _filter(logits, row)
    return int(places[_draw(logits[places], _find_temperature(logits[places], params), row.uniform)]), 0.0


def _weigh(logits: Doubles, temperature: float) -> Doubles:
    with np.errstate(over="ignore"):  # of a difference by a tiny temperature
        weights: Doubles = np.exp((logits - logits[0]) / temperature)
    return weights  # that of the largest is exactly 1


def _filter(logits: Doubles, row: SampleRow) -> Places:
    """The places that the rules leave, in the order of the rules."""
    params = row.params
    is_last = params.temperature_last or params.dynatemp_range > 0 or params.temperature == 0
    temperature = 1.0 if is_last else params.temperature
    places = np.arange(logits.shape[0])
    if params.top_n_sigma > 0:
        places = places[logits >= logits[0] - params.top_n_sigma * logits.std()]
    if params.top_k:
        places = places[: params.top_k]
    if params.typical_p < 1:
        places = places[_keep_typical(_weigh(logits[places], temperature), params.typical_p)]
    if params.top_p < 1:
        weights = _weigh(logits[places], temperature)
        places = places[: int(np.argmax(np.cumsum(weights) >= params.top_p * weights.sum())) + 1]
    places = places[_weigh(logits[places], temperature) >= params.min_p]
    if 0 < params.xtc_probability >= row.chance and params.xtc_threshold <= 0.5:
        weights = _weigh(logits[places], temperature)
        likely = np.count_nonzero(weights >= params.xtc_threshold * weights.sum())
        places = places[max(likely - 1, 0) :]
    return places


def _keep_typical(weights: Doubles, share: float) -> Places:
    """Of those whose surprise is nearest to the mean one, the fewest that go beyond `share`; of equals the first."""
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprises = -np.log(probabilities)
        mean = np.sum(np.where(probabilities > 0, probabilities * surprises, 0.0))
    nearest = np.argsort(np.abs(surprises - mean), kind="stable")
    beyond = np.cumsum(probabilities[nearest]) > share
    kept = int(np.argmax(beyond)) + 1 if beyond.any() else len(nearest)
    return np.sort(nearest[:kept])


def _find_temperature(logits: Doubles, params: SamplingParams) -> float:
    """The temperature of the draw; with a `dynatemp_range` it rises with the entropy of what is left."""
    if params.dynatemp_range == 0 or logits.shape[0] == 1:
        return params.temperature
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    weights = _weigh(logits, 1.0)
    probabilities = weights[weights > 0] / weights.sum()
    entropy = -np.sum(probabilities * np.log(probabilities)) / math.log(logits.shape[0])
    return float(low + (high - low) * min(max(entropy, 0.0), 1.0) ** params.dynatemp_exponent)


def _draw(logits: Doubles, temperature: float, uniform: float) -> int:
    """The first whose cumulative weight exceeds the share `uniform` of all."""
    if temperature == 0:
        return 0
    cumulative = np.cumsum(_weigh(logits, temperature))
    chosen = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(chosen, int(logits.shape[0]) - 1)


def _choose_by_mirostat(logits: Doubles, row: SampleRow) -> tuple[int, float]:
    params, bound = row.params, row.surprise_bound
    weights = _weigh(logits, params.temperature)
    if params.mirostat == 1:
        kept = _count_for_mirostat(logits / params.temperature, bound)
    else:
        kept = max(int(np.count_nonzero(weights >= np.exp2(-bound) * weights.sum())), 1)
    place = _draw(logits[:kept], params.temperature, row.uniform)
    return place, float(-np.log2(weights[place] / weights[:kept].sum()))


def _count_for_mirostat(scaled: Doubles, bound: float) -> int:
    """How many candidates version 1 keeps: it takes the likeliest for Zipfian and estimates their exponent."""
    head = scaled[:MIROSTAT_CANDIDATES]
    if head.shape[0] < 2:
        return 1
    steps = np.log(np.arange(2, head.shape[0] + 1) / np.arange(1, head.shape[0]))
    exponent = np.sum(steps * (head[:-1] - head[1:])) / np.sum(steps * steps)
    excess = exponent - 1
    with np.errstate(all="ignore"):
        kept = ((excess * np.exp2(bound)) / (1 - np.float64(scaled.shape[0]) ** -excess)) ** (1 / exponent)
    return 1 if np.isnan(kept) else int(min(max(kept, 1), scaled.shape[0]))
