"""Families with recurrent layers, with experts or without: one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxr.models import families
from mlxr.models.architecture import Architecture, TensorRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.recurrence_config import RecurrenceRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.rows.shared_parts import GRANITE, GRANITE_MIXTURE, SIGMOID

_LFM2: dict[str, Any] = {
    "qk_norm": True,
    "recurrence": RecurrenceRow("short_conv"),
    "tensors": TensorRow(output_norm="token_embd_norm"),
}
_QWEN35: dict[str, Any] = {
    "build": families.build_qwen35,
    "qk_norm": True,
    "gated_attention": True,
    "recurrence": RecurrenceRow("gated_delta", gguf_tiled=True),
}
_QWEN35_MIXTURE = MixtureRow(renormalises=True, shared="features", shared_gate=True)

RECURRENT = (
    Architecture(
        "granitemoehybrid",
        "granitehybrid",
        recurrence=RecurrenceRow("mamba2"),
        mixture=replace(GRANITE_MIXTURE, optional=True),
        **GRANITE,
    ),
    Architecture("lfm2", "lfm2", **_LFM2),
    Architecture("lfm2_moe", "lfm2moe", mixture=MixtureRow(floor=1e-6, **SIGMOID), **_LFM2),
    Architecture(
        "falcon_h1",
        "falcon-h1",
        build=families.build_falcon,
        recurrence=RecurrenceRow("mamba2", beside=True),
        tensors=TensorRow(gguf_bare=("ffn_norm",)),
    ),
    Architecture(
        "nemotron_h",
        "nemotron_h",
        gguf_experts_name="nemotron_h_moe",
        build=families.build_nemotron,
        activation="relu_squared",
        single_blocks=True,
        rope=RopeRow(still_every=1),
        recurrence=RecurrenceRow("mamba2"),
        mixture=MixtureRow(floor=1e-20, optional=True, gated=False, shared="features", **SIGMOID),
    ),
    Architecture("qwen3_5_text", "qwen35", **_QWEN35),
    Architecture("qwen3_5_moe_text", "qwen35moe", mixture=_QWEN35_MIXTURE, **_QWEN35),
    Architecture(
        "qwen3_next",
        "qwen3next",
        mixture=_QWEN35_MIXTURE,
        **_QWEN35 | {"recurrence": RecurrenceRow("gated_delta")},
    ),
)
