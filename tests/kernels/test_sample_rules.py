"""The rules that leave candidates out, each with numbers worked out by hand; docs/sampling.md defines them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from variants import make_row, native_contexts

from mlxr.kernels.context import Context
from mlxr.kernels.sample import sample

P = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))  # in order of probability: 1, 2, 3, 0


def drawn(logits: NDArray[np.float32], **fields: Any) -> list[int]:
    """Count how often each token is drawn by 1,000 even uniforms in the reference; native counts may differ by one."""
    rows = [make_row(uniform=(i + 0.5) / 1000, **{"temperature": 1.0, **fields}) for i in range(1000)]
    many = np.tile(logits, (1000, 1))
    contexts = (Context("reference"), native_contexts()[0])
    expected, native = (
        np.bincount([result.token_id for result in sample(ctx, many, rows)], minlength=len(logits)) for ctx in contexts
    )
    assert np.abs(expected - native).max() <= 1
    assert ((expected > 0) == (native > 0)).all()
    counts: list[int] = expected.tolist()
    return counts


def shares(*weights: float) -> Any:
    return pytest.approx([1000 * weight / sum(weights) for weight in weights], abs=1)


def test_top_n_sigma_keeps_what_is_near_the_largest_logit() -> None:
    logits = np.array([0, 1, 2, 5], np.float32)  # mean 2, deviation sqrt(3.5) = 1.87
    assert drawn(logits, top_n_sigma=1.0) == [0, 0, 0, 1000]
    assert drawn(logits, top_n_sigma=1.7) == shares(0, 0, math.exp(2), math.exp(5))  # down to 1.82
    assert drawn(logits, top_n_sigma=1.7, temperature=2.0) == shares(0, 0, math.exp(1), math.exp(2.5))
    assert drawn(logits, top_n_sigma=9.0, top_k=2) == shares(0, 0, math.exp(2), math.exp(5))


def test_typical_p_keeps_what_is_near_the_mean_surprise() -> None:
    # entropy 1.2799 nats; distances: 0.4 -> 0.3636, 0.3 -> 0.0759, 0.2 -> 0.3295, 0.1 -> 1.0227
    assert drawn(P, typical_p=0.29) == shares(0, 0, 1, 0)
    assert drawn(P, typical_p=0.31) == shares(0, 0, 0.3, 0.2)
    assert drawn(P, typical_p=0.51) == shares(0, 0.4, 0.3, 0.2)
    assert drawn(P, typical_p=0.91) == shares(0.1, 0.4, 0.3, 0.2)
    assert drawn(P, typical_p=0.31, top_k=3)[0] == 0
    assert drawn(P, typical_p=0.31, temperature=0.0) == [0, 0, 1000, 0]  # greedy among what is left
    assert drawn(P, typical_p=0.31, min_p=0.7) == shares(0, 0, 1, 0)  # relative to 0.3, the largest that is left


def test_xtc_drops_all_but_the_last_likely_token() -> None:
    rules = {"xtc_probability": 0.5, "xtc_threshold": 0.25}
    assert drawn(P, **rules, chance=0.6) == shares(0.1, 0.4, 0.3, 0.2)
    assert drawn(P, **rules, chance=0.5) == shares(0.1, 0, 0.3, 0.2)
    assert drawn(P, xtc_probability=1, xtc_threshold=0.35) == shares(0.1, 0.4, 0.3, 0.2)  # one alone stays
    assert drawn(P, xtc_probability=1, xtc_threshold=0.0) == [1000, 0, 0, 0]
    assert drawn(P, xtc_probability=1, xtc_threshold=0.51) == shares(0.1, 0.4, 0.3, 0.2)
    assert drawn(P, **rules, top_k=3) == shares(0, 0, 0.3, 0.2)
    assert drawn(P, **rules, temperature=0.0) == [0, 0, 1000, 0]


def test_temperature_last_leaves_the_other_rules_their_probabilities() -> None:
    assert drawn(P, temperature=0.1, min_p=0.6) == [0, 1000, 0, 0]
    cold = [0, 0.4**2, 0.3**2, 0]
    assert drawn(P, temperature=0.5, min_p=0.6, temperature_last=True) == shares(*cold)
    assert drawn(P, temperature=0.5, top_p=0.65, temperature_last=True) == shares(*cold)
    assert drawn(P, temperature=0.5, top_p=0.65, top_k=3, temperature_last=True)[3] == 0


def test_dynamic_temperature_rises_with_the_entropy() -> None:
    flat = np.zeros(4, np.float32)
    assert drawn(flat, dynatemp_range=0.5) == shares(1, 1, 1, 1)
    # entropy 1.2799 of at most 1.3863: 0.9232, so temperatures 0.5 + 0.9232 and 0.5 + 0.9232**4
    for exponent in (1.0, 4.0):
        temperature = 0.5 + 0.92320**exponent
        expected = shares(*(p ** (1 / temperature) for p in (0.1, 0.4, 0.3, 0.2)))
        assert drawn(P, dynatemp_range=0.5, dynatemp_exponent=exponent) == expected
    assert drawn(P, dynatemp_range=5.0, top_k=1) == [0, 1000, 0, 0]
    assert drawn(P, dynatemp_range=0.5, temperature=0.0) != [0, 1000, 0, 0]  # from 0 to 0.5


def test_mirostat_2_keeps_what_surprises_no_more_than_its_bound() -> None:
    bound = -math.log2(0.25)
    assert drawn(P, mirostat=2, surprise_bound=bound) == shares(0, 0.4, 0.3, 0)
    assert drawn(P, mirostat=2, surprise_bound=0.0) == [0, 1000, 0, 0]
    assert drawn(P, mirostat=2, surprise_bound=99.0) == shares(0.1, 0.4, 0.3, 0.2)
    assert drawn(P, mirostat=2, surprise_bound=bound, top_k=1, min_p=1.0) == shares(0, 0.4, 0.3, 0)  # instead of these
    row = make_row(temperature=1.0, mirostat=2, surprise_bound=bound, uniform=0.9)
    for ctx in (Context("reference"), *native_contexts()):
        (result,) = sample(ctx, P[None], [row])
        assert (result.token_id, result.surprise) == (2, pytest.approx(-math.log2(0.3 / 0.7), abs=1e-5))


def test_mirostat_1_estimates_how_many_to_keep() -> None:
    ranks = np.arange(1, 1001)
    zipf = (-1.5 * np.log(ranks)).astype(np.float32)  # exponent 1.5, which the estimate finds
    kept = math.floor(((0.5 * 2**3.0) / (1 - 1000**-0.5)) ** (1 / 1.5))
    counts = drawn(zipf, mirostat=1, surprise_bound=3.0)
    assert [count > 0 for count in counts] == [rank <= kept for rank in ranks]
    assert counts[:kept] == shares(*(rank**-1.5 for rank in ranks[:kept].tolist()))


def test_dry_penalties_come_after_the_others() -> None:
    seen = {"history_ids": np.array([1], np.int32), "history_counts": np.array([1], np.int32)}
    dry = {"dry_ids": np.array([1], np.int32), "dry_penalties": np.array([1.5], np.float32)}
    logits = np.array([1.0, 4.0], np.float32)
    for ctx in (Context("reference"), *native_contexts()):
        (result,) = sample(ctx, logits[None], [make_row(**seen, **dry, repetition_penalty=2.0, top_logprobs=2)])
        assert result.token_id == 0  # 4 / 2 - 1.5, not (4 - 1.5) / 2
        assert result.top[0].logprob - result.top[1].logprob == pytest.approx(0.5, abs=1e-6)
