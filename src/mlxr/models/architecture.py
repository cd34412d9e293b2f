"""What is said of one family of models: how its layers are built, and how its files state them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxr.kernels.activate import Activation
from mlxr.kernels.layers.operators import NormKind
from mlxr.models import families
from mlxr.models.bias_config import BiasRow
from mlxr.models.components import Layer
from mlxr.models.mixture import MixtureRow
from mlxr.models.recurrence_config import RecurrenceRow
from mlxr.models.rope_config import RopeRow
from mlxr.models.scale_config import ScaleRow
from mlxr.models.window_config import WindowRow

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

# What GGUF calls that which norms add to the variance.
EPS_KEYS: dict[NormKind, str] = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """How a family's GGUF files keep tensors."""

    gguf_names: dict[str, str] = field(default_factory=dict, hash=False)  # of those of layers
    gguf_bare: tuple[str, ...] = ()  # the weights whose names do not end in `.weight`
    output_norm: str = "output_norm"  # the name of the norm before the output
    is_joined: bool = False  # q, k and v are one tensor, and gate and up


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family, as its GGUF files state it."""

    name: str
    gguf_name: str  # its `general.architecture` and key prefix
    gguf_experts_name: str | None = None  # of a model with experts, where they are others
    build: Callable[[ModelConfig], tuple[Layer, ...]] = families.build_llama
    activation: Activation = "silu"  # that files mean
    norm_kind: NormKind = "rms"
    qk_norm: bool = False  # queries and keys are normed
    head_norms: bool = False  # or may be
    may_be_parallel: bool = False  # the blocks of a layer may stand side by side
    gated_attention: bool = False  # what attention gives is gated, by rows of the queries' weight
    two_sizes: bool = False  # see two_sizes.py
    single_blocks: bool = False  # each layer is one block; blocks without features are mixers
    biases: BiasRow = field(default_factory=BiasRow)
    rope: RopeRow = field(default_factory=RopeRow)
    windows: WindowRow = field(default_factory=WindowRow)
    scales: ScaleRow = field(default_factory=ScaleRow)
    recurrence: RecurrenceRow = field(default_factory=RecurrenceRow)
    tensors: TensorRow = field(default_factory=TensorRow)
    mixture: MixtureRow | None = None
