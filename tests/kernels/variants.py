"""Every way in which the native operators can run here, instruction sets and numbers of threads: all equal in bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxr.core.types import SamplingParams
from mlxr.kernels.context import Context, load_native
from mlxr.kernels.sample import SampleRow

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@cache
def native_contexts() -> tuple[Context, ...]:
    """One context for each instruction set of this machine and 1, 2 and 3 threads."""
    isas = load_native().available_isas()
    return tuple(Context("cpu", threads=threads, isa=isa) for isa in isas for threads in (1, 2, 3))


def assert_equal_bits(result: NDArray[Any], expected: NDArray[Any], what: object = "") -> None:
    """The same bytes, zeros' signs and all."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape, what
    different = np.flatnonzero(_bits(result) != _bits(expected))
    assert not different.size, f"{what}: {different.size} of {result.size} differ, first at {different[0]}"


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(-1)


def run_everywhere(operator: Callable[[Context], NDArray[Any]]) -> NDArray[Any]:
    """Return the result of `operator`, which must have the same bits in every native context."""
    contexts = native_contexts()
    expected = operator(contexts[0])
    for ctx in contexts[1:]:
        assert_equal_bits(operator(ctx), expected, ctx)
    return expected


def random_floats(seed: int | Sequence[int], *shape: int) -> Floats:
    """Draw normally distributed numbers; the same seed gives the same ones."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def any_floats(seed: int, *shape: int) -> Floats:
    """Finite numbers of every sign and exponent, subnormal ones included."""
    raw = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    return np.where(raw >> 23 & 0xFF == 0xFF, raw & 0x807FFFFF, raw).astype(np.uint32).view(np.float32)


def count_ulps(result: Floats, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance of each result from the exact value, in units of the last place of a float32 of that size."""
    with np.errstate(over="ignore"):
        spacing = np.spacing(np.maximum(np.abs(exact), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    return np.abs(result.astype(np.float64) - exact) / spacing


def make_row(**fields: Any) -> SampleRow:
    """A row from parameters and values of the step together."""
    own = {name: value for name, value in fields.items() if name in SampleRow.__dataclass_fields__}
    params = {name: value for name, value in fields.items() if name not in own}
    return SampleRow(SamplingParams(**params), **own)
