"""What a model is as GGUF's metadata; `config_from_gguf` goes the other way."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.core.errors import ModelError
from mlxr.models.architecture import EPS_KEYS
from mlxr.models.architectures import by_name, name_gguf
from mlxr.models.config import ModelConfig
from mlxr.models.mixture import mixture_metadata
from mlxr.models.recurrence_config import gguf_recurrence
from mlxr.models.rope_config import rope_metadata
from mlxr.models.rope_factors import list_rope_factors
from mlxr.models.scale_config import scale_metadata
from mlxr.models.two_sizes import sizes_metadata
from mlxr.models.window_config import window_metadata


def gguf_metadata(config: ModelConfig) -> dict[str, object]:
    """The metadata that says in GGUF what `config` says; without names, tokenizer and file type.

    ModelError for what GGUF cannot state of this family.
    """
    row = by_name(config.architecture)
    if config.activation != row.activation:
        raise ModelError(f"activation {config.activation} cannot be stated in a GGUF file of {config.architecture}")
    fields: dict[str, object] = {
        "block_count": config.layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        EPS_KEYS[row.norm_kind]: config.rms_eps,
    }
    if config.recurrence is not None:
        recurrent = config.recurrent_layers or (True,) * config.layers
        attends = tuple(layer.attention is not None for layer in config.layer_specs)
        fields |= gguf_recurrence(config.recurrence, recurrent, attends, config.kv_heads)
    if config.mixer_layers is not None:
        widths = [0 if is_mixer else config.ffn for is_mixer in config.mixer_layers]
        fields |= {"feed_forward_length": widths, EPS_KEYS["layer"]: config.rms_eps}
    if config.gated_attention:
        pairs = config.rope_dim // 2
        fields["rope.dimension_sections"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0]
    if row.two_sizes:
        fields |= sizes_metadata(config)
    if row.parallel_key is not None:
        fields["use_parallel_residual"] = config.parallel_blocks
    fields |= window_metadata(config, row.windows, states_layers=row.two_sizes)
    fields |= rope_metadata(config, row.rope)
    fields |= scale_metadata(config, row.scales)
    fields |= mixture_metadata(config, row.mixture)
    name = name_gguf(row, config.mixture is not None)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in fields.items()}


def gguf_rope_factors(config: ModelConfig) -> dict[str, Sequence[float]]:
    """The f32 tensors (rope_dim / 2), by name, that state what the metadata of a rotation have no keys for."""
    return list_rope_factors(config, by_name(config.architecture).rope.states_factors)
