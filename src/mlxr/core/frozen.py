"""Immutable values with named fields: `@frozen` makes what `@dataclass(frozen=True, slots=True)` makes, but sooner.

Python 3.11 compiles six functions for each such data class, half a millisecond in all, and mlxr has some 400 of them:
it was a quarter of the time that a command takes to start. Here `__init__` is compiled alone; all classes share the
others. `fields`, `replace` and `asdict` of `dataclasses` work, as does pickling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")
_UNSET = object()  # the default of an argument whose field has a factory


@overload
def frozen(cls: type[T], /) -> type[T]: ...


@overload
def frozen(
    *, eq: bool = True, kw_only: bool = False, slots: bool = True, weakref_slot: bool = False
) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(
    cls: type[T] | None = None,
    /,
    *,
    eq: bool = True,
    kw_only: bool = False,
    slots: bool = True,
    weakref_slot: bool = False,
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class one of immutable values: its annotations are its fields.

    Options are those of `dataclass`, with slots by default; with `eq=False` a value equals itself alone. Methods that
    the class has are kept. `InitVar` is not supported.
    """

    def make(cls: type[T]) -> type[T]:
        made = dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots, weakref_slot=weakref_slot)(cls)
        methods = {
            **_SHARED,
            **(_STATE if slots else {}),
            "__init__": _compile_init(made),
            **(_compare(made) if eq else {}),
        }
        for name, method in methods.items():
            if vars(made).get(name) is None:  # Python puts None for `__hash__` beside a class's own `__eq__`
                setattr(made, name, method)
        return made

    return make if cls is None else make(cls)


def _compile_init(cls: Any) -> Callable[..., None]:
    """Return `__init__`, with arguments in the order of the fields, those that need their names behind the others."""
    scope: dict[str, Any] = {"__set": object.__setattr__, "__unset": _UNSET}
    positional, named, lines = ["self"], list[str](), list[str]()
    for one in fields(cls):
        name, value = one.name, one.name
        if one.default_factory is not MISSING:
            scope[f"__make_{name}"], default = one.default_factory, "__unset"
            value = f"__make_{name}() if {name} is __unset else {name}" if one.init else f"__make_{name}()"
        elif one.default is not MISSING:
            # Under a name that is no other's, whatever the field is called.
            scope[f"__default_{name}"], default = one.default, f"__default_{name}"
            value = name if one.init else default
        elif one.init:
            default = ""
        else:
            continue  # `__post_init__` gives it its value
        if one.init:
            (named if one.kw_only else positional).append(f"{name}={default}" if default else name)
        lines.append(f" __set(self, {name!r}, {value})\n")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()\n")
    arguments = [*positional, *(["*", *named] if named else [])]
    exec(f"def __init__({', '.join(arguments)}):\n{''.join(lines) or ' pass'}", scope)
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {one.name: one.type for one in fields(cls) if one.init} | {"return": None}
    return init


def _compare(cls: Any) -> dict[str, Callable[..., Any]]:
    """Return `__eq__` and `__hash__`, by the fields that `field(compare=False)` or `hash=False` does not leave out."""
    compared = _read_all([one.name for one in fields(cls) if one.compare])
    hashed = _read_all([one.name for one in fields(cls) if (one.compare if one.hash is None else one.hash)])

    def equal(self: object, other: object) -> bool:
        return bool(compared(self) == compared(other)) if other.__class__ is self.__class__ else NotImplemented

    def digest(self: object) -> int:
        return hash(hashed(self))

    return {"__eq__": equal, "__hash__": digest}


def _read_all(names: list[str]) -> Callable[[object], tuple[object, ...]]:
    """Return a function that reads attributes as a tuple; in tuples, a value equals itself, also one that is NaN."""
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        read = attrgetter(*names)
        return lambda value: (read(value),)
    return lambda _value: ()


def _refuse_change(_self: object, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(_self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


@recursive_repr()
def _represent(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _get_state(self: Any) -> list[object]:
    return [getattr(self, one.name) for one in fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)


_SHARED: dict[str, Callable[..., Any]] = {
    "__setattr__": _refuse_change,
    "__delattr__": _refuse_deletion,
    "__repr__": _represent,
}
_STATE: dict[str, Callable[..., Any]] = {"__getstate__": _get_state, "__setstate__": _set_state}
