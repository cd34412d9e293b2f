"""Perplexity windows, the comparison of logits, and what the process takes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from fake_engine import BOS, PieceTokenizer
from hypothesis import given
from hypothesis import strategies as st

from mlxr.core.errors import InvalidRequest, ModelError
from mlxr.service.perplexity import score_text, split_windows
from mlxr.service.speed import Load, summarise
from mlxr.service.stats import OperatorCount
from mlxr.service.validation import (
    MAX_RELATIVE_ERROR_FLOAT,
    MAX_RELATIVE_ERROR_QUANTISED,
    LogitsTap,
    choose_tolerance,
    compare_logits,
)


class ScoringEngine:
    """Gives every token the same log-probability, and keeps the windows."""

    context_tokens = 64

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.windows: list[list[int]] = []

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        self.windows.append(list(token_ids))
        return np.full(len(token_ids) - 1, self.logprob)


@given(st.lists(st.integers(5, 9), max_size=50), st.integers(2, 12), st.booleans())
def test_windows_cover_the_text_once(token_ids: list[int], context: int, with_bos: bool) -> None:
    bos = [BOS] if with_bos else []
    windows = list(split_windows(token_ids, context, bos))
    assert all(2 <= len(window) <= context and window[: len(bos)] == bos for window in windows)
    covered = [token for window in windows for token in window[len(bos) :]]
    assert covered == token_ids[: len(covered)]
    assert len(token_ids) - len(covered) <= (0 if with_bos else 1)
    assert all(len(window) == context for window in windows[:-1])


def test_every_token_but_a_windows_first_is_scored() -> None:
    engine = ScoringEngine(-math.log(8))
    score = score_text(engine, PieceTokenizer(), "abcdefg", 4)  # type: ignore[arg-type]
    assert [len(window) for window in engine.windows] == [4, 4, 2]
    assert (score.tokens, score.text_bytes) == (7, 7)
    assert score.perplexity == pytest.approx(8)
    assert score.bits_per_byte == pytest.approx(3)
    without_bos = score_text(engine, PieceTokenizer(add_bos=False), "abcdefg", 4)  # type: ignore[arg-type]
    assert without_bos.tokens == 3 + 2
    assert without_bos.text_bytes == 5


def test_scoring_refuses_what_has_no_score() -> None:
    engine, tokenizer = ScoringEngine(-1.0), PieceTokenizer()
    with pytest.raises(InvalidRequest, match="too few"):
        score_text(engine, tokenizer, "", 4)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="from 2 to 64"):
        score_text(engine, tokenizer, "abc", 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="from 2 to 64"):
        score_text(engine, tokenizer, "abc", 65)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="nan"):
        score_text(ScoringEngine(math.nan), tokenizer, "abc", 4)  # type: ignore[arg-type]


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((5, 100)).astype(np.float32)


def test_equal_logits_agree_and_shifted_ones_differ_only_in_size() -> None:
    check = compare_logits(random_logits(0), random_logits(0), 0.01)
    assert (check.relative_error, check.same_greedy, check.positions) == (0, 5, 5)
    assert check.divergence_nats == pytest.approx(0, abs=1e-12)
    assert check.agree
    assert "1%" in check.criterion


def test_error_is_relative_to_the_spread() -> None:
    reference = random_logits(0) * 7
    noise = random_logits(1) * 7 * 0.02
    check = compare_logits(reference + noise, reference, 0.03)
    assert check.relative_error == pytest.approx(0.02, rel=0.2)
    assert check.agree
    assert not compare_logits(reference + noise, reference, 0.01).agree


def test_other_logits_and_not_a_number_disagree() -> None:
    assert not compare_logits(random_logits(0), random_logits(1), 0.1).agree
    broken = random_logits(0)
    broken[2, 3] = np.nan
    assert not compare_logits(broken, random_logits(0), 0.1).agree


def test_a_divergence_alone_disagrees() -> None:
    reference = np.zeros((1, 10_000), np.float32)
    reference[0, 0] = 12
    rows = reference.copy()
    rows[0, 0] = 11.0
    check = compare_logits(rows, reference, 1.0)
    assert check.divergence_nats > check.max_divergence_nats
    assert not check.agree


@pytest.mark.parametrize(
    ("variants", "tolerance"),
    [
        (["f32", "f16+bf16"], MAX_RELATIVE_ERROR_FLOAT),
        (["f32", "q4_k+q6_k"], MAX_RELATIVE_ERROR_QUANTISED),
        (["f16+q8_0"], MAX_RELATIVE_ERROR_QUANTISED),
    ],
)
def test_tolerance_follows_the_weights(variants: list[str], tolerance: float) -> None:
    rows = [OperatorCount("linear", "cpu", variant, 1) for variant in variants]
    assert choose_tolerance([*rows, OperatorCount("embed", "cpu", "q8_0", 1)]) == tolerance


def test_the_tap_keeps_copies() -> None:
    class Model:
        config = "config"

        def __init__(self) -> None:
            self.buffer = np.zeros((1, 3), np.float32)

        def forward(self, batch: float, arena: object) -> np.ndarray:
            self.buffer[:] = batch
            return self.buffer

    tap = LogitsTap(Model())  # type: ignore[arg-type]
    for value in (1.0, 2.0):
        assert tap.forward(value, None)[0, 0] == value
    assert [rows[0, 0] for rows in tap.rows] == [1.0, 2.0]
    assert tap.config == "config"


def test_a_load_and_a_spread() -> None:
    assert summarise([3.0, 1.0, 10.0]).median == 3.0
    assert (summarise([3.0, 1.0, 10.0]).min, summarise([3.0, 1.0, 10.0]).max) == (1.0, 10.0)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(InvalidRequest):
            Load(*sizes)


def test_peak_memory_is_the_process_own_and_grows_with_what_is_touched() -> None:
    script = (
        "from mlxr.service.process import read_peak_memory_bytes as read\n"
        "before = read(); block = b'x' * (100 << 20); print(before, read())"
    )
    ballast = b"x" * (200 << 20)  # held by the parent while the child starts: not the child's
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert 1 << 20 < before < 150 << 20
    assert (100 << 20) <= after - before < (110 << 20)
    assert len(ballast) == 200 << 20
