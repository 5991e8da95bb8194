"""Immutable values, as frozen dataclasses with slots are, at a tenth of what those cost to define.

:mod:`dataclasses` imports the interpreter's parser and disassembler, and compiles the methods of
each class: ten milliseconds of a cold start, and half a one for each class. To a reader and to mypy
there is no difference.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar, dataclass_transform

    Kind = TypeVar("Kind", bound=type)
    Kept = TypeVar("Kept")
else:

    def dataclass_transform(**_: bool) -> Callable[[Kind], Kind]:
        """Only mypy is told."""
        return lambda function: function


@dataclass_transform(frozen_default=True)
def value(cls: Kind) -> Kind:
    """Make a class of annotated fields, perhaps with defaults, one of immutable values.

    Args:
        cls: the class; what it inherits is no value. Fields that are named in its ``_apart``
            are neither compared nor hashed.

    Returns:
        A class of the same name that is created by position or by name, compared and hashed by
        its fields, and shows them.
    """
    names = tuple(cls.__annotations__)
    body = {name: kept for name, kept in cls.__dict__.items() if name not in _OF_THE_CLASS}
    defaults = {name: body.pop(name) for name in names if name in body}
    body |= {"__slots__": names, "__match_args__": names, "_defaults": defaults}
    made: Any = type(cls)(cls.__name__, (_Value, *cls.__bases__), body)
    return made  # type: ignore[no-any-return]


_OF_THE_CLASS = frozenset({"__dict__", "__weakref__"})


class _Value:
    """What all values have in common."""

    __slots__ = ()
    _defaults: dict[str, Any] = {}  # noqa: RUF012 - each class has its own, never written to
    _apart: tuple[str, ...] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        names: tuple[str, ...] = self.__slots__
        if len(values) > len(names):
            message = f"{type(self).__name__} has {len(names)} fields, not {len(values)}"
            raise TypeError(message)
        keep = object.__setattr__
        for name, kept in zip(names, values, strict=False):
            if name in named:
                message = f"{type(self).__name__} is given {name} twice"
                raise TypeError(message)
            keep(self, name, kept)
        for name in names[len(values) :]:
            if name in named:
                keep(self, name, named.pop(name))
            elif name in self._defaults:
                keep(self, name, self._defaults[name])
            else:
                message = f"{type(self).__name__} needs {name}"
                raise TypeError(message)
        if named:
            message = f"{type(self).__name__} has no {', '.join(named)}"
            raise TypeError(message)

    def __setattr__(self, name: str, _: object) -> None:
        message = f"{type(self).__name__}.{name} can't be changed"
        raise AttributeError(message)

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)  # and fail so

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[Any, ...]:
        names: tuple[str, ...] = self.__slots__
        return tuple(getattr(self, name) for name in names if name not in self._apart)

    def __repr__(self) -> str:
        names: tuple[str, ...] = self.__slots__
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({shown})"

    # Slots are not in a __dict__ that copy and pickle would look in, and cannot be set again.
    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), _fields(self)


def _fields(of: Any) -> tuple[Any, ...]:
    return tuple(getattr(of, name) for name in of.__slots__)


def defaults_of(of: object) -> dict[str, Any]:
    """The defaults of a value's fields, by name, for those that have one."""
    found: dict[str, Any] = of._defaults  # type: ignore[attr-defined] # noqa: SLF001 - of ours
    return found


def changed(of: Kept, **fields: Any) -> Kept:
    """A value that differs in some fields from another one.

    Args:
        of: the other one.
        fields: what differs.
    """
    return type(of)(**{**dict(zip(of.__slots__, _fields(of), strict=True)), **fields})  # type: ignore[attr-defined]
