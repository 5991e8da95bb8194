"""Frozen dataclasses with slots, at a fiftieth of the usual cost of defining them.

:mod:`dataclasses` compiles methods for each class, and imports the interpreter's parser for that.
This module compiles nothing. To mypy it is :mod:`dataclasses` itself, whose functions accept these
classes, too. Modules that a shim, or an agent with default options, imports use this one; others
use :mod:`dataclasses`.

Measured on 2026-11-29 with Python 3.11: processor time and private memory of a new process that
imports the modules, medians of 25 runs.

| modules                    | with these classes | with dataclasses  |
| -------------------------- | -----------------: | ----------------: |
| of a verb                  |  68 ms, 10.0 MB    |  74 ms, 11.2 MB   |
| of a cold shim             |  92 ms, 13.5 MB    | 118 ms, 15.0 MB   |
| of a cold shim's worker    | 121 ms, 15.7 MB    | 184 ms, 17.9 MB   |
| of the fork server         | 133 ms, 15.7 MB    | 200 ms, 17.9 MB   |
| of ``nvshim list``         | 188 ms, 15.5 MB    | 248 ms, 16.4 MB   |
| of the node agent          | 157 ms, 27.2 MB    | 204 ms, 29.2 MB   |

Imports for types cost no measurable time at run time, and one module at most. So ``if
TYPE_CHECKING`` is used only for a type from a module that imports gRPC, protobuf or yaml and is
otherwise not needed; each such place says so.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

__all__ = ["dataclass", "field", "replace"]


class _Missing:
    """The default of a field without one."""


class _Field(NamedTuple):
    default: Any
    make: Callable[[], Any] | None  # returns a new default for each value; None for none
    compare: bool
    shown: bool


class _AsDataclass:
    """The attributes of a class for :mod:`dataclasses`, created on demand."""

    def __set_name__(self, _: object, name: str) -> None:
        self._name = name
        # Cached: writing a CDI spec needs the fields of each of its hundreds of values.
        self._made: dict[type, Any] = {}

    def __get__(self, _: object, cls: Any) -> Any:
        if cls not in self._made:
            self._made[cls] = self._make(cls)
        return self._made[cls]

    def _make(self, cls: Any) -> Any:
        from dataclasses import MISSING, field, make_dataclass  # noqa: PLC0415 - see above

        fields = []
        for name in cls.__slots__:
            default, make = cls._defaults.get(name, MISSING), cls._makers.get(name, MISSING)
            described: Any = field(
                default=default, default_factory=make,
                compare=name not in cls._apart, repr=name not in cls._hidden,
            )  # fmt: skip
            fields.append((name, cls.__annotations__[name], described))
        return vars(make_dataclass(cls.__name__, fields, frozen=True))[self._name]


class _Value:
    __slots__ = ()
    __dataclass_fields__ = _AsDataclass()
    __dataclass_params__ = _AsDataclass()
    # Each class has its own.
    __match_args__: tuple[str, ...] = ()
    _defaults: dict[str, Any] = {}  # noqa: RUF012
    _makers: dict[str, Callable[[], Any]] = {}  # noqa: RUF012
    _apart: set[str] = set()  # noqa: RUF012
    _hidden: set[str] = set()  # noqa: RUF012
    _compared: Any
    _form: str

    def __eq__(self, other: object) -> Any:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared(self) == self._compared(other)

    def __hash__(self) -> int:
        return hash(self._compared(self))

    def __repr__(self) -> str:
        return self._form.format(*_kept(self))

    def __setattr__(self, name: str, _: object) -> NoReturn:
        message = f"{type(self).__name__}.{name} cannot be changed"
        raise AttributeError(message)

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce__(self) -> Any:
        return type(self), tuple(_kept(self))


def _made(cls: Any) -> Any:
    """Return the class with slots and the common methods; its own methods have priority."""
    names = tuple(cls.__annotations__)
    body = {k: v for k, v in vars(cls).items() if k not in {"__dict__", "__weakref__", *names}}
    stated = {name: getattr(cls, name) for name in names if name in vars(cls)}
    fields = {name: kept for name, kept in stated.items() if isinstance(kept, _Field)}
    apart = {name for name, kept in fields.items() if not kept.compare}
    hidden = {name for name, kept in fields.items() if not kept.shown}
    makers = {name: kept.make for name, kept in fields.items() if kept.make is not None}
    defaults = stated | {name: kept.default for name, kept in fields.items()}
    defaults = {name: kept for name, kept in defaults.items() if kept is not _Missing}
    if issubclass(cls, _Value) or hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__name__}: no value inherits another or has a __post_init__ here")
    if any(default.__hash__ is None for default in defaults.values()):
        raise TypeError(f"{cls.__name__}: all values would share a default that can be changed")
    compared = [name for name in names if name not in apart]
    body |= {"__slots__": names, "__match_args__": names, "__qualname__": cls.__qualname__}
    shown = (f"{name}={{{n}!r}}" for n, name in enumerate(names) if name not in hidden)
    form = f"{cls.__qualname__}({', '.join(shown)})"
    body |= {"_defaults": defaults, "_makers": makers, "_form": form}
    body |= {"_apart": apart, "_hidden": hidden}
    body["__annotations__"] = cls.__annotations__
    body["_compared"] = staticmethod(attrgetter(*compared) if compared else lambda _: ())
    made = type(cls)(cls.__name__, (_Value, *(b for b in cls.__bases__ if b is not object)), body)
    made.__init__ = _initializer(made, tuple(vars(made)[name].__set__ for name in names))
    return made


def _initializer(cls: Any, setters: tuple[Callable[[Any, Any], None], ...]) -> Any:
    defaults, makers, count = cls._defaults, cls._makers, len(setters)
    steps = tuple(zip(cls.__slots__, setters, strict=True))

    def init(self: Any, *values: Any, **named: Any) -> None:
        for keep, value in zip(setters, values, strict=False):
            keep(self, value)
        if len(values) == count and not named:
            return
        for name, keep in steps[len(values) :]:
            if name in named:
                keep(self, named.pop(name))
            elif name in defaults:
                keep(self, defaults[name])
            elif name in makers:
                keep(self, makers[name]())
            else:
                named[name] = None
                break
        if named or len(values) > count:
            message = f"{cls.__name__}: {len(values)} values and {list(named)} for {cls.__slots__}"
            raise TypeError(message)

    return init


def _dataclass(*, frozen: bool, slots: bool) -> Any:
    if frozen and slots:
        return _made
    raise TypeError("only frozen classes with slots are made here")


def _field(
    *,
    default: Any = _Missing,
    default_factory: Callable[[], Any] | None = None,
    compare: bool = True,
    repr: bool = True,  # noqa: A002 - as in dataclasses
) -> Any:
    return _Field(default, default_factory, compare, repr)


def _replace(value: Any, /, **changes: Any) -> Any:
    kept = zip(value.__match_args__, _kept(value), strict=True)
    return type(value)(*[changes.pop(name, old) for name, old in kept], **changes)


def _kept(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__match_args__]


if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:
    dataclass, field, replace = _dataclass, _field, _replace
