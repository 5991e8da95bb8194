"""Clients that read a container's output late, or never."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

import anyio
import pytest

from tests.harness.shim import ShimByHand, content_of, shell
from tests.harness.stdio import begin, reading

pytestmark = pytest.mark.anyio


def _waits(**seconds: float) -> pytest.MarkDecorator:
    """Change constants of :mod:`shim.stdio.streams`: who waits for one that is endless fails."""
    return pytest.mark.constants({f"shim.stdio.streams.{name}": s for name, s in seconds.items()})


_ENDLESS: Final = 3600.0

TERMINAL: Final = pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
@TERMINAL
async def test_a_client_that_opens_its_fifo_late_misses_nothing(
    shim: ShimByHand, exec_id: str, *, terminal: bool
) -> None:
    stdout = shim.fifo("out")
    late = shell(f"sleep 0.3; cat {stdout} > {stdout}.copy")
    await begin(shim, exec_id, "echo", "before you look", stdout=stdout, terminal=terminal)
    await shim.reap("c1", exec_id)
    assert late.wait(5) == 0
    assert content_of(f"{stdout}.copy").strip() == b"before you look"


@_waits(_READER_SECONDS=_ENDLESS, _TAKING_SECONDS=_ENDLESS, DRAIN_SECONDS=_ENDLESS)
@pytest.mark.parametrize(
    ("terminal", "size"),
    [(False, 6), (True, 6), (True, 65536 + 2000)],
    ids=["plain", "terminal", "terminal, more than a fifo holds"],
)
async def test_an_exit_is_told_at_once_though_nobody_reads_and_who_comes_then_misses_nothing(
    shim: ShimByHand, size: int, *, terminal: bool
) -> None:
    stdout = shim.fifo("out")
    command = ("head", "-c", str(size), "/dev/zero")
    await begin(shim, "", *command, stdout=stdout, terminal=terminal)
    await shim.events.until("TaskExit")
    # The output ends without a Delete.
    with reading(stdout) as copy:
        pass
    assert content_of(copy) == bytes(size)


# A client that is connected and reads nothing, and one that never connects.
@_waits(_READER_SECONDS=0.5, _TAKING_SECONDS=_ENDLESS, DRAIN_SECONDS=_ENDLESS)
@pytest.mark.parametrize("opens", [False, True], ids=["never comes", "reads nothing"])
async def test_a_client_holds_up_the_end_no_longer_than_a_moment(
    shim: ShimByHand, *, opens: bool
) -> None:
    stdout = shim.fifo("out")
    reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK) if opens else -1
    await begin(shim, "", "echo", "hello", stdout=stdout)
    await shim.reap("c1")
    if opens:
        assert os.read(reader, 100) == b"hello\n"
        os.close(reader)


# The shim copies an exec's output through a pipe; pipe and fifo have grown to 256 KiB.
@_waits(DRAIN_SECONDS=_ENDLESS)
@pytest.mark.parametrize(
    ("exec_id", "size", "terminal", "is_read"),
    [
        ("", 65536 + 2000, True, False),
        ("", 65536 + 2000, True, True),
        ("e1", 65536 + 2000, True, True),
        ("e1", 2 * 262144 - 16384, False, True),
    ],
    ids=["terminal, nobody", "terminal", "exec's terminal", "exec"],
)
async def test_more_output_than_a_fifo_holds_holds_no_delete_up_and_is_there_for_its_reader(
    shim: ShimByHand, exec_id: str, size: int, *, terminal: bool, is_read: bool
) -> None:
    stdout = shim.fifo("out")
    reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK) if is_read else -1
    writes = ("head", "-c", str(size), "/dev/zero")
    await begin(shim, exec_id, *writes, stdout=stdout, terminal=terminal)
    await shim.call("Wait", id="c1", exec_id=exec_id)
    await shim.call("Delete", id="c1", exec_id=exec_id)
    if is_read:
        read = b""
        while chunk := os.read(reader, 1 << 16):
            read += chunk
        assert read == bytes(size)
        os.close(reader)


# Like a busy machine, and like containerd, which writes each chunk to a log of short lines on a
# slow disk before it continues to read.
@pytest.mark.parametrize(("chunk", "pause"), [(8192, 0.03), (16384, 0.4)], ids=["often", "seldom"])
async def test_the_end_is_told_when_a_client_has_read_what_was_written(
    shim: ShimByHand, chunk: int, pause: float
) -> None:
    stdout = shim.fifo("out")
    reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
    await begin(shim, "", "head", "-c", "60000", "/dev/zero", stdout=stdout)
    read, slowest, last = 0, 0.0, time.monotonic()
    while read < 60000:
        slowest = max(slowest, time.monotonic() - last)
        last = time.monotonic()
        # The shim does not wait for a client that reads nothing for a second.
        assert "TaskExit" not in shim.events.names or slowest > 0.8
        await anyio.sleep(pause)
        with suppress(BlockingIOError):
            read += len(os.read(reader, chunk))
    await shim.events.until("TaskExit")
    os.close(reader)


@TERMINAL
async def test_what_a_client_has_not_read_when_it_goes_is_there_for_the_next(
    shim: ShimByHand, *, terminal: bool
) -> None:
    stdout = shim.fifo("out")
    # Like a containerd that hangs, and is killed and restarted.
    first = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
    await begin(shim, "", "echo", "hello", stdout=stdout, terminal=terminal)
    await shim.call("Wait", id="c1")
    os.close(first)
    with reading(stdout) as copy:
        pass
    assert content_of(copy).strip() == b"hello"


@_waits(_READER_SECONDS=_ENDLESS, DRAIN_SECONDS=_ENDLESS)
async def test_a_client_that_has_gone_is_not_waited_for_by_delete(
    shim: ShimByHand,
) -> None:
    """Like a container of `ctr run --detach`: the client that deletes it knows it has no reader."""
    stdout = shim.fifo("out")
    client = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
    await begin(shim, "", "echo", "hello", stdout=stdout)
    os.close(client)
    await shim.call("Wait", id="c1")
    await shim.call("Delete", id="c1")
