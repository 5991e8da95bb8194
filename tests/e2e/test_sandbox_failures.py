"""Sandboxes that cannot be created, and sandboxes of a killed shim, called directly."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import pytest

from api.errors import Status
from api.proto import pod_pb2, types_pb2
from api.ttrpc import ConnectionClosed, RemoteError
from tests.harness.runtime import is_alive
from tests.harness.sandbox import (
    SandboxByHand,
    linux_of,
    refusal_of,
    users_of,
)
from tests.harness.shim import StartShim
from tests.harness.waiting import eventually, settled

pytestmark = pytest.mark.anyio

SLEEP = ("sleep", "1000")


# -- failures -------------------------------------------------------------------------------


async def test_requests_for_another_sandbox_and_for_a_second_one_are_refused(
    pod: SandboxByHand,
) -> None:
    for method in (
        "StartSandbox", "Platform", "StopSandbox", "WaitSandbox", "SandboxStatus",
        "PingSandbox", "ShutdownSandbox", "SandboxMetrics",
    ):  # fmt: skip
        refused = await refusal_of(pod.call(method, sandbox_id="other"))
        assert refused.status == Status.NOT_FOUND, method
    assert (await refusal_of(pod.call("SandboxMetrics"))).status == Status.NOT_FOUND
    for sandbox_id in ("pod", "other"):
        refused = await refusal_of(SandboxByHand(pod.shim, sandbox_id).create())
        assert refused.status == Status.ALREADY_EXISTS
    assert (await refusal_of(pod.call("StartSandbox"))).status == Status.FAILED_PRECONDITION
    assert await pod.state() == "SANDBOX_READY"


async def test_a_start_before_anything_was_created_is_out_of_order(new_pod: SandboxByHand) -> None:
    refused = await refusal_of(new_pod.call("StartSandbox"))
    assert refused.status == Status.FAILED_PRECONDITION
    assert "NVSHIM-E1603" in str(refused)
    # The failed calls have changed nothing.
    await new_pod.start()


async def test_a_shim_whose_sandbox_was_never_made_ends_with_shutdown(
    new_pod: SandboxByHand,
) -> None:
    mount = types_pb2.Mount(type="tmpfs", source="tmpfs")
    refused = await refusal_of(new_pod.call("CreateSandbox", rootfs=[mount]))
    assert refused.status == Status.UNIMPLEMENTED


async def test_wait_for_a_sandbox_that_is_never_started_ends_with_it(
    new_pod: SandboxByHand,
) -> None:
    await new_pod.create()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(new_pod.call, "WaitSandbox")
        await anyio.sleep(0.1)
        await new_pod.call("StopSandbox")


UNREADABLE: Final[dict[str, dict[str, Any]]] = {
    "kernel.panic": {"linux": {"sysctls": {"kernel.panic": "1"}}},
    "net...x": {"linux": {"sysctls": {"net...x": "1"}}},
    "mode 1": users_of(pod_pb2.CONTAINER),
    "mode 3": users_of(pod_pb2.TARGET),
    "64 bytes": {"hostname": "x" * 65},
    "relative": {"netns_path": "relative"},
    "line break": {"dns_config": {"servers": ["1\n2"]}},
}
"""Configurations that are refused before anything is created, with a word of the error."""
UNMAKEABLE: Final[dict[str, dict[str, Any]]] = {
    "no such file": {"netns_path": "/run/no-such"},
    "something else": {"netns_path": "/proc/self/ns/ipc"},
    "net.no.such": {"linux": {"sysctls": {"net.no.such": "1"}}},
    "invalid argument": {"linux": {"sysctls": {"kernel.shmmax": "many"}}},
}


async def _is_not_made(pod: SandboxByHand, config: dict[str, Any], status: int, said: str) -> None:
    refused = await refusal_of(pod.start(**config))
    assert refused.status == status, said
    assert said in str(refused)
    assert settled(pod.shim.children, []) == []
    assert [left for left in pod.leftovers() if "mount" in left or "file" in left] == []


async def test_what_cannot_be_meant_is_one_line_and_makes_nothing(new_pod: SandboxByHand) -> None:
    for said, config in UNREADABLE.items():
        await _is_not_made(new_pod, config, Status.INVALID_ARGUMENT, said)
    await new_pod.start()


@pytest.mark.parametrize("said", UNMAKEABLE)
async def test_what_cannot_be_made_is_one_line_and_leaves_nothing(
    new_pod: SandboxByHand, said: str
) -> None:
    await _is_not_made(new_pod, UNMAKEABLE[said], Status.FAILED_PRECONDITION, said)


async def test_a_start_that_cannot_write_leaves_nothing(new_pod: SandboxByHand) -> None:
    os.mkdir(os.path.join(new_pod.bundle, "holder"))
    refused = await refusal_of(new_pod.start())
    assert refused.status == Status.FAILED_PRECONDITION
    assert settled(new_pod.shim.children, []) == []
    os.rmdir(os.path.join(new_pod.bundle, "holder"))
    # Another attempt succeeds.
    new_pod.pid = (await new_pod.call("StartSandbox")).pid


async def test_without_descriptors_a_start_fails_in_one_line_and_leaves_nothing(
    new_pod: SandboxByHand,
) -> None:
    await new_pod.create()
    before = resource.prlimit(new_pod.shim.pid, resource.RLIMIT_NOFILE)
    used = max(int(fd) for fd in os.listdir(f"/proc/{new_pod.shim.pid}/fd")) + 1
    for spare in range(4):
        resource.prlimit(new_pod.shim.pid, resource.RLIMIT_NOFILE, (used + spare, before[1]))
        said = await _outcome(new_pod)
        if not said:
            break
        assert "oo many open files" in said
        assert "\n" not in said
        assert settled(new_pod.shim.children, []) == []
    assert spare > 0
    resource.prlimit(new_pod.shim.pid, resource.RLIMIT_NOFILE, before)
    assert await new_pod.state() == "SANDBOX_READY"


# -- a shim that is killed ------------------------------------------------------------------


@pytest.mark.parametrize("member_bundle_is_gone", [False, True])
async def test_of_a_killed_shim_nothing_is_left_after_the_clean_up_of_its_sandbox(
    pod: SandboxByHand, *, member_bundle_is_gone: bool
) -> None:
    crun = pod.shim.options("crun")
    one = await pod.run("one", *SLEEP, options=crun)
    two = await pod.run("two", *SLEEP, share="network ipc uts pid")
    os.kill(pod.shim.pid, signal.SIGKILL)
    await pod.shim.until_gone()
    eventually(lambda: not (is_alive(pod.pid) or is_alive(two)), "the holder dies too")
    assert is_alive(one)
    if member_bundle_is_gone:
        for name in ("one", "two"):
            shutil.rmtree(os.path.join(pod.shim.directory, name))
    assert pod.shim.delete_verb("pod") < 4
    assert not is_alive(one)
    left = [each for each in pod.leftovers() if each not in ("file pod", "file holder")]
    assert left == []
    assert pod.shim.delete_verb("pod") < 4  # again


@pytest.mark.parametrize("has_paths", [False, True])
async def test_killed_at_any_moment_of_a_start_a_shim_leaves_no_holder(
    start_shim: StartShim, by_paths: dict[str, str], *, has_paths: bool
) -> None:
    environment = by_paths if has_paths else None
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        async with start_shim("pod", sandbox=True, environment=environment) as shim:
            pod = SandboxByHand(shim)
            await pod.create(linux=linux_of(pid=pod_pb2.CONTAINER))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_outcome, pod)
                await anyio.sleep(delay)
                os.kill(shim.pid, signal.SIGSTOP)
                eventually(partial(_is_stopped, shim.pid), "it is stopped")
                family = _family_of(shim.pid)
                os.kill(shim.pid, signal.SIGKILL)
            await shim.until_gone()
            eventually(partial(_are_gone, family), "no process is left")
            shim.delete_verb("pod")
            assert [left for left in pod.leftovers() if not left.startswith("file")] == []


async def _outcome(pod: SandboxByHand) -> str:
    """Return the error of a start; empty if it succeeds."""
    try:
        pod.pid = (await pod.call("StartSandbox")).pid
    except (RemoteError, ConnectionClosed) as error:
        return str(error)
    return ""


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def _are_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def _family_of(pid: int) -> list[int]:
    """Return a stopped process, and all its descendants."""
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [pid, *(each for child in file.read().split() for each in _family_of(int(child)))]
    return []
