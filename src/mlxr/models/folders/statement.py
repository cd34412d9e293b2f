"""What a model folder amounts to as a GGUF file: the metadata, with where each entry comes from, and what its tensors
need on the way.

Numbers are rounded as a GGUF file keeps them, so that a model loaded from the folder is the one that is converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxr.kernels.converted import make_vector, round_float
from mlxr.kernels.tensor import TensorSource
from mlxr.models.fields import OWN, Fields, Origin


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a family's folders keep tensors, where it is unusual."""

    names: Mapping[str, str] = field(default_factory=dict, hash=False)  # that mean something else than elsewhere
    norms_from_one: bool = False  # norms are stored less one
    alternates: bool = False  # rows of gate and up do, and stacks of experts have columns first, unless quantised
    turns_neighbours: bool = False  # neighbouring numbers of a head are rotated, as in GGUF files


@dataclass(slots=True)
class Statement:
    """The metadata of a folder, filled entry by entry.

    Entries are put in by their names without the architecture's prefix, which is known last.
    """

    layout: TensorLayout  # of the folder's tensors
    architecture: str = ""  # GGUF's name of it
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)  # of the values, by the same keys
    vectors: dict[str, Sequence[float]] = field(default_factory=dict)  # small f32 tensors that only GGUF has
    factors: dict[str, WeightFactors] = field(default_factory=dict)  # of weights, by their names without the layer

    def put(self, name: str, value: object, fields: Fields | None = None, key: str = "") -> None:
        """State an entry that `key` of the folder says."""
        self.values[name] = _round(value)
        if fields is not None:
            self.origins[name] = Origin(fields.key(key), fields.get(key))

    def put_own(self, name: str, value: object, fields: Fields | None = None, key: str = "") -> None:
        """State an entry that GGUF has no key for."""
        self.put(OWN + name, value, fields, key)

    def list_vectors(self) -> dict[str, TensorSource]:
        """Return the small tensors, by name."""
        return {name: make_vector(name, values) for name, values in self.vectors.items()}

    def integer(self, name: str) -> int:
        """Return a whole number that was stated."""
        value = self.values[name]
        assert isinstance(value, int)
        return value

    def finish(self) -> None:
        """Give all keys the prefix of the architecture, but for those of our own."""

        def spell(name: str) -> str:
            return name if name.startswith(OWN) else f"{self.architecture}.{name}"

        values = {spell(name): value for name, value in self.values.items()}
        self.values = {"general.architecture": self.architecture} | values
        self.origins = {spell(name): origin for name, origin in self.origins.items()}


@dataclass(frozen=True, slots=True)
class WeightFactors:
    """Numbers that rows of a weight are multiplied by: `counts[0]` rows by the first, and so on; all by one without."""

    factors: tuple[float, ...]
    counts: tuple[int, ...] = ()


def _round(value: object) -> object:
    """Return a number, or a list of them, as 32 bits keep it."""
    if isinstance(value, float):
        return round_float(value)
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, str):
        return value
    return [_round(item) for item in value]
