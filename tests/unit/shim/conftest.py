"""Fixtures of tests of the shim's server."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import anyio.abc
import pytest

from shim.children import Reaper
from shim.log import Log
from tests.harness import loop_backend
from tests.harness.cgroup import remove_cgroup
from tests.harness.own_process import children
from tests.harness.waiting import until


@pytest.fixture
def anyio_backend() -> str:
    """Run on the shim's loop."""
    loop_backend.register()
    return loop_backend.OURS


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    """Run a reaper until the last child of the test has exited."""
    reaper, others = Reaper(), children().keys()

    async def reap(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
            task_status.started()
            async for _ in signals:
                reaper.reap()

    async with anyio.create_task_group() as tasks:
        await tasks.start(reap)
        yield reaper
        await until(lambda: children().keys() <= others, "the test's children have ended")
        tasks.cancel_scope.cancel()


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[..., Log]]:
    """Open the log of a shim in the test's directory, which a shim keeps open."""
    opened: list[Log] = []

    def open_(*, debug: bool = False, **fields: str) -> Log:
        opened.append(Log(str(tmp_path), debug=debug, **fields))
        return opened[-1]

    yield open_
    for log in opened:
        for fd in log.descriptors():
            os.close(fd)


@pytest.fixture
def unified() -> Iterator[str]:
    """Make a cgroup v2, with one below it."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.exists(f"{root}/cgroup.controllers"):
            directory = f"{root}/nvshim-unit-{os.getpid()}"
            os.makedirs(f"{directory}/below")
            yield directory
            remove_cgroup(directory)
            return
    pytest.skip("the host has no version 2 of cgroups")
