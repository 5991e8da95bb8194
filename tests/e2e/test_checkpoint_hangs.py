"""If CRIU or the runtime that calls it hangs, exits, Kill and Delete do not wait for it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from api import typeurl
from api.errors import Status
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim, wait_for_file
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

# Seconds within which calls that do not wait for the checkpoint finish on a busy machine.
_PATIENCE = 15


def _hang_in(verb: str, shim: ShimByHand) -> str:
    """Return a script that makes the runtime and a child hang in a verb until the test ends."""
    linger = f"while test -d {shim.directory}; do sleep 0.1; done"
    return f"""
    if [ "$verb" = {verb} ]; then
        sh -c '{linger}' &
        echo $$ $! >{shim.directory}/hangs
        {linger}
    fi
    """


async def _hanging(shim: ShimByHand) -> list[int]:
    """Wait until the processes hang; return them."""
    text = await anyio.to_thread.run_sync(wait_for_file, f"{shim.directory}/hangs")
    return [int(word) for word in text.split()]


def _how(*, exit_: bool) -> Any:
    return typeurl.pack(runc_options_pb2.CheckpointOptions(exit=exit_))


@asynccontextmanager
async def _refused_meanwhile(shim: ShimByHand, method: str, **fields: Any) -> AsyncIterator[None]:
    """Run a call that fails and that finishes before what is done meanwhile."""
    outcomes: list[int] = []

    async def call() -> None:
        try:
            await shim.call(method, **fields)
        except RemoteError as error:
            outcomes.append(int(error.status))

    with anyio.fail_after(_PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            yield
    assert outcomes == [Status.UNKNOWN]


@pytest.mark.parametrize("exit_", [False, True], ids=["goes on", "is to end"])
async def test_a_container_is_killed_and_deleted_while_its_checkpoint_hangs(
    shim: ShimByHand, tmp_path: Path, *, exit_: bool
) -> None:
    saved = tmp_path / "saved"
    await shim.run("c1", options=shim.options(before=_hang_in("checkpoint", shim)))
    async with _refused_meanwhile(
        shim, "Checkpoint", id="c1", path=str(saved), options=_how(exit_=exit_)
    ):
        processes = await _hanging(shim)
        await shim.call("Kill", id="c1", signal=signal.SIGKILL)
        assert await shim.reap("c1") == 137
    assert not any(map(is_alive, processes))
    assert not saved.exists()
    await shim.events.until("TaskDelete")
    assert shim.events.of("c1") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


async def test_an_exit_is_told_while_a_checkpoint_hangs(
    start_shim: StartShim, tmp_path: Path
) -> None:
    script = "until test -e /go; do sleep 0.05; done; exit 3"
    async with start_shim("c1", "sh", "-c", script) as shim:
        await shim.run("c1", options=shim.options(before=_hang_in("checkpoint", shim)))
        async with _refused_meanwhile(
            shim, "Checkpoint", id="c1", path=str(tmp_path / "saved"), options=_how(exit_=True)
        ):
            await _hanging(shim)
            await anyio.Path(f"{shim.directory}/c1/rootfs/go").touch()
            assert (await shim.call("Wait", id="c1")).exit_status == 3
            assert await shim.status("c1") == "STOPPED"
            await shim.call("Delete", id="c1")


async def test_a_delete_of_what_runs_is_refused_while_a_checkpoint_hangs(
    shim: ShimByHand, tmp_path: Path
) -> None:
    await shim.run("c1", options=shim.options(before=_hang_in("checkpoint", shim)))
    async with _refused_meanwhile(shim, "Checkpoint", id="c1", path=str(tmp_path / "saved")):
        processes = await _hanging(shim)
        with pytest.raises(RemoteError) as caught:
            await shim.call("Delete", id="c1")
        assert caught.value.status == Status.FAILED_PRECONDITION
        assert all(map(is_alive, processes))
        await shim.end("c1")


def _tracer_of(pid: int) -> int:
    """Return the pid that traces a process; 0 if there is none."""
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("TracerPid"))
    return 0


def _has_stopped(pid: int) -> bool:
    """Whether a process has stopped after SIGSTOP, or has exited."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _stop_who_traces(pid: int, asked: list[int]) -> int:
    """Stop CRIU while it traces a process; return its pid, or 0 if it was faster."""
    while not asked:
        tracer = _tracer_of(pid)
        if not tracer:
            continue
        with suppress(ProcessLookupError):
            os.kill(tracer, signal.SIGSTOP)
            eventually(partial(_has_stopped, tracer), "CRIU has stopped")
            if _tracer_of(pid) == tracer:
                return tracer
            os.kill(tracer, signal.SIGCONT)  # it detached before it stopped, so let it continue
    return 0


async def test_a_container_is_killed_and_deleted_while_criu_hangs_and_traces_it(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    # CRIU takes longer for a larger container.
    script = "dd if=/dev/zero of=/dev/shm/large bs=1M count=48; echo $$ >/ready; sleep 1000"
    options = typeurl.pack(runc_options_pb2.Options(binary_name="runc", criu_path=criu))
    async with start_shim("c1", "sh", "-c", script) as shim:
        pid = await shim.run("c1", options=options)
        await anyio.to_thread.run_sync(wait_for_file, f"{shim.directory}/c1/rootfs/ready")
        answered: list[int] = []

        async def save() -> None:
            try:
                await shim.call("Checkpoint", id="c1", path=str(tmp_path / "saved"))
                answered.append(Status.OK)
            except RemoteError as error:
                answered.append(int(error.status))

        for _ in range(20):
            answered.clear()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(save)
                tracer = await anyio.to_thread.run_sync(_stop_who_traces, pid, answered)
                if tracer:
                    try:
                        with anyio.fail_after(_PATIENCE):
                            await shim.call("Kill", id="c1", signal=signal.SIGKILL)
                            assert await shim.reap("c1") == 137
                    finally:
                        if _tracer_of(pid) == tracer:
                            os.kill(tracer, signal.SIGKILL)
            if tracer:
                break
        assert answered == [Status.UNKNOWN]
        assert not is_alive(tracer)
