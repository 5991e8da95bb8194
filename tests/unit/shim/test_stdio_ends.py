"""Ends of fifos and files that are let go while somebody still waits at them."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from shim.stdio.ends import KeptEnd
from shim.stdio.log_file import FileRelay

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_an_end_may_be_closed_while_a_reader_is_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(fifo, os.O_WRONLY)
    os.write(writing, b"unread")
    os.close(writing)
    kept = KeptEnd(reading)
    with anyio.fail_after(1):  # a client that does not come is waited for twice as long
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.wait_for_reader)
            await anyio.sleep(0.05)
            kept.close()
            # Its number is another file's from now on, which nobody may close or ask.
            another = os.open("/dev/null", os.O_RDONLY)
    os.close(another)


async def test_a_relay_without_a_thread_gives_its_descriptors_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    await anyio.to_thread.run_sync(int)  # what a loop needs for threads it keeps
    monkeypatch.setattr(anyio.to_thread, "run_sync", refuse)
    monkeypatch.setattr("api.aio.threads.start_new_thread", refuse)
    before = os.listdir("/proc/self/fd")
    source, writing = os.pipe()
    sink = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    relay = FileRelay(source, sink)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            relay.start(tasks)
    assert caught.group_contains(RuntimeError, match="new thread")
    assert relay.done.is_set()
    relay.finish()
    relay.stop()
    os.close(writing)
    assert os.listdir("/proc/self/fd") == before


async def test_a_relay_that_is_cancelled_before_its_thread_has_begun_is_ended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Any] = []

    def begin_late(work: Any, arguments: Any) -> None:
        late.append(partial(work, *arguments))

    await anyio.to_thread.run_sync(int)
    monkeypatch.setattr("api.aio.threads.start_new_thread", begin_late)
    before = os.listdir("/proc/self/fd")
    source, writing = os.pipe()
    sink = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    relay = FileRelay(source, sink)
    async with anyio.create_task_group() as tasks:
        relay.start(tasks)
        await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert relay.done.is_set()
    # The numbers that the relay had are somebody else's from now on, who has something to read.
    pair = {sock.fileno(): sock for sock in socket.socketpair()}
    other = pair.pop(source)
    (another,) = pair.values()
    another.send(b"not for the relay")
    late.pop()()
    assert other.recv(99, socket.MSG_DONTWAIT) == b"not for the relay"
    other.close()
    another.close()
    os.close(writing)
    assert os.listdir("/proc/self/fd") == before
