"""The tensors of a model's files under their canonical names, with the values that they have in GGUF."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mlxr.formats import GGUFFile, SafetensorsFolder, TensorSource, join_quantised
from mlxr.kernels.tensor import TensorSource as WeightTensor
from mlxr.models import ModelConfig
from mlxr.models.architecture import Architecture
from mlxr.models.architectures import by_name
from mlxr.models.components.experts import part_alternating
from mlxr.models.names import adds_one, rename_hf_tensors


def read_tensors(file: GGUFFile | SafetensorsFolder, config: ModelConfig) -> Mapping[str, WeightTensor]:
    """The tensors of a file by canonical name, or by GGUF's."""
    if isinstance(file, GGUFFile):
        return file.tensors
    return name_tensors(join_quantised(file.tensors, file.config), config)


def name_tensors(tensors: Mapping[str, WeightTensor], config: ModelConfig) -> dict[str, WeightTensor]:
    """The tensors of a folder by canonical name, with the values that they have in GGUF."""
    row = by_name(config.architecture)
    named = rename_hf_tensors(tensors, row)
    if row.mixture is not None and row.mixture.interleaved:
        part_alternating(named)
    return {name: _arrange(name, tensor, row) for name, tensor in named.items()}


def _arrange(name: str, tensor: WeightTensor, row: Architecture) -> WeightTensor:
    """A tensor of a folder with the values and the shape that it has in GGUF."""
    if name.endswith(".ssm_a"):  # folders have the logarithm of what states decay by
        # In float32 the last bit of NumPy's exp depends on the processor.
        return _make_floats(tensor, -np.exp(tensor.to_float32().astype(np.float64)).astype(np.float32))
    if adds_one(name, row):
        return _add_one(tensor)
    return tensor


def _add_one(tensor: WeightTensor) -> TensorSource:
    return _make_floats(tensor, tensor.to_float32() + np.float32(1.0))


def _make_floats(tensor: WeightTensor, values: NDArray[np.float32]) -> TensorSource:
    return TensorSource(tensor.name, "f32", tensor.shape, values.view(np.uint8).reshape(-1))
