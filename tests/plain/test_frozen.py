"""`@frozen` makes what `@dataclass(frozen=True, slots=True)` makes: random classes of both kinds behave alike."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, MISSING, FrozenInstanceError, dataclass, field, fields, replace
from functools import cached_property, partial
from random import Random
from typing import Any, ClassVar

import pytest

from mlxr.core.frozen import frozen

Rows = list[tuple[str, dict[str, Any]]]


@frozen
class Point:
    """A value that can be pickled, as it is at the top of its module."""

    x: int
    y: float = 0.5
    tags: list[str] = field(default_factory=list, compare=False)


def draw_rows(random: Random) -> tuple[Rows, dict[str, Any]]:
    """Draw fields and options of a class; fields without a default come first, as Python wants it."""
    options = {"eq": random.random() < 0.8, "kw_only": random.random() < 0.2}
    rows: Rows = []
    has_default = False
    for index in range(random.randrange(6)):
        row: dict[str, Any] = {name: False for name in ("repr", "compare") if random.random() < 0.2}
        kind = random.choice(("plain", "default", "factory"))
        if kind == "default" or (has_default and kind == "plain"):
            row["default"] = random.choice((7, "text", None, 2.5))
        elif kind == "factory":
            row["default_factory"] = list
        has_default = has_default or "default" in row or "default_factory" in row
        if ("default" in row or "default_factory" in row) and random.random() < 0.2:
            row["init"] = False
        if random.random() < 0.1:
            row["hash"] = random.random() < 0.5
        rows.append((f"field_{index}", row))
    return rows, options


def make_class(decorate: Callable[..., Any], rows: Rows, options: dict[str, Any]) -> Any:
    body = {"__annotations__": {name: "object" for name, _ in rows}, "__doc__": "A class of random fields."}
    body |= {name: field(**row) for name, row in rows if row}
    return decorate(**options)(type("Drawn", (), body))


def attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return function(), None
    except (TypeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("seed", range(20))
def test_random_classes_are_those_of_dataclass(seed: int) -> None:
    random = Random(seed)
    for _ in range(25):
        rows, options = draw_rows(random)
        ours = make_class(frozen, rows, options)
        theirs = make_class(lambda **given: dataclass(frozen=True, slots=True, **given), rows, options)
        arguments = inspect.signature(theirs.__init__).parameters.values()
        mine = inspect.signature(ours.__init__).parameters.values()
        assert [(one.name, one.kind, one.default is one.empty) for one in mine] == [
            (one.name, one.kind, one.default is one.empty) for one in arguments
        ]
        assert ours.__slots__ == theirs.__slots__
        assert ours.__match_args__ == theirs.__match_args__
        made = []
        for _ in range(4):
            count = random.randrange(3)
            given = {
                f"field_{random.randrange(6)}": random.choice((1, 2, "a", (3,))) for _ in range(random.randrange(7))
            }
            values = [random.choice((1, "b")) for _ in range(count)]
            one, error = attempt(partial(ours, *values, **given))
            other, wanted = attempt(partial(theirs, *values, **given))
            assert error == wanted
            if error is None:
                made.append((one, other))
        for one, other in made:
            assert repr(one) == repr(other)
            hashed, unhashable = attempt(lambda one=one: hash(one))
            assert unhashable == attempt(lambda other=other: hash(other))[1]
            if options["eq"]:
                assert hashed == attempt(lambda other=other: hash(other))[0]
            assert [one == second for second, _ in made] == [other == second for _, second in made]
            assert one != other
            assert one != 3
            names = [row.name for row in fields(other)]
            for name in [*names, "unknown"]:
                for change in (lambda o, n=name: setattr(o, n, 1), lambda o, n=name: delattr(o, n)):
                    message = attempt(lambda one=one, change=change: change(one))[1]
                    assert message is not None
                    assert message.startswith(("FrozenInstanceError", "AttributeError"))
            for made_again in (copy.copy(one), copy.deepcopy(one)):
                assert [getattr(made_again, name) for name in names] == [getattr(one, name) for name in names]


def test_values_are_pickled_replaced_and_read_by_dataclasses() -> None:
    point = Point(1, tags=["a"])
    assert pickle.loads(pickle.dumps(point)) == point
    assert pickle.loads(pickle.dumps(point)).tags == ["a"]
    assert replace(point, x=2) == Point(2) != point
    assert dataclasses.asdict(point) == {"x": 1, "y": 0.5, "tags": ["a"]}
    assert Point(1).tags is not Point(1).tags
    assert repr(point) == "Point(x=1, y=0.5, tags=['a'])"
    assert len({point, Point(1)}) == 1
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    assert not hasattr(point, "__dict__")


def test_a_field_may_have_any_name_and_a_value_equals_itself() -> None:
    @frozen
    class Named:
        """Fields with the names that the making of a class might need itself."""

        set: float = float("nan")  # data classes of Python 3.13 compare it alone, so that it equals nothing
        unset: int = 2
        make_rows: int = 3
        rows: list[int] = field(default_factory=list, hash=False)
        default_rows: int = 4

    assert dataclasses.astuple(Named(1.5)) == (1.5, 2, 3, [], 4)
    assert Named(1.5, rows=[5]).rows == [5]
    assert Named() == Named()
    assert hash(Named()) == hash(Named())
    assert Named() != Named(rows=[5])


def test_a_class_keeps_its_own_methods_and_inherits_fields() -> None:
    @frozen
    class Base:
        """A base."""

        size: int
        twice: int = field(init=False)
        kind: ClassVar[str] = "base"

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.size)

    @frozen
    class Child(Base):
        """A child with a method of its own."""

        _: KW_ONLY
        name: str = ""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Child) and self.name == other.name

        def __hash__(self) -> int:
            return 5

        def __repr__(self) -> str:
            return f"<{self.name}>"

    @frozen(eq=False, slots=False)
    class Lazy:
        """A class with a place for what is computed once."""

        size: int

        @cached_property
        def double(self) -> int:
            return 2 * self.size

    child = Child(3, name="a")
    assert (child.size, child.twice, child.kind, repr(child), hash(child)) == (3, 6, "base", "<a>", 5)
    assert child == Child(4, name="a")
    assert Base(3) == Base(3)
    assert Base(3) != child
    lazy = Lazy(2)
    assert lazy.double == 4
    assert lazy != Lazy(2)
    assert lazy in {lazy}
    with pytest.raises(FrozenInstanceError):
        lazy.size = 3  # type: ignore[misc]
    assert all(one.default is MISSING for one in fields(Lazy))
