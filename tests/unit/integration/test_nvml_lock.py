"""The lock between processes that have NVML open and one that needs it closed."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from integration.nvml.lock import NONE, exclusive, is_exclusive, shared
from integration.nvml.query import ask

if TYPE_CHECKING:
    from pathlib import Path


def test_many_have_it_open_and_who_needs_it_closed_waits(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with exclusive(state, 0) as lock:
        assert lock is not None
        assert is_exclusive(state)
        with shared(state, 0) as other:
            assert other is None
    assert not is_exclusive(state)
    with shared(state, 0) as one, shared(state, 0) as other:
        assert one not in {None, NONE}
        assert other not in {None, NONE}
        assert not is_exclusive(state)
        with exclusive(state, 0) as lock:
            assert lock is None


def test_a_child_has_it_for_as_long_as_it_lives(tmp_path: Path) -> None:
    state = str(tmp_path)
    for have in (shared, exclusive):
        with have(state, 0) as lock:
            assert lock is not None
            child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock,))
        with exclusive(state, 0) as taken:
            assert taken is None
        child.communicate()
        with exclusive(state, 0) as taken:
            assert taken is not None


def test_nobody_asks_while_it_is_needed_closed_and_then_one_does(tmp_path: Path) -> None:
    state = str(tmp_path)
    command = ["sh", "-c", f"echo asked; ls -l /proc/self/fd | grep -c {state}/nvml.lock"]
    with exclusive(state, 0):
        assert ask(command, 0.05, state=state) is None
    assert ask(command, 10, state=state) == b"asked\n1\n"


def test_who_may_not_open_it_goes_without(tmp_path: Path) -> None:
    with shared(str(tmp_path / "nowhere"), 0) as lock:
        assert lock == NONE
    assert not os.path.exists(tmp_path / "nowhere")
    assert ask(["echo", "asked"], 10, state=str(tmp_path / "nowhere")) == b"asked\n"
