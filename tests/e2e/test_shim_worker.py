"""A worker that hangs or dies affects only its own container, and leaves nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from api.errors import NvshimError
from api.proto import types_pb2
from integration.simulated import SimulatedNode
from shim import syscalls
from tests.harness.fuse import FILE, fuse
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim
from tests.harness.waiting import eventually, settled

pytestmark = pytest.mark.anyio

ASKS: Final = ("NVIDIA_VISIBLE_DEVICES=all",)


@contextmanager
def hanging_image(path: str) -> Iterator[types_pb2.Mount]:
    """Yield a FUSE file system whose server never answers, to be mounted as a rootfs."""
    os.mkdir(path)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40755,user_id=0,group_id=0"
        syscalls.mount("hanging", path, "fuse.hanging", 0, options)
        yield types_pb2.Mount(type="bind", source=path, options=["rbind", "rw"])
    finally:
        os.close(fd)  # this ends all waiting requests
        with suppress(OSError):
            syscalls.umount(path, syscalls.MNT_DETACH)


def files_of(shim: ShimByHand, container_id: str) -> dict[str, Any]:
    bundle = os.path.join(shim.directory, container_id)
    return {name: os.lstat(os.path.join(bundle, name)).st_ino for name in os.listdir(bundle)}


def _mounts(shim: ShimByHand) -> list[str]:
    return [left for left in shim.leftovers() if left.startswith("mount")]


async def worker_of(shim: ShimByHand) -> int:
    """Return the pid of the shim's worker: a fork in its own process group."""
    with anyio.fail_after(20):
        while True:
            for child in shim.children():
                pid = int(child.split()[0])
                with suppress(OSError):
                    if os.getpgid(pid) == pid and "shim" in child:
                        return pid
            await anyio.sleep(0.01)


class Creation:
    """A Create in progress."""

    def __init__(self, shim: ShimByHand, container_id: str, rootfs: types_pb2.Mount) -> None:
        self._shim = shim
        self._id = container_id
        self._rootfs = rootfs
        self.error: NvshimError | None = None
        self.over = anyio.Event()

    async def __call__(self) -> None:
        try:
            await self._shim.create(self._id, rootfs=[self._rootfs])
        except NvshimError as error:
            self.error = error
        finally:
            self.over.set()


@pytest.fixture
async def pod(start_shim: StartShim, two_gpus: SimulatedNode) -> AsyncIterator[ShimByHand]:
    """Return a shim whose c1 runs, and whose c2 will be created with GPUs."""
    environment = {"NVSHIM_CONFIG": two_gpus.config_path}
    async with start_shim("c1", "sleep", "1000", environment=environment) as shim:
        await shim.run("c1")
        shim.bundle("c2", "true", env=ASKS, rootfs="rootfs")
        os.mkdir(f"{shim.directory}/c2/rootfs")
        yield shim


@asynccontextmanager
async def creating(
    shim: ShimByHand, container_id: str, image: types_pb2.Mount
) -> AsyncIterator[tuple[Creation, int]]:
    """Create a container from an image that hangs; yield the pid of its worker."""
    async with anyio.create_task_group() as tasks:
        create = Creation(shim, container_id, image)
        tasks.start_soon(create)
        worker = await worker_of(shim)
        await anyio.sleep(0.3)  # until it hangs
        yield create, worker


async def test_an_image_that_hangs_holds_no_other_container_up(pod: ShimByHand) -> None:
    before = files_of(pod, "c2")
    with hanging_image(f"{pod.directory}/image") as image:
        async with creating(pod, "c2", image) as (create, worker):
            began = time.monotonic()
            await pod.start_exec("c1", "e1", "true")
            await pod.call("Wait", id="c1", exec_id="e1")
            assert await pod.status("c1") == "RUNNING"
            assert await pod.end("c1") == 128 + signal.SIGKILL
            await pod.events.until("TaskDelete")
            assert time.monotonic() - began < 5
            assert not create.over.is_set()
            assert is_alive(worker)
            os.kill(worker, signal.SIGKILL)
        assert "NVSHIM-E1702" in str(create.error)
        eventually(lambda: not is_alive(worker), "the worker has exited")
    after = files_of(pod, "c2")
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before) == ["options.json", "runtime"]
    assert settled(partial(_mounts, pod), []) == []
    assert settled(pod.children, []) == []


async def test_a_shim_that_is_killed_takes_its_worker_with_it(
    start_shim: StartShim, two_gpus: SimulatedNode
) -> None:
    environment = {"NVSHIM_CONFIG": two_gpus.config_path}
    async with start_shim("c1", "true", env=ASKS, environment=environment) as shim:
        os.rename(f"{shim.directory}/c1/rootfs", f"{shim.directory}/unpacked")
        os.mkdir(f"{shim.directory}/c1/rootfs")
        with hanging_image(f"{shim.directory}/image") as image:
            async with creating(shim, "c1", image) as (_, worker):
                os.kill(shim.pid, signal.SIGKILL)
                await shim.until_gone()
                assert shim.delete_verb("c1") < 5
                eventually(lambda: not is_alive(worker), "the worker has exited")
        assert settled(partial(_mounts, shim), []) == []
        assert not os.path.exists(f"{shim.directory}/c1/nvidia.json")


@pytest.mark.parametrize("method", ["Kill", "Delete"])
async def test_a_create_that_hangs_is_ended_by_kill_and_delete(
    pod: ShimByHand, method: str
) -> None:
    with hanging_image(f"{pod.directory}/image") as image:
        async with creating(pod, "c2", image) as (create, worker):
            with pytest.raises(NvshimError):  # the task does not exist yet
                await pod.call(method, id="c2", **({"signal": 9} if method == "Kill" else {}))
            with anyio.fail_after(60):
                await create.over.wait()
        assert "NVSHIM-E1702" in str(create.error)
        assert "it was cancelled" in str(create.error)
        # It is killed, and no call waits for its exit.
        eventually(lambda: not is_alive(worker), "the worker has exited")
    assert settled(partial(_mounts, pod), []) == []


async def test_a_worker_that_cannot_be_killed_is_not_waited_for_and_leaves_no_mount(
    pod: ShimByHand, tmp_path: Path
) -> None:
    """In mount(2), on a file whose server has read the request and does not answer."""
    file = str(tmp_path / "ext4")
    await anyio.run_process(["mkfs.ext4", "-q", file, "16m"])
    with fuse(str(tmp_path / "fuse"), file) as server:
        source = os.path.join(server.mount_point, FILE)
        image = types_pb2.Mount(type="ext4", source=source, options=["loop"])
        server.hang()
        async with creating(pod, "c2", image) as (create, worker):
            with pytest.raises(NvshimError):
                await pod.call("Kill", id="c2", signal=9)
            with anyio.fail_after(8):
                await create.over.wait()
        assert create.error is not None
        assert await pod.status("c1") == "RUNNING"
        server.go_on()
        with anyio.fail_after(10):
            while is_alive(worker) or _mounts(pod):  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.05)
