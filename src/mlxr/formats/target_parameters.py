"""Parameters that PEFT updates without a module of their own (`target_parameters`), as stacks of experts are.

PEFT wraps the module that has a parameter, and wraps it again for each further one. So the matrices of the last
parameter have the module's name, and those of the one before it that of its `base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mlxr.core.errors import FormatError

_WRAPPED = ".base_layer"
_ORDER = ("gate_up_proj", "down_proj")  # in which modules of experts have them
_EXPERTS = "experts"  # the modules of parameters that are named alone
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_UNTURNED = (0, 19)  # from this version on PEFT tells inputs of a stack's matrices from outputs


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its `key`, and the `name` of the weight that it is: that of its module, where it is its weight."""

    key: str
    name: str


@dataclass(frozen=True, slots=True)
class TargetParameters:
    """Lists the names in an adapter's configuration; `may_be_turned` if it is from a PEFT that took inputs of a stack
    for outputs."""

    targets: tuple[str, ...]
    may_be_turned: bool

    def find(self, path: Path, module: str, modules: Collection[str]) -> Parameter | None:
        """The parameter whose matrices a file calls `module`, one of its `modules`; None for those of a module.

        Raises FormatError where those of a module's other parameters are missing.
        """
        plain, depth = module, 0
        while plain.endswith(_WRAPPED):
            plain, depth = plain.removesuffix(_WRAPPED), depth + 1
        names = self._list_names(plain)
        if not names:
            return None
        there = [other for other in range(len(names)) if plain + other * _WRAPPED in modules]
        if depth >= len(names) or len(there) != len(names) or (len(names) > 1 and not set(names) <= set(_ORDER)):
            reason = f"has matrices of {len(there)} parameters, and {', '.join(names)} are its targets"
            raise FormatError(path, f"adapter of {plain[:120]!r}", None, reason)
        name = names[len(names) - 1 - depth]
        return Parameter(f"{plain}.{name}", plain if name == "weight" else f"{plain}.{name}")

    def _list_names(self, module: str) -> list[str]:
        """The parameters of a module that are targets, in the order in which it has them."""
        names = set()
        for target in self.targets:
            prefix, _, name = target.rpartition(".")
            if f".{module}".endswith(f".{prefix}" if prefix else f".{_EXPERTS}"):
                names.add(name)
        return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else -1, name))


def read_target_parameters(path: Path, config: dict[str, object]) -> TargetParameters:
    """Read the field of an adapter_config.json. Raises FormatError unless it is a list of names."""
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise FormatError(path, "target_parameters", None, f"is {targets!r:.80}, not a list of names")
    return TargetParameters(tuple(targets), _read_version(config.get("peft_version")) < _UNTURNED)


def _read_version(version: object) -> tuple[int, ...]:
    """Major and minor number; (0, 0) where none is said, as PEFT did before 0.18."""
    found = _VERSION.match(version) if isinstance(version, str) else None
    return (0, 0) if found is None else (int(found[1]), int(found[2]))
