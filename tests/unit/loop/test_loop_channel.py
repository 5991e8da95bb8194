"""Watched descriptors, and sockets that the loop reads without a task."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from shim import loop
from shim.loop.core import Descriptors

pytestmark = pytest.mark.anyio


class Recorded(loop.Channel):
    """Keeps what arrives."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.data = b""
        self.ends = 0
        self.errors: list[Exception] = []
        self.failing = False

    def received(self, data: bytes) -> None:
        if self.failing:
            raise ValueError(data)
        self.data += data
        self.ends += not data

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def peers() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return a list with one entry for each turn of the loop."""
    turns: list[float | None] = []
    poll = Descriptors.poll

    def counted(descriptors: Descriptors, patience: float | None) -> list[tuple[int, int]]:
        turns.append(patience)
        return poll(descriptors, patience)

    monkeypatch.setattr(Descriptors, "poll", counted)
    return turns


async def test_a_watched_descriptor_calls_its_function_until_it_is_unwatched() -> None:
    reading, writing = os.pipe()
    seen: list[bytes] = []
    loop.watch(reading, lambda _: seen.append(os.read(reading, 1)))
    os.write(writing, b"abc")
    while len(seen) < 2:
        await loop.checkpoint()
    loop.unwatch(reading)
    loop.unwatch(reading)  # no harm
    await loop.sleep(0.01)
    assert seen == [b"a", b"b"]
    await loop.wait_readable(reading)  # a task may wait for it now
    for fd in (reading, writing):
        os.close(fd)


async def test_what_arrives_is_received_and_the_end_once(
    peers: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = peers
    channel = Recorded(ours)
    theirs.sendall(b"hello")
    theirs.close()
    with loop.fail_after(20):
        while not channel.ends:
            await loop.sleep(0.01)
    await loop.sleep(0.01)
    assert (channel.data, channel.ends) == (b"hello", 1)
    channel.close()


async def test_a_peer_that_does_not_read_is_not_read_from_until_it_does(
    peers: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = peers
    channel = Recorded(ours)
    channel.write(bytes(4 << 20))
    channel.write(b"the last")
    assert channel.crowded
    theirs.sendall(b"hello")
    with loop.move_on_after(0.02) as waiting:
        await channel.room()
    assert waiting.cancelled_caught
    assert channel.data == b""
    taken = b""
    theirs.setblocking(False)
    with loop.fail_after(5):
        while not taken.endswith(b"the last"):
            await loop.wait_readable(theirs)
            taken += theirs.recv(1 << 20)
        await channel.room()
        await loop.sleep(0.01)
    assert len(taken) == (4 << 20) + len(b"the last")
    assert channel.data == b"hello"
    channel.close()


@pytest.mark.parametrize("kept", [0, 4 << 20])
async def test_a_connection_that_has_ended_costs_no_turns(
    peers: tuple[socket.socket, socket.socket], turns: list[float | None], kept: int
) -> None:
    ours, theirs = peers
    channel = Recorded(ours)
    channel.write(bytes(kept))
    theirs.close()
    await loop.sleep(0.01)
    assert channel.ends == 1
    turns.clear()
    await loop.sleep(0.05)
    assert len(turns) <= 2
    channel.write(b"to nobody")  # no harm
    await channel.room()
    channel.close()
    channel.close()
    channel.write(b"to nobody")


async def test_closing_it_wakes_those_who_wait_for_room(
    peers: tuple[socket.socket, socket.socket],
) -> None:
    channel = Recorded(peers[0])
    channel.write(bytes(4 << 20))
    with loop.fail_after(5):
        async with loop.create_task_group() as tasks:
            tasks.start_soon(channel.room)
            await loop.checkpoint()
            channel.close()


async def test_what_a_channel_raises_ends_no_loop(
    peers: tuple[socket.socket, socket.socket],
) -> None:
    channel = Recorded(peers[0])
    channel.failing = True
    peers[1].sendall(b"x")
    await loop.sleep(0.01)
    assert [str(error) for error in channel.errors] == ["b'x'"]
    channel.close()
