"""Watching a cgroup's memory, on real cgroup file systems.

The tests watch ``cgroup.events``, which every v2 cgroup has: the kernel notifies of changes in it
as it does for ``memory.events``.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest

from shim.cgroup import oom
from shim.cgroup.cgroup import UNIFIED, Cgroup
from tests.harness.cgroup import remove_cgroup
from tests.harness.own_process import restored
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

V1 = "/sys/fs/cgroup/memory"
GREEDY = ("tail", "/dev/zero")


def _write(directory: str, name: str, content: str) -> None:
    with open(os.path.join(directory, name), "w", encoding="ascii") as file:
        file.write(content)


@pytest.fixture
def limited() -> Iterator[str]:
    """Make a memory cgroup v1 with a small limit."""
    if not os.path.exists(f"{V1}/cgroup.event_control"):
        pytest.skip("the host has no version 1 of the memory controller")
    directory = f"{V1}/nvshim-unit-{os.getpid()}"
    os.makedirs(directory)
    _write(directory, "memory.limit_in_bytes", str(8 << 20))
    yield directory
    remove_cgroup(directory)


@contextmanager
def _run_in(directory: str, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that is in a cgroup when the block starts, and ends at the latest with it."""
    script = 'echo $$ > "$0/cgroup.procs" && echo joined && exec "$@" > /dev/null'
    argv = ("sh", "-c", script, directory, *argv)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"joined\n"
            yield process
        finally:
            process.kill()


class Followed:
    """Count the notifications of a watch while the block runs."""

    def __init__(self, watch: oom.OomWatch) -> None:
        self.told = 0
        self.ended = False
        self._watch = watch

    async def follow(self) -> None:
        await oom.follow(self._watch, self._tell)
        self.ended = True

    def _tell(self) -> None:
        self.told += 1

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(5):
            while not holds():  # noqa: ASYNC110 - the test looks from outside
                await anyio.sleep(0.005)


async def test_a_kill_is_told_once_and_a_removal_not_at_all(limited: str) -> None:
    watch = oom.WatchV1(limited)
    followed = Followed(watch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(followed.follow)
        for number in range(2):
            with _run_in(limited, *GREEDY) as process:
                await anyio.to_thread.run_sync(process.wait)
            await followed.until(lambda number=number: followed.told == number + 1)  # type: ignore[misc]
        await anyio.sleep(0.7)
        assert followed.told == 2
        os.rmdir(limited)
        await followed.until(lambda: followed.ended)
        assert followed.told == 2
        assert watch.fileno() == -1
        assert not watch.news(init_killed=True)
        os.mkdir(limited)


def test_a_kill_before_a_removal_is_believed_of_a_killed_init_only(limited: str) -> None:
    for init_killed in (True, False):
        watch = oom.WatchV1(limited)
        with _run_in(limited, *GREEDY) as process:
            process.wait()
        os.rmdir(limited)
        # The kernel reports the removal a moment later, from a work queue.
        eventually(lambda watch=watch: _signals(watch) == 2, "both signals")  # type: ignore[misc]
        assert watch.news(init_killed=init_killed) is init_killed
        assert watch.over
        watch.close()
        os.mkdir(limited)
        _write(limited, "memory.limit_in_bytes", str(8 << 20))


def _signals(watch: oom.WatchV1) -> int:
    watch._signals += watch._drain()
    return watch._signals


def test_what_happened_before_the_watch_is_not_told(limited: str) -> None:
    with _run_in(limited, *GREEDY) as process:
        process.wait()
    watch = oom.WatchV1(limited)
    assert not watch.news()
    watch.close()


def test_processes_that_wait_for_memory_count_where_the_kernel_may_not_kill(limited: str) -> None:
    _write(limited, "memory.oom_control", "1")
    watch = oom.WatchV1(limited)
    with _run_in(limited, *GREEDY) as process:
        eventually(watch.news, "it is told")
        assert process.poll() is None
    watch.close()


async def test_a_change_wakes_who_follows_version_2(
    unified: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "_EVENTS", "cgroup.events")
    monkeypatch.setattr(oom, "_KILLS", "populated")
    below = f"{unified}/below"
    watch = oom.WatchV2(below)
    followed = Followed(watch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(followed.follow)
        for number in range(2):
            with _run_in(below, "sleep", "1000"):
                await followed.until(lambda number=number: followed.told == number + 1)  # type: ignore[misc]
            await followed.until(lambda: watch._seen == 0)
        # Nothing happens, and no task wakes up.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        await anyio.sleep(0.5)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.05
        os.rmdir(below)
        await anyio.sleep(0.5)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.1
        assert followed.told == 2
        tasks.cancel_scope.cancel()
    assert watch.fileno() == -1
    os.mkdir(below)


def test_of_a_cgroup_that_is_gone_the_parent_still_knows(
    unified: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "_EVENTS", "cgroup.events")
    monkeypatch.setattr(oom, "_KILLS", "populated")
    watch = oom.WatchV2(f"{unified}/below")
    os.rmdir(f"{unified}/below")
    assert not watch.news(init_killed=True)
    with _run_in(unified, "sleep", "1000"):
        assert not watch.news()
        assert watch.over
        assert watch.news(init_killed=True)
        watch.close()
        assert watch.news(init_killed=True)
    os.mkdir(f"{unified}/below")


def test_without_a_memory_controller_nothing_is_watched(unified: str, limited: str) -> None:
    pids = Cgroup({"pids": "/sys/fs/cgroup/pids/x"}, is_v2=False)
    gone = Cgroup({"memory": f"{limited}/gone"}, is_v2=False)
    not_enabled = Cgroup({UNIFIED: unified}, is_v2=True)
    for cgroup in (None, pids, gone):
        assert oom.watch(cgroup) is None
    if not os.path.exists(f"{unified}/memory.events"):
        assert oom.watch(not_enabled) is None


@pytest.mark.parametrize("free", [0, 1, 2])
def test_a_watch_that_cannot_be_opened_leaves_no_descriptor(limited: str, free: int) -> None:
    before = os.listdir("/proc/self/fd")
    assert _refused(lambda: oom.WatchV1(limited), free) == errno.EMFILE
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("free", [0, 1])
def test_a_watch_of_version_2_that_cannot_be_opened_leaves_no_descriptor(
    unified: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "_EVENTS", "cgroup.events")
    before = os.listdir("/proc/self/fd")
    assert _refused(lambda: oom.WatchV2(unified), free) == errno.EMFILE
    assert os.listdir("/proc/self/fd") == before


def test_a_kill_while_no_descriptor_is_free_is_found_when_one_is(limited: str) -> None:
    watch = oom.WatchV1(limited)
    with _run_in(limited, *GREEDY) as process:
        process.wait()
    with _few_descriptors(0):
        assert not watch.news()
    assert not watch.over
    assert watch.unsure
    assert watch.news()
    watch.close()


def _refused(make: Callable[[], oom.OomWatch], free: int) -> int | None:
    """Create a watch while only this many descriptors are free; return the error."""
    try:
        with _few_descriptors(free):
            make().close()
    except OSError as error:
        return error.errno
    return None


@contextmanager
def _few_descriptors(free: int) -> Iterator[None]:
    """Leave only this many descriptors free inside the block."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    with restored():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            while (fd := _open_another()) is not None:
                held.append(fd)
            for _ in range(free):
                os.close(held.pop())
            yield
        finally:
            for fd in held:
                os.close(fd)


def _open_another() -> int | None:
    try:
        return os.open("/dev/null", os.O_RDONLY)
    except OSError:
        return None
