"""What tests of the server's modules share."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import anyio
import anyio.abc
import pytest

from shim.children import Reaper
from tests.harness import loop_backend


@pytest.fixture
def anyio_backend() -> str:
    """The loop that a shim runs."""
    loop_backend.register()
    return loop_backend.OURS


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    reaper = Reaper()

    async def reap(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
            task_status.started()
            async for _ in signals:
                reaper.reap()

    async with anyio.create_task_group() as tasks:
        await tasks.start(reap)
        yield reaper
        tasks.cancel_scope.cancel()
