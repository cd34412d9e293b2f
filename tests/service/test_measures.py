"""Perplexity windows, the comparison of logits, and the memory and time of the process."""

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
from mlxr.service.measures import Load, score_text, split_windows, summarise
from mlxr.service.validation import LogitsTap, Reference, compare_logits


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


def make_reference(rows: np.ndarray, moved_by: float = 0.005, product_error: float = 0.0) -> Reference:
    return Reference(rows, rows + moved_by * rows.std() * random_logits(9), product_error)


def test_equal_logits_agree() -> None:
    check = compare_logits(random_logits(0), make_reference(random_logits(0)))
    assert (check.relative_error, check.same_greedy, check.positions) == (0, 5, 5)
    assert check.divergence_nats == pytest.approx(0, abs=1e-12)
    assert check.agree


def test_the_bound_is_what_rounding_moves_this_model_by() -> None:
    reference, noise = random_logits(0) * 7, random_logits(1) * 7
    cases = [(0.005, 0.015, True), (0.005, 0.025, False), (0.05, 0.15, True), (0.05, 0.25, False)]
    for moved_by, error, agrees in cases:
        check = compare_logits(reference + error * noise, make_reference(reference, moved_by))
        assert check.relative_error == pytest.approx(error, rel=0.2)
        assert check.agree is agrees


def test_wrong_products_other_logits_and_not_a_number_disagree() -> None:
    assert not compare_logits(random_logits(0), make_reference(random_logits(0), product_error=0.1)).agree
    assert not compare_logits(random_logits(0), make_reference(random_logits(1))).agree
    broken = random_logits(0)
    broken[2, 3] = np.nan
    assert not compare_logits(broken, make_reference(random_logits(0))).agree


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
        "from mlxr.service.measures import read_peak_memory_bytes as read\n"
        "before = read(); block = b'x' * (100 << 20); print(before, read())"
    )
    ballast = b"x" * (200 << 20)  # held by the parent while the child starts: not the child's
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert 1 << 20 < before < 150 << 20
    assert (100 << 20) <= after - before < (110 << 20)
    assert len(ballast) == 200 << 20
