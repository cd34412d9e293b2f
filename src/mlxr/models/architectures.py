"""The architectures we run: one row each. They share one decoder and differ in what a row says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.models import families
from mlxr.models.specs import LayerSpec

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family.

    `name` is its `model_type` in `config.json`; `gguf_name` its `general.architecture` and key prefix in GGUF;
    `hf_class` its entry in `architectures`. `gguf_interleaved`: GGUF files have the rows of q and k in an order that
    rotates neighbouring pairs. `qkv_bias`: always has biases on q, k and v; `bias_key`: `attention_bias` in
    `config.json` gives q, k, v and o biases, `mlp_bias` gate, up and down. `qk_norm`: RMS norm of every query and key
    head. `window_switch`: the sliding window counts only with `use_sliding_window`. `build` makes the layers.
    """

    name: str
    gguf_name: str
    hf_class: str
    gguf_interleaved: bool = False
    qkv_bias: bool = False
    bias_key: bool = False
    qk_norm: bool = False
    windowed: bool = False
    window_switch: bool = False
    kv_heads_default: bool = False  # old llama configurations leave num_key_value_heads out when all heads have one
    build: Callable[[ModelConfig], tuple[LayerSpec, ...]] = families.build_llama


ARCHITECTURES = (
    Architecture("llama", "llama", "LlamaForCausalLM", gguf_interleaved=True, bias_key=True, kv_heads_default=True),
    Architecture("mistral", "llama", "MistralForCausalLM", gguf_interleaved=True, windowed=True),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", qkv_bias=True, windowed=True, window_switch=True),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", bias_key=True, qk_norm=True, windowed=True, window_switch=True),
)


def by_name(name: str) -> Architecture:
    """Return the row that `ModelConfig.architecture` names; ModelError when there is none."""
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise ModelError(
        f"architecture {name!r} is not supported; supported are {_listed({r.name for r in ARCHITECTURES})}"
    )


@lru_cache(maxsize=16)
def build_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers of a configuration."""
    return by_name(config.architecture).build(config)


def by_gguf_name(name: str) -> Architecture:
    """The row of a GGUF file's `general.architecture`; "llama" there means Mistral too."""
    for row in ARCHITECTURES:
        if row.gguf_name == name:
            return row
    known = _listed({row.gguf_name for row in ARCHITECTURES})
    raise ModelError(f"general.architecture is {name!r}, which is not supported; supported are {known}")


def by_hf_class(name: str) -> Architecture:
    """The row of an entry of `architectures` in `config.json`."""
    for row in ARCHITECTURES:
        if row.hf_class == name:
            return row
    known = _listed({row.hf_class for row in ARCHITECTURES})
    raise ModelError(f"architectures is [{name!r}], which is not supported; supported are {known}")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
