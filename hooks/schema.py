"""Settings, each declared once, and the kinds of their values.

A :class:`Setting` has the kind of its value, its default, where it may be set (a key of a file,
variables, options) and a description. All code that reads, checks, completes, changes or documents
settings uses it.

Rules
- A kind has two entry points: :meth:`Kind.check` takes a value of a document (TOML, YAML, JSON),
  and :meth:`Kind.parse` the text of a variable or an option. Both return the value that the program
  uses.
- A wrong value raises :class:`WrongValue`. The caller, which knows the place, raises its own error.
- If several variables set the same thing, the first that is set wins.
- A shim imports this module, so it imports almost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from api.values import dataclass
from hooks.words import items_of, normal_path

_T = TypeVar("_T")
_MOST_DIGITS: Final = 9
_FOREVER: Final = float("inf")
TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})
"""The words for booleans, as in Go's strconv.ParseBool."""


class WrongValue(ValueError):
    """A value is not of the right kind.

    Args:
        wanted: the allowed values, as in :class:`Kind`.
        value: the wrong value, or the wrong part of it.
        part: where that part is, such as ``[2].name``; "" for the whole value.
    """

    def __init__(self, wanted: str, value: Any, part: str = "") -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.value = value
        self.part = part

    @property
    def wanted_text(self) -> str:
        """Return the allowed values of a text, without quotes."""
        return self.wanted.replace('"', "")


def _in_document(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value."""

    # converts a document's value; raises ValueError if it is wrong, WrongValue if a part is
    of_value: Callable[[Any], Any]
    wanted: str  # the allowed values, in words; strings are in quotes, as in TOML
    of_text: Callable[[str], Any] | None = None  # converts a text; None if ``of_value`` does
    words: tuple[str, ...] = ()  # the words among the allowed values, for completion
    metavar: str = "TEXT"  # the placeholder of the value in an option's help
    is_list: bool = False  # whether an option may be repeated, to add entries
    # converts it back to a document's value; None if a document cannot express it
    written: Callable[[Any], Any] = _in_document

    def check(self, value: Any) -> Any:
        """Return the program's value for a value in a document.

        Raises:
            WrongValue: it is not of this kind.
        """
        return self._convert(self.of_value, value)

    def parse(self, text: str) -> Any:
        """Return the program's value for a text.

        Raises:
            WrongValue: it is not of this kind.
        """
        return self._convert(self.of_text or self.of_value, text)

    def _convert(self, convert: Callable[[Any], Any], value: Any) -> Any:
        try:
            return convert(value)
        except WrongValue:
            raise
        except ValueError:
            raise WrongValue(self.wanted, value) from None


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting."""

    field: str  # the field of the program's settings; "" for none
    kind: Kind
    default: Any
    text: str  # what it does, or why it has no effect
    key: str = ""  # the key of the file, with its tables before it; "" for none
    variables: tuple[str, ...] = ()  # the environment variables; the first that is set wins
    options: tuple[str, ...] = ()  # the names of the option, with their dashes

    @property
    def is_ignored(self) -> bool:
        """Whether the setting is accepted but has no effect."""
        return self.kind is IGNORED


class Declarations:
    """Collects the settings of a class. Each is declared as the default of a field."""

    def __init__(self) -> None:
        self._declared: list[tuple[Any, ...]] = []

    def __call__(
        self,
        kind: Kind,
        text: str,
        *variables: str,
        default: _T,
        key: str = "",
        options: Sequence[str] = (),
    ) -> _T:
        """Declare the next field; the arguments are those of :class:`Setting`.

        Returns:
            The default, for the class.
        """
        self._declared.append((kind, default, text, key, variables, tuple(options)))
        return default

    def of(self, cls: Any) -> tuple[Setting, ...]:
        """Return the settings of a class; fields without a declaration come last."""
        named = zip(cls.__match_args__, self._declared, strict=False)
        return tuple(Setting(name, *declared) for name, declared in named)


# -- kinds of value ----------------------------------------------------------------------------


def need(fits: object) -> None:
    """Raise ValueError if a value does not fit."""
    if not fits:
        raise ValueError


def either(words: Iterable[str]) -> str:
    """Return alternatives in words: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def choice(meanings: Mapping[str, Any], other: Kind | None = None, wanted: str = "") -> Kind:
    """Return a kind whose words stand for values.

    Args:
        meanings: the values by word.
        other: the kind of other allowed values; None for none.
        wanted: the allowed values, if there are others than the words.
    """

    def door(convert: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        def convert_word(value: Any) -> Any:
            if isinstance(value, str) and value in meanings:
                return meanings[value]
            if convert is None:
                raise ValueError
            return convert(value)

        return convert_word

    def written(value: Any) -> Any:
        for word, meaning in meanings.items():
            if meaning == value and type(meaning) is type(value):
                return word
        return _in_document(value)

    return Kind(
        door(other.of_value if other else None),
        wanted or either(f'"{word}"' for word in meanings),
        door((other.of_text or other.of_value) if other else None),
        (*meanings, *(other.words if other else ())),
        f"[{'|'.join(meanings)}]" if other is None else other.metavar,
        written=written,
    )


def one_of(*words: str) -> Kind:
    """Return the kind of these words."""
    return choice({word: word for word in words})


def like(pattern: str | re.Pattern[str], wanted: str, metavar: str = "NAME") -> Kind:
    """Return the kind of strings that match a pattern."""
    matches = re.compile(pattern).fullmatch

    def convert(value: Any) -> str:
        need(isinstance(value, str) and matches(value))
        return str(value)

    return Kind(convert, wanted, metavar=metavar)


def list_of(entry: Kind, wanted: str, *, once: bool = True, commas: bool = True) -> Kind:
    """Return the kind of lists.

    Args:
        entry: the kind of an entry.
        wanted: the allowed values.
        once: whether duplicate entries count once.
        commas: whether commas in a text separate entries; otherwise the text is one entry.
    """

    def door(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert_list(value: Any) -> tuple[Any, ...]:
            need(isinstance(value, list))
            found = [convert(each) for each in value]
            return tuple(dict.fromkeys(found) if once else found)

        return convert_list

    of_text = door(entry.of_text or entry.of_value)
    return Kind(
        door(entry.of_value), wanted, lambda text: of_text(items_of(text) if commas else [text]),
        entry.words, entry.metavar, is_list=True,
    )  # fmt: skip


def number(least: int, most: int, wanted: str = "", metavar: str = "N") -> Kind:
    """Return the kind of whole numbers in a range."""

    def of_value(value: Any) -> int:
        need(isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)
        return int(value)

    def of_text(text: str) -> int:
        need(text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS)
        return of_value(int(text))

    return Kind(of_value, wanted or f"a number, {least} to {most}", of_text, metavar=metavar)


def seconds(most: float = _FOREVER, least: float | None = None) -> Kind:
    """Return the kind of durations in seconds.

    Args:
        most: the longest one.
        least: the shortest one; None for any above 0.
    """

    def of_value(value: Any) -> float:
        need(isinstance(value, int | float) and not isinstance(value, bool))
        need((value > 0 if least is None else value >= least) and value <= most)
        need(value < _FOREVER)
        return float(value)

    shortest = "more than 0" if least is None else f"at least {least:g}"
    longest = "" if most == _FOREVER else f" and at most {most:g}"
    return Kind(
        of_value, f"a number of seconds, {shortest}{longest}", lambda text: of_value(float(text)),
        metavar="SECONDS",
    )  # fmt: skip


def text(metavar: str = "TEXT") -> Kind:
    """Return the kind of arbitrary strings."""
    return Kind(_string, "a string", metavar=metavar)


def _string(value: Any) -> str:
    need(isinstance(value, str))
    return str(value)


def _path(value: Any) -> str:
    need(isinstance(value, str) and value.startswith("/") and "\0" not in value)
    return normal_path(value)


def _truth(value: Any) -> bool:
    need(isinstance(value, bool))  # 0 and 1 are equal to False and True, and are refused
    return bool(value)


def _truth_of_text(word: str) -> bool:
    need(word in TRUE or word in FALSE)
    return word in TRUE


PATH: Final = Kind(_path, 'an absolute path ("/…")', metavar="PATH")
BOOLEAN: Final = Kind(_truth, "true or false", _truth_of_text, ("true", "false"), "[true|false]")
IGNORED: Final = Kind(lambda _: None, "anything")
"""The kind of settings without effect."""
