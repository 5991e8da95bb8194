"""A program may be a logger if only root could have installed it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from shim.errors import LoggerNotAllowed
from shim.stdio.logger import check_program
from tests.harness.raising import raises

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def place() -> Iterator[str]:
    """Make a directory that only root can change, up to /, with a program in it."""
    path = tempfile.mkdtemp(prefix="nvshim-loggers-", dir="/run")
    os.chmod(path, 0o755)
    _program(f"{path}/logger")
    yield path
    shutil.rmtree(path)


def _program(path: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write("#!/bin/sh\n")
    os.chmod(path, 0o755)


def test_a_program_of_roots_is_allowed(place: str) -> None:
    assert check_program(f"{place}/logger") == f"{place}/logger"
    assert check_program(f"/{place}/./x/../logger".replace("/x/..", "")) == f"{place}/logger"


def test_links_of_roots_are_followed(place: str) -> None:
    os.mkdir(f"{place}/releases")
    _program(f"{place}/releases/logger-2")
    os.symlink("releases", f"{place}/current")
    os.symlink("../current/logger-2", f"{place}/releases/latest")
    os.symlink(f"{place}/current/latest", f"{place}/link")
    assert check_program(f"{place}/link") == f"{place}/releases/logger-2"
    assert check_program("/bin/sh") == os.path.realpath("/bin/sh")


@pytest.mark.parametrize(
    ("mode", "owner"), [(0o775, 0), (0o757, 0), (0o755, 1234), (0o644, 0), (0o4777, 0)]
)
def test_a_program_that_another_could_change_or_nobody_can_run(
    place: str, mode: int, owner: int
) -> None:
    os.chown(f"{place}/logger", owner, 0)
    os.chmod(f"{place}/logger", mode)
    with raises(LoggerNotAllowed):
        check_program(f"{place}/logger")


@pytest.mark.parametrize(("mode", "owner"), [(0o1777, 0), (0o775, 0), (0o755, 1234)])
def test_a_directory_on_the_way_that_another_could_change(
    place: str, mode: int, owner: int
) -> None:
    os.makedirs(f"{place}/a/b")
    _program(f"{place}/a/b/logger")
    os.symlink(f"{place}/a/b/logger", f"{place}/link")
    os.chown(f"{place}/a", owner, 0)
    os.chmod(f"{place}/a", mode)
    for path in (f"{place}/a/b/logger", f"{place}/link"):
        with raises(LoggerNotAllowed, match=f"{place}/a "):
            check_program(path)


def test_a_link_of_somebody_elses_is_not_followed(place: str) -> None:
    os.symlink(f"{place}/logger", f"{place}/link")
    os.chown(f"{place}/link", 1234, 0, follow_symlinks=False)
    with raises(LoggerNotAllowed, match="user 1234"):
        check_program(f"{place}/link")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("missing", "No such file"),
        ("logger/x", "not a directory"),
        ("", "directory"),
        ("loop", "too many links"),
        ("device", "not a program"),
        ("name" * 100, "File name too long"),
    ],
)
def test_what_is_no_program_is_said(place: str, name: str, found: str) -> None:
    os.symlink("loop", f"{place}/loop")
    os.mknod(f"{place}/device", 0o20755, os.makedev(1, 3))
    with raises(LoggerNotAllowed, match=found):
        check_program(f"{place}/{name}")


def test_with_a_list_only_what_is_on_it(place: str) -> None:
    os.symlink("logger", f"{place}/link")
    _program(f"{place}/another")
    for allowed in (f"{place}/logger", f"{place}/link"):
        for path in (f"{place}/logger", f"{place}/link"):
            assert check_program(path, [allowed]) == f"{place}/logger"
    for allowed_ in ([], [f"{place}/logger"], ["/missing"]):
        with raises(LoggerNotAllowed, match="list"):
            check_program(f"{place}/another", allowed_)


def test_a_list_does_not_make_an_unsafe_program_safe(place: str) -> None:
    os.chmod(f"{place}/logger", 0o777)
    with raises(LoggerNotAllowed, match="written by others"):
        check_program(f"{place}/logger", [f"{place}/logger"])
