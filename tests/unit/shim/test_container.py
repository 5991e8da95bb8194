"""Parts of a container without a runtime: the answer to Pids, and errors during an exit."""

from __future__ import annotations

import _thread
import errno
import os
import signal
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from api.proto import sandbox_pb2, task_pb2
from shim import files
from shim.cgroup import oom
from shim.cgroup.moves import ExpectedMoves
from shim.children import Child, Exit, Reaper
from shim.context import ShimContext
from shim.errors import (
    KilledWhileStarting,
    ProcessFinished,
    ProgramTimeout,
    RuntimeFailed,
    TaskNotFound,
    WrongProcessState,
)
from shim.log import Log
from shim.loop import GuardedTasks
from shim.pod import checkpoints, fd_reserve
from shim.pod.container import Container
from shim.pod.creation import Resources, in_thread
from shim.pod.exec import Exec
from shim.pod.operations import Exits, Operations
from shim.pod.process import Event, Process, State
from shim.pod.sandbox_service import SandboxService
from shim.pod.service import Lifetime, TaskService
from shim.runtime.options import RuntimeOptions
from shim.sandbox import namespaces
from shim.sandbox.errors import WrongSandboxState
from shim.sandbox.pod import Pod
from shim.sandbox.sandbox import Sandbox
from shim.sandbox.sandbox import State as SandboxState
from shim.stdio.logger import Logger
from shim.stdio.uris import StdioUris
from tests.harness.raising import is_error, raises
from tests.harness.runtime import is_alive
from tests.harness.waiting import until

pytestmark = pytest.mark.anyio

_NO_STDIO = StdioUris("", "", "", terminal=False)


class _Publisher:
    def publish(self, _: str, event: Any) -> None:
        """Drop the event."""


class _FailingStdio:
    async def ended(self) -> None:
        raise OSError(errno.EMFILE, "no descriptor")


class _Resources:
    """The part of a container's resources that its exits use."""

    cgroup = None
    own_pid_namespace = True
    has_gpus = False

    class runtime:  # noqa: N801
        @staticmethod
        def end_calls(*_: str) -> None:
            pass


def _context(bundle: str, publisher: _Publisher, tasks: Any = None) -> ShimContext:
    return ShimContext(
        namespace="n",
        reaper=Reaper(),
        publisher=cast("Any", publisher),
        tasks=tasks,
        log=Log(bundle, debug=False, shim="c", namespace="n"),
        moves=ExpectedMoves(),
    )


async def test_what_is_to_be_restored_has_an_init_without_a_pid(tmp_path: Any) -> None:
    # After an error or an empty answer, a restarted containerd would delete the task.
    bundle = str(tmp_path)
    container = Container(_context(bundle, _Publisher()), "c", bundle, RuntimeOptions(), _NO_STDIO)
    assert container.pids() == {0: ""}


async def test_what_is_killed_when_its_restore_has_just_succeeded_is_killed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    bundle = str(tmp_path)
    tasks = SimpleNamespace(start_soon=lambda *_: None)
    context = _context(bundle, _Publisher(), tasks)
    container = Container(context, "c", bundle, RuntimeOptions(), _NO_STDIO)
    container._resources.saved = cast("Any", "checkpoint")
    container.init.stdio = cast("Any", "open")

    async def restore(init: Process) -> None:
        # The runtime was reaped in this turn of the loop, and its process is not known yet.
        await container.kill("", signal.SIGKILL, everyone=False)
        init.child = Child(4_000_000)
        monkeypatch.setattr(Child, "kill", lambda child: killed.append(child.pid))

    monkeypatch.setattr(container._resources, "restore", restore)
    assert await container.start("") == 4_000_000
    assert killed == [4_000_000]


async def test_what_has_ended_is_not_saved_though_its_exit_is_not_published_yet(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []

    async def save(path: str, **_: object) -> None:
        saved.append(path)

    monkeypatch.setattr(checkpoints, "save", save)
    bundle = str(tmp_path)
    container = Container(_context(bundle, _Publisher()), "c", bundle, RuntimeOptions(), _NO_STDIO)
    container.init.child = Child(4_000_000)
    container.init.advance(Event.STARTED)
    await container.checkpoint("/running", None)
    container._exits.init_reaped = True
    with raises(WrongProcessState):
        await container.checkpoint("/ended", None)
    assert saved == ["/running"]


@pytest.mark.parametrize("exec_id", ["", "e"], ids=["container", "exec"])
async def test_a_create_is_ended_for_its_container_and_not_for_an_exec_of_an_earlier_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, exec_id: str
) -> None:
    cancelled: list[str] = []
    forgotten: list[str] = []

    async def cancel_create() -> bool:
        cancelled.append("c")
        return True

    bundle = str(tmp_path)
    context = _context(bundle, _Publisher())
    container = Container(context, "c", bundle, RuntimeOptions(), _NO_STDIO)
    monkeypatch.setattr(container, "cancel_create", cancel_create)
    containers: dict[str, Container] = {"c": container}
    own_socket = cast("Any", SimpleNamespace(forget=forgotten.append))
    lifetime = Lifetime(context, own_socket, containers, lambda: None)
    tasks = TaskService(context, containers, lifetime)
    nobody = cast("Any", None)
    with raises(TaskNotFound):
        await tasks.kill(nobody, task_pb2.KillRequest(id="c", exec_id=exec_id, signal=9))
    with raises(TaskNotFound):
        await tasks.delete(nobody, task_pb2.DeleteRequest(id="c", exec_id=exec_id))
    with raises(TaskNotFound):
        await tasks.delete(nobody, task_pb2.DeleteRequest(id="announced", exec_id=exec_id))
    assert cancelled == ([] if exec_id else ["c", "c"])
    assert forgotten == ([] if exec_id else ["announced"])


async def test_a_dead_logger_is_survived_without_a_descriptor(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor")

    child = Child(4_000_000)
    child._finish(Exit(child.pid, 1, 1))
    reading, writing = os.pipe()
    async with anyio.create_task_group() as tasks:
        context = _context(str(tmp_path), _Publisher(), tasks)
        logger = Logger(context, "logger", child, writing, [reading])
        monkeypatch.setattr(os, "dup", refuse)
        logger.watch()
    logger.close()


async def test_an_exit_is_published_though_its_output_fails(tmp_path: Any) -> None:
    reported: list[str] = []
    async with anyio.create_task_group() as tasks:
        init = Process("c", "", _NO_STDIO)
        init.child = Child(4_000_000)
        init.child._finish(Exit(4_000_000, 3, 1))
        init.stdio = cast("Any", _FailingStdio())
        init.advance(Event.STARTED)
        context = _context(str(tmp_path), _Publisher(), tasks)
        resources: Any = _Resources()

        def report(kind: Any, *_: object, **__: object) -> None:
            reported.append(kind.__name__)

        Exits(
            context, resources, Operations(), report=report, init=init, execs={}, bundle=""
        ).watch_init()
    assert reported == ["TaskExit"]
    assert init.state is State.STOPPED


async def test_an_exit_is_published_though_what_is_left_cannot_be_signalled(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeFailed("runc kill", found="exit status 1")

    def refuse(_: int) -> None:
        raise OSError(errno.EMFILE, "no descriptor")

    monkeypatch.setattr(fd_reserve, "fill", lambda: None)
    reported: list[str] = []
    async with anyio.create_task_group() as tasks:
        init = Process("c", "", _NO_STDIO)
        init.child = Child(4_000_000)
        init.child._finish(Exit(4_000_000, 3, 1))
        init.advance(Event.STARTED)
        bundle = str(tmp_path)
        context = _context(bundle, _Publisher(), GuardedTasks(cast("Any", tasks), lambda _: None))
        resources = Resources(context, "c", bundle, RuntimeOptions())
        resources.own_pid_namespace = False
        resources.runtime = cast("Any", SimpleNamespace(kill=fail, end_calls=lambda *_: None))
        resources.cgroup = cast("Any", SimpleNamespace(signal=refuse, directory=lambda _: None))

        def report(kind: Any, *_: object, **__: object) -> None:
            reported.append(kind.__name__)

        Exits(
            context, resources, Operations(), report=report, init=init, execs={}, bundle=bundle
        ).watch_init()
    assert reported == ["TaskExit"]


async def test_the_memory_of_what_is_restored_is_followed_as_soon_as_its_exit(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tasks start in one turn of the loop, and one opens the watch that the other uses."""
    followed: list[str] = []

    async def follow(watch: Any, _: object) -> None:
        followed.append(watch)

    monkeypatch.setattr(oom, "watch", lambda _: "watch")
    monkeypatch.setattr(oom, "follow", follow)
    bundle = str(tmp_path)
    async with anyio.create_task_group() as tasks:
        init = Process("c", "", _NO_STDIO)
        init.child = Child(4_000_000)
        init.advance(Event.STARTED)
        context = _context(bundle, _Publisher(), GuardedTasks(cast("Any", tasks), lambda _: None))
        resources: Any = _Resources()
        exits = Exits(
            context,
            resources,
            Operations(),
            report=lambda *_, **__: None,
            init=init,
            execs={},
            bundle=bundle,
        )
        exits.watch_init()
        exits.follow_memory()
        await until(lambda: followed, "its memory is followed")
        tasks.cancel_scope.cancel()
    assert followed == ["watch"]


async def test_what_fails_in_a_thread_for_want_of_another_is_not_done_on_the_loop() -> None:
    threads: list[int] = []

    def work() -> None:
        threads.append(_thread.get_ident())
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match="can't start"):
        await in_thread(work)
    assert len(threads) == 1
    assert threads != [_thread.get_ident()]


class _LateRuntime:
    """A runtime that makes an exec's process, and is then killed or hangs."""

    def __init__(self, process: int, *, hangs: bool) -> None:
        self.hanging = anyio.Event()
        self._process = process
        self._hangs = hangs

    async def execute(self, _: object, *, process_file: str, pid_file: str) -> None:
        assert os.path.exists(process_file)
        files.write(pid_file, b"%d" % self._process)
        if self._hangs:
            self.hanging.set()
            await anyio.sleep_forever()
        raise RuntimeFailed("runc exec", found="exit status 137")


def _made_and_left() -> int:
    return os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})


@pytest.mark.parametrize("hangs", [False, True], ids=["runtime is killed", "exec is killed"])
async def test_an_exec_that_was_made_before_its_start_failed_is_killed(
    tmp_path: Any, reaper: Reaper, *, hangs: bool
) -> None:
    left = _made_and_left()
    try:
        bundle = str(tmp_path)
        context = _context(bundle, _Publisher())
        context.reaper = reaper
        resources = Resources(context, "c", bundle, RuntimeOptions())
        runtime = resources.runtime = cast("Any", _LateRuntime(left, hangs=hangs))
        process = Exec("c", "e", _NO_STDIO, {}, bundle)

        async def start() -> None:
            with raises(KilledWhileStarting if hangs else RuntimeFailed):
                await process.start(resources, reaper)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            if hangs:
                await runtime.hanging.wait()
                process.cancel_start()
        assert process.child is None
        assert os.listdir(bundle) == []
        await until(lambda: not is_alive(left), "the process has ended")
    finally:
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


async def test_a_paused_container_is_ended_with_its_pod_though_it_cannot_be_resumed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = str(tmp_path)
    context = _context(bundle, _Publisher())
    container = Container(context, "c", bundle, RuntimeOptions(), _NO_STDIO)
    container.created = True
    container.init.advance(Event.STARTED)
    container.init.advance(Event.PAUSED)
    ended: list[str] = []

    async def resume() -> None:
        container.init.advance(Event.RESUMED)  # by another client, who was faster
        raise WrongProcessState("to resume c", found="it is running")

    async def kill(exec_id: str, signum: int, *, everyone: bool) -> None:
        assert (exec_id, signum, everyone) == ("", signal.SIGKILL, False)
        ended.append("container")
        container.init.finish(Exit(4_000_000, 137, 1))

    async def stop() -> None:
        ended.append("sandbox")

    monkeypatch.setattr(container, "resume", resume)
    monkeypatch.setattr(container, "kill", kill)
    pod = SandboxService(context, cast("Any", SimpleNamespace(containers=[container])))
    pod._held = cast("Any", SimpleNamespace(id="pod", stop=stop, close=lambda: None))
    await pod.stop(cast("Any", None), sandbox_pb2.StopSandboxRequest(sandbox_id="pod"))
    assert ended == ["container", "sandbox"]


class _FreezingRuntime:
    """A runtime that freezes the container, and is killed before it says so."""

    def __init__(self) -> None:
        self.hangs = True
        self.frozen = False

    async def pause(self) -> None:
        self.frozen = True
        if self.hangs:
            raise ProgramTimeout("runc pause of c", found="it was killed")

    async def resume(self) -> None:
        if not self.frozen:
            raise ProcessFinished("runc resume", found="container not paused")
        self.frozen = False


async def test_a_pause_whose_runtime_was_killed_leaves_no_frozen_container(tmp_path: Any) -> None:
    """Its state is RUNNING, in which Resume would be refused."""
    bundle = str(tmp_path)
    container = Container(_context(bundle, _Publisher()), "c", bundle, RuntimeOptions(), _NO_STDIO)
    runtime = container._resources.runtime = cast("Any", _FreezingRuntime())
    container.init.advance(Event.STARTED)
    with raises(ProgramTimeout):
        await container.pause()
    assert (container.init.state, runtime.frozen) == (State.RUNNING, False)
    runtime.hangs = False
    await container.pause()
    assert (container.init.state, runtime.frozen) == (State.PAUSED, True)


class _Pod:
    """A pod without namespaces, whose creates wait for their file system until they succeed."""

    def __init__(self, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hanging = anyio.Event()
        self.directory = directory
        shim = _context(directory, _Publisher())
        self.containers: dict[str, Container] = {}
        own_socket = cast("Any", SimpleNamespace(forget=lambda _: None))
        lifetime = Lifetime(shim, own_socket, self.containers, lambda: None)
        self.tasks = TaskService(shim, self.containers, lifetime)
        self.sandboxes = SandboxService(shim, self.tasks)
        self.sandboxes._held = Sandbox(shim, "pod", directory, Pod())
        shim.sandbox = self.sandboxes._held
        monkeypatch.setattr(Resources, "_mount", self._hang)

    async def _hang(self, *_: object) -> None:
        self.hanging.set()
        await anyio.sleep_forever()

    async def create(self, name: str) -> None:
        bundle = os.path.join(self.directory, name)
        os.mkdir(bundle)
        files.write(os.path.join(bundle, "config.json"), b"{}")
        await self.tasks.create(_NOBODY, task_pb2.CreateTaskRequest(id=name, bundle=bundle))

    async def stop(self) -> None:
        await self.sandboxes.stop(_NOBODY, sandbox_pb2.StopSandboxRequest(sandbox_id="pod"))


_NOBODY: Any = None


async def test_a_create_under_way_ends_with_its_pod_and_none_follows(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = _Pod(str(tmp_path), monkeypatch)
    refused: list[Exception] = []

    async def create(name: str) -> None:
        with raises(KilledWhileStarting, WrongSandboxState) as caught:
            await pod.create(name)
        refused.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(create, "c")
        await pod.hanging.wait()
        await pod.stop()
        assert (len(refused), pod.containers) == (1, {})
        await create("late")
    assert is_error(refused[1], WrongSandboxState)
    assert pod.containers == {}


async def test_what_waits_to_be_restored_is_not_started_after_its_pod(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = _Pod(str(tmp_path), monkeypatch)
    container = Container(pod.tasks._shim, "c", str(tmp_path), RuntimeOptions(), _NO_STDIO)
    container.created = True
    container._resources.saved = cast("Any", "checkpoint")
    container.init.stdio = cast("Any", "open")
    pod.containers["c"] = container
    await pod.stop()
    with raises(WrongSandboxState):
        await pod.tasks.start(_NOBODY, task_pb2.StartRequest(id="c"))


@pytest.mark.parametrize("state", SandboxState, ids=lambda state: state.name.lower())
async def test_the_status_of_a_pod_has_a_pid_only_while_it_is_the_holders(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, state: SandboxState
) -> None:
    pod = _Pod(str(tmp_path), monkeypatch)
    sandbox = cast("Sandbox", pod.sandboxes._held)
    sandbox.pid, sandbox.state = 4_000_000, state
    asked = sandbox_pb2.SandboxStatusRequest(sandbox_id="pod", verbose=True)
    answer = pod.sandboxes.status(_NOBODY, asked)
    lives = state is SandboxState.READY
    assert answer.pid == (4_000_000 if lives else 0)
    assert ("4000000" in str(answer)) is lives


async def test_namespaces_that_cannot_be_forked_leave_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    monkeypatch.setattr(os, "fork", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        await namespaces.hold(Reaper(), Pod())
    assert len(os.listdir("/proc/self/fd")) == len(before)
