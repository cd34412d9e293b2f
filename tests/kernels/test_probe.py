"""The probe runs on every tier, and its figures are the true rates of its work."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mlxr.core.errors import DeviceError
from mlxr.kernels.context import Context
from mlxr.kernels.ledger import Probe

native = pytest.importorskip("mlxr._native", reason="the native module is not built")
MIB = 1 << 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.slow
def test_every_tier_measures(isa: str, threads: int) -> None:
    probe = Context(threads=threads, isa=isa).start_probe()
    limits = probe.measure(1)
    assert 1e8 < limits.read_bytes_per_s < 1e13
    assert 1e6 < limits.int8_macs_per_s < 1e15  # a sanitizer, or other work, may slow it a hundred times


def test_the_buffer_is_whole_pieces() -> None:
    ctx = Context(threads=1)
    assert [Probe(ctx, size).buffer_bytes for size in (1, 8 * MIB, 8 * MIB + 1)] == [8 * MIB, 8 * MIB, 16 * MIB]


def test_rates_fit_the_clock() -> None:
    ctx = Context(threads=1)
    probe = ctx.module.Probe(ctx.native, 32 * MIB)
    works: list[Callable[[], float]] = [
        lambda: float(probe.read(ctx.native, 4096)),
        lambda: 2e9 / float(probe.multiply(ctx.native, 2 * 10**9)),
    ]
    for work in works:
        start_s = time.perf_counter()
        told_s = work()
        # What the probe tells is inside what passed here, and most of it when the machine is not taken away meanwhile.
        assert 0 < told_s <= (time.perf_counter() - start_s) * 1.001


def test_sizes_are_checked() -> None:
    ctx = Context(threads=1)
    with pytest.raises(ValueError, match="bytes is 0"):
        ctx.module.Probe(ctx.native, 0)
    probe = ctx.module.Probe(ctx.native, 1)
    with pytest.raises(ValueError, match="ahead is -1"):
        probe.read(ctx.native, -1)
    with pytest.raises(ValueError, match="macs is 0"):
        probe.multiply(ctx.native, 0)


def test_the_reference_device_has_nothing_to_measure() -> None:
    with pytest.raises(DeviceError, match="'reference' has no native kernels"):
        Context("reference").start_probe()
