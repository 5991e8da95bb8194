"""The thread that serves a pod never sleeps: what is busy is waited for, and the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from api import typeurl
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from tests.harness.cgroup import is_v2
from tests.harness.shim import CGROUP, ShimByHand, StartShim, content_of, gone, shell
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _no_sleep(shim: ShimByHand) -> AsyncIterator[None]:
    """Look at the shim's own thread meanwhile; what else it has started is not of interest."""
    trace = f"{shim.directory}/trace"
    what = "-e trace=clock_nanosleep,nanosleep -e signal=none"
    with shell(f"exec strace -qq {what} -o {trace} -p {shim.pid}") as strace:
        try:
            with anyio.fail_after(10):
                while not _is_traced(shim.pid):  # noqa: ASYNC110 - seen from outside
                    await anyio.sleep(0.01)
            yield
        finally:
            strace.send_signal(signal.SIGINT)  # which lets go of the shim
    assert content_of(trace) == b""


def _is_traced(pid: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return "TracerPid:\t0\n" not in file.read()


async def test_a_delete_does_not_sleep_while_somebody_is_busy_in_the_rootfs(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        image, rootfs = f"{shim.directory}/image", f"{shim.directory}/c1/rootfs"
        os.rename(rootfs, image)
        os.mkdir(rootfs)
        bind: dict[str, Any] = {"type": "bind", "source": image, "options": ["rbind", "rw"]}
        await shim.run("c1", rootfs=[bind])
        with shell(f"cd {rootfs} && exec sleep 1000") as busy:
            try:
                eventually(lambda: os.readlink(f"/proc/{busy.pid}/cwd") == rootfs, "it is there")
                async with _no_sleep(shim):
                    await shim.end("c1")
            finally:
                busy.kill()
        await gone(shim, "c1")


async def test_a_restore_that_fails_does_not_sleep_until_its_processes_are_gone(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved, deadly = str(tmp_path / "saved"), tmp_path / "criu"
    async with start_shim("c1", "sleep", "1000") as shim:
        # It asks for its version first. Then it dies, with the runtime, of what it has made.
        cgroup = f"/sys/fs/cgroup{'' if is_v2() else '/pids'}{CGROUP}/c2"
        deadly.write_text(f"""#!/bin/sh
[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; exec {criu} "$@"; }}
mkdir -p {cgroup}
sh -c 'while test -d {shim.directory}; do sleep 0.1; done' &
echo $! >{cgroup}/cgroup.procs
kill -9 $PPID
""")
        deadly.chmod(0o755)
        await shim.run("c1", options=_runc(criu))
        await shim.call("Checkpoint", id="c1", path=saved)
        await shim.end("c1")
        shim.bundle("c2", "sleep", "1000")
        await shim.create("c2", options=_runc(str(deadly)), checkpoint=saved)
        async with _no_sleep(shim):
            with pytest.raises(RemoteError, match="exit status 137"):
                await shim.call("Start", id="c2")
        assert not os.path.exists(cgroup)
        await shim.call("Delete", id="c2")
        await gone(shim, "c2")


def _runc(criu: str) -> Any:
    return typeurl.pack(runc_options_pb2.Options(binary_name="runc", criu_path=criu))
