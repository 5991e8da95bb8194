"""A program that no signal ends once it runs, like one that is blocked in a driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.harness.waiting import eventually

_FREEZER: Final = Path("/sys/fs/cgroup/freezer")


@contextmanager
def frozen_program(
    directory: Path,
) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Yield the program's path, and functions: wait until it is frozen; thaw it.

    It is killed at the end.

    Args:
        directory: where it is created.
    """
    if not (_FREEZER / "tasks").exists():
        pytest.skip("no freezer of cgroup v1, whose processes no signal reaches")
    cgroup = _FREEZER / f"nvshim-frozen-{os.getpid()}"
    processes, state = cgroup / "cgroup.procs", cgroup / "freezer.state"
    cgroup.mkdir()
    program = directory / "frozen"
    program.write_text(
        f"#!/bin/sh\necho $$ > {processes}\necho FROZEN > {state}\nexec sleep 1000\n"
    )
    program.chmod(0o755)

    def wait() -> None:
        eventually(lambda: state.read_text() == "FROZEN\n", "it is frozen")

    def thaw() -> None:
        state.write_text("THAWED")

    try:
        yield str(program), wait, thaw
    finally:
        thaw()
        for pid in processes.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        eventually(lambda: not processes.read_text(), "it has ended")
        cgroup.rmdir()
