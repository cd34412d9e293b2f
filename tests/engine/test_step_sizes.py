"""The size of a step follows from the settings and the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_model import FakeModel

from mlxr.core.model_settings import (
    GPU_SIZES,
    LIGHT_SIZES,
    ROOM_SIZES,
    SIZES,
    USUAL_SIZES,
    ModelSettings,
    StepSizes,
    size_steps,
)
from mlxr.engine.memory_plan import is_light


@pytest.mark.parametrize(("device", "sizes"), [("cpu", USUAL_SIZES), ("cuda", GPU_SIZES), ("metal", SIZES["metal"])])
def test_what_is_not_said_follows_from_the_device(device: str, sizes: StepSizes) -> None:
    assert size_steps(ModelSettings(), device) == sizes
    assert size_steps(ModelSettings(max_sequences=3), device).max_sequences == 3
    assert size_steps(ModelSettings(max_sequences=3), device).max_batch_tokens == sizes.max_batch_tokens


@pytest.mark.parametrize(("device", "heads"), [("cpu", 2**7), ("cuda", 2**10)])
def test_small_encoders_have_larger_steps(device: str, heads: int) -> None:
    assert size_steps(ModelSettings(), device, is_light=True) == LIGHT_SIZES[device]
    encoder = replace(FakeModel().config, is_causal=False)
    assert is_light(encoder, device)
    assert is_light(replace(encoder, heads=heads), device)
    assert not is_light(replace(encoder, heads=2 * heads), device)
    assert not is_light(FakeModel().config, device)
    assert not is_light(encoder, "metal")
    assert size_steps(ModelSettings(), "metal", is_light=True) == SIZES["metal"]


@pytest.mark.parametrize(("device", "sizes"), [("cpu", USUAL_SIZES), ("cuda", ROOM_SIZES["cuda"])])
def test_steps_are_larger_on_a_gpu_with_much_memory(device: str, sizes: StepSizes) -> None:
    assert size_steps(ModelSettings(), device, has_room=True) == sizes
    assert size_steps(ModelSettings(max_batch_tokens=100), device, has_room=True).max_batch_tokens == 100
    assert size_steps(ModelSettings(), device, is_light=True, has_room=True) == LIGHT_SIZES.get(device, sizes)
