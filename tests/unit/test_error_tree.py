"""The error table as a whole: every code has to mean one thing."""

from __future__ import annotations

import ast
import re

import pytest

from api.errors import NvshimError, Status, describe_bug
from tests.harness.raising import raises
from tools.reference.error_codes import Entry, every_error
from tools.reference.sources import calls, modules, remedies

# Their message comes from another program, and includes the remedy.
QUOTES = {"RemoteError", "RuntimeFailed", "CriRefused"}


@pytest.fixture(scope="module")
def errors() -> list[Entry]:
    return every_error()


def test_a_code_and_a_name_are_those_of_one_error(errors: list[Entry]) -> None:
    codes = [error.code for error in errors]
    slugs = [error.slug for error in errors]
    assert [code for code in codes if codes.count(code) > 1] == []
    # From us and the engine; from a simulated node and a configuration.
    assert {slug for slug in slugs if slugs.count(slug) > 1} == {
        "config-unreadable", "shim-not-found",
    }  # fmt: skip
    assert len(codes) > 300


def test_every_error_says_when_it_is_raised(errors: list[Entry]) -> None:
    for error in errors:
        assert re.fullmatch(r"NVSHIM-E\d{4}", error.code), error
        assert error.status in range(Status.CANCELLED, Status.UNAUTHENTICATED + 1), error
        assert error.meaning.endswith("."), error


def test_a_row_is_named_as_people_write_it(errors: list[Entry]) -> None:
    for error in errors:
        assert re.sub("(?<!^)([A-Z])", r"-\1", error.name).lower() == error.slug


def _classes(kind: type[NvshimError]) -> set[type[NvshimError]]:
    return {kind}.union(*map(_classes, kind.__subclasses__()))


def test_what_is_only_raised_is_a_row() -> None:
    mentioned, branches = set(), set()
    for module in modules():
        called = {id(call.func) for _, call in calls(module)}
        rows = [call.func for name, call in calls(module) if name == "row"]
        branches |= {ast.unparse(row.value) for row in rows if isinstance(row, ast.Attribute)}
        names = [node for node in ast.walk(module.tree) if isinstance(node, ast.Name)]
        mentioned |= {name.id for name in names if id(name) not in called}
    every_error()  # imports every module
    ours = ("api.", "hooks.", "shim.", "integration.", "tools.")
    for kind in _classes(NvshimError):
        if kind.__module__.startswith(ours):
            assert kind.__name__ in mentioned or "__init__" in vars(kind), kind
            is_branch = kind.__name__ in branches or kind.__subclasses__()
            assert is_branch or "code" in vars(kind), kind


# Answers to other calls than Create.
NOT_OF_CREATE = {
    "CriuUnsupportedByRuntime", "FeaturesUnknown", "MachineUnsupported",
    "SandboxRootfsUnsupported", "Unimplemented",
}  # fmt: skip


def test_no_create_says_that_it_is_not_implemented(errors: list[Entry]) -> None:
    """containerd 2 would take it for an API version 2 shim, and retry with that version."""
    of_the_shim = [error for error in errors if error.module.startswith(("api", "hooks", "shim"))]
    said = {error.name for error in of_the_shim if error.status == Status.UNIMPLEMENTED}
    assert said == NOT_OF_CREATE


def test_every_error_that_a_person_can_meet_says_what_to_do(errors: list[Entry]) -> None:
    silent: dict[str, list[str]] = {}
    for module in modules():
        for name, call in calls(module):
            if not any(word.arg == "do" for word in call.keywords):
                silent.setdefault(name, []).append(f"{module.path}:{call.lineno}")
    advised = remedies()
    lacking = {
        error.code: silent.get(error.name, ["it is raised nowhere by its name"])
        for error in errors
        if not error.module.startswith("tools") and not error.is_branch
        if error.name not in QUOTES
        if not error.remedy and (error.name in silent or error.name not in advised)
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


def test_a_row_makes_errors_of_its_branch_that_are_its_own() -> None:
    row = NvshimError.row("NVSHIM-E9998 no-such-thing", Status.NOT_FOUND, "When.", remedy="wait")
    other = NvshimError.row("NVSHIM-E9997 no-thing", Status.NOT_FOUND, "When.", remedy="wait")
    error = row("to look", found="it is dark")
    assert str(error) == "NVSHIM-E9998 no-such-thing: cannot look: it is dark. Wait"
    assert error.status == Status.NOT_FOUND
    assert row("a", found="b", do="go").do == "go"
    assert (NvshimError.code, NvshimError.slug) == ("NVSHIM-E0000", "nvshim-error")
    assert describe_bug(error).startswith("NoSuchThing: NVSHIM-E9998")
    with raises(row, match="dark"):
        raise error
    with raises(other, row):
        raise error
    with pytest.raises(AssertionError), raises(other):
        raise error
    with pytest.raises(AttributeError):
        row.code = "NVSHIM-E0001"  # type: ignore[misc]
