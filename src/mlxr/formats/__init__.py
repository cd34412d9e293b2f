"""Files of weights as tables of tensors: GGUF and safetensors, quantised ones too; one table row per type.

Knows files, types and blocks; nothing of models, tokenizers or kernels. A file is opened (mapped, checked, nothing
copied) into metadata and `TensorSource`s; weights go back to disk through `write_gguf`.
"""

from __future__ import annotations

from mlxr.formats.adapter_file import AdapterFile, find_adapter_files, measure_adapter, read_adapter
from mlxr.formats.ggml_types import GGML_TYPES, MLX_TYPES, GGMLType, by_id, by_name, encode_tensor
from mlxr.formats.gguf import GGUFFile, open_gguf
from mlxr.formats.gguf_writer import TensorToWrite, write_gguf
from mlxr.formats.mlx_affine import (
    AffineBlocks,
    AffineTensor,
    Float4Tensor,
    FloatGroups,
    MicroscaledTensor,
    join_factors,
)
from mlxr.formats.packed import Float8Tensor, LevelsTensor, join_quantised
from mlxr.formats.safetensors import SafetensorsFolder, open_safetensors
from mlxr.formats.tensor import TensorSource, WeightSource, hash_tensors

__all__ = [
    "GGML_TYPES",
    "MLX_TYPES",
    "AdapterFile",
    "AffineBlocks",
    "AffineTensor",
    "Float4Tensor",
    "Float8Tensor",
    "FloatGroups",
    "GGMLType",
    "GGUFFile",
    "LevelsTensor",
    "MicroscaledTensor",
    "SafetensorsFolder",
    "TensorSource",
    "TensorToWrite",
    "WeightSource",
    "by_id",
    "by_name",
    "encode_tensor",
    "find_adapter_files",
    "hash_tensors",
    "join_factors",
    "join_quantised",
    "measure_adapter",
    "open_gguf",
    "open_safetensors",
    "read_adapter",
    "write_gguf",
]
