"""The tree of errors as a whole: what people look up by its code has to be one thing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from api.errors import NvshimError, Status
from tools.reference.error_codes import every_error
from tools.reference.sources import calls, modules, remedies

# Their message is that of another program, which says itself what to do.
QUOTES = {"RemoteError", "RuntimeFailed", "CriRefused"}


def _descendants(kind: type[NvshimError]) -> Iterator[type[NvshimError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


@pytest.fixture(scope="module")
def errors() -> list[type[NvshimError]]:
    every_error()  # for that, every module is imported
    ours = ("api", "hooks", "shim", "integration", "tools")
    return [error for error in _descendants(NvshimError) if error.__module__.startswith(ours)]


def test_no_two_errors_have_one_code(errors: list[type[NvshimError]]) -> None:
    names: dict[str, set[str]] = {}
    for error in errors:
        if "code" in vars(error):
            names.setdefault(error.code, set()).add(error.__name__)
    assert {code: twice for code, twice in names.items() if len(twice) > 1} == {}
    assert len(names) > 50


def test_every_error_that_is_raised_has_a_code_and_says_when_it_is(
    errors: list[type[NvshimError]],
) -> None:
    for error in errors:
        if not error.__subclasses__():
            assert "code" in vars(error), error
        assert re.fullmatch(r"NVSHIM-E\d{4}", error.code), error
        assert error.status in range(Status.CANCELLED, Status.UNAUTHENTICATED + 1), error
        assert error.__doc__, error


# Answers to other calls than Create.
NOT_OF_CREATE = {
    "CriuUnsupportedByRuntime", "FeaturesUnknown", "MachineUnsupported",
    "SandboxRootfsUnsupported", "Unimplemented",
}  # fmt: skip


def test_no_create_says_that_it_is_not_implemented(errors: list[type[NvshimError]]) -> None:
    """containerd 2 takes that for a shim of version 2, and asks once more as if it were."""
    of_the_shim = [e for e in errors if e.__module__.startswith(("api", "hooks", "shim"))]
    said = {error.__name__ for error in of_the_shim if error.status == Status.UNIMPLEMENTED}
    assert said == NOT_OF_CREATE


def test_every_error_that_a_person_can_meet_says_what_to_do(
    errors: list[type[NvshimError]],
) -> None:
    silent: dict[str, list[str]] = {}
    for module in modules():
        for name, call in calls(module):
            if not any(word.arg == "do" for word in call.keywords):
                silent.setdefault(name, []).append(f"{module.path}:{call.lineno}")
    advised = remedies()
    lacking = {
        error.code: silent.get(error.__name__, ["it is raised nowhere by its name"])
        for error in errors
        if not error.__module__.startswith(("tests", "tools")) and not error.__subclasses__()
        if error.__name__ not in QUOTES
        if not error.remedy and (error.__name__ in silent or error.__name__ not in advised)
    }
    assert lacking == {}


@pytest.mark.parametrize(
    ("asked", "found", "do", "line"),
    [
        ("to read /etc/x", "it is empty.", "write it.",
         "cannot read /etc/x: it is empty. Write it"),
        ("GPU 7", "does not exist; this node has 0", "", "GPU 7 does not exist; this node has 0"),
        ("GPU 7", "no node", "nvidia-smi makes it", "GPU 7: no node. nvidia-smi makes it"),
        ("the key a", "there is none", "Did you mean b?",
         "the key a: there is none. Did you mean b?"),
    ],
)  # fmt: skip
def test_an_error_reads_as_sentences(asked: str, found: str, do: str, line: str) -> None:
    assert str(NvshimError(asked, found=found, do=do)) == f"NVSHIM-E0000 nvshim-error: {line}"


def test_whatever_is_put_into_an_error_stays_one_bounded_line() -> None:
    text = str(NvshimError("a\nb\x1b[31m", found="c\r\n" * 10_000, do="d\u2028e"))
    assert "\n" not in text
    assert text.isprintable()
    assert len(text) < 2000
