"""The reference of `sample`: every rule by itself, their order, and the checks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import make_row

from mlxr.kernels.context import Context
from mlxr.kernels.sample import NO_TOKEN, SampleResult, SampleRow, sample


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def draw(ctx: Context, logits: NDArray[np.float32], **fields: Any) -> SampleResult:
    (result,) = sample(ctx, logits[None], [make_row(**fields)])
    return result


def tokens_drawn(ctx: Context, logits: NDArray[np.float32], **fields: Any) -> list[int]:
    """The token at each of 1,000 equally spaced draws."""
    rows = [make_row(uniform=(i + 0.5) / 1000, **fields) for i in range(1000)]
    return [result.token_id for result in sample(ctx, np.tile(logits, (1000, 1)), rows)]


def test_greedy_takes_the_largest_and_of_equals_the_first(reference: Context) -> None:
    assert draw(reference, floats(0, 3, 1, 3)).token_id == 1
    assert reference.ledger.snapshot().dispatches[0].variant == "greedy"


def test_logprob_and_top_are_of_the_softmax(reference: Context) -> None:
    result = draw(reference, floats(1, 3, 2, 3), top_logprobs=3)
    total = math.exp(1) + 2 * math.exp(3) + math.exp(2)
    assert result.logprob == pytest.approx(3 - math.log(total))
    assert [(t.token_id, pytest.approx(t.logprob)) for t in result.top] == [
        (1, 3 - math.log(total)),
        (3, 3 - math.log(total)),
        (2, 2 - math.log(total)),
    ]


def test_top_is_never_longer_than_the_vocabulary(reference: Context) -> None:
    assert len(draw(reference, floats(1, 2), top_logprobs=5).top) == 2


def test_temperature_shapes_the_draw_but_not_the_logprob(reference: Context) -> None:
    logits = floats(0, math.log(3))
    assert tokens_drawn(reference, logits, temperature=1.0).count(1) == 750
    assert tokens_drawn(reference, logits, temperature=0.5).count(1) == 900
    assert draw(reference, logits, temperature=0.5, uniform=0.0).logprob == pytest.approx(math.log(0.75))


def test_draw_walks_from_the_likeliest(reference: Context) -> None:
    logits = np.log(floats(0.2, 0.5, 0.3))
    drawn = [
        draw(reference, logits, temperature=1.0, uniform=u).token_id for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.9999)
    ]
    assert drawn == [1, 1, 2, 2, 0, 0]


def test_top_k_keeps_the_largest(reference: Context) -> None:
    logits = np.log(floats(0.1, 0.4, 0.3, 0.2))
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_k=2)) == {1, 2}
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_k=1)) == {1}
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_k=100)) == {0, 1, 2, 3}


def test_top_p_keeps_the_one_that_crosses(reference: Context) -> None:
    logits = np.log(floats(0.1, 0.4, 0.3, 0.2))
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_p=0.69)) == {1, 2}
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_p=0.71)) == {1, 2, 3}
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_p=0.01)) == {1}


def test_top_p_counts_what_top_k_left(reference: Context) -> None:
    logits = np.log(floats(0.1, 0.4, 0.3, 0.2))
    # of 0.4 and 0.3 the first has 4 / 7
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_k=2, top_p=0.55)) == {1}
    assert set(tokens_drawn(reference, logits, temperature=1.0, top_k=2, top_p=0.6)) == {1, 2}


def test_min_p_is_relative_to_the_largest(reference: Context) -> None:
    logits = np.log(floats(0.1, 0.4, 0.3, 0.2))
    assert set(tokens_drawn(reference, logits, temperature=1.0, min_p=0.6)) == {1, 2}
    assert set(tokens_drawn(reference, logits, temperature=1.0, min_p=1.0)) == {1}


def test_filters_see_the_tempered_probabilities(reference: Context) -> None:
    logits = np.log(floats(0.4, 0.3, 0.3))
    assert set(tokens_drawn(reference, logits, temperature=0.1, min_p=0.1)) == {0}
    assert set(tokens_drawn(reference, logits, temperature=1.0, min_p=0.1)) == {0, 1, 2}


def test_repetition_penalty_divides_above_zero_and_multiplies_below(reference: Context) -> None:
    logits, seen = floats(2, 1.5, -1, 0), {"history_ids": ints(0, 2), "history_counts": ints(0, 3)}
    result = draw(reference, logits, repetition_penalty=2.0, top_logprobs=4, **seen)
    adjusted = [1.0, 1.5, -2.0, 0.0]
    total = sum(math.exp(value) for value in adjusted)
    assert result.token_id == 1
    assert {t.token_id: pytest.approx(t.logprob) for t in result.top} == {
        i: value - math.log(total) for i, value in enumerate(adjusted)
    }


def test_presence_and_frequency_count_the_answer_only(reference: Context) -> None:
    fields = {"history_ids": ints(0, 1, 2), "history_counts": ints(0, 1, 3), "top_logprobs": 4}
    result = draw(reference, floats(0, 0, 0, 0), presence_penalty=0.5, frequency_penalty=0.25, **fields)
    expected = {0: 0.0, 3: 0.0, 1: -0.75, 2: -1.25}
    best = result.top[0].logprob
    assert {t.token_id: pytest.approx(t.logprob - best) for t in result.top} == expected


def test_bias_comes_before_penalties(reference: Context) -> None:
    fields = {"bias_ids": ints(0), "bias_values": floats(3), "history_ids": ints(0), "history_counts": ints(1)}
    result = draw(reference, floats(-1, 0), repetition_penalty=2.0, top_logprobs=2, **fields)
    # (-1 + 3) / 2, not -1 * 2 + 3
    assert result.top[0].logprob - result.top[1].logprob == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_bias_forces_and_forbids(reference: Context, temperature: float) -> None:
    forced = draw(
        reference,
        floats(9, 0, 1),
        temperature=temperature,
        bias_ids=ints(1),
        bias_values=floats(math.inf),
        uniform=0.99,
    )
    assert (forced.token_id, forced.logprob) == (1, 0.0)
    forbidden = draw(
        reference,
        floats(9, 0, 1),
        temperature=temperature,
        bias_ids=ints(0),
        bias_values=floats(-math.inf),
        uniform=0.0,
    )
    assert forbidden.token_id == 2


def test_nan_is_an_error(reference: Context) -> None:
    with pytest.raises(ValueError, match="logits of row 0 is not a number at id 1, expected numbers"):
        draw(reference, floats(1, math.nan, 2))


def test_rows_do_not_see_each_other(reference: Context) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    rows = [
        SampleRow(),
        make_row(temperature=0.8, top_p=0.9, uniform=0.3, top_logprobs=4),
        make_row(temperature=1.5, top_k=7, uniform=0.8, history_ids=ints(3), history_counts=ints(1)),
    ]
    together = sample(reference, logits, rows)
    alone = [sample(reference, logits[i : i + 1], rows[i : i + 1])[0] for i in range(3)]
    assert together == alone


def test_logits_are_left_alone(reference: Context) -> None:
    logits = floats(1, 2, 3)
    draw(reference, logits, bias_ids=ints(0), bias_values=floats(5), temperature=0.5, uniform=0.5)
    np.testing.assert_array_equal(logits, [1, 2, 3])


def test_no_rows_give_no_results(reference: Context) -> None:
    assert sample(reference, np.empty((0, 5), np.float32), []) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uniform": 1.0}, r"rows\[0\] is .* expected top_logprobs of at least 0, uniform and chance"),
        (
            {"history_ids": ints(3), "history_counts": ints(1)},
            r"rows\[0\].history_ids is \[3\], expected ids from 0 to 2",
        ),
        ({"history_ids": ints(1), "history_counts": ints()}, "history: number of values is 0, expected 1"),
        ({"bias_ids": ints(-1), "bias_values": floats(1)}, r"bias_ids is \[-1\]"),
        ({"bias_ids": np.array([1]), "bias_values": floats(1)}, "bias_ids is int64, expected int32"),
        ({"bias_ids": ints(1), "bias_values": np.array([1.0])}, "bias_values is float64, expected float32"),
    ],
)
def test_senseless_rows_are_refused(reference: Context, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(reference, floats(1, 2, 3), **fields)


def test_wrong_shapes_are_refused(reference: Context) -> None:
    with pytest.raises(ValueError, match="number of rows is 1, expected 2"):
        sample(reference, np.zeros((2, 3), np.float32), [SampleRow()])
    with pytest.raises(ValueError, match=r"rows\[0\].mask: number of words is 1, expected 2"):
        draw(reference, np.zeros(33, np.float32), mask=np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match=r"rows\[0\].mask is int64, expected uint32"):
        draw(reference, floats(1, 2, 3), mask=np.zeros(1, np.int64))


def test_where_no_token_is_possible_there_is_none(reference: Context) -> None:
    assert draw(reference, floats(-math.inf, -math.inf)) == SampleResult(NO_TOKEN, -math.inf, [])
    assert draw(reference, floats(1, 2), mask=np.array([0b100], np.uint32), top_logprobs=2).token_id == NO_TOKEN


def test_what_the_mask_leaves_out_is_impossible(reference: Context) -> None:
    mask = np.array([0b10101], np.uint32)
    result = draw(reference, floats(1, 9, 2, 8, 3), mask=mask, top_logprobs=4)
    assert result.token_id == 4
    assert [token.token_id for token in result.top] == [4, 2, 0, 1]
    assert result.top[3].logprob == -math.inf
    assert sum(math.exp(token.logprob) for token in result.top) == pytest.approx(1)
    assert set(tokens_drawn(reference, floats(1, 9, 2, 8, 3), mask=mask, temperature=1.0)) == {0, 2, 4}
    # neither a bias nor a penalty brings a token back
    forced = {"bias_ids": ints(1), "bias_values": floats(math.inf), "history_ids": ints(3), "history_counts": ints(1)}
    assert draw(reference, floats(1, 9, 2, 8, 3), mask=mask, frequency_penalty=-100.0, **forced).token_id == 4
