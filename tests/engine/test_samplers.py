"""Samplers' state from token to token is a function of the answer's own history, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_model import VOCABULARY, generate

from mlxr.core.types import SamplingParams
from mlxr.engine.request import MaskSource
from mlxr.engine.sampler import Sampler, draw_uniform, draw_uniforms

PROMPT = [1, 2, 3]


def test_mirostat_goes_towards_its_aim() -> None:
    sampler = Sampler(SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5, temperature=1), PROMPT)
    assert sampler.row().surprise_bound == 6.0
    sampler.accept(4, 5.0)
    assert sampler.row().surprise_bound == 5.0
    sampler.accept(4, 1.0)
    assert sampler.row().surprise_bound == 6.0


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise(version: int) -> None:
    answers = [
        generate(PROMPT, SamplingParams(max_tokens=60, temperature=1, mirostat=version, mirostat_tau=tau, seed=5))
        for tau in (0.1, 4.0)
    ]
    narrow, wide = (len(set(answer)) for answer in answers)
    assert answers[0] != answers[1]
    assert narrow <= wide


def test_xtc_has_numbers_of_its_own() -> None:
    params = SamplingParams(temperature=1, xtc_probability=0.5, seed=9)
    sampler = Sampler(params, PROMPT, answer=3)
    for index in range(3):
        row = sampler.row()
        assert row.uniform == draw_uniform(9, index, 3)
        assert row.chance == draw_uniforms(9, index, 1, 3, word=1)[0] != row.uniform
        assert sampler.row().chance == row.chance
        sampler.accept(0)


def test_dry_ends_a_loop() -> None:
    """The fake model repeats itself in time; with DRY it does not."""
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]
    bias = {8: 100.0}
    assert generate(prompt, SamplingParams(max_tokens=1, logit_bias=bias)) == [8]
    hard: dict[str, Any] = {"dry_multiplier": 100.0, "dry_base": 3.0}
    assert generate(prompt, SamplingParams(max_tokens=1, logit_bias=bias, **hard)) != [8]
    unbroken = frozenset([(6,)])  # one token after it: less than 2
    assert generate(prompt, SamplingParams(max_tokens=1, logit_bias=bias, **hard), dry_breaker_ids=unbroken) == [8]


def test_no_end_before_min_tokens() -> None:
    ends = {"stop_token_ids": frozenset([7]), "logit_bias": {7: 100.0}}
    assert generate(PROMPT, SamplingParams(max_tokens=9, **ends)) == [7]  # type: ignore[arg-type]
    answer = generate(PROMPT, SamplingParams(max_tokens=9, min_tokens=4, **ends))  # type: ignore[arg-type]
    assert len(answer) == 5
    assert answer.index(7) == 4


def test_a_grammar_that_only_leaves_the_end_goes_before_min_tokens() -> None:
    class Only:
        def __init__(self, *token_ids: int) -> None:
            self.token_ids = token_ids

        needs_end = True

        def count_free(self) -> int:
            return 0

        def fill_mask(self, mask: Any) -> None:
            for token_id in self.token_ids:
                mask[token_id // 32] |= np.uint32(1 << token_id % 32)

        def accept(self, token_id: int) -> None: ...

        def look_ahead(self, tokens_left: int) -> Any: ...

        def close(self) -> Any: ...

        def count_allowed(self, token_ids: Any) -> Any: ...

        def fork(self) -> Any: ...

    params = SamplingParams(min_tokens=4)
    for allowed, left in (((7, 8), {8}), ((7,), {7})):
        row = Sampler(params, PROMPT, masks=MaskSource(Only(*allowed), VOCABULARY), stop_ids=[7]).row()
        assert row.mask is not None
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits)) == left
