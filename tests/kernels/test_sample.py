"""The native `sample` against its reference, rule by rule and at random, with equal bits everywhere.

The two sum probabilities in different precision, so that a draw close to a border may fall on either side; then the
token's rank among the candidates must lie between those of the reference's draws a little to either side.
`test_sample_reference.py` says what the rules mean.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from variants import Floats, Ints, make_row, native_contexts, random_floats

from mlxr.core.types import SamplingParams, TokenLogprob
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Dispatch
from mlxr.kernels.sample import NO_TOKEN, SampleResult, SampleRow, sample

REFERENCE = Context("reference")


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def mask_of(vocabulary: int, *token_ids: int) -> NDArray[np.uint32]:
    mask = np.zeros(-(-vocabulary // 32), np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


def draw(ctx: Context, logits: Floats, **fields: Any) -> SampleResult:
    (result,) = sample(ctx, logits[None], [make_row(**fields)])
    return result


def draw_everywhere(logits: Floats, **fields: Any) -> SampleResult:
    """The result in every native context, which must be the same to the last bit."""
    results = [draw(ctx, logits, **fields) for ctx in native_contexts()]
    assert all(result == results[0] for result in results)
    return results[0]


def count_draws(ctx: Context, logits: Floats, **fields: Any) -> list[int]:
    """Count how often 1,000 evenly spaced uniforms draw each token."""
    rows = [make_row(uniform=(i + 0.5) / 1000, **fields) for i in range(1000)]
    drawn = [result.token_id for result in sample(ctx, np.tile(logits, (1000, 1)), rows)]
    counts: list[int] = np.bincount(drawn, minlength=len(logits)).tolist()
    return counts


TEN = np.log(floats(0.02, 0.22, 0.05, 0.3, 0.01, 0.03, 0.12, 0.15, 0.04, 0.06))
SEEN = {"history_ids": ints(3, 0, 7), "history_counts": ints(0, 1, 4)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"temperature": 1e-30},
        {"temperature": 100.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_k": 9},
        {"temperature": 1.0, "top_k": 10},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 1.0, "top_p": 0.75},
        {"temperature": 1.0, "top_p": 0.995},
        {"temperature": 1.0, "min_p": 0.11},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 6, "min_p": 0.2},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 1.0, "repetition_penalty": 1.5, **SEEN},
        {"temperature": 1.0, "repetition_penalty": 0.5, **SEEN},
        {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": -0.2, **SEEN},
        {"temperature": 1.0, "bias_ids": ints(4, 1), "bias_values": floats(2.5, -1), "top_p": 0.9, **SEEN},
    ],
    ids=str,
)
def test_rules_draw_as_often_as_in_the_reference(cpu: Context, fields: dict[str, Any]) -> None:
    for logits in (TEN, TEN + 3):  # of both signs, for the repetition penalty
        expected = count_draws(REFERENCE, logits, **fields)
        assert np.abs(np.subtract(count_draws(cpu, logits, **fields), expected)).max() <= 1
        assert [n > 0 for n in count_draws(cpu, logits, **fields)] == [n > 0 for n in expected]


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 511, 512, 513, 5000])
def test_greedy_takes_the_largest_and_of_equals_the_first(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for _ in range(20):
        logits = rng.integers(-4, 5, vocabulary).astype(np.float32)  # many equal ones
        assert draw_everywhere(logits).token_id == int(np.argmax(logits))


def test_equal_logits_come_in_order_of_ids() -> None:
    logits = np.full(3000, 0.25, np.float32)
    assert [token.token_id for token in draw_everywhere(logits, top_logprobs=5).top] == [0, 1, 2, 3, 4]
    for uniform in (0.0, 0.1, 0.5, 0.99995):
        expected = int(uniform * 3000)
        assert draw_everywhere(logits, temperature=1.0, uniform=uniform).token_id == expected
        assert draw_everywhere(logits, temperature=1.0, top_k=2000, uniform=uniform).token_id == int(uniform * 2000)
    # 0.5 of 3,000 is reached with the 1,500th
    drawn = {draw_everywhere(logits, temperature=1.0, top_p=0.5, uniform=u).token_id for u in (0.0, 0.99999)}
    assert drawn == {0, 1499}


@pytest.mark.parametrize("vocabulary", [1, 7, 600, 40_000])
@pytest.mark.parametrize("count", [1, 5, 100])
def test_logprobs_are_those_of_the_reference(vocabulary: int, count: int) -> None:
    logits = random_floats(vocabulary, vocabulary) * 4
    fields: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "uniform": 0.3, "top_logprobs": count}
    result, expected = draw_everywhere(logits, **fields), draw(REFERENCE, logits, **fields)
    assert result.token_id == expected.token_id
    assert result.logprob == pytest.approx(expected.logprob, abs=3e-6)
    assert [token.token_id for token in result.top] == [token.token_id for token in expected.top]
    for token, wanted in zip(result.top, expected.top, strict=True):
        assert token.logprob == pytest.approx(wanted.logprob, abs=3e-6)


def test_infinite_bias_forces_and_forbids() -> None:
    for temperature in (0.0, 1.0):
        forced = {"bias_ids": ints(1), "bias_values": floats(math.inf), "uniform": 0.99}
        result = draw_everywhere(floats(9, 0, 1), temperature=temperature, **forced)
        assert (result.token_id, result.logprob) == (1, 0.0)
        forbidden = {"bias_ids": ints(0), "bias_values": floats(-math.inf), "uniform": 0.0, "top_logprobs": 3}
        result = draw_everywhere(floats(9, 0, 1), temperature=temperature, **forbidden)
        assert result.token_id == 2
        assert result.top[2] == TokenLogprob(0, -math.inf)
    impossible = {"bias_ids": ints(0), "bias_values": floats(math.inf), "temperature": 1.0, "uniform": 0.0}
    assert draw_everywhere(floats(-math.inf, 0, 1), **impossible).token_id == 2


def test_infinite_logits() -> None:
    logits = floats(0, math.inf, 2, math.inf, -math.inf)
    assert draw_everywhere(logits).token_id == 1
    assert draw_everywhere(logits, temperature=1.0, uniform=0.75).token_id == 3
    assert draw_everywhere(logits).logprob == pytest.approx(math.log(0.5))
    only = np.full(700, -math.inf, np.float32)
    only[650] = -3e38
    for fields in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert draw_everywhere(only, temperature=1.0, uniform=0.999, **fields).token_id == 650


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_a_number_is_an_error_that_names_row_and_id(cpu: Context, temperature: float) -> None:
    logits = random_floats(1, 3, 1000)
    logits[1, [700, 900]] = math.nan
    with pytest.raises(ValueError, match="sample: logits of row 1 is not a number at id 700, expected numbers"):
        sample(cpu, logits, [make_row(temperature=temperature)] * 3)


def test_where_no_token_is_possible_there_is_none_and_the_other_rows_go_on(cpu: Context) -> None:
    logits = random_floats(2, 3, 20)
    logits[1] = -math.inf
    rows = [make_row(top_logprobs=3, temperature=t, mask=m) for t, m in ((0.0, None), (1.0, None), (1.0, mask_of(20)))]
    results = sample(cpu, logits, rows)
    assert results[1:] == [SampleResult(NO_TOKEN, -math.inf, [])] * 2
    assert results[0].token_id == int(np.argmax(logits[0]))
    everything = {"bias_ids": np.arange(20, dtype=np.int32), "bias_values": np.full(20, -np.inf, np.float32)}
    assert draw(cpu, logits[0], **everything).token_id == NO_TOKEN


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 500, 5000])
@pytest.mark.parametrize("share", [0.002, 0.3, 0.5, 0.97, 1.0])
def test_masked_logits_are_as_good_as_minus_infinity(vocabulary: int, share: float) -> None:
    rng = np.random.default_rng([vocabulary, int(1000 * share)])
    logits = rng.standard_normal(vocabulary).astype(np.float32)
    allowed = np.flatnonzero(rng.random(vocabulary) < share)
    allowed = allowed if allowed.size else np.array([vocabulary - 1])
    barred = np.full(vocabulary, -np.inf, np.float32)
    barred[allowed] = logits[allowed]
    for fields in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 40}, {"temperature": 1.0, "top_p": 0.8}):
        rules: dict[str, Any] = {"uniform": float(rng.random()), "top_logprobs": 20, **fields}
        result = draw_everywhere(logits, mask=mask_of(vocabulary, *allowed), **rules)
        assert result == draw_everywhere(barred, **rules)
        assert result.token_id in allowed
        expected = draw(REFERENCE, logits, mask=mask_of(vocabulary, *allowed), **rules)
        assert [token.token_id for token in result.top] == [token.token_id for token in expected.top]


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    assert draw_everywhere(floats(3, 1, 2), mask=np.array([0xFFFFFFFE], np.uint32)).token_id == 2


def test_masks_of_the_wrong_length_are_refused(cpu: Context) -> None:
    with pytest.raises(ValueError, match=r"sample: rows\[1\].mask: number of words is 2, expected 1"):
        sample(cpu, random_floats(2, 2, 32), [SampleRow(), make_row(mask=np.zeros(2, np.uint32))])


OTHERS: list[dict[str, Any]] = [
    {},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.5},
    {"xtc_probability": 0.8, "xtc_threshold": 0.02},
    {"temperature_last": True},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    {"mirostat": 1},
    {"mirostat": 2},
    {"typical_p": 0.95, "top_n_sigma": 2.0, "xtc_probability": 1.0, "xtc_threshold": 0.01, "temperature_last": True},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001, "dynatemp_range": 0.9},
    {},
]


def make_rows(count: int, vocabulary: int) -> list[SampleRow]:
    rng = np.random.default_rng(count)
    rows = []
    for index in range(count):
        params: dict[str, Any] = {
            "temperature": (0.0, 0.7, 1.0, 2.0)[index % 4],
            "top_k": (0, 40, 700)[index % 3],
            "top_p": (1.0, 0.9)[index // 2 % 2],
            "min_p": (0.0, 0.02)[index // 4 % 2],
            **OTHERS[index % len(OTHERS)],
        }
        if index % 2:
            params |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
        row = make_row(
            **params,
            uniform=float(rng.random()),
            chance=float(rng.random()),
            surprise_bound=float(rng.uniform(0, 12)),
            top_logprobs=index % 3,
        )
        if index % 2:
            row.history_ids = rng.permutation(vocabulary)[: index % 7 * 10].astype(np.int32)
            row.history_counts = rng.integers(0, 3, len(row.history_ids)).astype(np.int32)
        if index % 7 == 3:
            row.dry_ids = rng.permutation(vocabulary)[:9].astype(np.int32)
            row.dry_penalties = rng.uniform(0, 9, 9).astype(np.float32)
        if index % 5 == 1:
            row.bias_ids = rng.permutation(vocabulary)[:4].astype(np.int32)
            row.bias_values = rng.normal(0, 3, 4).astype(np.float32)
        if index % 4 == 2:
            row.mask = rng.integers(0, 2**32, -(-vocabulary // 32), np.uint32)
        rows.append(row)
    return rows


def test_row_has_the_same_result_alone_and_in_a_batch() -> None:
    logits = random_floats(3, 24, 3000) * 3
    before = logits.copy()
    rows = make_rows(24, 3000)
    expected = sample(native_contexts()[0], logits, rows)
    for ctx in native_contexts():
        assert sample(ctx, logits, rows) == expected
        assert [sample(ctx, logits[i : i + 1], rows[i : i + 1])[0] for i in range(24)] == expected
    np.testing.assert_array_equal(logits, before)


def place_of(logits: Floats, row: SampleRow, token_id: int) -> int:
    """Return the token's rank among the candidates, 0 for the best."""
    everything = replace(row, params=replace(row.params, mirostat=1, temperature=0), top_logprobs=len(logits))
    (result,) = sample(REFERENCE, logits[None], [everything])
    return [token.token_id for token in result.top].index(token_id)


def assert_near_reference(ctx: Context, logits: Floats, rows: list[SampleRow], slack: float = 3e-5) -> None:
    for index, (row, result) in enumerate(zip(rows, sample(ctx, logits, rows), strict=True)):
        uniform, places = row.uniform, []
        for nudge in (-slack, slack):
            row.uniform = min(max(uniform + nudge, 0.0), 1 - 2**-53)
            (expected,) = sample(REFERENCE, logits[index : index + 1], [row])
            places.append(place_of(logits[index], row, expected.token_id))
        row.uniform = uniform
        assert places[0] <= place_of(logits[index], row, result.token_id) <= places[1], (index, row)


def test_draws_are_those_of_the_reference(cpu: Context) -> None:
    assert_near_reference(cpu, random_floats(4, 36, 2000) * 3, make_rows(36, 2000))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_row_draws_as_the_reference(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([1, 2, 9, 16, 30, 130, 600, 1100]))
    spread = data.draw(st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0]))
    logits = random_floats([data.draw(st.integers(0, 1000)), vocabulary], 1, vocabulary) * np.float32(spread)
    seen = data.draw(st.integers(0, vocabulary))
    row = make_row(
        temperature=data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.7, 50.0])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 5, 50, 500, 5000])),
        top_p=data.draw(st.sampled_from([1.0, 0.999, 0.83, 0.31, 1e-9])),
        min_p=data.draw(st.sampled_from([0.0, 1e-6, 0.037, 0.41])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.8])),
        history_ids=np.random.default_rng(seen).permutation(vocabulary)[:seen].astype(np.int32),
        history_counts=np.arange(seen, dtype=np.int32) % 3,
        presence_penalty=data.draw(st.sampled_from([0.0, 0.6])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -0.4])),
        top_n_sigma=data.draw(st.sampled_from([0.0, 0.0, 0.7, 2.1])),
        typical_p=data.draw(st.sampled_from([1.0, 1.0, 0.97, 0.33])),
        xtc_probability=data.draw(st.sampled_from([0.0, 0.5])),
        xtc_threshold=data.draw(st.sampled_from([0.0, 0.013, 0.21, 0.6])),
        temperature_last=data.draw(st.booleans()),
        dynatemp_range=data.draw(st.sampled_from([0.0, 0.0, 0.45, 2.0])),
        dynatemp_exponent=data.draw(st.sampled_from([1.0, 2.5])),
        mirostat=data.draw(st.sampled_from([0, 0, 1, 2])),
        surprise_bound=data.draw(st.sampled_from([-3.0, 0.5, 4.2, 11.0, 2000.0])),
        chance=data.draw(st.sampled_from([0.2, 0.8])),
        uniform=data.draw(st.floats(0, 1, exclude_max=True)),
    )
    results = [sample(ctx, logits, [row]) for ctx in native_contexts()[::2]]
    assert all(result == results[0] for result in results)
    if spread != 0.1 or vocabulary < 600:  # otherwise hundreds of candidates would lie within the slack of a border
        assert_near_reference(native_contexts()[0], logits, [row])


def test_large_vocabulary() -> None:
    logits = random_floats(5, 131_072) * 3
    greedy = draw_everywhere(logits, top_logprobs=20)
    order = np.argsort(-logits, kind="stable")
    assert [token.token_id for token in greedy.top] == order[:20].tolist()
    total = np.log(np.exp(logits.astype(np.float64) - logits.max()).sum())
    assert greedy.logprob == pytest.approx(-total, abs=1e-5)
    weights = np.exp((logits[order] - logits.max()).astype(np.float64) / 0.9)
    cumulative = np.cumsum(weights) / weights.sum()
    for uniform in (0.01, 0.4, 0.9, 0.9999):
        token_id = draw_everywhere(logits, temperature=0.9, uniform=uniform).token_id
        place = int(np.flatnonzero(order == token_id)[0])
        assert cumulative[place] >= uniform - 1e-5
        assert place == 0 or cumulative[place - 1] <= uniform + 1e-5


def test_ledger_names_the_kind(cpu: Context) -> None:
    sample(cpu, random_floats(6, 2, 10), [SampleRow(), SampleRow()])
    sample(cpu, random_floats(6, 2, 10), [SampleRow(), make_row(temperature=1.0)])
    assert cpu.ledger.snapshot().dispatches == [
        Dispatch("sample", "cpu", "greedy", 1),
        Dispatch("sample", "cpu", "random", 1),
    ]


# The native module is called directly from here on: it must check by itself.


def force(**values: object) -> SampleRow:
    """A row with parameters that SamplingParams does not let through."""
    row = make_row(**{name: value for name, value in values.items() if name in SampleRow.__dataclass_fields__})
    row.params = SamplingParams(top_k=3)
    for name in values.keys() - set(SampleRow.__dataclass_fields__):
        object.__setattr__(row.params, name, values[name])
    return row


def native_sample(ctx: Context, *rows: object, columns: int = 50) -> Any:
    return ctx.module.sample(ctx.native, random_floats(7, 2, columns), rows or (SampleRow(), SampleRow()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"history_ids": ints(1, 50), "history_counts": ints(0, 1)}, r"history_ids\[1\] is 50, expected 0 to 49"),
        ({"bias_ids": ints(-1), "bias_values": floats(1)}, r"bias_ids\[0\] is -1, expected 0 to 49"),
        ({"bias_ids": ints(1), "bias_values": floats(1, 2)}, "bias_values: length is 2, expected 1"),
        ({"bias_ids": ints(1, 2)[::2], "bias_values": ints(1)}, "bias_values is of another type"),
        ({"history_ids": ints(1, 2, 3, 4)[::2], "history_counts": ints(0, 1)}, "history_ids is of another type"),
        ({"history_ids": ints(1), "history_counts": ints()}, "history_counts: length is 0, expected 1"),
        ({"mask": np.zeros(1, np.uint32)}, "mask: number of words is 1, expected 2"),
        ({"mask": np.zeros(2, np.int64)}, "mask is of another type"),
        ({"top_logprobs": -1}, "top_logprobs is -1.0+, expected in the range"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": -(2**70)}, "top_k is -1"),
        ({"temperature": math.nan}, "temperature is"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"min_p": 2.0}, "min_p is 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"uniform": 1.0}, "uniform is 1"),
        ({"chance": -0.5}, "chance is -0.5"),
        ({"surprise_bound": math.nan}, "surprise_bound is"),
        ({"typical_p": 1.5}, "typical_p is 1.5"),
        ({"mirostat": 3}, "mirostat is 3"),
        ({"dynatemp_range": -1.0}, "dynatemp_range is -1"),
        ({"dry_ids": ints(50), "dry_penalties": floats(1)}, r"dry_ids\[0\] is 50, expected 0 to 49"),
    ],
)
def test_hostile_rows_are_refused_by_name(cpu: Context, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"sample: rows\[1\].{message}"):
        native_sample(cpu, SampleRow(), force(**changes))


def test_rows_and_columns_are_checked_natively(cpu: Context) -> None:
    best = [len(top) for _, _, top, _ in native_sample(cpu, SampleRow(), force(top_k=2**70, top_logprobs=60))]
    assert best == [0, 50]
    with pytest.raises(ValueError, match="sample: number of rows is 1, expected 2"):
        native_sample(cpu, SampleRow())
    with pytest.raises(ValueError, match="sample: columns of logits is 0, expected at least 1"):
        native_sample(cpu, columns=0)
    with pytest.raises(AttributeError, match="params"):
        native_sample(cpu, SampleRow(), "no row")
