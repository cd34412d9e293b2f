"""Reads values out of metadata that anybody may have written: every value has a type and a range, or a ModelError.

The error names the key as the file spells it, what it holds and what it may hold. Keys of our own are for facts that
GGUF has no key for, or none that readers of the family know. Files that `mlxr convert` makes of folders have them; each
is read in place of the family's usual value. A key of our own that is not in the table is refused, as a later version
may have written it. Knows no architecture.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import NoReturn

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen


@frozen
class Origin:
    """The source of an entry of metadata that no file has under that key."""

    key: str  # of the file that was mapped
    value: object  # as that file has it


NO_ORIGINS: Mapping[str, Origin] = {}
MAX_LABELS = 1024  # of a classifier


class Fields:
    """Typed access to `values`; keys are given without `prefix`. A null value counts as absent.

    It knows which keys were asked for: those are understood, so no list of them has to agree with the readers. Errors
    about an entry that has an origin (by its whole key) name the origin's key.
    """

    def __init__(
        self, values: Mapping[str, object], prefix: str = "", origins: Mapping[str, Origin] = NO_ORIGINS
    ) -> None:
        self._values = values
        self._prefix = prefix
        self._origins = origins
        self._asked: set[str] = set()

    def key(self, name: str) -> str:
        """Return the key as the file spells it."""
        origin = self._origins.get(self._prefix + name)
        return self._prefix + name if origin is None else origin.key

    def get(self, name: str) -> object:
        """Return the raw value, or None."""
        self._asked.add(name)
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        """Return True if the key is there at all, null or not."""
        self._asked.add(name)
        return self._prefix + name in self._values

    def names(self) -> list[str]:
        """Return the keys that are there, without the prefix."""
        return [name.removeprefix(self._prefix) for name in self._values if name.startswith(self._prefix)]

    def note(self, names: Iterable[str]) -> None:
        """Count the keys as asked for: their contents are known otherwise."""
        self._asked.update(names)

    def was_asked(self, name: str) -> bool:
        """Return True if a reader asked for the key."""
        return name in self._asked

    def list_unread(self) -> list[str]:
        """Return the keys, without the prefix, that nobody has asked for and that switch something on."""
        return [
            name
            for name in self.names()
            if name not in self._asked and not says_nothing(self._values[self._prefix + name])
        ]

    def refuse_unread(self, changing: Mapping[str, tuple[object, ...]], why: str) -> None:
        """Raise for a key that is there, was not asked for, and changes answers unless it has one of the values."""
        for name in self.list_unread():
            if name in changing:
                self.refuse_unless((name,), changing[name], why)

    def refuse(self, name: str, wants: str) -> NoReturn:
        """Raise the error about one value."""
        origin = self._origins.get(self._prefix + name)
        value = self.get(name) if origin is None else origin.value
        has = "missing" if value is None else f"{_shorten(value)}"
        raise ModelError(f"{self.key(name)} is {has}, expected {wants}")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in [low, high]; a list of equal ones (some files have a value per layer) counts as
        one."""
        value = self.get(name)
        wants = f"a whole number from {low} to {high}"
        if value is None:
            return self.refuse(name, wants) if default is None else default
        number = _as_integer(value)
        if number is None or not low <= number <= high:
            self.refuse(name, wants)
        return number

    def integers(self, name: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return `count` whole numbers in [low, high]: a list of them, or one for all."""
        value = self.get(name)
        numbers: list[int | None]
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            numbers = [None if isinstance(item, Iterable) else _as_integer(item) for item in value]
        else:
            numbers = [_as_integer(value)] * count
        found = tuple(number for number in numbers if number is not None and low <= number <= high)
        if len(found) != count or len(numbers) != count:
            self.refuse(name, f"a whole number from {low} to {high}, or {count} of them")
        return found

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in [low, high]."""
        value = self.get(name)
        wants = f"a number from {low:g} to {high:g}"
        if value is None:
            return self.refuse(name, wants) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, wants)
        if not low <= value <= high:  # true of NaN, and safe with integers beyond any float
            self.refuse(name, wants)
        return float(value)

    def numbers(self, name: str, low: float, high: float, count: int | None = None) -> tuple[float, ...]:
        """Return a list of finite numbers in [low, high]; with a `count`, so many, or one for all."""
        value = self.get(name)
        if count is not None and isinstance(value, int | float):
            return (self.number(name, low, high),) * count
        if not isinstance(value, list) or len(value) != (len(value) if count is None else count):
            self.refuse(name, "a list of numbers" if count is None else f"a number, or {count} of them")
        items = {f"{name}[{index}]": item for index, item in enumerate(value)}
        fields = Fields({self._prefix + item: number for item, number in items.items()}, self._prefix)
        return tuple(fields.number(item, low, high) for item in items)

    def flag(self, name: str, default: bool) -> bool:
        """Return the field `name`, which must be true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def flags(self, name: str, count: int) -> tuple[bool, ...] | None:
        """Return the field `name`, a list of `count` flags, each true, false, 1 or 0; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        items = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else []
        if len(items) != count or any(isinstance(item, Iterable) or item not in (0, 1) for item in items):
            self.refuse(name, f"{count} flags")
        return tuple(map(bool, items))

    def text(self, name: str, default: str | None = None) -> str:
        """Return the field `name`, which must be a string."""
        value = self.get(name)
        if value is None:
            return self.refuse(name, "a string") if default is None else default
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def mapping(self, name: str) -> Fields | None:
        """Return a nested object, or None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            self.refuse(name, "an object")
        prefix = f"{self._prefix}{name}."
        return Fields({prefix + key: item for key, item in value.items()}, prefix)

    def fill(self, left_out: Mapping[str, object]) -> Fields:
        """Return the same object with these values for what it leaves out."""
        stated = {key: value for key, value in self._values.items() if value is not None}
        return Fields({self._prefix + key: value for key, value in left_out.items()} | stated, self._prefix)

    def refuse_unless(self, names: Iterable[str], harmless: tuple[object, ...], why: str) -> None:
        """Raise for any of `names` that is there with a value other than the `harmless` ones."""
        for name in names:
            value = self.get(name)
            if value is not None and not (isinstance(value, int | float | str) and value in harmless):
                raise ModelError(f"{self.key(name)} is {_shorten(value)}: {why}")


def says_nothing(value: object) -> bool:
    """Return True for a value that switches nothing on: null, false, 0, nothing, or a list of such."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return not value
    return all(says_nothing(item) for item in value)


def _as_integer(value: object) -> int | None:
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    if not isinstance(value, Iterable):
        return None
    items = {_as_integer(item) if not isinstance(item, Iterable) else None for item in value}
    return items.pop() if len(items) == 1 else None


def _shorten(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())  # arrays print over several lines
    return text if len(text) <= 80 else f"{text[:77]}..."


OWN = "mlxr."
BARE = "xielu."  # keys that have no architecture's name before them in GGUF

OWN_KEYS = {
    "activation": "the activation of feed-forward blocks, as Activation spells it",
    "attention.head_norms": "true if queries and keys are normed, in families where this differs",
    "attention.gates_heads": "true if a head has one gate, and not one for each number",
    "attention.keys_as_values": "true if the values of layers without a window are their keys",
    "attention.output_bias": "true if the product after attention has a bias",
    "attention.qkv_bias": "true if the products of queries, keys and values have biases",
    "attention.relative_buckets_of_each_layer": "true if every layer has a table of the buckets of distances",
    "attention.scale": "what scores of attention are multiplied by",
    "attention.sliding_window_layers": "a flag for each layer: it has the window",
    "classifier": "what ranks a text: both, output or first of its products",
    "classifier.bias": "true if the first one has a bias",
    "classifier.output_bias": "true if the last one has a bias",
    "classifier.pooling": "which states they read: mean, cls or last",
    "classifier.norm": "true if a norm follows the first one, with GELU before it instead of tanh",
    "dense_2.activation": "what follows the first product of the vector of a text, as Activation spells it",
    "dense_2.bias": "true if it has a bias",
    "dense_3.activation": "what follows the second one",
    "dense_3.bias": "true if that has a bias",
    "ngram_rows": "how many rows the table has that n-grams name",
    "embedding.max_tokens": "the most tokens of a text that becomes a vector",
    "embedding.prompts": "what goes before such a text, by names, and which of them does unasked, as JSON",
    "expert_group_count": "groups that experts are chosen by",
    "expert_group_used_count": "groups that a token's experts come from",
    "expert_layers": "a flag for each layer: it has experts",
    "expert_weights_norm": "true if the shares of a token's experts are divided by their sum",
    "expert_weights_scale": "what the shares of experts are multiplied by",
    "feed_forward_bias": "true if the products of feed-forward blocks have biases",
    "feed_forward_gated": "true if feed-forward blocks have a gate, in families where this differs",
    "expert_sum_bias": "true if what the experts of a token give together has a bias",
    "output_bias": "true if logits have a bias",
    "parallel_norms": "true if blocks that stand side by side have a norm each",
    "parallel_blocks": "true if the two blocks of a layer stand side by side",
    "rope.layers": "a flag for each layer: it rotates queries and keys",
    "rope.scaling.yarn_truncate": "true if yarn's range is rounded to whole pairs",
    "laurel_rank": "the rank of the product beside attention (Gemma 3n)",
    "ssm.norm": "true if what Mamba-2 gives is normed",
    "ssm.norm_eps": "what the norms of a Falcon Mamba's steps, B and C add to the variance",
    "token_types": "how many types of tokens have embeddings of their own",
    "tied_embeddings": "true if the output is the table of embeddings",
}

# Those of them without which other programs, which do not read them, compute another model.
NEEDED = frozenset(
    (
        *("activation", "attention.scale", "attention.sliding_window_layers", "rope.layers"),
        *("rope.scaling.yarn_truncate", "expert_group_count", "expert_group_used_count", "expert_weights_norm"),
        *("expert_weights_scale", "dense_2.activation", "dense_3.activation"),
    )
)


def list_needed(metadata: Mapping[str, object]) -> list[str]:
    """Return the keys without which other programs compute another model."""
    return [key for key in metadata if key.startswith(OWN) and key.removeprefix(OWN) in NEEDED]


def open_own_keys(metadata: Mapping[str, object], origins: Mapping[str, Origin] = NO_ORIGINS) -> Fields:
    """Return the entries of our own keys. Raises ModelError for one that is not in the table."""
    own = Fields(metadata, OWN, origins)
    for name in own.names():
        if name not in OWN_KEYS:
            raise ModelError(f"{OWN}{name} is there, which this version of mlxr does not know; take a later one")
    return own
