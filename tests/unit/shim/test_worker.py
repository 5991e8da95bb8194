"""A worker answers, fails, hangs or dies, and the shim continues."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import anyio
import pytest

from api.errors import Status
from hooks.errors import UnknownDevice
from shim.errors import ProgramTimeout, SystemRefused, WorkerFailed, WorkerTimeout
from shim.work import injection, worker
from shim.work.worker import Worker
from tests.harness.frozen import frozen_program
from tests.harness.raising import raises

if TYPE_CHECKING:
    from pathlib import Path

    from shim.children import Reaper
    from shim.work.worker import Answer, Link

pytestmark = pytest.mark.anyio


def echo(link: Link) -> Answer | None:
    request = link.receive()
    return None if request is None else ({"pid": os.getpid(), "group": os.getpgrp(), **request}, -1)


def hang(link: Link) -> None:
    link.receive()
    time.sleep(100)


async def ask(reaper: Reaper, work: Any, request: dict[str, Any] | None = None) -> Answer:
    return await Worker(reaper, work, frozenset()).ask(request or {})


async def until_ended(other: Worker) -> None:
    with anyio.fail_after(5):
        while other.runs():  # noqa: ASYNC110 - seen from outside
            await anyio.sleep(0.01)


async def test_the_answer_is_of_a_process_in_a_group_of_its_own(reaper: Reaper) -> None:
    long = "x" * (1 << 20)
    value, fd = await ask(reaper, echo, {"long": long})
    assert value["long"] == long
    assert value["pid"] == value["group"] != os.getpid()
    assert fd == -1


async def test_one_that_cannot_begin_says_why(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shim.forked.set_up_child", Mock(side_effect=OSError(24, "too many")))
    with pytest.raises(OSError, match="too many"):
        await ask(reaper, echo)


async def test_a_descriptor_is_passed_on(reaper: Reaper, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path = tmp_path / "file"
    _, fd = await ask(
        reaper, lambda _: ({"x": "y" * 300000}, os.open(path, os.O_RDWR | os.O_CREAT))
    )
    assert os.readlink(f"/proc/self/fd/{fd}") == str(path)
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_it_has_no_descriptors_signals_or_handlers_of_the_shim(reaper: Reaper) -> None:
    leak = os.open("/", os.O_RDONLY)

    def work(_: Link) -> Answer:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        handled = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
        return {"fds": fds, "signals": [*blocked, *handled]}, -1

    value, _ = await ask(reaper, work)
    os.close(leak)
    # The reserved ones, the connection, and the descriptor of listdir.
    assert len([fd for fd in value["fds"] if fd > 5]) <= 2
    assert value["signals"] == []


async def test_it_is_forked_while_threads_run(reaper: Reaper) -> None:
    """For example, threads that copy log files, in system calls and in Python code."""
    reading, writing = os.pipe()
    over = threading.Event()

    def copy() -> None:
        while os.read(reading, 1) and not over.is_set():
            os.write(writing, b"x")

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    os.write(writing, b"xx")
    for number in range(30):
        value, _ = await ask(reaper, echo, {"number": number})
        assert value["number"] == number
    over.set()
    os.write(writing, b"x" * len(threads))
    for thread in threads:
        thread.join()
    os.close(reading)
    os.close(writing)


def unknown_device(_: Link) -> Answer:
    raise UnknownDevice("GPU 7", found="0 and 1", do="name one of them")


def refused(_: Link) -> Answer:
    raise SystemRefused("to make c1", found="it said no", status=Status.RESOURCE_EXHAUSTED)


async def test_an_error_arrives_as_it_was_raised(reaper: Reaper) -> None:
    with pytest.raises(UnknownDevice) as raised:
        await ask(reaper, unknown_device)
    assert str(raised.value) == str(UnknownDevice("GPU 7", found="0 and 1", do="name one of them"))
    with pytest.raises(SystemRefused) as failed:
        await ask(reaper, refused)
    assert failed.value.status == Status.RESOURCE_EXHAUSTED
    assert (failed.value.asked, failed.value.found) == ("to make c1", "it said no")


async def test_an_error_of_the_kernel_and_a_defect_arrive(reaper: Reaper) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        await ask(reaper, lambda _: os.open("/no/such/file", os.O_RDONLY))
    assert missing.value.filename == "/no/such/file"
    with raises(WorkerFailed, match=r"NVSHIM-E1702 .*ZeroDivisionError"):
        await ask(reaper, lambda _: 1 // 0)


async def test_one_that_is_killed_is_one_error(reaper: Reaper) -> None:
    with raises(WorkerFailed, match="was killed by signal 9"):
        await ask(reaper, lambda _: os.kill(os.getpid(), signal.SIGKILL))


async def test_one_that_takes_too_long_is_killed_with_its_programs(
    reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"

    def work(link: Link) -> Answer:
        link.run(["sh", "-c", f"echo $$ > {pid}; sleep 100"], 4)
        return {}, -1

    with monkeypatch.context() as patch:
        patch.setattr(worker, "DEADLINE", 0.2)
        with raises(WorkerTimeout, match="NVSHIM-E1701"):
            await ask(reaper, hang)
    monkeypatch.setattr(worker, "DEADLINE", 3.0)
    # A step with its own timeout has that in addition.
    with raises(ProgramTimeout, match="had not ended after 4 s"):
        await ask(reaper, work)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_a_program_that_no_signal_reaches_is_left_alone(
    reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DEADLINE", 10.0)
    with frozen_program(tmp_path) as (program, *_):

        def work(link: Link) -> Answer:
            with suppress(ProgramTimeout):
                link.run([program], 0.5)
            return {"goes": "on"}, -1

        value, _ = await ask(reaper, work)
        assert value == {"goes": "on"}


async def test_a_program_that_has_closed_its_output_is_not_waited_for_any_longer(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DEADLINE", 10.0)

    def work(link: Link) -> Answer:
        with suppress(ProgramTimeout):
            link.run(["sh", "-c", "exec >&-; exec sleep 1000"], 0.5)
        return {"goes": "on"}, -1

    value, _ = await ask(reaper, work)
    assert value == {"goes": "on"}


async def test_one_that_nobody_waits_for_any_more_is_killed(reaper: Reaper) -> None:
    other = Worker(reaper, hang, frozenset())
    with anyio.move_on_after(0.1):
        await other.ask({})
    await until_ended(other)


async def test_one_without_a_request_ends(reaper: Reaper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "UNUSED", 0.1)
    unused = Worker(reaper, echo, frozenset())
    await until_ended(unused)
    with raises(WorkerFailed, match="ended with 0"):
        await unused.ask({})


def give_up(link: Link) -> None:
    """Be out of time when the request has just arrived."""
    poll = select.poll()
    poll.register(link._connection, select.POLLIN)
    poll.poll()


def provide(link: Link) -> Answer:
    link.receive()
    return {"mounted": [], "claimed": False, "later": None, "nodes": []}, -1


async def test_a_create_is_undone_once_its_worker_is_gone(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process completes its system call: its mount would follow the unmount."""
    killed, failed = anyio.Event(), anyio.Event()
    groups: list[int] = []

    def kill(group: int, _: int) -> None:
        groups.append(group)
        killed.set()

    monkeypatch.setattr(injection, "_ahead", {})
    monkeypatch.setattr(injection, "_fork", lambda *_, **__: Worker(reaper, hang, frozenset()))
    real, scope = os.killpg, anyio.CancelScope()
    monkeypatch.setattr(os, "killpg", kill)

    async def create() -> None:
        with scope, raises(WorkerFailed, match="it was cancelled"):
            await injection.Injection(reaper, "bundle", Mock()).provide(Mock(), [], "runc", None)
        failed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(create)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await killed.wait()
        await anyio.wait_all_tasks_blocked()
        assert not failed.is_set()
        real(groups[0], signal.SIGKILL)
        with anyio.fail_after(5):
            await failed.wait()
    assert not os.path.exists(f"/proc/{groups[0]}")


async def test_create_is_done_by_another_when_the_one_from_the_start_has_just_given_up(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = injection._Ahead({}, Mock(), Worker(reaper, give_up, frozenset()))
    monkeypatch.setattr(injection, "_ahead", {"bundle": early})
    fork = Mock(side_effect=lambda *_, **__: Worker(reaper, provide, frozenset()))
    monkeypatch.setattr(injection, "_fork", fork)
    made = injection.Injection(reaper, "bundle", Mock())
    assert await made.provide(Mock(), [], "runc", None) == []
    assert fork.call_count == 1


async def test_create_fails_with_the_one_from_the_start_that_was_killed(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: Link) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    early = injection._Ahead({}, Mock(), Worker(reaper, die, frozenset()))
    monkeypatch.setattr(injection, "_ahead", {"bundle": early})
    monkeypatch.setattr(Worker, "runs", lambda _: True)
    with raises(WorkerFailed, match="was killed by signal 9"):
        await injection.Injection(reaper, "bundle", Mock()).provide(Mock(), [], "runc", None)


async def test_a_program_is_run_to_its_end(reaper: Reaper) -> None:
    def work(link: Link) -> Answer:
        status, output = link.run(["sh", "-c", "echo out; exit 3"], 10)
        return {"status": status, "output": output.decode()}, -1

    value, _ = await ask(reaper, work)
    assert value == {"status": 3, "output": "out\n"}
