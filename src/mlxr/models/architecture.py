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
    """How a family's files keep tensors.

    `hf_names` are names in Hugging Face folders that mean something else than elsewhere, `gguf_names` what GGUF files
    call those of layers, `gguf_bare` the weights whose names do not end in `.weight` there, and `output_norm` what they
    call the norm before the output. `norms_from_one`: Hugging Face stores norms less one. `is_joined`: files keep q, k
    and v as one tensor, and gate and up.
    """

    hf_names: dict[str, str] = field(default_factory=dict, hash=False)
    gguf_names: dict[str, str] = field(default_factory=dict, hash=False)
    gguf_bare: tuple[str, ...] = ()
    output_norm: str = "output_norm"
    norms_from_one: bool = False
    is_joined: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family.

    `name` is its `model_type` in `config.json`; `gguf_name` its `general.architecture` and key prefix in GGUF, or
    `gguf_experts_name` those of a model with experts, where they are others; `hf_class` its entry in `architectures`,
    and `older_class` the one in folders that brought their own code.
    `build` makes the layers. `activation` is the one that GGUF files of this family mean.

    `qk_norm`: queries and keys are normed; `head_norm_key` in `config.json` says whether they are, in GGUF their norms.
    `parallel_key` there says whether the blocks of a layer stand side by side, in GGUF whether the second one has a
    norm. `gated_attention`: what attention gives is gated, by rows of the queries' weight. `two_sizes`: see
    `two_sizes.py`. `single_blocks`: each layer is one block, and GGUF files say so by feed-forward blocks without
    features.

    `kv_heads_default`: a `config.json` without `num_key_value_heads` means as many as heads. `context_keys` there state
    the longest context; the first one counts. `dense_key` is what it calls the features of a feed-forward block in a
    model without experts, and `eps_key` what norms add to the variance, where its name is a rare one. `tied_default`:
    what `tie_word_embeddings` is where it is not stated.
    """

    name: str
    gguf_name: str
    hf_class: str
    gguf_experts_name: str | None = None
    older_class: str | None = None
    build: Callable[[ModelConfig], tuple[Layer, ...]] = families.build_llama
    activation: Activation = "silu"
    norm_kind: NormKind = "rms"
    qk_norm: bool = False
    head_norm_key: str | None = None
    parallel_key: str | None = None
    gated_attention: bool = False
    two_sizes: bool = False
    single_blocks: bool = False
    kv_heads_default: bool = False
    context_keys: tuple[str, ...] = ("max_position_embeddings",)
    dense_key: str = "intermediate_size"
    eps_key: str | None = None
    tied_default: bool = False
    biases: BiasRow = field(default_factory=BiasRow)
    rope: RopeRow = field(default_factory=RopeRow)
    windows: WindowRow = field(default_factory=WindowRow)
    scales: ScaleRow = field(default_factory=ScaleRow)
    recurrence: RecurrenceRow = field(default_factory=RecurrenceRow)
    tensors: TensorRow = field(default_factory=TensorRow)
    mixture: MixtureRow | None = None
