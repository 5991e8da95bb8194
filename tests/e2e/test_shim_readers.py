"""Clients that come late, or never, to what a container has written, or do not read it."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import anyio
import anyio.to_thread
import pytest

from api.proto import events_pb2
from tests.harness.shim import ShimByHand, StartShim, content_of, gone, shell

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_a_client_that_opens_its_fifo_late_misses_nothing(
    start_shim: StartShim, exec_id: str, *, terminal: bool
) -> None:
    command = ("sleep", "1000") if exec_id else ("echo", "over before you look")
    async with start_shim("c1", *command) as shim:
        stdout = shim.fifo("out")
        late = shell(f"sleep 0.3; cat {stdout} > {stdout}.copy")
        if exec_id:
            await shim.run("c1")
            words = ("echo", "over before you look")
            await shim.exec("c1", "e1", *words, stdout=stdout, terminal=terminal)
            await shim.call("Start", id="c1", exec_id="e1")
        else:
            await shim.run("c1", stdout=stdout, terminal=terminal)
        await shim.call("Wait", id="c1", exec_id=exec_id)
        await shim.call("Delete", id="c1", exec_id=exec_id)
        assert late.wait(5) == 0
        assert content_of(f"{stdout}.copy").strip() == b"over before you look"
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")


def _told_after(shim: ShimByHand) -> float:
    """How long after the end of init, in seconds, it was told."""
    (envelope,) = [e for e in shim.events.envelopes if e.topic == "/tasks/exit"]
    (event,) = [e for e in shim.events.events if isinstance(e, events_pb2.TaskExit)]
    return (envelope.timestamp.ToNanoseconds() - event.exited_at.ToNanoseconds()) / 1e9


@pytest.mark.parametrize(
    ("terminal", "size"),
    [(False, 6), (True, 6), (True, 65536 + 2000)],
    ids=["plain", "terminal", "terminal, more than a fifo holds"],
)
async def test_an_exit_is_told_at_once_though_nobody_reads_and_who_comes_then_misses_nothing(
    start_shim: StartShim, size: int, *, terminal: bool
) -> None:
    async with start_shim("c1", "head", "-c", str(size), "/dev/zero") as shim:
        stdout = shim.fifo("out")
        await shim.run("c1", stdout=stdout, terminal=terminal)
        await shim.events.until("TaskExit")
        # Before, it took two seconds; now nothing is between the two but a moment.
        assert _told_after(shim) < 1.8
        # Nobody has to delete it for the end to come.
        late = shell(f"cat {stdout} > {stdout}.copy")
        assert await anyio.to_thread.run_sync(late.wait, 10) == 0
        assert content_of(f"{stdout}.copy") == bytes(size)
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")


@pytest.mark.serial
async def test_a_client_that_never_comes_holds_nothing_up_for_long(start_shim: StartShim) -> None:
    async with start_shim("c1", "echo", "hello") as shim:
        await shim.run("c1", stdout=shim.fifo("out"))
        began = time.monotonic()
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        assert time.monotonic() - began < 4
        await gone(shim, "c1")


# What an exec writes is passed on through a pipe; it and the fifo have grown to 256 KiB then.
@pytest.mark.serial
@pytest.mark.parametrize(
    ("exec_id", "size", "terminal", "is_read"),
    [
        ("", 65536 + 6000, True, False),
        ("", 65536 + 6000, True, True),
        ("e1", 65536 + 6000, True, True),
        ("e1", 2 * 262144 - 16384, False, True),
    ],
    ids=["terminal, nobody", "terminal", "exec's terminal", "exec"],
)
async def test_more_output_than_a_fifo_holds_holds_no_delete_up_and_is_there_for_its_reader(
    start_shim: StartShim, exec_id: str, size: int, *, terminal: bool, is_read: bool
) -> None:
    writes = ("head", "-c", str(size), "/dev/zero")
    async with start_shim("c1", *(("sleep", "1000") if exec_id else writes)) as shim:
        stdout = shim.fifo("out")
        reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK) if is_read else -1
        if exec_id:
            await shim.run("c1")
            await shim.exec("c1", "e1", *writes, stdout=stdout, terminal=terminal)
            await shim.call("Start", id="c1", exec_id="e1")
        else:
            await shim.run("c1", stdout=stdout, terminal=terminal)
        await shim.call("Wait", id="c1", exec_id=exec_id)
        began = time.monotonic()
        await shim.call("Delete", id="c1", exec_id=exec_id)
        assert time.monotonic() - began < 6  # 10 s before
        if is_read:
            read = b""
            while chunk := os.read(reader, 1 << 16):
                read += chunk
            assert read == bytes(size)
            os.close(reader)
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")


# As on a machine that has much to do; and as containerd, which writes each chunk to a log of short
# lines on a slow disk before it reads on.
@pytest.mark.serial
@pytest.mark.parametrize(("chunk", "pause"), [(8192, 0.03), (16384, 0.4)], ids=["often", "seldom"])
async def test_the_end_is_told_when_a_client_has_read_what_was_written(
    start_shim: StartShim, chunk: int, pause: float
) -> None:
    async with start_shim("c1", "head", "-c", "60000", "/dev/zero") as shim:
        stdout = shim.fifo("out")
        reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
        await shim.run("c1", stdout=stdout)
        read, slowest, last = 0, 0.0, time.monotonic()
        while read < 60000:
            slowest = max(slowest, time.monotonic() - last)
            last = time.monotonic()
            # A client that takes nothing for a second is not waited for.
            assert "TaskExit" not in shim.events.names or slowest > 0.8
            await anyio.sleep(pause)
            with suppress(BlockingIOError):
                read += len(os.read(reader, chunk))
        await shim.events.until("TaskExit", seconds=2)
        os.close(reader)
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")


@pytest.mark.serial
async def test_a_client_that_reads_nothing_holds_up_the_end_no_longer_than_a_moment(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "echo", "hello") as shim:
        stdout = shim.fifo("out")
        reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
        await shim.run("c1", stdout=stdout)
        began = time.monotonic()
        await shim.call("Wait", id="c1")
        assert time.monotonic() - began < 4
        await shim.call("Delete", id="c1")
        assert os.read(reader, 100) == b"hello\n"
        os.close(reader)
        await gone(shim, "c1")


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_what_a_client_has_not_read_when_it_goes_is_there_for_the_next(
    start_shim: StartShim, *, terminal: bool
) -> None:
    async with start_shim("c1", "echo", "hello") as shim:
        stdout = shim.fifo("out")
        # As a containerd that hangs, and is killed and started again.
        first = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
        await shim.run("c1", stdout=stdout, terminal=terminal)
        await shim.call("Wait", id="c1")
        os.close(first)
        late = shell(f"cat {stdout} > {stdout}.copy")
        assert await anyio.to_thread.run_sync(late.wait, 10) == 0
        assert content_of(f"{stdout}.copy").strip() == b"hello"
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
async def test_what_was_written_while_containerd_was_away_is_there_when_it_is_back(
    start_shim: StartShim, exec_id: str
) -> None:
    command = ("sleep", "1000") if exec_id else ("echo", "last words")
    async with start_shim("c1", *command) as shim:
        stdout = shim.fifo("out")
        await shim.run("c1", stdout="" if exec_id else stdout)
        if exec_id:
            await shim.exec("c1", "e1", "echo", "last words", stdout=stdout)
            await shim.call("Start", id="c1", exec_id="e1")
        await shim.call("Wait", id="c1", exec_id=exec_id)
        await anyio.sleep(0.5)
        back = shell(f"cat {stdout} > {stdout}.copy")
        await anyio.sleep(0.5)
        await shim.call("Delete", id="c1", exec_id=exec_id)
        assert back.wait(5) == 0
        assert content_of(f"{stdout}.copy") == b"last words\n"
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")
