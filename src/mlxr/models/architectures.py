"""The architectures we run, by their names: `rows` has one row for each. They share one decoder."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from mlxr.core.errors import ModelError
from mlxr.models.architecture import Architecture
from mlxr.models.components import Layer
from mlxr.models.rows.dense import DENSE
from mlxr.models.rows.mixtures import MIXTURES
from mlxr.models.rows.recurrent import RECURRENT

if TYPE_CHECKING:
    from mlxr.models.config import ModelConfig

ARCHITECTURES = DENSE + MIXTURES + RECURRENT


def by_name(name: str) -> Architecture:
    """Return the row that `ModelConfig.architecture` names; ModelError when there is none."""
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise ModelError(
        f"architecture {name!r} is not supported; supported are {_listed({r.name for r in ARCHITECTURES})}"
    )


@lru_cache(maxsize=16)
def build_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """The layers of a configuration."""
    return by_name(config.architecture).build(config)


def by_gguf_name(name: str, has_experts: bool = False) -> Architecture:
    """The row of a GGUF file's `general.architecture`; "llama" there means Mistral, too, and with experts Mixtral."""
    rows = [row for row in ARCHITECTURES if name in (row.gguf_name, row.gguf_experts_name)]
    for row in rows:
        if (row.mixture is not None) == has_experts:
            return row
    if rows:
        return rows[0]
    names = {name for row in ARCHITECTURES for name in (row.gguf_name, row.gguf_experts_name)}
    known = _listed({name for name in names if name is not None})
    raise ModelError(f"general.architecture is {name!r}, which is not supported; supported are {known}")


def name_gguf(row: Architecture, has_experts: bool) -> str:
    """The `general.architecture` of a GGUF file of this row."""
    return row.gguf_experts_name if has_experts and row.gguf_experts_name is not None else row.gguf_name


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
