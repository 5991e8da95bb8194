"""Waiting for descriptors that are closed, reused, duplicated, or invalid."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shim import loop

pytestmark = pytest.mark.anyio


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        try:
            os.close(fd)
        except OSError:
            pass


async def _note(order: list[str], name: str, wait: Any, what: Any) -> None:
    await wait(what)
    order.append(name)


async def test_both_directions_of_a_socket_are_waited_for_at_once() -> None:
    ours, theirs = socket.socketpair()
    order: list[str] = []
    with ours, theirs:
        ours.setblocking(False)
        try:
            while True:
                ours.send(bytes(65536))
        except BlockingIOError:
            pass
        async with loop.create_task_group() as tasks:
            tasks.start_soon(_note, order, "reads", loop.wait_readable, ours)
            tasks.start_soon(_note, order, "writes", loop.wait_writable, ours)
            await loop.sleep(0.01)
            assert order == []
            theirs.send(b"x")
            await loop.sleep(0.01)
            assert order == ["reads"]
            ours.recv(1)
            while order == ["reads"]:
                theirs.recv(1 << 20)
                await loop.sleep(0.001)
    assert order == ["reads", "writes"]


async def test_the_end_of_the_other_side_wakes_both_directions() -> None:
    ours, theirs = socket.socketpair()
    order: list[str] = []
    with ours:
        ours.setblocking(False)
        try:
            while True:
                ours.send(bytes(65536))
        except BlockingIOError:
            pass
        with loop.fail_after(5):
            async with loop.create_task_group() as tasks:
                tasks.start_soon(_note, order, "reads", loop.wait_readable, ours)
                tasks.start_soon(_note, order, "writes", loop.wait_writable, ours)
                await loop.sleep(0.01)
                theirs.close()
    assert sorted(order) == ["reads", "writes"]


async def test_what_cannot_be_waited_for_is_an_error_and_leaves_nothing(
    tmp_path: Path, pipe: tuple[int, int]
) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(PermissionError):
        await loop.wait_readable(file)
    os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        await loop.wait_readable(file)
    closed = socket.socket(socket.AF_UNIX)
    closed.close()
    with pytest.raises(ValueError, match=r"."):
        await loop.wait_readable(closed)
    # Reuse the regular file's number for a descriptor that can be waited for.
    os.dup2(pipe[0], file)
    os.write(pipe[1], b"x")
    with loop.fail_after(5):
        await loop.wait_readable(file)
    os.close(file)


async def test_two_tasks_that_wait_for_the_same_are_refused(pipe: tuple[int, int]) -> None:
    async with loop.create_task_group() as tasks:
        tasks.start_soon(loop.wait_readable, pipe[0])
        await loop.sleep(0.001)
        with pytest.raises(RuntimeError, match="two tasks wait"):
            await loop.wait_readable(pipe[0])
        tasks.cancel_scope.cancel()


async def test_a_number_that_is_another_file_now_is_waited_for_as_that() -> None:
    for _ in range(3):
        reading, writing = os.pipe()
        os.write(writing, b"x")
        await loop.wait_readable(reading)
        os.close(reading)
        os.close(writing)
        again, writing = os.pipe()
        assert again == reading
        with loop.move_on_after(0.001) as scope:
            await loop.wait_readable(again)
        assert scope.cancelled_caught
        os.close(again)
        os.close(writing)


async def test_who_waits_for_a_number_is_not_kept_from_it_by_a_file_that_had_it_before() -> None:
    reading, writing = os.pipe()
    async with loop.create_task_group() as tasks:
        tasks.start_soon(loop.wait_readable, reading)
        await loop.sleep(0.001)
        other = os.dup(reading)  # keeps the description in epoll
        os.close(reading)
        tasks.cancel_scope.cancel()
    new, new_writing = os.pipe()
    assert new == reading
    order: list[str] = []
    with loop.fail_after(5):
        async with loop.create_task_group() as tasks:
            tasks.start_soon(_note, order, "writes", loop.wait_writable, new_writing)
            tasks.start_soon(_note, order, "reads", loop.wait_readable, new)
            await loop.sleep(0.001)
            os.write(writing, b"of the file before")
            await loop.sleep(0.001)
            os.write(new_writing, b"x")
    assert sorted(order) == ["reads", "writes"]
    for fd in (other, writing, new, new_writing):
        os.close(fd)


async def test_a_description_that_comes_back_under_its_number_can_be_waited_for() -> None:
    reading, writing = os.pipe()
    other = -1
    with loop.CancelScope() as scope:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(loop.wait_readable, reading)
            await loop.sleep(0.001)
            other = os.dup(reading)
            os.close(reading)
            scope.cancel()
    os.dup2(other, reading)
    os.write(writing, b"x")
    with loop.fail_after(5):
        await loop.wait_readable(reading)
    for fd in (reading, other, writing):
        os.close(fd)


async def test_a_descriptor_that_is_closed_by_one_of_two_who_wait_ends_no_loop() -> None:
    ours, theirs = socket.socketpair()
    fd = ours.fileno()
    order: list[str] = []
    try:
        while True:
            ours.send(bytes(65536), socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass
    with loop.fail_after(5):
        async with loop.create_task_group() as tasks:
            tasks.start_soon(_note, order, "reads", loop.wait_readable, fd)
            tasks.start_soon(_note, order, "writes", loop.wait_writable, fd)
            await loop.sleep(0.001)
            other = os.dup(fd)
            ours.close()
            theirs.send(b"x")
    assert sorted(order) == ["reads", "writes"]
    os.close(other)
    theirs.close()


async def test_a_descriptor_that_is_ready_in_the_turn_of_a_cancellation(
    pipe: tuple[int, int],
) -> None:
    woken = False
    with loop.CancelScope() as scope:
        async with loop.create_task_group() as tasks:

            async def cancel() -> None:
                os.write(pipe[1], b"x")
                scope.cancel()

            tasks.start_soon(cancel)
            await loop.wait_readable(pipe[0])
            woken = True
    assert scope.cancelled_caught
    assert not woken
    await loop.wait_readable(pipe[0])  # and it still works
