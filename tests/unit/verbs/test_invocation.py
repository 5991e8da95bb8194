"""Command lines of containerd, and invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.errors import InvalidIdentifier, InvalidInvocation, ShimError
from shim.files import LONGEST_ID, check_id
from shim.verbs.invocation import parse
from tests.harness.raising import is_error, raises

_START = ["-namespace", "k8s.io", "-address", "/run/c.sock", "-publish-binary", "/usr/bin/c"]


@pytest.mark.parametrize(
    "words",
    [
        [*_START, "-id", "web-1", "start"],
        ["--namespace", "k8s.io", "--address", "/run/c.sock", "--id", "web-1", "start"],
        ["-namespace=k8s.io", "-address=/run/c.sock", "-id=web-1", "start"],
        ["--namespace=k8s.io", "--address=/run/c.sock", "--id=web-1", "start", "-debug"],
        [*_START, "-new-switch", "-id", "web-1", "start"],
        [*_START, "-new-flag", "value", "-id", "web-1", "start"],
        [*_START, "-new-flag=value", "-id", "web-1", "start"],
        [*_START, "-socket", "/run/s", "-id", "web-1", "start"],
        [*_START, "-id", "web-1", "--", "start"],
        [*_START, "-id", "other", "-id", "web-1", "start", "more", "words"],
    ],
)
def test_every_way_to_say_it_is_understood(words: list[str]) -> None:
    asked = parse(words)
    assert (asked.verb, asked.namespace, asked.container_id, asked.address) == (
        "start",
        "k8s.io",
        "web-1",
        "/run/c.sock",
    )


def test_an_unknown_switch_right_before_the_verb_does_not_swallow_it() -> None:
    assert parse(["-namespace", "n", "-id", "i", "-new-switch", "delete"]).verb == "delete"


@pytest.mark.parametrize(
    ("words", "debug"),
    [([], False), (["-debug"], True), (["-debug=true"], True), (["-debug=F"], False)],
)
def test_debug_is_a_switch(words: list[str], debug: bool) -> None:
    assert parse([*words, "-namespace", "n", "-id", "i", "start"]).debug is debug


def test_delete_names_the_bundle() -> None:
    asked = parse([*_START, "-id", "web-1", "-bundle", "/run/b c", "-debug", "delete"])
    assert (asked.verb, asked.bundle, asked.debug) == ("delete", "/run/b c", True)


@pytest.mark.parametrize("words", [["-info"], ["--info"], ["-info=true"]])
def test_info_needs_nothing_else(words: list[str]) -> None:
    assert parse(words).info


@pytest.mark.parametrize("words", [["-v"], ["-version"], ["--version"]])
def test_version_needs_nothing_else(words: list[str]) -> None:
    assert parse(words).version


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["serve"],
        ["-namespace", "n", "-id", "i"],
        ["-namespace", "n", "-id"],
        ["-debug=perhaps", "-namespace", "n", "-id", "i", "start"],
        ["-info=false"],
        ["-"],
    ],
)
def test_what_no_containerd_says_is_refused(words: list[str]) -> None:
    with raises(InvalidInvocation):
        parse(words)


_UNSAFE = ["", ".", "..", "-", "-a", "_a", "a/b", "../a", "a b", "a\n", "a\0", "ä", "a" * 77]


@pytest.mark.parametrize("name", _UNSAFE)
def test_an_unsafe_id_or_namespace_is_refused_before_it_can_be_a_path(name: str) -> None:
    with raises(InvalidIdentifier, match="container id"):
        parse(["-namespace", "n", f"-id={name}", "start"])
    with raises(InvalidIdentifier, match="namespace"):
        parse([f"-namespace={name}", "-id", "i", "start"])


@pytest.mark.parametrize("name", ["a", "0", "a.b", "a..b", "A_b-c.9", "f" * LONGEST_ID])
def test_what_containerd_accepts_is_accepted(name: str) -> None:
    assert check_id(name) == name


@given(st.lists(st.text(max_size=12) | st.sampled_from(["-id", "-namespace", "start", "-v"])))
def test_any_words_are_a_request_or_one_of_our_errors(words: list[str]) -> None:
    try:
        asked = parse(words)
    except ShimError as error:
        # Both results are valid, and each is checked.
        assert is_error(error, InvalidInvocation) or is_error(error, InvalidIdentifier)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert asked.info or asked.version or "/" not in asked.container_id + asked.namespace
