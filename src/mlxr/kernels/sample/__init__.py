"""Choose the next token of every row of logits.

Steps, in this order: what the mask leaves out becomes impossible; add the logit bias; penalties, then those of DRY;
(log-probabilities are those of the softmax of this). With temperature 0 the largest logit is taken. Else candidates are
left out by top_n_sigma, top_k, typical_p, top_p, min_p and XTC, which see probabilities at the temperature, or at 1
with `temperature_last`; with Mirostat by it alone. The token is drawn from what is left, at the temperature, which with
`dynatemp_range` depends on what is left. `docs/sampling.md` says what each rule does, the reference below how.

Candidates are ordered by falling logit, equal ones by rising id; the draw takes the first whose cumulative probability
exceeds `uniform`. Nothing depends on the other rows. A row of logits that holds not-a-number is an error that names row
and id: something before went wrong, and a draw from the rest would hide it.

The reference computes one row after another in float64; a rule takes the candidates that are left and returns those
that it leaves, in the same order. Sources: typical_p, Meister et al. 2022; Mirostat, Basu et al. 2021, version 2 as in
its authors' code; top_n_sigma, Tang et al. 2024; min_p, Nguyen et al. 2024; order and details as in llama.cpp.
"""

# ruff: noqa: ARG001 -- every implementation takes the context
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.kernels.checks import check_floats, check_ints, check_mask, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray

NO_IDS: IntArray = np.empty(0, np.int32)
NO_VALUES: FloatArray = np.empty(0, np.float32)
NO_TOKEN = -1  # in place of a token id where no token is possible
GREEDY = SamplingParams()


def takes_likeliest(params: SamplingParams) -> bool:
    """Whether the token is always the one with the largest logit, so that no number is drawn."""
    return (
        params.temperature == 0 and params.dynatemp_range == 0 and (params.mirostat > 0 or not drops_likeliest(params))
    )


def drops_likeliest(params: SamplingParams) -> bool:
    """Whether a rule may leave out the likeliest token, so that greedy choice has to look at what is left."""
    return params.typical_p < 1 or (params.xtc_probability > 0 and params.xtc_threshold <= 0.5)


@dataclass(slots=True, eq=False)
class SampleRow:
    """How the token of one row of logits is chosen: by `params`, and by what changes from token to token."""

    params: SamplingParams = GREEDY
    history_ids: IntArray = field(default_factory=lambda: NO_IDS)  # distinct tokens of prompt and answer so far
    history_counts: IntArray = field(default_factory=lambda: NO_IDS)  # how often in the answer; 0: only in the prompt
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)  # distinct
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    dry_ids: IntArray = field(default_factory=lambda: NO_IDS)  # distinct
    dry_penalties: FloatArray = field(default_factory=lambda: NO_VALUES)  # by which their logits fall
    uniform: float = 0.0  # in [0, 1): the next number of the request's own random stream
    following_uniform: float | None = None  # the one after it, where it is known
    chance: float = 0.0  # a second number for the same token, by which XTC decides
    surprise_bound: float = 0.0  # what Mirostat has come to, in bits
    top_logprobs: int = 0  # how many best tokens are wanted
    mask: npt.NDArray[np.uint32] | None = (
        None  # bit i % 32 of [i // 32]: token i may be chosen; (ceil(vocabulary / 32),)
    )


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The chosen token, its log-probability, and the best tokens (as many as were asked for), best first.

    `surprise` is that of the token among those Mirostat left, in bits; 0 without Mirostat. Where no token has a finite
    logit: NO_TOKEN, minus infinity, and none.
    """

    token_id: int
    logprob: float
    top: list[TokenLogprob]
    surprise: float = 0.0


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow], *, goes_on: bool = True) -> list[SampleResult]:
    """One result for each row of logits (R, vocabulary), which are left as they are.

    `goes_on`: the next step is likely to compute these tokens and no others, so that a GPU may begin with it.
    Raises ValueError for ids outside the vocabulary, for values no rule allows, and for logits that are not numbers;
    the text names the row. A row that leaves no token possible gives NO_TOKEN.
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
    """The likeliest column of each row, and on a GPU of up to `places - 1` steps after it, each on the tokens before.

    `logits` are those of the step that ran last. There are fewer places, or one, where the steps after it would need
    what only the host knows.
    """
    return CHAIN.pick(ctx.device)[1](ctx, logits, places)


def fetch_logits(ctx: Context, logits: FloatArray) -> FloatArray:
    """The logits in the host's memory, as f32."""
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
MIROSTAT_CANDIDATES = 100  # from which the first version estimates the shape of the distribution
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


def _sample_native(
    ctx: Context, logits: FloatArray, rows: Sequence[SampleRow], goes_on: bool
) -> list[SampleResult] | None:
    """Every row by itself, rows spread over the threads."""
    return [
        SampleResult(token_id, logprob, [TokenLogprob(*best) for best in top], surprise)
        for token_id, logprob, top, surprise in ctx.module.sample(ctx.native, logits, rows)
    ]


def sample_one_place(ctx: Context, logits: FloatArray, places: int) -> list[list[SampleResult]]:
    """One place, where no step is computed ahead."""
    return [sample(ctx, logits, [SampleRow()] * logits.shape[0], goes_on=False)]


def _keep_logits(ctx: Context, logits: FloatArray) -> FloatArray:
    """The logits, which are in the host's memory."""
    return logits


_GPU = f"{__name__}.gpu"
SAMPLE = Choice("sample", _sample_reference, _sample_native, _GPU)
CHAIN = Choice("sample", sample_one_place, gpu=_GPU, name="sample_chain")
FETCH = Choice("sample", _keep_logits, gpu=_GPU, name="fetch_logits")
