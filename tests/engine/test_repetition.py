"""DRY's search against its definition, spelt out place by place."""

from __future__ import annotations

import numpy as np
import pytest

from mlxr.core.types import SamplingParams
from mlxr.engine.sampler import Repetition, find_largest_power, match_end


def count_match(tokens: list[int], place: int) -> int:
    """Return how many tokens up to `place` equal those at the end."""
    length = 0
    while length <= place and tokens[place - length] == tokens[-1 - length]:
        length += 1
    return length


def define_penalties(tokens: list[int], params: SamplingParams, breakers: set[tuple[int, ...]]) -> dict[int, float]:
    window = tokens if params.dry_penalty_last_n < 0 else tokens[max(len(tokens) - params.dry_penalty_last_n, 0) :]
    ends = [
        end for breaker in breakers for end in range(1, len(tokens) + 1)
        if tuple(tokens[max(end - len(breaker), 0) : end]) == breaker
    ]  # fmt: skip
    unbroken = len(tokens) - max(ends, default=0)
    longest: dict[int, int] = {}
    for place in range(len(window) - 1):
        length = min(count_match(window, place), unbroken)
        if length >= params.dry_allowed_length and (window[place + 1],) not in breakers:
            longest[window[place + 1]] = max(longest.get(window[place + 1], 0), length)
    return {
        token: params.dry_multiplier
        * params.dry_base ** min(length - params.dry_allowed_length, find_largest_power(params.dry_base))
        for token, length in longest.items()
    }


@pytest.mark.parametrize("window", [-1, 1, 2, 11, 500])
@pytest.mark.parametrize("allowed", [0, 1, 3])
@pytest.mark.parametrize("kinds", [1, 3, 12])
def test_penalties_are_those_of_the_definition(window: int, allowed: int, kinds: int) -> None:
    chance = np.random.default_rng([window + 1, allowed, kinds])
    params = SamplingParams(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=window)
    breakers = {(11,), (9, 8), (7, 7, 6)}
    tokens = chance.integers(0, kinds, 20).tolist()
    searched = Repetition(tokens, params, breakers)
    for _ in range(80):
        ids, penalties = searched.list_penalties()
        expected = define_penalties(tokens, params, breakers)
        assert dict(zip(ids.tolist(), penalties.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)
        assert ids.dtype == np.int32
        repeats = chance.random() < 0.3
        for token_id in tokens[3:8] if repeats else chance.integers(0, kinds, 1).tolist():
            searched.add(token_id)
            tokens.append(token_id)


def test_a_long_prompt_takes_linear_time() -> None:
    lengths = match_end([1] * 50_000)  # a search place by place would take hours
    assert lengths.tolist() == [*range(1, 50_000), 0]


def test_growth_is_bounded_by_what_a_float_holds() -> None:
    params = SamplingParams(dry_multiplier=100, dry_base=100)
    (_, penalties) = Repetition([1] * 5000, params, ()).list_penalties()
    assert penalties.max() > 1e37
    (_, flat) = Repetition([1] * 50, SamplingParams(dry_multiplier=2, dry_base=1), ()).list_penalties()
    assert flat.tolist() == [2.0]
