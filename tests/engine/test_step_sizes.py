"""How much a step computes, by the settings and the device."""

from __future__ import annotations

import pytest

from mlxr.core.model_settings import GPU_SIZES, SIZES, USUAL_SIZES, ModelSettings, StepSizes, size_steps


@pytest.mark.parametrize(("device", "sizes"), [("cpu", USUAL_SIZES), ("cuda", GPU_SIZES), ("metal", SIZES["metal"])])
def test_what_is_not_said_follows_from_the_device(device: str, sizes: StepSizes) -> None:
    assert size_steps(ModelSettings(), device) == sizes
    assert size_steps(ModelSettings(max_sequences=3), device).max_sequences == 3
    assert size_steps(ModelSettings(max_sequences=3), device).max_batch_tokens == sizes.max_batch_tokens
