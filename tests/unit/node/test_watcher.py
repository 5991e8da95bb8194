"""Watch files that come, go and change, processes that exit, and directories that are recreated."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from integration.watcher import ANY, Interest, Watcher, first_of
from shim import syscalls
from tests.harness.fuse import fuse
from tests.harness.own_process import restored
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def heard(watcher: Watcher, wanted: Mapping[str, Interest]) -> None:
    """Wait for one change, and add all new watches that follow from it."""
    with anyio.fail_after(20):
        await watcher.change(wanted)
    while watcher.follow(wanted):
        pass


async def test_a_directory_that_is_not_there_yet_is_heard_of(tmp_path: Path) -> None:
    plugins = tmp_path / "kubelet" / "device-plugins"
    wanted = {str(plugins): ANY}
    with Watcher(0.05) as watcher:
        await heard(watcher, wanted)  # the first look
        (tmp_path / "noise").touch()
        assert not await watcher.wait(0.3)
        for path in (plugins.parent, plugins):
            path.mkdir()
            await heard(watcher, wanted)
        (plugins / "kubelet.sock").touch()
        await heard(watcher, wanted)
        (plugins / "kubelet.sock").unlink()
        await heard(watcher, wanted)
        plugins.rmdir()
        await heard(watcher, wanted)
        plugins.mkdir()
        await heard(watcher, wanted)
        assert not await watcher.wait(0.3)


async def test_a_directory_that_is_made_anew_is_heard(tmp_path: Path) -> None:
    """Many file systems reuse the inode number of the old one."""
    driver = tmp_path / "driver"
    driver.mkdir()
    wanted = {str(driver): ANY}
    with Watcher(0.05) as watcher:
        watcher.follow(wanted)
        for _ in range(5):
            driver.rmdir()
            driver.mkdir()
            await heard(watcher, wanted)
            (driver / "libcuda.so.1").touch()
            await heard(watcher, wanted)
            (driver / "libcuda.so.1").unlink()
            await heard(watcher, wanted)


async def test_only_what_matters_wakes(tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    with Watcher(0) as watcher:
        watcher.follow({str(tmp_path): Interest(content=False)})
        (tmp_path / "null").write_bytes(b"x")
        assert not await watcher.wait(0.1)
        os.mkfifo(tmp_path / "nvidia0")
        assert await watcher.wait(10)
        watcher.follow({str(tmp_path): Interest(frozenset({"init.pid"}), content=False)})
        (tmp_path / "log.json").touch()
        assert not await watcher.wait(0.3)
        (tmp_path / "init.pid").touch()
        assert await watcher.wait(10)


async def test_directories_are_exchanged(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Watcher(0) as watcher:
        assert watcher.follow({str(tmp_path / "a"): ANY})
        assert watcher.follow({str(tmp_path / "b"): ANY, "/nonexistent": ANY})
        assert not watcher.follow({str(tmp_path / "b"): ANY, "/nonexistent": ANY})
        (tmp_path / "a" / "x").touch()
        assert not await watcher.wait(0.1)
        (tmp_path / "b" / "x").touch()
        assert await watcher.wait(10)


async def test_a_swarm_is_one_reason(tmp_path: Path) -> None:
    coming = [tmp_path / str(number) for number in range(10)]

    class Swarmed(Watcher):
        async def _one(self, seconds: float) -> bool:
            one = await super()._one(seconds)
            if coming:  # the next one comes after the last was noticed, however late
                coming.pop().touch()
            else:
                self._quiet = 0.01
            return one

    with Swarmed(20, longest=60) as watcher:
        watcher.follow({str(tmp_path): ANY})
        coming.pop().touch()
        assert await watcher.wait(10)
        assert not coming
        assert not await watcher.wait(0.05)


async def test_a_swarm_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    async def install() -> None:
        while True:
            (tmp_path / "file").touch()
            await anyio.sleep(0.05)

    with Watcher(0.3, longest=0.5) as watcher:
        watcher.follow({str(tmp_path): ANY})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(install)
            begun = time.monotonic()
            assert await watcher.wait(10)
            assert time.monotonic() - begun < 9
            tasks.cancel_scope.cancel()


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


async def test_the_end_of_a_process_is_heard_once(init: subprocess.Popen[bytes]) -> None:
    with Watcher(0) as watcher:
        assert not watcher.follow_processes([init.pid])
        assert not await watcher.wait(0.2)
        init.kill()
        assert await watcher.wait(10)
        assert not watcher.follow_processes([init.pid])
        assert not await watcher.wait(0.2)
        assert not watcher.follow_processes([])
    init.wait()
    with Watcher(0) as watcher:
        assert watcher.follow_processes([init.pid])


async def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Watcher(0) as watcher:
        watcher.follow({str(tmp_path): ANY})
        watcher.follow_processes([os.getpid()])
    # A thread of gRPC may have closed one of the descriptors meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_a_watcher_that_is_left_while_a_directory_hangs_closes_its_descriptors_later(
    tmp_path: Path,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with fuse(str(tmp_path / "hangs")) as server:
        ours = set(os.listdir("/proc/self/fd"))
        server.hang()
        with Watcher(0) as watcher, anyio.move_on_after(20) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watcher.follow_detached, {str(tmp_path / "hangs"): ANY})
                assert await anyio.to_thread.run_sync(server.asked.wait, 20)
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught
        server.go_on()
        await until(lambda: set(os.listdir("/proc/self/fd")) <= ours, "they are closed")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_watcher_that_was_left_before_its_thread_began_watches_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Watcher(0) as watcher:
        pass
    assert not watcher.follow({str(tmp_path): ANY})
    assert set(os.listdir("/proc/self/fd")) <= before


@contextmanager
def no_descriptors() -> Iterator[None]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    with restored():
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        yield


async def test_what_could_not_be_watched_is_watched_once_it_can(tmp_path: Path) -> None:
    wanted = {str(tmp_path): ANY}
    with Watcher(0) as watcher:
        with no_descriptors():
            assert not watcher.follow(wanted)
            assert watcher.deaf == "Too many open files"
            assert not await watcher.wait(0.05)
            with anyio.fail_after(20):
                await watcher.change(wanted)  # it polls
        assert watcher.follow(wanted)  # the caller has to look for changes in the meantime
        assert watcher.deaf == ""
        (tmp_path / "libcuda.so.1").touch()
        assert await watcher.wait(10)


async def test_where_not_all_can_be_watched_those_above_tell_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundles exceed the inotify limit: the parent directory still reports a new one."""
    watch = syscalls.inotify_watch_changes

    def limited(fd: int, directory: str, *, content: bool = True) -> int:
        if directory != str(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return watch(fd, directory, content=content)

    monkeypatch.setattr(syscalls, "inotify_watch_changes", limited)
    bundles = [tmp_path / str(number) for number in range(50)]
    for bundle in bundles:
        bundle.mkdir()
    with Watcher(quiet=0) as watcher:
        assert watcher.follow(dict.fromkeys(map(str, (*bundles, tmp_path)), ANY))
        assert watcher.deaf == "No space left on device"
        (tmp_path / "another").mkdir()
        assert await watcher.wait(10)


async def test_the_first_of_several_things_ends_the_wait_for_the_others() -> None:
    ended = []

    async def other() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("other")

    async def soon() -> str:
        return "soon"

    assert await first_of(other, soon) == (1, "soon")
    assert ended == ["other"]


async def test_what_one_of_several_raises_is_raised_as_it_is() -> None:
    async def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await first_of(anyio.sleep_forever, fail)
