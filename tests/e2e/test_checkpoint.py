"""Containers that are saved and restored, by a shim that is asked directly."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import anyio
import pytest

from api import typeurl
from api.proto import events_pb2, runc_options_pb2
from api.ttrpc import RemoteError
from tests.harness.runtime import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from google.protobuf.any_pb2 import Any as AnyMessage

    from tests.harness.shim import ShimByHand

    StartShim = Callable[..., AbstractAsyncContextManager[ShimByHand]]

pytestmark = pytest.mark.anyio

# Counts in memory alone, and ends with a code of its own.
COUNT: Final = """
trap 'exit 7' TERM
i=0
while :; do i=$((i+1)); echo $i; echo $i >/dev/shm/i; sleep 0.02; done
"""

# CRIU refuses to save a file lock unless it is told to.
LOCK: Final = f"exec 9>/dev/shm/lock; flock 9; {COUNT}"


class Output:
    """What comes out of a container's stdout, a number in each line."""

    def __init__(self, shim: ShimByHand, name: str) -> None:
        self.path = shim.fifo(name)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def numbers(self) -> list[int]:
        """All that has come so far."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._fd, 1 << 16):
                self._text += chunk
        whole, _, _ = self._text.rpartition(b"\n")
        return [int(line) for line in whole.split()]

    async def more(self, count: int = 5) -> int:
        """Wait until so many more have come; returns the last."""
        before = len(self.numbers)
        with anyio.fail_after(10):
            while len(self.numbers) < before + count:  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)
        return self.numbers[-1]


def _options(criu: str, **more: Any) -> AnyMessage:
    return typeurl.pack(runc_options_pb2.Options(binary_name="runc", criu_path=criu, **more))


def _how(**options: Any) -> AnyMessage:
    return typeurl.pack(runc_options_pb2.CheckpointOptions(**options))


async def _refused(shim: ShimByHand, method: str, **fields: Any) -> tuple[int, str]:
    with pytest.raises(RemoteError) as caught:
        await shim.call(method, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return int(caught.value.status), message


def _left_in(bundle: str) -> list[str]:
    """What is in a bundle of what this work leaves there for its time."""
    return [n for n in sorted(os.listdir(bundle)) if "criu" in n or n.startswith(("log.", "exec."))]


async def test_restored_container_goes_on_where_it_was_saved(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        with Output(shim, "one") as one, Output(shim, "two") as two:
            pid = await shim.run("c1", stdout=one.path, options=_options(criu))
            last = await one.more()
            await shim.call("Checkpoint", id="c1", path=saved, options=_how(exit=True))
            waited = await shim.call("Wait", id="c1")
            assert waited.exit_status == 128 + signal.SIGKILL
            assert not is_alive(pid)
            last = one.numbers[-1]
            await shim.call("Delete", id="c1")
            assert "descriptors.json" in os.listdir(saved)

            shim.bundle("c2", "sh", "-c", COUNT)
            assert (
                await shim.create("c2", stdout=two.path, options=_options(criu), checkpoint=saved)
                == 0
            )
            state = await shim.call("State", id="c2")
            assert (state.pid, await shim.status("c2")) == (0, "CREATED")
            pid = (await shim.call("Start", id="c2")).pid
            assert is_alive(pid)
            assert await shim.status("c2") == "RUNNING"
            await two.more()
            assert two.numbers[:2] in ([last, last + 1], [last + 1, last + 2])
            # It is a container as any other: execs, pids, signals, its exit.
            await shim.exec("c2", "e1", "sh", "-c", "test $(cat /dev/shm/i) -gt 1 && exit 3")
            await shim.call("Start", id="c2", exec_id="e1")
            assert (await shim.call("Wait", id="c2", exec_id="e1")).exit_status == 3
            await shim.call("Delete", id="c2", exec_id="e1")
            assert pid in {p.pid for p in (await shim.call("Pids", id="c2")).processes}
            await shim.call("Kill", id="c2", signal=signal.SIGTERM)
            assert (await shim.call("Wait", id="c2")).exit_status == 7
            deleted = await shim.call("Delete", id="c2")
            assert (deleted.pid, deleted.exit_status) == (pid, 7)
        await shim.events.until("TaskDelete", count=2)
        assert shim.events.of("c1") == [
            "TaskCreate", "TaskStart", "TaskCheckpointed", "TaskExit", "TaskDelete",
        ]  # fmt: skip
        assert shim.events.of("c2") == [
            "TaskCreate", "TaskStart", "TaskExecAdded e1", "TaskExecStarted e1", "TaskExit e1",
            "TaskExit", "TaskDelete",
        ]  # fmt: skip
        created = [e for e in shim.events.events if isinstance(e, events_pb2.TaskCreate)]
        assert [(e.checkpoint, bool(e.pid)) for e in created] == [("", True), (saved, False)]
        (checkpointed,) = (
            e for e in shim.events.events if isinstance(e, events_pb2.TaskCheckpointed)
        )
        assert checkpointed.checkpoint == saved
        for bundle in ("c1", "c2"):
            assert _left_in(f"{shim.directory}/{bundle}") == []
        await shim.call("Shutdown", id="c2")
        await shim.until_gone()
        assert shim.leftovers() == []
