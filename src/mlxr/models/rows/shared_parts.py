"""What rows of families of several kinds have in common."""

from __future__ import annotations

from typing import Any

from mlxr.models.architecture import TensorRow
from mlxr.models.bias_config import BiasRow
from mlxr.models.mixture import MixtureRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.scale_config import ScaleRow
from mlxr.models.window_config import WindowRow

BY_BLOCK = BiasRow(by_block=True)
LLAMA_ROPE = RopeRow(gguf_interleaved=True)
MAYBE_WINDOWS = WindowRow(in_folders=True, default=0)
QWEN_WINDOWS = WindowRow(in_folders=True, switch=True)
GRANITE_MIXTURE = MixtureRow(
    ("num_local_experts",), "intermediate_size", renormalises=True, shared_key="shared_intermediate_size"
)
GRANITE_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
GRANITE_ROPE = RopeRow(gguf_interleaved=True, gguf_switch=True)
GRANITE: dict[str, Any] = {
    "biases": BY_BLOCK,
    "rope": GRANITE_ROPE,
    "scales": ScaleRow(multipliers=True),
    "tensors": TensorRow(GRANITE_NAMES),
}
# Of DeepSeek's kind: sigmoids, shares that are divided by their sum, a bias for the choice alone.
SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "renormalises": True, "states_rule": True, "choice_bias": True}
