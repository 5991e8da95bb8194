"""Which processes get a signal; and the pod's thread never sleeps."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from api import typeurl
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from integration.simulated import SimulatedNode
from tests.harness.cgroup import is_v2
from tests.harness.killing import straced
from tests.harness.pids import process_with
from tests.harness.runtime import is_alive
from tests.harness.shim import CGROUP, ShimByHand, StartShim, content_of, shell
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio


SLEEP: Final = ("sleep", "1000")


TWO: Final = ("sh", "-c", "sleep 1000 & sleep 1000; true")


async def _both(shim: ShimByHand) -> list[int]:
    """Return the processes of a container with more than one."""
    while True:
        pids = [each.pid for each in (await shim.call("Pids", id="c1")).processes]
        if len(pids) > 2:
            return pids


def _without_descriptors(pid: int) -> tuple[int, int]:
    """Leave a process no free descriptor; return its previous limits."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    return before


@pytest.mark.parametrize("everyone", [False, True], ids=["init", "all"])
@pytest.mark.parametrize("binary", ["runc", "wrapped runc"])
async def test_a_kill_without_a_free_descriptor_signals_all_the_same(
    start_shim: StartShim, *, binary: str, everyone: bool
) -> None:
    async with start_shim("c1", *TWO, shared_pids=everyone) as shim:
        options = shim.options(before="true" if binary == "wrapped runc" else "")
        await shim.run("c1", options=options)
        pids = await _both(shim)
        before = _without_descriptors(shim.pid)
        await shim.call("Kill", id="c1", signal=signal.SIGKILL, all=everyone)
        eventually(lambda: not any(map(is_alive, pids)), "they are dead")
        resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, before)
        assert await shim.reap("c1") == 137


async def test_processes_out_of_a_cgroup_are_signalled_by_what_cannot_become_anothers(
    start_shim: StartShim, tmp_path: Path
) -> None:
    async with start_shim("c1", *TWO, shared_pids=True) as shim:
        await shim.run("c1", options=shim.options(before="true"))
        pids = await _both(shim)
        (path,) = (f"{shim.directory}/{n}" for n in os.listdir(shim.directory) if "runtime-" in n)
        os.rename(path, f"{path}.away")  # without it, the shim sends the signals itself
        trace = tmp_path / "trace"
        with straced(shim.pid, "kill,tkill,tgkill,pidfd_send_signal", trace):
            await shim.call("Kill", id="c1", signal=signal.SIGKILL, all=True)
            eventually(lambda: not any(map(is_alive, pids)), "they are dead")
        calls = [line for line in trace.read_text().splitlines() if "SIGKILL" in line]
        assert len(calls) >= len(pids)
        assert [line for line in calls if "pidfd_send_signal(" not in line] == []
        os.rename(f"{path}.away", path)
        await shim.reap("c1")


async def test_a_claim_is_not_that_of_the_next_process_of_that_pid(
    start_shim: StartShim, two_gpus: SimulatedNode, tmp_path: Path
) -> None:
    text = content_of(two_gpus.config_path).decode()
    config = tmp_path / "config.toml"
    config.write_text(f'{text}\n[sharing]\nholders = "exclusive"\n')
    fields = {
        "env": ["NVIDIA_VISIBLE_DEVICES=0"],
        "environment": {"NVSHIM_CONFIG": str(config)},
    }
    async with start_shim("c1", *SLEEP, **fields) as first:
        init = await first.run("c1")
        for pid in (first.pid, init):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{init}"), "its pid is free")
        # Its state was not cleaned up, and another process has its pid.
        with process_with(init):
            async with start_shim("c2", *SLEEP, **fields) as second:
                await second.run("c2")
                await second.end("c2")
                second.client.close()  # no request cleans up after the first container


# -- the thread that serves a pod never sleeps while one container waits


@contextmanager
def _no_sleep(shim: ShimByHand) -> Iterator[None]:
    """Trace the shim's own thread meanwhile, and not its other threads."""
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
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    # CRIU interrupts system calls, which ends busybox 1.37's sleep, so repeat it.
    async with start_shim("c1", "sh", "-c", "while :; do sleep 1000; done") as shim:
        await _restore_that_fails(shim, criu, tmp_path)


async def _restore_that_fails(shim: ShimByHand, criu: str, tmp_path: Path) -> None:
    saved, deadly = str(tmp_path / "saved"), tmp_path / "criu"
    # The first call gets the version. The second leaves a process and kills the runtime.
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
