"""The thread that serves a pod never sleeps: what is busy is waited for, and the others go on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api import typeurl
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from tests.harness.cgroup import is_v2
from tests.harness.killing import straced
from tests.harness.shim import CGROUP, ShimByHand, shell
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio


@contextmanager
def _no_sleep(shim: ShimByHand) -> Iterator[None]:
    """Look at the shim's own thread meanwhile; what else it has started is not of interest."""
    trace = Path(shim.directory, "trace")
    with straced(shim.pid, "clock_nanosleep,nanosleep", trace, follows=False):
        yield
    assert trace.read_bytes() == b""


async def test_a_delete_does_not_sleep_while_somebody_is_busy_in_the_rootfs(
    shim: ShimByHand,
) -> None:
    image, rootfs = f"{shim.directory}/image", f"{shim.directory}/c1/rootfs"
    os.rename(rootfs, image)
    os.mkdir(rootfs)
    bind: dict[str, Any] = {"type": "bind", "source": image, "options": ["rbind", "rw"]}
    await shim.run("c1", rootfs=[bind])
    with shell(f"cd {rootfs} && exec sleep 1000") as busy:
        try:
            eventually(lambda: os.readlink(f"/proc/{busy.pid}/cwd") == rootfs, "it is there")
            with _no_sleep(shim):
                await shim.end("c1")
        finally:
            busy.kill()


async def test_a_restore_that_fails_does_not_sleep_until_its_processes_are_gone(
    shim: ShimByHand, criu: str, tmp_path: Path
) -> None:
    saved, deadly = str(tmp_path / "saved"), tmp_path / "criu"
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
    with _no_sleep(shim), pytest.raises(RemoteError, match="exit status 137"):
        await shim.call("Start", id="c2")
    assert not os.path.exists(cgroup)


def _runc(criu: str) -> Any:
    return typeurl.pack(runc_options_pb2.Options(binary_name="runc", criu_path=criu))
