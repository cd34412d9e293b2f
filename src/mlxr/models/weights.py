"""Which tensors a model has, and in which shapes: checked completely before any of them is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlxr.core.errors import ModelError
from mlxr.kernels.tensor import TensorSource, read_vector
from mlxr.models.config import ModelConfig
from mlxr.models.layer import list_tensors
from mlxr.models.names import ROPE_FACTORS

_DERIVED_SUFFIX = ".attn_rot_embd.weight"  # old GGUF files store what rope.freq_base says


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor the model must have."""
    table = (config.vocab_size, config.hidden)
    expected: dict[str, tuple[int, ...]] = {"token_embd.weight": table, "output_norm.weight": (config.hidden,)}
    if config.layer_specs[-1].norms.bias:
        expected["output_norm.bias"] = (config.hidden,)
    if not config.tied_embeddings:
        expected["output.weight"] = table
    for index, layer in enumerate(config.layer_specs):
        for part, shape in list_tensors(layer, config.hidden):
            expected[f"blk.{index}.{part}"] = shape
    return expected


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> None:
    """Raise ModelError naming the first tensor that is missing, has another shape, or has no place in the model."""
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelError(
                f"tensor {name} is missing, which a {config.architecture} model of {config.layers} layers needs"
            )
        _check_shape(name, tensors[name].shape, shape, config)
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            _check_shape(name, tensor.shape, (config.rope_dim // 2,), config)
        elif name == "output.weight" and config.tied_embeddings:
            # some folders store the copy that the configuration calls tied; the table is what counts
            _check_shape(name, tensor.shape, expected["token_embd.weight"], config)
        elif name not in expected and not name.endswith(_DERIVED_SUFFIX):
            why = "; mixture of experts is not supported" if "_exps" in name or "gate_inp" in name else ""
            raise ModelError(
                f"tensor {name} has no place in a {config.architecture} model of {config.layers} layers{why}"
            )


def read_rope_factors(tensors: Mapping[str, TensorSource]) -> list[float] | None:
    """Return the divisors of the rotary frequencies, or None; ModelError unless all are finite and positive."""
    tensor = tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    factors: list[float] = read_vector(tensor).tolist()
    for index, factor in enumerate(factors):
        if not 0.0 < factor < math.inf:
            raise ModelError(f"tensor {ROPE_FACTORS} holds {factor} at {index}; it must be finite and above 0")
    return factors


def _check_shape(name: str, has: tuple[int, ...], wants: tuple[int, ...], config: ModelConfig) -> None:
    if has != wants:
        raise ModelError(
            f"tensor {name} has shape {has}, expected {wants} by hidden {config.hidden}, heads {config.heads}, "
            f"kv_heads {config.kv_heads}, head_dim {config.head_dim}, ffn {config.ffn}, vocab_size {config.vocab_size}"
        )
