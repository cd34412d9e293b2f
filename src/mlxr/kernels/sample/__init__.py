"""Choose the next token of every row of logits.

Steps, in this order: what the mask leaves out becomes impossible; add the logit bias; penalties; (log-probabilities
are those of the softmax of this); with temperature 0 the largest logit, else divide by the temperature; keep the top_k
largest; of these the fewest largest whose probabilities reach top_p; of these those of at least min_p times the largest
probability; draw from what is left. Candidates are ordered by falling logit, equal ones by rising id; the draw takes
the first whose cumulative probability exceeds `uniform`. Nothing depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.kernels.checks import check_floats, check_ints, check_mask, check_size, refuse
from mlxr.kernels.choice import Choice
from mlxr.kernels.context import Context
from mlxr.kernels.sample.row import NO_IDS, NO_TOKEN, SampleResult, SampleRow
from mlxr.kernels.tensor import FloatArray, IntArray

__all__ = ["NO_IDS", "NO_TOKEN", "SampleResult", "SampleRow", "sample"]

CHOICE = Choice(__name__)


def sample(ctx: Context, logits: FloatArray, rows: Sequence[SampleRow]) -> list[SampleResult]:
    """One result for each row of logits (R, vocabulary), which are left as they are.

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
    if name == "gpu" and not implementation.takes_rows(ctx, rows):
        logits = implementation.fetch_logits(ctx, logits)
        name, implementation = CHOICE.pick("reference" if ctx.native is None else "cpu")
    ctx.ledger.count("sample", name, "greedy" if all(row.temperature == 0 for row in rows) else "random")
    results: list[SampleResult] = implementation.sample(ctx, logits, rows)
    return results


def _check_row(index: int, row: SampleRow, vocabulary: int) -> None:
    where = f"rows[{index}]."
    positive = row.temperature >= 0 and row.top_k >= 0 and row.top_logprobs >= 0 and row.repetition_penalty > 0
    if not (positive and 0 < row.top_p <= 1 and 0 <= row.min_p <= 1 and 0 <= row.uniform < 1):
        refuse("sample", f"rows[{index}]", row, "values in the ranges of SamplingParams and uniform in [0, 1)")
    if row.history_ids.shape[0] or row.history_counts.shape[0]:
        check_ints("sample", f"{where}history_counts", row.history_counts)
        _check_ids(f"{where}history", row.history_ids, row.history_counts.shape[0], vocabulary)
    if row.bias_ids.shape[0] or row.bias_values.shape[0]:
        check_floats("sample", f"{where}bias_values", row.bias_values, 1)
        _check_ids(f"{where}bias", row.bias_ids, row.bias_values.shape[0], vocabulary)
    if row.mask is not None:
        check_mask("sample", f"{where}mask", row.mask)
        check_size("sample", f"{where}mask: number of words", row.mask.shape[0], -(-vocabulary // 32))


def _check_ids(where: str, ids: IntArray, values: int, vocabulary: int) -> None:
    check_ints("sample", f"{where}_ids", ids)
    check_size("sample", f"{where}: number of values", values, ids.shape[0])
    if ids.min() < 0 or ids.max() >= vocabulary:
        refuse("sample", f"{where}_ids", ids.tolist(), f"ids from 0 to {vocabulary - 1}")
