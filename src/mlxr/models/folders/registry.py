"""The classes of Hugging Face folders that we read, of all families."""

from __future__ import annotations

from mlxr.models.architectures import by_name, name_gguf
from mlxr.models.config import ModelConfig
from mlxr.models.folders.statement import TensorLayout
from mlxr.models.rows import (
    cohere,
    falcon_h1,
    gemma,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    lfm2,
    llama,
    ministral3,
    nemotron_h,
    olmo,
    phi3,
    phimoe,
    qwen,
    qwen35,
    smollm3,
    stablelm,
    starcoder2,
)

FOLDERS = (
    *cohere.FOLDERS,
    *falcon_h1.FOLDERS,
    *gemma.FOLDERS,
    *gemma4.FOLDERS,
    *glm4_moe.FOLDERS,
    *gpt_oss.FOLDERS,
    *granite.FOLDERS,
    *lfm2.FOLDERS,
    *llama.FOLDERS,
    *ministral3.FOLDERS,
    *nemotron_h.FOLDERS,
    *olmo.FOLDERS,
    *phi3.FOLDERS,
    *phimoe.FOLDERS,
    *qwen.FOLDERS,
    *qwen35.FOLDERS,
    *smollm3.FOLDERS,
    *stablelm.FOLDERS,
    *starcoder2.FOLDERS,
)


def find_layout(config: ModelConfig) -> TensorLayout:
    """Return how folders of models like this one keep tensors."""
    architecture = name_gguf(by_name(config.architecture), config.mixture is not None)
    layouts = [
        family.tensors for family in FOLDERS if architecture in (family.architecture, family.experts_architecture)
    ]
    return layouts[0] if layouts else TensorLayout()
