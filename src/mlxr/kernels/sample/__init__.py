"""Choose the next token of every row of logits.

Steps, in this order: what the mask leaves out becomes impossible; add the logit bias; penalties, then those of DRY;
(log-probabilities are those of the softmax of this). With temperature 0 the largest logit is taken. Else candidates are
left out by top_n_sigma, top_k, typical_p, top_p, min_p and XTC, which see probabilities at the temperature, or at 1
with `temperature_last`; with Mirostat by it alone. The token is drawn from what is left, at the temperature, which with
`dynatemp_range` depends on what is left. `docs/sampling.md` says what each rule does, `reference` how.

Candidates are ordered by falling logit, equal ones by rising id; the draw takes the first whose cumulative probability
exceeds `uniform`. Nothing depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.kernels.checks import check_floats, check_ints, check_mask, check_size, refuse
from mlxr.kernels.choice import REFERENCE, Choice
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, IntArray

__all__ = ["NO_IDS", "NO_TOKEN", "SampleResult", "SampleRow", "fetch_logits", "sample", "takes_likeliest"]

CHOICE = Choice(__name__)
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
    """How the token of one row of logits is chosen: by `params`, and by what changes from token to token.

    `history_ids` are the distinct tokens of prompt and answer so far, `history_counts` how often each occurs in the
    answer (0: only in the prompt). `bias_ids` are distinct, and so are `dry_ids`, whose logits fall by `dry_penalties`.
    `uniform` in [0, 1) is the next number of the request's own random stream, `following_uniform` the one after it,
    where it is known, and `chance` a second one for the same token, by which XTC decides. `surprise_bound` is what
    Mirostat has come to, in bits. `top_logprobs` asks for that many best tokens. Bit i % 32 of mask[i // 32] says
    whether token i may be chosen, (ceil(vocabulary / 32),).
    """

    params: SamplingParams = GREEDY
    history_ids: IntArray = field(default_factory=lambda: NO_IDS)
    history_counts: IntArray = field(default_factory=lambda: NO_IDS)
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    dry_ids: IntArray = field(default_factory=lambda: NO_IDS)
    dry_penalties: FloatArray = field(default_factory=lambda: NO_VALUES)
    uniform: float = 0.0
    following_uniform: float | None = None
    chance: float = 0.0
    surprise_bound: float = 0.0
    top_logprobs: int = 0
    mask: npt.NDArray[np.uint32] | None = None


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
    name, implementation = CHOICE.pick(ctx.device)
    if name == "gpu":
        if not isinstance(logits, np.ndarray) and implementation.takes_rows(ctx, rows):
            drawn: list[SampleResult] = implementation.sample(ctx, logits, rows, goes_on=goes_on)
            return drawn
        logits = fetch_logits(ctx, logits)
        name, implementation = CHOICE.pick(REFERENCE if ctx.native is None else "cpu")
    if name == REFERENCE:
        ctx.ledger.count("sample", name, "greedy" if all(row.params.temperature == 0 for row in rows) else "random")
    results: list[SampleResult] = implementation.sample(ctx, logits, rows)
    return results


def sample_chain(ctx: Context, logits: FloatArray, places: int) -> list[list[SampleResult]]:
    """The likeliest column of each row, and on a GPU of up to `places - 1` steps after it, each on the tokens before.

    `logits` are those of the step that ran last. There are fewer places, or one, where the steps after it would need
    what only the host knows.
    """
    name, implementation = CHOICE.pick(ctx.device)
    if name == "gpu" and not isinstance(logits, np.ndarray):
        chain: list[list[SampleResult]] = implementation.sample_chain(ctx, logits, places)
        return chain
    return [sample(ctx, logits, [SampleRow()] * logits.shape[0])]


def fetch_logits(ctx: Context, logits: FloatArray) -> FloatArray:
    """The logits in the host's memory, as f32."""
    name, implementation = CHOICE.pick(ctx.device)
    if name != "gpu" or isinstance(logits, np.ndarray):
        return logits
    fetched: FloatArray = implementation.fetch_logits(ctx, logits)
    return fetched


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
