"""Numbers that results of products are multiplied by (Falcon-H1): out of `config.json`, and into the weights.

GGUF files have them in the weights already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.kernels.scaled import scale_rows
from mlxr.kernels.tensor import TensorSource
from mlxr.models.components import Mamba2
from mlxr.models.fields import Fields

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

_LOWEST, _HIGHEST = 1e-9, 1e6
_TABLE, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What results of products are multiplied by in folders of Falcon-H1, where other files have it in the weights.

    `attention_in` and `recurrent_in` multiply what the mixers read, and `keys` those of attention besides; `parts` are
    those of Mamba-2's gate, its columns, B, C and steps; `gate` and `down` are of the feed-forward block.
    """

    embedding: float = 1.0
    logits: float = 1.0
    attention_in: float = 1.0
    keys: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0
    parts: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0


def read_multipliers(fields: Fields) -> Multipliers:
    """The multipliers of a model folder, 1 where it states none."""

    def number(name: str) -> float:
        return fields.number(name, _LOWEST, _HIGHEST, default=1.0)

    gate, down = _read_list(fields, "mlp_multipliers", 2)
    return Multipliers(
        embedding=number("embedding_multiplier"),
        logits=number("lm_head_multiplier"),
        attention_in=number("attention_in_multiplier"),
        keys=number("key_multiplier"),
        attention_out=number("attention_out_multiplier"),
        recurrent_in=number("ssm_in_multiplier"),
        recurrent_out=number("ssm_out_multiplier"),
        parts=_read_list(fields, "ssm_multipliers", 5),
        gate=gate,
        down=down,
    )


def _read_list(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    if fields.get(name) is None:
        return (1.0,) * count
    numbers = fields.numbers(name, _LOWEST, _HIGHEST)
    if len(numbers) != count:
        fields.refuse(name, f"a list of {count} numbers")
    return numbers


def multiply_weights(tensors: dict[str, TensorSource], config: ModelConfig) -> None:
    """Multiply the weights of a folder, each row of which makes a number of a result.

    A model whose output is the table of embeddings gets one of its own, as the two are multiplied by different numbers.
    Raises ModelError for a folder that MLX wrote: depending on the version all of its weights are multiplied already,
    or some, and nothing says which.
    """
    stated = config.multipliers
    assert stated is not None, "the model was read out of a folder"
    for index in range(config.layers):
        conv = tensors.get(f"blk.{index}.ssm_conv1d.weight")
        if conv is not None and len(conv.shape) == 3 and conv.shape[2] == 1:  # channels last
            raise ModelError(
                f"tensor {conv.name} is laid out as MLX does, whose folders of {config.architecture} do not say which "
                "weights they have multiplied; take the original folder, or a GGUF file"
            )
    if _TABLE in tensors:
        tensors.setdefault(_OUTPUT, tensors[_TABLE])
    _multiply(tensors, _TABLE, stated.embedding)
    _multiply(tensors, _OUTPUT, stated.logits)
    for index in range(config.layers):
        for part, factor in _list_factors(stated):
            _multiply(tensors, f"blk.{index}.{part}.weight", factor)
        _multiply_input(tensors, f"blk.{index}.ssm_in.weight", stated, config)


def _list_factors(stated: Multipliers) -> Iterator[tuple[str, float]]:
    """What the products of a layer are multiplied by, but for the recurrent mixer's input."""
    yield "attn_q", stated.attention_in
    yield "attn_k", stated.attention_in * stated.keys
    yield "attn_v", stated.attention_in
    yield "attn_output", stated.attention_out
    yield "ffn_gate", stated.gate
    yield "ffn_down", stated.down
    yield "ssm_out", stated.recurrent_out


def _multiply(tensors: dict[str, TensorSource], name: str, factor: float) -> None:
    tensor = tensors.get(name)
    if tensor is not None and len(tensor.shape) == 2 and factor != 1.0:  # others have no place in the model
        tensors[name] = scale_rows(tensor, (factor,), tensor.shape[:1])


def _multiply_input(tensors: dict[str, TensorSource], name: str, stated: Multipliers, config: ModelConfig) -> None:
    """Each part of what the mixer reads has a number of its own."""
    mixer, tensor = config.recurrence, tensors.get(name)
    assert isinstance(mixer, Mamba2), "the only mixer of folders with multipliers"
    states = mixer.groups * mixer.state_dim
    counts = (mixer.results, mixer.results, states, states, mixer.heads)
    if tensor is not None and tensor.shape == (sum(counts), config.hidden):
        tensors[name] = scale_rows(tensor, [stated.recurrent_in * part for part in stated.parts], counts)
