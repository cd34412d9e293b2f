"""Logits of tiny models with adapters as `peft` saves them against those of `peft` (tools/make_adapter_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_adapters import fit
from tiny_models import TinyRun, build_gguf, build_hf, read_golden

from mlxr.formats import read_adapter
from mlxr.kernels.context import Context

ADAPTERS = Path(__file__).parent / "adapter_goldens"
CASES = sorted(path.name for path in ADAPTERS.iterdir())
TOLERANCE = 1e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "layout", "device"),
    [
        (case, layout, device)
        for case in CASES
        for layout, device in (("folder", "reference"), ("folder", "cpu"), ("gguf", "reference"))
    ],
)
def test_logits_equal_those_of_peft(case: str, layout: str, device: str) -> None:
    with np.load(ADAPTERS / case / "logits.npz") as stored:
        base, tokens, golden = str(stored["base"]), stored["tokens"], stored["logits"]
    config, seed, _, _ = read_golden(base)
    ctx = Context("reference") if device == "reference" else Context("cpu", threads=2)
    model = build_hf(ctx, config, seed) if layout == "folder" else build_gguf(ctx, config, seed)
    adapter = fit(model, read_adapter(ADAPTERS / case))
    logits = TinyRun(model, adapters=[adapter]).run(tokens)
    assert np.abs(logits - golden).max() < TOLERANCE
    assert np.abs(TinyRun(model).run(tokens) - golden).max() > 100 * TOLERANCE
