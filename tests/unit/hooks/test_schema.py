"""The types of values, each with two parsers, and the declarations of settings."""

from __future__ import annotations

from typing import Any

import pytest

from api.values import dataclass
from hooks.schema import (
    BOOLEAN,
    PATH,
    Declarations,
    Kind,
    WrongValue,
    choice,
    either,
    like,
    list_of,
    number,
    one_of,
    seconds,
)

MODE = one_of("strict", "default")
AUTO = choice({"auto": None}, PATH)
WORDS = list_of(MODE, "a list of modes")
WRONG = object()


def outcome(convert: Any, value: object) -> object:
    try:
        return convert(value)
    except WrongValue:
        return WRONG


@pytest.mark.parametrize(
    ("kind", "value", "text", "meant"),
    [
        (BOOLEAN, True, "T", True),
        (BOOLEAN, 0, "yes", WRONG),
        (PATH, "/a//b/../c", "/a/c/", "/a/c"),
        (PATH, "a", "/a\0", WRONG),
        (number(1, 9), 9, "9", 9),
        (number(1, 9), True, "1_0", WRONG),
        (number(1, 9), 10, "-1", WRONG),
        (seconds(9), 1, "1e0", 1.0),
        (seconds(9), 0, "nan", WRONG),
        (seconds(), float("inf"), "inf", WRONG),
        (seconds(least=0), 0, "0", 0.0),
        (MODE, "strict", "strict", "strict"),
        (MODE, ["strict"], "Strict", WRONG),
        (AUTO, "auto", "auto", None),
        (AUTO, "/a", "/a", "/a"),
        (AUTO, "Auto", "a", WRONG),
        (WORDS, ["strict", "default", "strict"], "strict, default,", ("strict", "default")),
        (WORDS, "strict", "strict, x", WRONG),
        (list_of(PATH, "", commas=False), ["/a,b"], "/a,b", ("/a,b",)),
        (like("[a-z]+", "a word"), "ab", "ab", "ab"),
    ],
)
def test_a_value_and_a_text_mean_the_same(
    kind: Kind, value: object, text: str, meant: object
) -> None:
    assert outcome(kind.check, value) == meant
    assert outcome(kind.parse, text) == meant


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [(AUTO, None, "auto"), (AUTO, "/a", "/a"), (WORDS, ("strict",), ["strict"]),
     (choice({"fail": False, "leave-out": True}), False, "fail"), (number(0, 1), 0, 0)],
)  # fmt: skip
def test_a_value_is_written_as_it_is_read(kind: Kind, value: object, written: object) -> None:
    assert kind.written(value) == written
    assert kind.check(written) == value


def test_what_is_wrong_has_the_allowed_values() -> None:
    with pytest.raises(WrongValue) as caught:
        MODE.parse("x")
    assert (caught.value.wanted, caught.value.value) == ('"strict" or "default"', "x")
    assert caught.value.wanted_text == "strict or default"
    assert either(["a", "b", "c"]) == "a, b or c"


def test_fields_of_a_class_are_its_settings() -> None:
    setting = Declarations()

    @dataclass(frozen=True, slots=True)
    class Options:
        mode: str = setting(MODE, "how", "MODE", "OLD_MODE", default="default", key="a.mode")
        root: str | None = setting(AUTO, "where", default=None, options=["--root"])
        source: str = ""

    first, second = setting.of(Options)
    assert (first.field, first.key, first.variables) == ("mode", "a.mode", ("MODE", "OLD_MODE"))
    assert (second.field, second.default, second.options) == ("root", None, ("--root",))
    assert Options().mode == first.default
