"""Kinds of rotation that families bring: factors by context, a share of the pairs, none at all, warmer queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mlxr.core.errors import ModelError
from mlxr.kernels.rope import (
    QueryTemperature,
    RopeScaling,
    build_table,
    inverse_frequencies,
    longrope_attention_factor,
)

SHORT, LONG = tuple(1.0 + 0.01 * i for i in range(24)), tuple(1.0 + 2.0 * i for i in range(24))


def make_longrope(**changes: Any) -> RopeScaling:
    fields = {"factor": 1.0, "original_context": 4096, "short_factors": SHORT, "long_factors": LONG}
    return RopeScaling("longrope", **{**fields, **changes})


@pytest.mark.parametrize(("context", "factors"), [(100, SHORT), (4096, SHORT), (4097, LONG), (131072, LONG)])
def test_longrope_takes_its_factors_by_the_context_that_is_served(context: int, factors: tuple[float, ...]) -> None:
    scaled = inverse_frequencies(48, 1e4, make_longrope(), context=context)
    np.testing.assert_allclose(scaled, inverse_frequencies(48, 1e4) / np.array(factors), rtol=1e-15)


def test_longrope_rows_do_not_depend_on_how_many_there_are() -> None:
    """A table that grows with a context keeps the meaning of keys that are cached."""
    scaling = make_longrope()
    short, long = (build_table(n, 48, 1e4, interleaved=False, scaling=scaling, context=8192) for n in (10, 5000))
    np.testing.assert_array_equal(short.cos, long.cos[:10])
    with pytest.raises(ValueError, match="context with longrope scaling is None"):
        build_table(10, 48, 1e4, interleaved=False, scaling=scaling)
    with pytest.raises(ValueError, match="number of longrope factors is 24, expected 32"):
        build_table(10, 64, 1e4, interleaved=False, scaling=scaling, context=10)


def test_longrope_sharpens_by_how_much_longer_the_model_was_made() -> None:
    factor = longrope_attention_factor(131072 / 4096, 4096)
    assert factor == pytest.approx(1.1902380714238083)  # Phi-3.5: sqrt(1 + ln 32 / ln 4096)
    assert longrope_attention_factor(1.0, 4096) == longrope_attention_factor(2.0, 1) == 1.0
    scaling = make_longrope(attention_factor=factor)
    table = build_table(2, 48, 1e4, interleaved=False, scaling=scaling, context=4096)
    np.testing.assert_allclose(table.cos[0], factor, rtol=1e-6)


def test_a_large_factor_leaves_a_pair_where_it_is() -> None:
    """Files say so of a share of the pairs; the others turn with the frequencies of the whole head."""
    table = build_table(3000, 512, 1e6, interleaved=False, frequency_factors=[1.0] * 64 + [1e30] * 192)
    plain = build_table(3000, 512, 1e6, interleaved=False)
    np.testing.assert_array_equal(table.cos[:, :64], plain.cos[:, :64])
    np.testing.assert_array_equal(table.cos[:, 64:], 1.0)
    np.testing.assert_allclose(table.sin[:, 64:], 0.0, atol=1e-20)
    # which is not what rotating a quarter of the head alone is
    assert np.abs(build_table(30, 128, 1e6, interleaved=False).cos - table.cos[:30, :64]).max() > 0.5


def test_factors_divide_frequencies() -> None:
    divided = inverse_frequencies(64, 1e4, frequency_factors=[8.0] * 32)
    np.testing.assert_allclose(divided, inverse_frequencies(64, 1e4) / 8)


def test_no_rotation_is_a_table_without_pairs() -> None:
    table = build_table(7, 0, 1e4, interleaved=False, temperature=QueryTemperature(0.1, 3))
    assert (table.positions, table.rot_dim, table.cos.shape) == (7, 0, (7, 0))
    assert table.query_factors is not None
    np.testing.assert_allclose(table.query_factors[[0, 2, 3, 6]], [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])


def test_queries_are_warmer_by_whole_periods() -> None:
    ministral = build_table(40000, 8, 1e4, interleaved=False, temperature=QueryTemperature(0.1, 16384)).query_factors
    llama = build_table(40000, 8, 1e4, interleaved=False, temperature=QueryTemperature(0.1, 8192, 1)).query_factors
    assert ministral is not None
    assert llama is not None
    assert ministral[16383] == 1
    assert ministral[16384] == pytest.approx(1 + 0.1 * math.log(2))
    assert llama[8190] == 1
    assert llama[8191] == pytest.approx(1 + 0.1 * math.log(2))
    assert build_table(4, 8, 1e4, interleaved=False).query_factors is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"original_context": None}, "original_context is None"),
        ({"short_factors": ()}, "0 short_factors and 24 long_factors"),
        ({"long_factors": LONG[:3]}, "24 short_factors and 3 long_factors"),
        ({"short_factors": (0.0, *SHORT[1:])}, "short_factors is 0.0"),
        ({"long_factors": (math.nan, *LONG[1:])}, "long_factors is nan"),
    ],
)
def test_senseless_longrope_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_longrope(**changes)


def test_other_senseless_values_are_refused() -> None:
    for fields in ({"beta": -1.0, "period": 1}, {"beta": math.nan, "period": 1}, {"beta": 0.1, "period": 0}):
        with pytest.raises(ModelError, match="query temperature"):
            QueryTemperature(**fields)  # type: ignore[arg-type]
