"""Checkpoints and restores that fail, hang or are killed, and CRIUs that do not work."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from api.errors import Status
from api.ttrpc import ConnectionClosed, RemoteError
from tests.e2e.checkpoints import COUNT, checkpointing, left_in, refusal, with_criu
from tests.harness.runtime import is_alive
from tests.harness.shim import StartShim, wait_for_file
from tools.criu import complaint
from tools.parts import SYSTEM_PATH

pytestmark = pytest.mark.anyio


async def test_checkpoint_that_is_none_leaves_nothing_of_its_container(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        await shim.run("c1", options=with_criu(criu))
        await shim.call("Checkpoint", id="c1", path=str(saved), options=checkpointing(exit=True))
        await shim.reap("c1")
        bundle = shim.bundle("c2", "sh", "-c", COUNT)
        before = sorted(os.listdir(bundle))
        create: dict[str, Any] = {"id": "c2", "bundle": bundle, "options": with_criu(criu)}
        for path in (str(tmp_path / "none"), str(tmp_path), "relative"):
            status, message = await refusal(shim, "Create", checkpoint=path, **create)
            assert (status, "E1528 checkpoint-unusable" in message) == (9, True)
            assert sorted(os.listdir(bundle)) == before
        status, message = await refusal(
            shim, "Create", checkpoint=str(saved), parent_checkpoint="/no/parent", **create
        )
        assert "no such directory of the parent" in message

        # Errors that only CRIU can detect appear at Start, which can be retried.
        core = next(name for name in os.listdir(saved) if name.startswith("core-"))
        whole = (saved / core).read_bytes()
        (saved / core).write_bytes(b"garbage")
        await shim.call("Create", checkpoint=str(saved), **create)
        with pytest.raises(RemoteError, match="its init process is not restored yet"):
            await shim.exec("c2", "e1", "true")
        _, message = await refusal(shim, "Start", id="c2")
        assert "NVSHIM-E1529 restore-failed" in message
        assert "CRIU: " in message
        assert f"{bundle}/criu-restore.log" in message
        assert await shim.status("c2") == "CREATED"
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]
        assert left_in(bundle) == ["criu-restore.log"]
        assert shim.children() == []
        (saved / core).write_bytes(whole)
        pid = (await shim.call("Start", id="c2")).pid
        assert is_alive(pid)
        await shim.end("c2")
        await shim.events.until("TaskDelete", count=2)
        assert shim.events.of("c2") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


def _criu_that(directory: Path, criu: str, *, instead_of_restoring: str) -> str:
    """Return a CRIU that reports its version when asked, and then does something else."""
    path = directory / "criu"
    asked = directory / "asked"
    path.write_text(
        f'#!/bin/sh\n[ -e {asked} ] || {{ touch {asked}; exec {criu} "$@"; }}\n'
        f"{instead_of_restoring}\n"
    )
    path.chmod(0o755)
    return str(path)


async def test_runtime_that_is_killed_while_it_restores_leaves_nothing(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    deadly = _criu_that(tmp_path, criu, instead_of_restoring="kill -9 $PPID")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        await shim.run("c1", options=with_criu(criu))
        await shim.call("Checkpoint", id="c1", path=saved)
        await shim.end("c1")
        shim.bundle("c2", "sh", "-c", COUNT)
        await shim.create("c2", options=with_criu(deadly), checkpoint=saved)
        _, message = await refusal(shim, "Start", id="c2")
        assert "exit status 137" in message
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


async def test_restore_that_hangs_is_ended_by_kill_and_may_be_deleted(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        # Until the end of the test.
        linger = f"echo $$ >{tmp_path}/pid; while test -d {shim.directory}; do sleep 0.1; done"
        slow = _criu_that(tmp_path, criu, instead_of_restoring=linger)
        await shim.run("c1", options=with_criu(criu))
        await shim.call("Checkpoint", id="c1", path=saved)
        await shim.end("c1")
        shim.bundle("c2", "sh", "-c", COUNT)
        await shim.create("c2", options=with_criu(slow), checkpoint=saved)
        refused: list[str] = []

        async def start() -> None:
            refused.append((await refusal(shim, "Start", id="c2"))[1])

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(start)
                pid = int(await anyio.to_thread.run_sync(wait_for_file, f"{tmp_path}/pid"))
                tasks.start_soon(start)  # it waits for the first, and must not restore either
                await anyio.wait_all_tasks_blocked()
                await shim.call("Kill", id="c2", signal=signal.SIGKILL)
                await shim.call("Delete", id="c2")
        assert "exit status 137" in refused[0]
        assert "NVSHIM-E1310" in refused[1]
        assert not is_alive(pid)


async def test_shim_that_is_killed_while_it_restores_leaves_nothing_to_containerds_clean_up(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    slow = _criu_that(tmp_path, criu, instead_of_restoring=f"echo $$ >{tmp_path}/pid; sleep 1000")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        await shim.run("c1", options=with_criu(criu))
        await shim.call("Checkpoint", id="c1", path=saved)
        await shim.end("c1")
        shim.bundle("c2", "sh", "-c", COUNT)
        await shim.create("c2", options=with_criu(slow), checkpoint=saved)

        async def start() -> None:
            with suppress(ConnectionClosed):
                await shim.call("Start", id="c2")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            pid = int(await anyio.to_thread.run_sync(wait_for_file, f"{tmp_path}/pid"))
            os.kill(shim.pid, signal.SIGKILL)
        assert shim.delete_verb("c1") < 5
        assert shim.delete_verb("c2") < 5
        assert not is_alive(pid)


async def test_task_that_is_not_restored_yet_has_no_process_and_can_be_deleted(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        await shim.run("c1", options=with_criu(criu))
        await shim.call("Checkpoint", id="c1", path=saved)
        shim.bundle("c2", "sh", "-c", COUNT)
        # For an unknown runtime, containerd names the checkpoint in the options.
        options = with_criu(criu, criu_image_path=saved)
        assert await shim.create("c2", options=options) == 0
        assert (await refusal(shim, "Kill", id="c2", signal=9))[0] == Status.NOT_FOUND
        # An error or an empty list would make containerd treat the shim as one without a task.
        assert [p.pid for p in (await shim.call("Pids", id="c2")).processes] == [0]
        for method in ("Pause", "Resume", "Checkpoint"):
            status, _ = await refusal(shim, method, id="c2")
            assert (method, status) == (method, Status.FAILED_PRECONDITION)
        with pytest.raises(RemoteError) as caught:
            await shim.exec("c2", "e1", "true")
        assert caught.value.status == Status.FAILED_PRECONDITION
        waited: list[int] = []

        async def wait() -> None:
            waited.append((await refusal(shim, "Wait", id="c2"))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            deleted = await shim.call("Delete", id="c2")
        assert (deleted.pid, deleted.exit_status) == (0, 0)
        assert waited == [Status.NOT_FOUND]
        assert (await refusal(shim, "State", id="c2"))[0] == Status.NOT_FOUND
        await shim.events.until("TaskDelete")
        assert shim.events.of("c2") == ["TaskCreate", "TaskDelete"]
        assert await shim.status("c1") == "RUNNING"


async def test_without_criu_one_line_says_so(start_shim: StartShim, tmp_path: Path) -> None:
    only_runc = tmp_path / "bin"
    only_runc.mkdir()
    for name in ("runc", "sh"):
        (only_runc / name).symlink_to(shutil.which(name) or "")
    async with start_shim("c1", "sh", "-c", COUNT, environment={"PATH": str(only_runc)}) as shim:
        await shim.run("c1")
        path = str(tmp_path / "saved")
        for how in (checkpointing(), checkpointing(exit=True)):
            status, message = await refusal(shim, "Checkpoint", id="c1", path=path, options=how)
            assert status == Status.FAILED_PRECONDITION
            assert "NVSHIM-E1523 criu-not-found" in message
            assert not os.path.exists(path)
        shim.bundle("c2", "sh", "-c", COUNT)
        await shim.run("c2", options=with_criu("/no/such/criu"))
        status, message = await refusal(shim, "Checkpoint", id="c2", path=path)
        assert (status, "cannot run '/no/such/criu'" in message) == (
            Status.FAILED_PRECONDITION,
            True,
        )
        for container in ("c1", "c2"):
            assert await shim.status(container) == "RUNNING"
            assert left_in(f"{shim.directory}/{container}") == []
            await shim.end(container)


async def test_criu_that_does_not_know_the_kernel_is_said(
    start_shim: StartShim, tmp_path: Path
) -> None:
    installed = shutil.which("criu", path=SYSTEM_PATH)
    if installed is None or not complaint(installed):
        pytest.skip("the installed CRIU knows this kernel, or there is none")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        await shim.run("c1", options=with_criu(installed))
        path = str(tmp_path / "saved")
        status, message = await refusal(shim, "Checkpoint", id="c1", path=path)
        assert status == Status.FAILED_PRECONDITION
        assert "NVSHIM-E1526 criu-unsupported-by-kernel" in message
        assert await shim.status("c1") == "RUNNING"


async def test_crun_without_criu_is_said(start_shim: StartShim, tmp_path: Path) -> None:
    if b"+CRIU" in (await anyio.run_process(["crun", "--version"])).stdout:
        pytest.skip("this crun is built with CRIU")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        await shim.run("c1", options=shim.options("crun"))
        path = str(tmp_path / "saved")
        status, message = await refusal(shim, "Checkpoint", id="c1", path=path)
        assert status == Status.UNIMPLEMENTED
        assert "NVSHIM-E1525 criu-unsupported-by-runtime" in message
        assert await shim.status("c1") == "RUNNING"
