"""Choose the next token of every row of logits.

Steps, in this order: tokens outside the mask become impossible; the logit bias is added; penalties are applied, then
those of DRY. (Log-probabilities are those of the softmax of the result.) With temperature 0, the largest logit is
taken. Otherwise top_n_sigma, top_k, typical_p, top_p, min_p and XTC leave out candidates, by probabilities at the
temperature, or at 1 with `temperature_last`; Mirostat replaces all of these. The token is drawn from the rest at the
temperature, which with `dynatemp_range` depends on the rest. `docs/sampling.md` describes the rules.

Candidates are ordered by falling logit, equal ones by rising id; the draw takes the first whose cumulative probability
exceeds `uniform`. Nothing depends on the other rows. NaN in a row of logits is an error that names row and id:
something before went wrong, and a draw from the rest would hide it.

The reference computes one row after another in float64; a rule takes the remaining candidates and returns those that it
keeps, in the same order. Sources: typical_p, Meister et al. 2022; Mirostat, Basu et al. 2021, version 2 as in its
authors' code; top_n_sigma, Tang et al. 2024; min_p, Nguyen et al. 2024; order and details as in llama.cpp.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxr.core.frozen import frozen
from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.kernels.checks import check_floats, check_ints, check_mask, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray

NO_IDS: IntArray = np.empty(0, np.int32)
NO_VALUES: FloatArray = np.empty(0, np.float32)
NO_TOKEN = -1  # in place of a token id if no token is possible
GREEDY = SamplingParams()


def takes_likeliest(params: SamplingParams) -> bool:
    """Return True if the token is always the one with the largest logit, so that no random number is needed."""
    return (
        params.temperature == 0 and params.dynatemp_range == 0 and (params.mirostat > 0 or not drops_likeliest(params))
    )


def drops_likeliest(params: SamplingParams) -> bool:
    """Return True if a rule may leave out the likeliest token, so that even greedy choice must apply the rules."""
    return params.typical_p < 1 or (params.xtc_probability > 0 and params.xtc_threshold <= 0.5)


@dataclass(slots=True, eq=False)
class SampleRow:
    """The inputs of the choice in one row of logits: `params`, and what changes from token to token."""

    params: SamplingParams = GREEDY
    history_ids: IntArray = field(default_factory=lambda: NO_IDS)  # distinct tokens of prompt and answer so far
    history_counts: IntArray = field(default_factory=lambda: NO_IDS)  # how often in the answer; 0: only in the prompt
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)  # distinct
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    dry_ids: IntArray = field(default_factory=lambda: NO_IDS)  # distinct
    dry_penalties: FloatArray = field(default_factory=lambda: NO_VALUES)  # subtracted from their logits
    uniform: float = 0.0  # in [0, 1): the next number of the request's own random stream
    following_uniform: float | None = None  # the one after it, if it is known
    chance: float = 0.0  # a second random number for the same token, by which XTC decides
    surprise_bound: float = 0.0  # Mirostat's present bound, in bits
    top_logprobs: int = 0  # number of best tokens wanted
    mask: npt.NDArray[np.uint32] | None = (
        None  # bit i % 32 of [i // 32]: token i may be chosen; (ceil(vocabulary / 32),)
    )


@frozen
class SampleResult:
    """The chosen token, its log-probability, and the best tokens (as many as wanted), best first.

    `surprise` is the token's among those that Mirostat kept, in bits; 0 without Mirostat. If no token has a finite
    logit, the result is NO_TOKEN, minus infinity and no best tokens.
    """

    token_id: int
    logprob: float
    top: list[TokenLogprob]
    surprise: float = 0.0


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow], *, goes_on: bool = True) -> list[SampleResult]:
    """Return a result for each row of logits (R, vocabulary), which are not changed.

    With `goes_on`, the next step is likely to compute exactly these tokens, so a GPU may begin with it. Raises
    ValueError, which names the row, for ids outside the vocabulary, for values that no rule allows, and for NaN in the
    logits. A row in which no token is possible gives NO_TOKEN.
    """
    check_floats("sample", "logits", logits, 2)
    check_size("sample", "number of rows", len(rows), logits.shape[0])
    for index, row in enumerate(rows):
        _check_row(index, row, logits.shape[1])
    if not rows:
        return []
    name, implementation = SAMPLE.pick(ctx.device)
    if name == "gpu":
        drawn = implementation(ctx, logits, rows, goes_on)
        if drawn is not None:
            return drawn
        logits = fetch_logits(ctx, logits)
        name, implementation = SAMPLE.pick(REFERENCE if ctx.native is None else "cpu")
    if name == REFERENCE:
        ctx.ledger.count("sample", name, "greedy" if all(row.params.temperature == 0 for row in rows) else "random")
    results = implementation(ctx, logits, rows, goes_on)
    assert results is not None  # on the host all rows are taken
    return results


def sample_chain(ctx: Context, logits: FloatArray, places: int) -> list[list[SampleResult]]:
    """Return the likeliest token of each row, and on a GPU those of up to `places - 1` further steps, each on the last.

    `logits` are those of the last step. There are fewer places, or one, if further steps need what only the host knows.
    """
    return CHAIN.pick(ctx.device)[1](ctx, logits, places)


def fetch_logits(ctx: Context, logits: FloatArray) -> FloatArray:
    """Return the logits in host memory, as f32."""
    return logits if isinstance(logits, np.ndarray) else FETCH.pick(ctx.device)[1](ctx, logits)


def _check_row(index: int, row: SampleRow, vocabulary: int) -> None:
    where = f"rows[{index}]."
    if not (row.top_logprobs >= 0 and 0 <= row.uniform < 1 and 0 <= row.chance < 1):
        refuse("sample", f"rows[{index}]", row, "top_logprobs of at least 0, uniform and chance in [0, 1)")
    if row.history_ids.shape[0] or row.history_counts.shape[0]:
        check_ints("sample", f"{where}history_counts", row.history_counts)
        _check_ids(f"{where}history", row.history_ids, row.history_counts.shape[0], vocabulary)
    if row.bias_ids.shape[0] or row.bias_values.shape[0]:
        check_floats("sample", f"{where}bias_values", row.bias_values, 1)
        _check_ids(f"{where}bias", row.bias_ids, row.bias_values.shape[0], vocabulary)
    if row.dry_ids.shape[0] or row.dry_penalties.shape[0]:
        check_floats("sample", f"{where}dry_penalties", row.dry_penalties, 1)
        _check_ids(f"{where}dry", row.dry_ids, row.dry_penalties.shape[0], vocabulary)
    if row.mask is not None:
        check_mask("sample", f"{where}mask", row.mask)
        check_size("sample", f"{where}mask: number of words", row.mask.shape[0], -(-vocabulary // 32))


def _check_ids(where: str, ids: IntArray, values: int, vocabulary: int) -> None:
    check_ints("sample", f"{where}_ids", ids)
    check_size("sample", f"{where}: number of values", values, ids.shape[0])
    if ids.min() < 0 or ids.max() >= vocabulary:
        refuse("sample", f"{where}_ids", ids.tolist(), f"ids from 0 to {vocabulary - 1}")


Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
MIROSTAT_CANDIDATES = 100  # candidates from which version 1 estimates the shape of the distribution
# A bias of +inf means "this token": as large as float32 goes, so that the softmax stays defined.
_LARGEST = float(np.finfo(np.float32).max)


def _sample_reference(
    ctx: Context, logits: FloatArray, rows: Sequence[SampleRow], goes_on: bool
) -> list[SampleResult] | None:
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
    """Apply mask, logit bias, then penalties; a bias of +inf on a logit of -inf leaves the token impossible."""
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
    """Return the index of the chosen one of `logits`, which are finite and falling, and Mirostat's surprise in bits."""
    params = row.params
    if takes_likeliest(params):
        return 0, 0.0
    if params.mirostat and params.temperature > 0:
        return _choose_by_mirostat(logits, row)
    places = _filter(logits, row)
    return int(places[_draw(logits[places], _find_temperature(logits[places], params), row.uniform)]), 0.0


def _weigh(logits: Doubles, temperature: float) -> Doubles:
    with np.errstate(over="ignore"):  # a difference divided by a tiny temperature
        weights: Doubles = np.exp((logits - logits[0]) / temperature)
    return weights  # the largest is exactly 1


def _filter(logits: Doubles, row: SampleRow) -> Places:
    """Return the indices of the candidates that remain after all rules, in order."""
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
    """Keep the fewest candidates, those with a surprise nearest to the mean, whose probabilities exceed `share`.

    Of equal ones, the first come first.
    """
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprises = -np.log(probabilities)
        mean = np.sum(np.where(probabilities > 0, probabilities * surprises, 0.0))
    nearest = np.argsort(np.abs(surprises - mean), kind="stable")
    beyond = np.cumsum(probabilities[nearest]) > share
    kept = int(np.argmax(beyond)) + 1 if beyond.any() else len(nearest)
    return np.sort(nearest[:kept])


def _find_temperature(logits: Doubles, params: SamplingParams) -> float:
    """Return the temperature of the draw; with a `dynatemp_range` it rises with the entropy of the candidates."""
    if params.dynatemp_range == 0 or logits.shape[0] == 1:
        return params.temperature
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    weights = _weigh(logits, 1.0)
    probabilities = weights[weights > 0] / weights.sum()
    entropy = -np.sum(probabilities * np.log(probabilities)) / math.log(logits.shape[0])
    return float(low + (high - low) * min(max(entropy, 0.0), 1.0) ** params.dynatemp_exponent)


def _draw(logits: Doubles, temperature: float, uniform: float) -> int:
    """Return the first candidate whose cumulative weight exceeds the share `uniform` of the total."""
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
    """Return the number of candidates that version 1 keeps: it estimates the Zipf exponent of the likeliest ones."""
    head = scaled[:MIROSTAT_CANDIDATES]
    if head.shape[0] < 2:
        return 1
    steps = np.log(np.arange(2, head.shape[0] + 1) / np.arange(1, head.shape[0]))
    exponent = np.sum(steps * (head[:-1] - head[1:])) / np.sum(steps * steps)
    excess = exponent - 1
    with np.errstate(all="ignore"):
        kept = ((excess * np.exp2(bound)) / (1 - np.float64(scaled.shape[0]) ** -excess)) ** (1 / exponent)
    return 1 if np.isnan(kept) else int(min(max(kept, 1), scaled.shape[0]))


def _sample_native(
    ctx: Context, logits: FloatArray, rows: Sequence[SampleRow], goes_on: bool
) -> list[SampleResult] | None:
    """Choose the token of each row by itself; threads share the rows."""
    return [
        SampleResult(token_id, logprob, [TokenLogprob(*best) for best in top], surprise)
        for token_id, logprob, top, surprise in ctx.module.sample(ctx.native, logits, rows)
    ]


def sample_one_place(ctx: Context, logits: FloatArray, places: int) -> list[list[SampleResult]]:
    """Return the likeliest tokens of one place, as no step is computed ahead."""
    return [sample(ctx, logits, [SampleRow()] * logits.shape[0], goes_on=False)]


def _keep_logits(ctx: Context, logits: FloatArray) -> FloatArray:
    """Return the logits, which are in host memory."""
    return logits


_GPU = f"{__name__}.gpu"
SAMPLE = Choice("sample", _sample_reference, _sample_native, _GPU)
CHAIN = Choice("sample", sample_one_place, gpu=_GPU, name="sample_chain")
FETCH = Choice("sample", _keep_logits, gpu=_GPU, name="fetch_logits")
