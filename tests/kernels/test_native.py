"""The native module has every function and class of its protocols, with as many arguments."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from mlxr.kernels import native
from mlxr.kernels.context import load_native

MODULE: Any = load_native()
CLASSES = {
    name.removeprefix("Native"): kind
    for name, kind in vars(native).items()
    if isinstance(kind, type) and name.startswith("Native") and name != "Native"
}


def list_methods(protocol: type) -> dict[str, Any]:
    return {name: member for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}


def count_stated(signature: str) -> int:
    """Count the arguments in the first line of a native function's documentation."""
    inside = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", re.sub(r"shape=\([^)]*\)", "", signature)))
    arguments = inside[inside.index("(") + 1 : inside.rindex(") ->")]
    return len(arguments.split(", ")) - arguments.startswith("self") if arguments else 0


def count_known(function: Any) -> int:
    return len(inspect.signature(function).parameters) - 1


@pytest.mark.parametrize("name", list_methods(native.Native))
def test_functions_take_what_is_stated(name: str) -> None:
    made = getattr(MODULE, name)
    stated = made.__init__.__doc__ if isinstance(made, type) else made.__doc__
    assert count_stated(stated.splitlines()[0]) == count_known(list_methods(native.Native)[name])


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_what_is_stated(name: str) -> None:
    real, protocol = getattr(MODULE, name), CLASSES[name]
    methods = list_methods(protocol)
    assert {member for member in vars(real) if member[0] != "_"} == {
        *(member for member in vars(protocol) if member[0] != "_"),
        *(member for member in protocol.__annotations__ if member[0] != "_"),
    }
    for member, known in methods.items():
        assert count_stated(getattr(real, member).__doc__.splitlines()[0]) == count_known(known)
