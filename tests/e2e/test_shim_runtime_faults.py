"""The low-level runtime or the kernel fails: the shim reports it, and keeps running."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from api.errors import Status
from api.ttrpc import RemoteError
from integration.timeouts import PATIENCE
from tests.harness.cgroup import is_v2
from tests.harness.runtime import is_alive
from tests.harness.shim import LIFE, ShimByHand, StartShim, gone, wait_for_file
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio


# A test makes a verb of the runtime fail with a file named after the verb.
_FAIL_ON_DEMAND: Final = 'f=${0%/*}/fail-$verb; [ -e "$f" ] && . "$f"'


def _break(shim: ShimByHand, verb: str, script: str) -> str:
    path = os.path.join(shim.directory, f"fail-{verb}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(script + "\n")
    return path


async def _error(call: Awaitable[Any]) -> RemoteError:
    """Return a call's error: one line with a code."""
    with pytest.raises(RemoteError) as caught:
        await call
    assert "\n" not in str(caught.value)
    assert "NVSHIM-E" in str(caught.value)
    assert caught.value.status != Status.INTERNAL or "NVSHIM-E12" in str(caught.value)
    return caught.value


# -- it hangs ---------------------------------------------------------------------------------


async def test_what_hangs_in_its_start_holds_up_nobody_else_and_can_be_killed(
    shim: ShimByHand,
) -> None:
    shim.bundle("c2", "sleep", "1000")
    for verb, name in (("start", "c1"), ("exec", "c2")):
        hanging = shim.options(before=f'[ "$verb" = {verb} ] && kill -STOP $$')
        await shim.create(name, options=hanging)
    await shim.call("Start", id="c2")
    await shim.exec("c2", "e1", "true")
    hang: tuple[dict[str, Any], ...] = ({"id": "c1"}, {"id": "c2", "exec_id": "e1"})
    # containerd gives up and disconnects; the shim keeps waiting.
    for fields in hang:
        with pytest.raises(Exception, match="deadline"):
            await shim.call("Start", **fields, timeout=0.3)
    shim.bundle("c3", "sh", "-c", "exit 4")
    await shim.run("c3")
    assert await shim.reap("c3") == 4
    assert await shim.status("c1") == "CREATED"
    assert await shim.status("c2", "e1") == "CREATED"
    lines = [line for line in await shim.log_lines("c1", ask=10) if "call=" in line]
    assert any("container=c1" in line and "call=start" in line for line in lines)
    assert any("container=c2" in line and "call=exec" in line for line in lines)

    async def is_refused(fields: dict[str, Any]) -> None:
        error = await _error(shim.call("Delete", **fields))
        assert error.status == Status.FAILED_PRECONDITION
        assert "it is being started" in str(error)

    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            for fields in hang:
                tasks.start_soon(is_refused, fields)
    assert "it is being started" in str(await _error(shim.call("Kill", **hang[1], signal=15)))
    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            for name in ("c1", "c2"):
                tasks.start_soon(shim.end, name)
    await gone(shim, "c1")
    assert shim.events.of("c1") == ["TaskCreate", "TaskExit", "TaskDelete"]


async def _until_it_hangs(shim: ShimByHand) -> int:
    """Wait for a runtime created by :func:`_hang_in`; return its pid."""
    pid = int(await anyio.to_thread.run_sync(wait_for_file, f"{shim.directory}/hangs"))
    stat = Path(f"/proc/{pid}/stat")  # the shell writes the file before it stops
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
    return pid


def _hang_in(verb: str, *, after: str = "") -> str:
    """Return a runtime that stops in a verb, with a child that survives unless it is killed too."""
    return (
        f'[ "$verb" = {verb} ] && {{ {after or ":"}; sleep 1000 & echo $! > ${{0%/*}}/child;'
        " echo $$ > ${0%/*}/tmp; mv ${0%/*}/tmp ${0%/*}/hangs; kill -STOP $$; }"
    )


@pytest.mark.parametrize("method", ["Kill", "Delete"])
@pytest.mark.parametrize("after", ["", '$binary "$@"'])
async def test_a_create_that_hangs_is_ended_and_undone_by_kill_and_delete(
    shim: ShimByHand, method: str, after: str
) -> None:
    """Also when the container was created, but its runtime does not return."""
    await shim.run("c1")
    shim.bundle("c2", "sleep", "1000")
    hanging = shim.options(before=_hang_in("create", after=after))
    async with anyio.create_task_group() as tasks:
        failed: list[RemoteError] = []

        async def create() -> None:
            failed.append(await _error(shim.create("c2", options=hanging)))

        tasks.start_soon(create)
        runtime = await _until_it_hangs(shim)
        child = int((Path(shim.directory) / "child").read_text())
        await shim.exec("c1", "e1", "true")  # other calls do not wait
        await shim.call("Start", id="c1", exec_id="e1")
        fields = {"signal": signal.SIGKILL} if method == "Kill" else {}
        error = await _error(shim.call(method, id="c2", **fields))
        assert error.status == Status.NOT_FOUND
        assert "it was being created, which was cancelled" in str(error)
    assert failed[0].status == Status.ABORTED
    assert "NVSHIM-E1310" in str(failed[0])
    assert not is_alive(runtime)
    eventually(lambda: not is_alive(child), "the runtime's children have exited")
    kinds = ("mount", "cgroup", "runtime")
    left = [line for line in shim.leftovers() if line.startswith(kinds)]
    assert [line for line in left if "c2" in line.split("/")[-1]] == []
    assert shim.events.of("c2") == []
    assert await shim.status("c1") == "RUNNING"
    # The container can be created again.
    await shim.run("c2")
    assert await shim.end("c2") == 128 + signal.SIGKILL


async def test_a_signal_that_does_not_kill_leaves_a_create_alone(shim: ShimByHand) -> None:
    hanging = shim.options(before=_hang_in("create"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(shim.create, "c1", options=hanging))
        runtime = await _until_it_hangs(shim)
        error = await _error(shim.call("Kill", id="c1", signal=signal.SIGTERM))
        assert error.status == Status.NOT_FOUND
        os.kill(runtime, signal.SIGCONT)
    os.kill(int((Path(shim.directory) / "child").read_text()), signal.SIGKILL)


async def test_an_exec_that_hangs_in_its_start_is_ended_by_its_kill_alone(
    shim: ShimByHand,
) -> None:
    """So is a second start that waits for the first: a killed process never runs."""
    await shim.run("c1", options=shim.options(before=_hang_in("exec")))
    await shim.exec("c1", "e1", "true")
    with anyio.fail_after(60 * PATIENCE):
        async with anyio.create_task_group() as tasks:
            failed: list[RemoteError] = []

            async def start() -> None:
                call = shim.call("Start", id="c1", exec_id="e1")
                failed.append(await _error(call))

            tasks.start_soon(start)
            runtime = await _until_it_hangs(shim)
            tasks.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            await shim.call("Kill", id="c1", exec_id="e1", signal=signal.SIGKILL)
    assert [error.status for error in failed] == [Status.ABORTED] * 2
    assert all("NVSHIM-E1310" in str(error) for error in failed)
    assert not is_alive(runtime)
    assert await shim.status("c1") == "RUNNING"
    await shim.call("Delete", id="c1", exec_id="e1")


async def test_starts_that_wait_for_one_that_hangs_end_with_the_container(shim: ShimByHand) -> None:
    """None of them calls the runtime after init's exit, because it could hang as well."""
    await shim.create("c1", options=shim.options(before=_hang_in("start")))
    failed: list[RemoteError] = []

    async def start() -> None:
        failed.append(await _error(shim.call("Start", id="c1")))

    with anyio.fail_after(30 * PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await _until_it_hangs(shim)
            tasks.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            assert await shim.end("c1") == 128 + signal.SIGKILL
    assert len(failed) == 2
    assert "NVSHIM-E1310" in str(failed[1])
    await gone(shim, "c1")


# -- it fails ---------------------------------------------------------------------------------


async def test_a_runtime_that_fails_at_any_verb_is_quoted_and_may_be_asked_again(
    shim: ShimByHand,
) -> None:
    options = shim.options(before=_FAIL_ON_DEMAND)
    script = """printf '\\377\\0\\n[\\n{"level": "error", "msg": "out of %s"}' $verb > "$4"
        echo garbage; echo garbage >&2; exit 3"""

    async def twice(verb: str, call: Callable[[], Awaitable[Any]]) -> None:
        path = _break(shim, verb, script)
        error = await _error(call())
        assert error.status == Status.UNKNOWN
        assert f"{verb}: out of {verb}" in str(error)
        os.unlink(path)
        await call()

    await twice("create", lambda: shim.create("c1", options=options))
    await twice("start", lambda: shim.call("Start", id="c1"))
    await shim.exec("c1", "e1", "true")
    await twice("exec", lambda: shim.call("Start", id="c1", exec_id="e1"))
    await twice("pause", lambda: shim.call("Pause", id="c1"))
    await twice("resume", lambda: shim.call("Resume", id="c1"))
    await twice("kill", lambda: shim.call("Kill", id="c1", signal=9))
    assert (await shim.call("Wait", id="c1")).exit_status == 137
    await twice("delete", lambda: shim.call("Delete", id="c1"))


async def test_a_pid_that_is_not_the_containers_is_never_taken_for_it(
    start_shim: StartShim,
) -> None:
    with subprocess.Popen(["sleep", "1000"]) as sentinel:  # noqa: ASYNC220 - does not block
        try:
            async with start_shim("c1", "sleep", "1000") as shim:
                options = shim.options(before=_FAIL_ON_DEMAND)
                for pid in ("1", "-1", "0", "", "x", "9" * 30, str(sentinel.pid)):
                    lie = f'$binary "$@" && echo "{pid}" > "${{11}}"; exit'
                    path = _break(shim, "create", lie)
                    error = str(await _error(shim.create("c1", options=options)))
                    assert "NVSHIM-E1204" in error, pid
                    os.unlink(path)
                await shim.run("c1", options=options)
            assert sentinel.poll() is None
        finally:
            sentinel.kill()


async def test_a_runtime_that_does_nothing_and_says_that_it_has_is_found_out(
    shim: ShimByHand,
) -> None:
    options = shim.options(before=_FAIL_ON_DEMAND)
    for verb in ("create", "exec", "delete"):
        _break(shim, verb, "exit 0")
    assert "NVSHIM-E1204" in str(await _error(shim.create("c1", options=options)))
    os.unlink(f"{shim.directory}/fail-create")
    await shim.run("c1", options=options)
    await shim.exec("c1", "e1", "true")
    start = shim.call("Start", id="c1", exec_id="e1")
    assert "NVSHIM-E1204" in str(await _error(start))
    await shim.call("Kill", id="c1", signal=9)
    await shim.call("Wait", id="c1")
    assert "NVSHIM-E1207" in str(await _error(shim.call("Delete", id="c1")))
    os.unlink(f"{shim.directory}/fail-delete")


async def test_a_container_whose_runtime_was_removed_can_still_be_stopped(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sh", "-c", "sleep 1000 & sleep 1000") as shim:
        options = shim.options(before=":")
        await shim.run("c1", options=options)
        binary = f"{shim.directory}/runtime-0"
        os.rename(binary, f"{binary}.away")
        await shim.exec("c1", "e1", "true")
        assert "NVSHIM-E1201" in str(await _error(shim.call("Start", id="c1", exec_id="e1")))
        await shim.call("Kill", id="c1", signal=9, all=True)
        assert (await shim.call("Wait", id="c1")).exit_status == 137
        assert "NVSHIM-E1201" in str(await _error(shim.call("Delete", id="c1")))
        os.rename(f"{binary}.away", binary)


# -- the kernel refuses -----------------------------------------------------------------------


async def test_a_full_disk_is_named_and_a_container_is_made_when_there_is_room(
    shim: ShimByHand,
) -> None:
    bundle = f"{shim.directory}/c1"
    image = f"{shim.directory}/image"
    spec = shim.spec("c1")
    os.rename(f"{bundle}/rootfs", image)
    await anyio.run_process(["mount", "-t", "tmpfs", "-o", "size=64k", "x", bundle])
    os.mkdir(f"{bundle}/rootfs")
    shim.write_spec("c1", spec)
    bind = {"type": "bind", "source": image, "options": ["rbind", "rw"]}
    _fill(bundle)
    before = sorted(os.listdir(bundle))
    assert "no space left" in str(await _error(shim.create("c1", rootfs=[bind]))).lower()
    assert sorted({*os.listdir(bundle)} - {"options.json", "runtime"}) == before
    os.unlink(f"{bundle}/filler")
    await shim.run("c1", rootfs=[bind])
    _fill(bundle)
    await shim.exec("c1", "e1", "true")
    error = await _error(shim.call("Start", id="c1", exec_id="e1"))
    assert "no space left" in str(error).lower()
    assert await shim.status("c1") == "RUNNING"
    assert await shim.end("c1") == 137
    assert shim.leftovers() == [
        f"mount {bundle}", f"socket {shim.socket_path}", f"process {shim.pid}",
    ]  # fmt: skip
    await anyio.run_process(["umount", "--lazy", bundle])


def _fill(directory: str) -> None:
    with open(f"{directory}/filler", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal without a reader"])
async def test_a_shim_that_has_no_descriptor_left_says_so_and_recovers(
    shim: ShimByHand, *, terminal: bool
) -> None:
    await shim.run("c1")
    before = await shim.files_at_rest()
    whole = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
    stdio = {"terminal": True} if terminal else {"stdout": shim.fifo("out")}
    refused = 0
    shim.bundle("c2", "true")
    for room in range(14):
        resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (len(before) + room, whole[1]))
        await shim.exec("c1", "e1", "true", **stdio)
        for call in (shim.call("Start", id="c1", exec_id="e1"), shim.create("c2", **stdio)):
            try:
                await call
            except RemoteError as error:
                assert "NVSHIM-E" in str(error)  # noqa: PT017 - it may succeed as well
                if "oo many open files" in str(error):
                    assert "ook at the shim's limits" in str(error)  # noqa: PT017 - as above
                refused += 1
        assert await shim.status("c1") == "RUNNING"
        resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, whole)
        with suppress(RemoteError):
            await shim.call("Wait", id="c1", exec_id="e1")
        await shim.call("Delete", id="c1", exec_id="e1")
        with suppress(RemoteError):
            await shim.call("Delete", id="c2")
        assert await shim.files_at_rest(before) == before, f"room for {room}"
    assert 4 < refused < 28


async def test_a_shim_may_open_as_many_files_as_its_hard_limit_allows(
    start_shim: StartShim,
) -> None:
    whole = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (whole[1] - 1, whole[1]))
    try:
        async with start_shim("c1", "sleep", "1000") as shim:
            await shim.run("c1")
            assert resource.prlimit(shim.pid, resource.RLIMIT_NOFILE) == (whole[1], whole[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, whole)


async def test_an_exec_whose_output_nobody_reads_is_deleted_though_no_descriptor_is_left(
    shim: ShimByHand,
) -> None:
    await shim.run("c1")
    before = await shim.files_at_rest()
    whole = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
    out = shim.fifo("out")
    for _ in range(2):  # the same id, which is free again
        await shim.start_exec("c1", "e1", "echo", "hello", stdout=out)
        await shim.call("Wait", id="c1", exec_id="e1")
        resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (0, whole[1]))
        await shim.call("Delete", id="c1", exec_id="e1")
        resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, whole)
    assert await shim.files_at_rest(before) == before


@pytest.fixture
def no_more_processes() -> Iterator[Path]:
    """Yield a cgroup that limits processes, in the hierarchy that does that here."""

    root = Path("/sys/fs/cgroup") if is_v2() else Path("/sys/fs/cgroup/pids")
    directory = root / f"nvshim-pids-{os.getpid()}"
    directory.mkdir()
    if not (directory / "pids.max").exists():
        directory.rmdir()
        pytest.skip("the controller for processes is not delegated here")
    yield directory
    deadline = time.monotonic() + 5
    while True:
        try:
            directory.rmdir()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


async def test_a_shim_that_may_not_fork_says_so_and_recovers(
    shim: ShimByHand, no_more_processes: Path
) -> None:
    (no_more_processes / "cgroup.procs").write_text(str(shim.pid))
    (no_more_processes / "pids.max").write_text("1")
    before = await shim.files_at_rest()
    error = await _error(shim.create("c1"))
    assert error.status == Status.RESOURCE_EXHAUSTED
    assert "NVSHIM-E1309" in str(error)
    assert await shim.files_at_rest(before) == before
    (no_more_processes / "pids.max").write_text("max")
    await shim.run("c1")
    (no_more_processes / "pids.max").write_text("1")
    await shim.exec("c1", "e1", "true")
    error = await _error(shim.call("Start", id="c1", exec_id="e1"))
    assert error.status == Status.RESOURCE_EXHAUSTED
    # A signal needs no process.
    await shim.call("Kill", id="c1", signal=signal.SIGKILL)
    assert (await shim.call("Wait", id="c1")).exit_status == 137
    (no_more_processes / "pids.max").write_text("max")
    await shim.call("Delete", id="c1")
    await gone(shim, "c1")
    assert shim.events.of("c1") == [*LIFE[:2], "TaskExecAdded e1", *LIFE[2:]]
