"""Who is signalled, and that it is: without descriptors, without a runtime, with recurring pids."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.killing import straced
from tests.harness.pids import process_with
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim, content_of
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

SLEEP: Final = ("sleep", "1000")
TWO: Final = ("sh", "-c", "sleep 1000 & sleep 1000; true")


async def _both(shim: ShimByHand) -> list[int]:
    """The processes of a container of more than one."""
    while True:
        pids = [each.pid for each in (await shim.call("Pids", id="c1")).processes]
        if len(pids) > 2:
            return pids


def _without_descriptors(pid: int) -> tuple[int, int]:
    """Leave a process none to open; returns its limits as they were."""
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
        os.rename(path, f"{path}.away")  # without it, the shim has to signal by itself
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
        # Nobody has cleaned up after it, and another process has its pid.
        with process_with(init):
            async with start_shim("c2", *SLEEP, **fields) as second:
                await second.run("c2")
                await second.end("c2")
                second.client.close()  # what the first has left is nobody's to ask for
