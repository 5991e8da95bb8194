"""Installers that are killed at each change."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest

from integration.containers import tree_users
from integration.containers.procfs import Procfs
from integration.install.survey import take_survey
from integration.install.trees import problem_of
from tests.unit.install.nodes import PROGRAMS, Node

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


_CHANGES: Final = frozenset(
    {"os.rename", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown"}
)


def _killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run a function in a child that is killed before its nth change; return whether it was.

    Opening a file for writing counts as a change.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            writes = (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
            )
            if event in _CHANGES or writes:
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        status = 1
        try:
            sys.addaudithook(hook)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's processes: scanning them a thousand times would take a minute."""
    monkeypatch.setattr(Procfs, "pids", lambda _: iter(()))
    monkeypatch.setattr(tree_users, "is_blind", lambda *_, **__: False)


def _every_death(work: Callable[[], object], check: Callable[[], None]) -> int:
    number = 0
    while _killed_at(number, work):
        check()
        number += 1
    return number


def _whole(node: Node, *versions: str) -> None:
    """Check that one of these versions is active and complete."""
    survey = take_survey(node.layout, check=problem_of)
    current = survey.named(survey.current)
    assert current is not None
    assert current.tree is not None
    assert current.problem == ""
    assert current.tree.version in versions
    assert [e.name for e in survey.installed if e.problem or e.tree is None] == []


def test_an_upgrade_that_is_killed_at_any_change_leaves_one_version_whole_and_is_repaired(
    node: Node, quiet: None
) -> None:
    node.install(node.old)

    def check() -> None:
        _whole(node, "1.0", "2.0")
        assert node.said()[1] in {"1.0", "2.0"}

    # Each run starts where the last one was killed, and repairs what it left.
    assert _every_death(lambda: node.install(node.new), check) > 20
    assert node.names == [node.old.name, node.new.name, "current", "previous"]
    assert sorted(os.listdir(node.layout.bindir)) == PROGRAMS
    assert node.said() == [PROGRAMS[0], "2.0"]
    assert node.status()["problems"] == []
    assert take_survey(node.layout).previous == node.old.name


def test_each_death_of_a_first_installation_is_repaired_by_the_next_one(
    node: Node, quiet: None
) -> None:
    deaths = 0
    while _killed_at(deaths, lambda: node.install(node.old)):
        deaths += 1
        node.install(node.old)
        assert node.names == [node.old.name, "current"]
        assert sorted(os.listdir(node.layout.bindir)) == PROGRAMS
        assert node.status()["problems"] == []
        shutil.rmtree(node.layout.prefix)
        shutil.rmtree(node.layout.bindir)
    assert deaths > 20


def test_an_uninstallation_that_is_killed_at_any_change_is_finished_by_the_next_one(
    node: Node, quiet: None
) -> None:
    deaths = 0
    while True:
        node.install(node.old)
        node.install(node.new)
        if not _killed_at(deaths, node.uninstall):
            break
        deaths += 1
        # As long as a program is installed, it belongs to a complete tree.
        if os.path.exists(f"{node.layout.bindir}/{PROGRAMS[0]}"):
            _whole(node, "2.0")
        node.uninstall()
        assert not os.path.exists(node.layout.prefix)
        assert os.listdir(node.layout.bindir) == []
    assert deaths > 20
