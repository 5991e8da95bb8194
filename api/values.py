"""Immutable values, as frozen dataclasses with slots are, at a tenth of what those cost to define.

:mod:`dataclasses` imports the interpreter's parser and disassembler, and compiles the methods of
each class: ten milliseconds of a cold start, and half a one for each class. To a reader and to mypy
there is no difference.
"""

from __future__ import annotations

from collections import namedtuple
from operator import attrgetter

__all__ = ["Record", "changed", "defaults_of", "value"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar, dataclass_transform
    from typing import NamedTuple as Record

    Kind = TypeVar("Kind", bound=type)
    Kept = TypeVar("Kept")
else:

    def dataclass_transform(**_: bool) -> Callable[[Kind], Kind]:
        """Only mypy is told."""
        return lambda function: function

    class _Recorder(type):
        """Makes named tuples of classes."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            names = tuple(body["__annotations__"])
            defaults = [body.pop(name) for name in names if name in body]
            base = namedtuple(name, names, defaults=defaults, module=body["__module__"])  # noqa: PYI024
            return type(name, (base,), {**body, "__slots__": ()})

    class Record(metaclass=_Recorder):
        """What typing.NamedTuple is, without typing: for what is made often."""


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
    compared = [name for name in names if name not in body.get("_apart", ())]
    if compared:
        body["_compared"] = staticmethod(attrgetter(*compared))
    made: Any = type(cls)(cls.__name__, (_Value, *cls.__bases__), body)
    # What a slot's own descriptor does is done without a look for it by name.
    keepers = tuple(made.__dict__[name].__set__ for name in names)
    type.__setattr__(made, "_keepers", keepers)
    return made  # type: ignore[no-any-return]


_OF_THE_CLASS = frozenset({"__dict__", "__weakref__"})


class _Value:
    """What all values have in common."""

    __slots__ = ()
    # Each class has its own, which are never written to.
    _defaults: dict[str, Any] = {}  # noqa: RUF012
    _keepers: tuple[Callable[[Any, Any], None], ...] = ()
    _apart: tuple[str, ...] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        keepers = self._keepers
        if named or len(values) != len(keepers):
            values = self._complete(values, named)
        for keep, kept in zip(keepers, values, strict=True):
            keep(self, kept)

    def _complete(self, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """What is given by position, by name and by default, in the order of the fields."""
        names: tuple[str, ...] = self.__slots__
        rest = names[len(values) :]
        given = {**self._defaults, **named} if self._defaults else named
        # As many as there are fields, and each of them there: so they are the fields.
        if len(values) + len(given) != len(names) or values:
            self._check(values, named, rest)
        try:
            return (*values, *[given[name] for name in rest])
        except KeyError:
            self._check(values, named, rest)
            raise

    def _check(self, values: tuple[Any, ...], named: dict[str, Any], rest: tuple[str, ...]) -> None:
        what = type(self).__name__
        if len(values) > len(self.__slots__):
            message = f"{what} has {len(self.__slots__)} fields, not {len(values)}"
            raise TypeError(message)
        wrong = named.keys() - set(rest)
        if wrong:
            message = f"{what} is given {', '.join(sorted(wrong))} twice, or has no such field"
            raise TypeError(message)
        missing = [name for name in rest if name not in named and name not in self._defaults]
        if missing:
            message = f"{what} needs {', '.join(missing)}"
            raise TypeError(message)

    @staticmethod
    def _compared(_: Any) -> Any:
        """The fields by which values are compared: of a class without fields, none."""
        return ()

    def __setattr__(self, name: str, _: object) -> None:
        message = f"{type(self).__name__}.{name} can't be changed"
        raise AttributeError(message)

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)  # and fail so

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self._compared(self) == self._compared(other))

    def __hash__(self) -> int:
        return hash(self._compared(self))

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
