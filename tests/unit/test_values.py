"""Values behave as frozen dataclasses with slots do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest

from api.values import changed, defaults_of, value


@value
class Point:
    """A point."""

    x: int
    y: int = 0

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclass(frozen=True, slots=True)
class Model:
    x: int
    y: int = 0


@value
class Nothing:
    """No fields."""


@value
class Found:
    what: int
    where: str = "here"
    _apart = ("where",)


def test_what_is_set_apart_makes_no_difference() -> None:
    assert Found(1) == Found(1, "there")
    assert hash(Found(1)) == hash(Found(1, "there"))
    assert Found(1) != Found(2)
    assert repr(Found(1)) == "Found(what=1, where='here')"
    assert defaults_of(Found(1, "there")) == {"where": "here"}


def test_it_is_made_compared_hashed_and_shown_as_a_dataclass_is() -> None:
    assert Point(1) == Point(x=1, y=0) == Point(1, 0)
    assert Point(1) != Point(2)
    assert Point(1, 2).__eq__(Model(1, 2)) is NotImplemented
    assert len({Point(1), Point(1), Point(2)}) == 2
    assert repr(Point(1, 2)) == repr(Model(1, 2)).replace("Model", "Point")
    assert Point(1, 2).sum == 3
    assert Point.__doc__ == "A point."
    assert Nothing() == Nothing()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})],
    ids=["too few", "too many", "twice", "unknown"],
)
def test_what_a_dataclass_refuses_it_refuses(
    arguments: tuple[int, ...], named: dict[str, int]
) -> None:
    for kind in (Point, Model):
        with pytest.raises(TypeError):
            kind(*arguments, **named)


def test_it_cannot_be_changed() -> None:
    point = Point(1, 2)
    with pytest.raises(AttributeError, match=r"Point.x can't be changed"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del point.y
    with pytest.raises(AttributeError):
        point.z = 1  # type: ignore[attr-defined]
    assert not hasattr(point, "__dict__")


def test_it_can_be_copied_changed_and_matched() -> None:
    point = Point(1, 2)
    assert copy.copy(point) == copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
    assert changed(point, y=5) == Point(1, 5)
    match point:
        case Point(x, y):
            assert (x, y) == (1, 2)
