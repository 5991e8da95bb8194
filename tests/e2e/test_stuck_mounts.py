"""A rootfs on a hanging file system blocks only its own container."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from api.errors import Status
from api.ttrpc import RemoteError
from tests.harness.fuse import FILE, FuseServer, fuse
from tests.harness.shim import ShimByHand, StartShim
from tools.images import busybox, unpack

pytestmark = pytest.mark.anyio

_POD: dict[str, Any] = {"annotations": {"io.kubernetes.cri.sandbox-id": "pod"}}
# Seconds in which a request that does not hang is answered, even on a busy machine; the shim
# gives up a hanging one after ten.
_SOON = 8

# FUSE_READ; and where in its file one hangs, behind what a pipe holds.
_READ, _MIDDLE = 15, 400_000


@asynccontextmanager
async def _refused_later(call: Any) -> AsyncIterator[list[RemoteError]]:
    """Start a call that fails; after the block, the yielded list has its error."""
    errors: list[RemoteError] = []

    async def ask() -> None:
        with pytest.raises(RemoteError) as caught:
            await call
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        yield errors


async def _asked(server: FuseServer) -> None:
    with anyio.fail_after(60):
        assert await anyio.to_thread.run_sync(server.asked.wait, 60)


async def _a_life_goes_on(shim: ShimByHand, name: str) -> None:
    """Make all important requests for another container, until its exit."""
    with anyio.fail_after(_SOON):
        assert await shim.status(name) == "RUNNING"
        await shim.start_exec(name, "e1", "true")
        assert await shim.reap(name, "e1") == 0
        assert await shim.end(name) == 137
        await shim.events.until("TaskDelete")


@pytest.mark.parametrize("method", ["Kill", "Delete"])
@pytest.mark.parametrize("kind", ["overlay", "bind"])
async def test_a_mount_that_hangs_holds_up_no_neighbour_and_is_given_up_on_request(
    start_shim: StartShim, tmp_path: Path, kind: str, method: str
) -> None:
    for name in ("upper", "work", "layer"):
        (tmp_path / name).mkdir()
    async with start_shim("c1", "sleep", "1000", **_POD) as shim:
        await shim.run("c1")
        shim.bundle("c2", "sleep", "1000", **_POD)
        with fuse(str(tmp_path / "fuse")) as server:
            server.hang()
            stuck = f"{server.mount_point}/layer"
            (tmp_path / "link").symlink_to(server.mount_point)
            options = [
                f"workdir={tmp_path}/work",
                f"upperdir={tmp_path}/upper",
                f"lowerdir={tmp_path}/layer:{tmp_path}/link/layer",
            ]
            mount = {"type": "bind", "source": stuck, "options": ["rbind", "ro"]}
            if kind == "overlay":
                mount = {"type": "overlay", "source": "overlay", "options": options}
            async with _refused_later(shim.create("c2", rootfs=[mount])) as errors:
                await _asked(server)
                await _a_life_goes_on(shim, "c1")
                fields = {"signal": 9} if method == "Kill" else {}
                with anyio.fail_after(_SOON), pytest.raises(RemoteError) as caught:
                    await shim.call(method, id="c2", **fields)
                assert caught.value.status == Status.NOT_FOUND
            assert "NVSHIM-E1103" in str(errors[0])
            assert "mount(2) had not returned" in str(errors[0])
        shim.bundle("c3", "sleep", "1000", **_POD)
        await shim.run("c3")


@pytest.mark.parametrize("is_mounted", [True, False], ids=["mounted", "named by the spec"])
async def test_a_root_that_hangs_after_its_mount_holds_up_no_neighbour(
    start_shim: StartShim, tmp_path: Path, *, is_mounted: bool
) -> None:
    """The kernel mounts the top of a file system without asking its server."""
    async with start_shim("c1", "sleep", "1000", **_POD) as shim:
        await shim.run("c1")
        with fuse(str(tmp_path / "fuse")) as server:
            shim.bundle(
                "c2", "sleep", "1000", **_POD, rootfs="" if is_mounted else server.mount_point
            )
            mount = {"type": "bind", "source": server.mount_point, "options": ["rbind"]}
            server.hang()
            rootfs = [mount] if is_mounted else []
            async with _refused_later(shim.create("c2", rootfs=rootfs)) as errors:
                await _asked(server)
                await _a_life_goes_on(shim, "c1")
                with anyio.fail_after(_SOON), pytest.raises(RemoteError) as caught:
                    await shim.call("Kill", id="c2", signal=9)
                assert caught.value.status == Status.NOT_FOUND
            assert "it was killed or deleted before it was made" in str(errors[0])


async def test_a_file_that_hangs_on_its_way_to_a_pipe_holds_up_no_neighbour(
    start_shim: StartShim, tmp_path: Path
) -> None:
    """sendfile(2), as of busybox's cat, has the pipe locked while it waits for the file's server.

    Then read(2), splice(2) and FIONREAD of the pipe wait as well, whatever its flags, and no
    signal ends them.
    """
    content = tmp_path / "content"
    content.write_bytes(b"x" * (1 << 21))
    gate, hangs = threading.Event(), threading.Event()
    async with start_shim("c1", "sleep", "1000", **_POD) as shim:
        await shim.run("c1")
        shim.bundle("c2", "sleep", "1000", **_POD)
        with fuse(str(tmp_path / "fuse"), str(content), mode=0o644) as server:
            answer = server._answer

            def hang_in_the_middle(opcode: int, node: int, body: bytes) -> bytes | int:
                if opcode == _READ and struct.unpack_from("<QQ", body)[1] > _MIDDLE:
                    hangs.set()
                    gate.wait(60)
                return answer(opcode, node, body)

            server._answer = hang_in_the_middle  # type: ignore[method-assign]
            spec = shim.spec("c2")
            source = os.path.join(server.mount_point, FILE)
            mount = {"destination": "/data", "type": "bind", "source": source, "options": ["bind"]}
            spec["mounts"].append(mount)
            shim.write_spec("c2", spec)
            await shim.run("c2")
            out = str(tmp_path / "out")
            os.mkfifo(out)
            reading = subprocess.Popen(["cat", out], stdout=subprocess.DEVNULL)  # noqa: ASYNC220
            try:
                await shim.start_exec("c2", "e1", "sh", "-c", "cat /data & exit 0", stdout=out)
                assert await anyio.to_thread.run_sync(hangs.wait, 60)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(shim.reap, "c2", "e1")  # passes the rest on
                    try:
                        await _a_life_goes_on(shim, "c1")
                    finally:
                        gate.set()
            finally:
                gate.set()
                reading.kill()
                reading.wait()


# Another process's new mount namespace also has this mount, and then umount(2) does not wait.
# tests/unit/mounts/test_stuck.py also tests a second wait for a hanging unmount.
@pytest.mark.serial
@pytest.mark.thorough
async def test_an_unmount_that_hangs_is_an_error_in_time_and_may_be_asked_for_again(
    start_shim: StartShim, tmp_path: Path
) -> None:
    image, tree = str(tmp_path / "ext4"), str(tmp_path / "tree")
    unpack(busybox().tree, tree)
    await anyio.run_process(["mkfs.ext4", "-q", "-d", tree, image, "64m"])
    async with start_shim("c1", "sleep", "1000", **_POD) as shim:
        await shim.run("c1")
        shim.bundle("c2", "sh", "-c", "echo written > /file; exit 5", **_POD)
        with fuse(str(tmp_path / "fuse"), image) as server:
            source = os.path.join(server.mount_point, FILE)
            mount = {"type": "ext4", "source": source, "options": ["loop"]}
            await shim.run("c2", rootfs=[mount])
            assert (await shim.call("Wait", id="c2")).exit_status == 5
            server.hang()
            began = time.monotonic()
            async with _refused_later(shim.call("Delete", id="c2")) as errors:
                await _asked(server)
                await _a_life_goes_on(shim, "c1")
                assert await shim.status("c2") == "STOPPED"
            assert "NVSHIM-E1105" in str(errors[0])
            assert time.monotonic() - began < 20
            server.go_on()
            await shim.call("Delete", id="c2")
