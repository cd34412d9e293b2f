"""Contexts for the operator tests."""

from __future__ import annotations

import pytest

from mlxr.kernels.context import ISAS, Context, load_native


@pytest.fixture
def reference() -> Context:
    return Context("reference")


@pytest.fixture(params=ISAS)
def cpu(request: pytest.FixtureRequest) -> Context:
    """The native kernels on two threads, once for each instruction set of this machine."""
    if request.param not in load_native().available_isas():
        pytest.skip(f"this machine or build lacks instruction set {request.param}")
    return Context("cpu", threads=2, isa=request.param)
