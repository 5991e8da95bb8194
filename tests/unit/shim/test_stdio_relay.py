"""The relay between pipes: complete, in order, fair, and no faster than the reader."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from shim import loop
from shim.stdio.pipes import Relay
from tests.harness.examples import seeds

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tasks() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


def _write_all(fd: int, pieces: list[bytes]) -> threading.Thread:
    def write() -> None:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.close(fd)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


async def _read_all(fd: int) -> bytes:
    data = b""
    while chunk := await anyio.to_thread.run_sync(os.read, fd, 1 << 20):
        data += chunk
    os.close(fd)
    return data


@pytest.mark.parametrize("seed", seeds(1))
async def test_pieces_of_any_size_arrive_in_order(tasks: TaskGroup, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([1, 10, 4095, 4096, 4097, 70_000, 1 << 20]) for _ in range(60)]
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    (source, writing), (reading, sink) = os.pipe(), os.pipe()
    relay = Relay(source, sink)
    relay.start(tasks)
    thread = _write_all(writing, pieces)
    assert await _read_all(reading) == b"".join(pieces)
    thread.join()
    await relay.done.wait()


@pytest.mark.parametrize("is_short", [False, True], ids=["threads", "no thread"])
async def test_what_is_read_in_threads_arrives_in_order(
    tasks: TaskGroup, monkeypatch: pytest.MonkeyPatch, *, is_short: bool
) -> None:
    start = loop.run_in_thread

    async def start_no_step(function: Any) -> Any:
        if getattr(function, "__func__", None) is Relay._step:
            raise RuntimeError("can't start new thread")
        return await start(function)

    if is_short:
        monkeypatch.setattr(loop, "run_in_thread", start_no_step)
    pieces = [bytes([number]) * size for number, size in enumerate((1, 4096, 70_000, 1 << 20, 5))]
    (source, writing), (reading, sink) = os.pipe(), os.pipe()
    relay = Relay(source, sink)
    relay.use_threads()
    relay.start(tasks)
    thread = _write_all(writing, pieces)
    assert await _read_all(reading) == b"".join(pieces)
    thread.join()
    await relay.done.wait()


async def test_what_is_stopped_keeps_its_descriptors_until_its_thread_has_ended(
    tasks: TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while another process has the pipe locked; their numbers may then be other files."""
    entered, unlocked = threading.Event(), threading.Event()

    def step(_: Relay) -> int:
        entered.set()
        unlocked.wait()
        raise BlockingIOError

    monkeypatch.setattr(Relay, "_step", step)
    (source, writing), (reading, sink) = os.pipe(), os.pipe()
    relay = Relay(source, sink)
    relay.use_threads()
    relay.start(tasks)
    await anyio.to_thread.run_sync(entered.wait)
    relay.stop()
    await anyio.lowlevel.checkpoint()
    assert not relay.done.is_set()
    assert [os.get_inheritable(fd) for fd in (source, sink)] == [False, False]
    unlocked.set()
    await relay.done.wait()
    for fd in (source, sink):
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    os.close(writing)
    os.close(reading)


async def test_what_nobody_takes_stays_in_the_pipes_and_arrives_later(tasks: TaskGroup) -> None:
    (source, writing), (reading, sink) = os.pipe(), os.pipe()
    relay = Relay(source, sink)
    relay.start(tasks)
    os.set_blocking(writing, False)
    written = 0
    refused = 0
    while refused < 1000:  # until the relay had enough turns and is full
        refused += 1
        with suppress(BlockingIOError):
            written += os.write(writing, b"a line of some length\n" * 8)
            refused = 0
        await anyio.lowlevel.checkpoint()
    # Short lines fill whole pages of the first pipe, too. The total is at most what two pipes hold.
    assert 1 << 17 < written <= 1 << 19
    os.close(writing)
    assert len(await _read_all(reading)) == written
    await relay.done.wait()


async def test_others_have_their_turn_while_there_is_always_more(tasks: TaskGroup) -> None:
    for source in ("/dev/zero", "pipe"):
        sink = os.open(os.devnull, os.O_WRONLY)
        if source == "pipe":
            reading, writing = os.pipe()
            threading.Thread(target=_endless, args=(writing,)).start()
        else:
            reading = os.open(source, os.O_RDONLY)
        relay = Relay(reading, sink)
        relay.start(tasks)
        turns = 0
        with anyio.move_on_after(0.2):
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1
        assert turns > 10
        relay.stop()
        await relay.done.wait()


def _endless(fd: int) -> None:
    with suppress(BrokenPipeError):
        while True:
            os.write(fd, bytes(65536))
    os.close(fd)


async def test_what_comes_last_is_written_after_the_end_of_the_source(tasks: TaskGroup) -> None:
    (source, writing), (reading, sink) = os.pipe(), os.pipe()
    relay = Relay(source, sink, last=lambda: b"\x04\x04")
    relay.start(tasks)
    os.write(writing, b"typed")
    os.close(writing)
    assert await _read_all(reading) == b"typed\x04\x04"


async def test_a_sink_that_nobody_reads_any_more_ends_it(tasks: TaskGroup) -> None:
    (source, writing), (reading, sink) = os.pipe(), os.pipe()
    relay = Relay(source, sink)
    relay.start(tasks)
    os.close(reading)
    os.write(writing, b"lost")
    with anyio.fail_after(5):
        await relay.done.wait()
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"nobody")
    os.close(writing)
