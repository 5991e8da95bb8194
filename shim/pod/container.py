"""One container: its state, and the operations that containerd requests.

:mod:`shim.pod.operations` defines which operation waits for which, and when an exit is published.
:mod:`shim.pod.creation` creates and removes a container's resources on the node. Create is the
first event of a container, Delete the last.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from api.proto import events_pb2, task_pb2
from shim.cgroup import resources, stats
from shim.checkpoint import criu
from shim.context import ShimContext
from shim.errors import (
    InvalidSignal,
    KilledWhileStarting,
    NvshimError,
    ProcessExists,
    ProcessFinished,
    ProcessNotFound,
    ProgramNotFound,
    ProgramTimeout,
    ShimError,
    TaskNotFound,
    WrongProcessState,
)
from shim.pod import checkpoints
from shim.pod.creation import Resources
from shim.pod.exec import Exec
from shim.pod.operations import Exits, Kind, Operations
from shim.pod.process import Event, Process, State, fill_exit
from shim.runtime.options import RuntimeOptions
from shim.stdio.uris import StdioUris

# 0 sends no signal: the answer only tells whether the process exists.
_SIGNALS: Final = range(65)


class Container:
    """A container and its processes.

    Args:
        shim: the state that the shim's containers share.
        container_id: the container's id.
        bundle: its bundle directory.
        options: options of its runtime.
        uris: the stdio of its init process.

    Attributes:
        created: whether its Create has succeeded.
    """

    def __init__(
        self,
        shim: ShimContext,
        container_id: str,
        bundle: str,
        options: RuntimeOptions,
        uris: StdioUris,
    ) -> None:
        self.id = container_id
        self.bundle = bundle
        self.created = False
        self.init = Process(container_id, "", uris)
        self._shim = shim
        self._execs: dict[str, Exec] = {}
        self._operations = Operations()
        self._resources = Resources(shim, container_id, bundle, options)
        self._exits = Exits(
            shim,
            self._resources,
            self._operations,
            report=self._report,
            init=self.init,
            execs=self._execs,
            bundle=bundle,
        )

    # -- create and start ------------------------------------------------------------------

    async def create(self, request: task_pb2.CreateTaskRequest, checkpoint: str = "") -> int:
        """Create the container as :meth:`shim.pod.creation.Resources.make` does.

        Args:
            request: containerd's request.
            checkpoint: the directory of a checkpoint to restore.

        Returns:
            The pid of the init process; 0 if Start will restore it from a checkpoint.
        """
        mounts = [(m.type, m.source, m.target, tuple(m.options)) for m in request.rootfs]
        async with self._operations.turn(Kind.CREATE):
            await self._resources.make(self.init, mounts, checkpoint, request.parent_checkpoint)
        self.created = True
        stdio = events_pb2.TaskIO(
            stdin=request.stdin,
            stdout=request.stdout,
            stderr=request.stderr,
            terminal=request.terminal,
        )
        self._report(
            events_pb2.TaskCreate,
            bundle=self.bundle,
            rootfs=request.rootfs,
            io=stdio,
            checkpoint=checkpoint,
            pid=self.init.pid,
        )
        self._exits.watch_init()
        return self.init.pid

    async def cancel_create(self) -> bool:
        """Cancel a running :meth:`create`.

        Returns:
            Whether it was undone within a few seconds.
        """
        self._resources.cancel()
        return await self._operations.ended(Kind.CREATE)

    async def start(self, exec_id: str) -> int:
        """Start init, or an added exec; return the pid."""
        process = self.process(exec_id)
        asked, kills = f"to start {process.id}", process.kills
        async with self._operations.turn(Kind.START_EXEC if exec_id else Kind.START, exec_id):
            if process.state is not State.CREATED:
                raise WrongProcessState(
                    asked, found=f"it is {process.state.name.lower()}", do="start a process once"
                )
            if process.kills != kills or (not exec_id and self._exits.init_reaped):
                raise KilledWhileStarting(asked, found="it was killed or has ended", do="delete it")
            if isinstance(process, Exec):
                await self._start_exec(process)
            else:
                if self._resources.injection is not None:
                    self._resources.injection.refuse_changed(self.id)
                await self._start_init()
        return process.pid

    async def _start_init(self) -> None:
        restored = self._resources.saved is not None and self.init.stdio is not None
        if restored:
            if self._shim.sandbox is not None:  # Stop found no process to end
                self._shim.sandbox.refuse_if_closed(self.id)
            kills = self.init.kills
            await self._resources.restore(self.init)
            if self.init.kills != kills and self.init.child is not None:
                self.init.child.kill()  # the runtime had just returned
        else:
            await self._resources.runtime.start()
        self.init.advance(Event.STARTED)
        self._report(events_pb2.TaskStart, pid=self.init.pid)
        if restored:
            self._exits.watch_init()
        self._exits.follow_memory()

    # -- execs -----------------------------------------------------------------------------

    async def add_exec(self, exec_id: str, spec: dict[str, Any], uris: StdioUris) -> None:
        """Add an exec, to start later.

        Args:
            exec_id: the exec's id, unique in this container.
            spec: the OCI process to run.
            uris: its stdio. This, not the spec, tells whether it has a terminal.

        Raises:
            ProcessExists: the id is taken.
            WrongProcessState: there is no init process, or it is paused.
        """
        async with self._operations.turn(Kind.EXEC, exec_id):
            # Events identify processes only by id: an exit with init's id would count as init's.
            if exec_id in self._execs or exec_id == self.id:
                found = "the container's own id" if exec_id == self.id else "an exec of that id"
                raise ProcessExists(
                    f"exec {exec_id} in {self.id}", found=found, do="choose another"
                )
            self._refuse_without_init()
            spec = {**spec, "terminal": uris.terminal}
            if self._resources.injection is not None:
                spec = self._resources.injection.edit_process(spec)
            self._execs[exec_id] = Exec(self.id, exec_id, uris, spec, self.bundle)
            self._report(events_pb2.TaskExecAdded, exec_id=exec_id)

    async def _start_exec(self, process: Exec) -> None:
        process.await_exit()
        try:
            self._refuse_without_init()
            self._shim.moves.expect()
            await process.start(self._resources, self._shim.reaper)
        except Exception as error:
            process.fail_waiters(
                WrongProcessState(
                    f"to wait for {process.exec_id} in {self.id}",
                    found=f"it could not be started: {error}",
                )
            )
            raise
        process.advance(Event.STARTED)
        self._report(events_pb2.TaskExecStarted, exec_id=process.exec_id, pid=process.pid)
        self._exits.watch_exec(process)

    async def delete_exec(self, exec_id: str) -> Process:
        """Remove an exec that has ended or never started.

        Raises:
            WrongProcessState: it runs, or is being started.
            ProcessNotFound: another Delete was faster.
        """
        process = self.process(exec_id)
        async with self._operations.turn(Kind.DELETE_EXEC, exec_id) as turn:
            if process.state is State.DELETED:
                raise self._no_exec(exec_id)
            asked = f"to delete exec {exec_id} of {self.id}"
            self._refuse_while_starting(turn.overdue, asked)
            if process.state is State.RUNNING:
                raise WrongProcessState(asked, found="it is running", do="kill it first")
            process.advance(Event.DELETED)
        # Its id stays in use until its output has been passed on.
        if process.stdio is not None:
            await self._exits.best_effort(process.stdio.drain())
        process.close_stdio()
        if process.exit is None:
            process.fail_waiters(self._no_exec(exec_id))
        del self._execs[exec_id]
        return process

    def process(self, exec_id: str) -> Process:
        """Return init or an exec.

        Raises:
            ProcessNotFound: there is no exec with that id.
        """
        process = self._execs.get(exec_id) if exec_id else self.init
        if process is None:
            raise self._no_exec(exec_id)
        return process

    # -- kill --------------------------------------------------------------------------------

    async def kill(self, exec_id: str, signum: int, *, everyone: bool) -> None:
        """Signal a process, or all processes of the container.

        Raises:
            InvalidSignal, ProcessFinished, ProcessNotFound, WrongProcessState: the signal does not
            exist, or the process has ended, or does not exist yet.
        """
        process = self.process(exec_id)
        asked = f"signal {signum} to {process.id}"
        if signum not in _SIGNALS:
            raise InvalidSignal(asked, found="signals 0 to 64", do="use one of them")
        if process.state in (State.STOPPED, State.DELETED):
            if everyone and not exec_id:
                return  # none is left
            raise ProcessFinished(asked, found="it has ended")
        if not exec_id:
            async with self._operations.turn(Kind.KILL):
                await self._kill_init(asked, signum, everyone=everyone)
        elif process.child is None:
            starts = self._operations.has(Kind.START_EXEC, exec_id=exec_id)
            if starts and signum == signal.SIGKILL:
                self._execs[exec_id].cancel_start()
                return
            found = "it is being started" if starts else "it was never started"
            raise WrongProcessState(asked, found=found, do="start it")
        elif process.child.exit is not None:
            raise ProcessFinished(asked, found="it has ended")
        else:
            process.child.signal(signum)

    async def _kill_init(self, asked: str, signum: int, *, everyone: bool) -> None:
        runtime = self._resources.runtime
        if self.init.child is None:
            if signum == signal.SIGKILL and self._operations.has(Kind.START):
                # CRIU may hang, and no other process exists yet.
                self.init.kills += 1
                runtime.end_calls("restore")
                return
            raise ProcessNotFound(
                asked,
                found="it is restored from a checkpoint by Start, and has no process yet",
                do="start it",
            )
        self._exits.by_checkpoint &= signum != signal.SIGKILL
        try:
            await runtime.kill(signum, everyone=everyone)
        except (ProgramNotFound, ProgramTimeout, OSError) as error:
            # A container must be stoppable even if its runtime was removed, hangs, or cannot start
            # for lack of descriptors or processes.
            self._shim.log.warning("signalled without the runtime", id=self.id, why=str(error))
            if everyone:
                self._resources.signal_cgroup(signum)
            else:
                self.init.child.signal(signum)

    # -- pause, resume, update ---------------------------------------------------------------

    async def pause(self) -> None:
        """Freeze the container.

        Raises:
            WrongProcessState: it does not run.
        """
        asked = f"to pause {self.id}"
        async with self._operations.turn(Kind.PAUSE):
            self._require_init(State.RUNNING, asked)
            try:
                await self._resources.runtime.pause()
            except ProgramTimeout:
                await self._thaw()
                raise
            except ProcessFinished as error:
                if self.init.child is None or self.init.child.exit is not None:
                    raise
                # runc reports a paused container as not running.
                raise WrongProcessState(
                    asked, found=error.found, do="resume it, if another client has paused it"
                ) from error
            if self.init.state is State.RUNNING:  # it may have died meanwhile
                self.init.advance(Event.PAUSED)
                self._report(events_pb2.TaskPaused)

    async def _thaw(self) -> None:
        """Undo a pause whose runtime was killed: a frozen "running" container cannot be resumed."""
        try:
            await self._resources.runtime.resume()
        except (NvshimError, OSError) as error:  # the runtime had not frozen it
            self._shim.log.debug("undoing a pause", id=self.id, why=str(error))

    async def resume(self) -> None:
        """Resume a frozen container.

        Raises:
            WrongProcessState: it is not paused.
        """
        async with self._operations.turn(Kind.RESUME):
            self._require_init(State.PAUSED, f"to resume {self.id}")
            await self._resources.runtime.resume()
            if self.init.state is State.PAUSED:
                self.init.advance(Event.RESUMED)
                self._report(events_pb2.TaskResumed)

    async def update(self, limits: dict[str, Any]) -> None:
        """Change the container's limits.

        Args:
            limits: the OCI spec's ``linux.resources``; missing limits do not change.

        Raises:
            InvalidResources, WrongProcessState: the limits are malformed, or the container has
                ended.
        """
        document = resources.encode(limits)
        async with self._operations.turn(Kind.UPDATE):
            if self.init.state in (State.STOPPED, State.DELETED):
                raise WrongProcessState(
                    f"to update {self.id}", found="it has ended", do="update a running container"
                )
            await self._resources.runtime.update(document)

    # -- checkpoint --------------------------------------------------------------------------

    async def checkpoint(self, path: str, options: AnyMessage | None) -> None:
        """Save the container in a directory.

        Args:
            path: the directory.
            options: of type containerd.runc.v1.CheckpointOptions; None for the defaults.

        Raises:
            WrongProcessState: it does not run.
            NvshimError: saving failed. The container continues, and nothing is left of the
                checkpoint.
        """
        request = criu.read_options(options)
        asked = f"a checkpoint of {self.id}"
        async with self._operations.turn(Kind.CHECKPOINT):
            if self.init.state is not State.PAUSED:
                self._require_init(State.RUNNING, asked)
            if self._exits.init_reaped:  # another process may have its pid by now
                raise WrongProcessState(asked, found="it has ended", do="save a running container")
            await checkpoints.save(
                path,
                tasks=self._shim.tasks,
                resources=self._resources,
                exits=self._exits,
                init=self.init,
                pids=self.pids(),
                request=request,
                report=self._report,
            )

    # -- delete ------------------------------------------------------------------------------

    async def delete(self) -> None:
        """Remove the container, whose init has ended or never started.

        Raises:
            WrongProcessState: it runs, or is being started.
            TaskNotFound: another Delete was faster.
            NvshimError: the runtime or an unmount failed; Delete may be repeated.
        """
        asked = f"to delete {self.id}"
        self._refuse_while_running(asked)
        async with self._operations.turn(Kind.DELETE) as turn:
            if self.init.state is State.DELETED:
                raise TaskNotFound(f"task {self.id}", found="it was deleted a moment ago")
            self._refuse_while_starting(turn.overdue, asked)
            self._refuse_while_running(asked)
            await self._resources.remove_from_runtime(self.init)
            # For one that never started; for others it is known.
            if self.init.child is not None:
                await self.init.wait()
            if self.init.stdio is not None:
                await self._exits.best_effort(self.init.stdio.drain())
            await self._resources.remove_rootfs()
            self.init.advance(Event.DELETED)
        self._report(events_pb2.TaskDelete, self.init, pid=self.init.pid)
        for process in (self.init, *self._execs.values()):
            if process.exit is None:
                process.fail_waiters(self._no_exec(process.exec_id))
            # Closing the last descriptor of a fifo without a name frees it on its disk. No client
            # waits for that.
            if process.stdio is not None:
                self._shim.tasks.start_soon(_close_stdio, process)

    # -- questions ---------------------------------------------------------------------------

    def pids(self) -> dict[int, str]:
        """Return the pids in the container, each with its exec's id; "" if it is not an exec.

        Init's pid is included until the container is deleted, even if init has ended. Until a
        restore, the pid is 0, as in State. After an error or an empty answer, a restarting
        containerd would assume a shim without a task, and delete it with its unread exit.
        """
        if self.init.child is None:
            return {0: ""}
        named = {p.pid: p.exec_id for p in self._execs.values() if p.state is State.RUNNING}
        named[self.init.pid] = ""
        cgroup = self._resources.cgroup
        inside = cgroup.pids() if cgroup else []
        return {pid: named.get(pid, "") for pid in sorted({*inside, *named})}

    def describe(self) -> list[dict[str, object]]:
        """Describe init, each exec, and each unfinished runtime call, for the log."""
        state = "" if self.created else "being created"
        lines: list[dict[str, object]] = [
            {
                "container": self.id,
                "exec": process.exec_id,
                "state": state or process.state.name.lower(),
                "pid": process.pid,
                "starting": self._operations.has(
                    Kind.START_EXEC if process.exec_id else Kind.START, exec_id=process.exec_id
                ),
            }
            for process in (self.init, *self._execs.values())
        ]
        calls = self._resources.runtime.calls()
        return lines + [{"container": self.id, "call": verb, "pid": pid} for pid, verb in calls]

    def stats(self) -> Message:
        """Return the container's usage, as the message for the host's version of cgroups.

        Raises:
            CgroupNotFound: it has no cgroup of its own, or its cgroup was removed.
        """
        pid = 0 if self._exits.init_reaped else self.init.pid
        return stats.read(self._resources.cgroup, container_id=self.id, pid=pid)

    def _report(
        self, kind: Callable[..., Message], exited: Process | None = None, **fields: Any
    ) -> None:
        """Publish an event of the container, with the exit of a process if it has one."""
        event = kind(container_id=self.id, **fields)
        if exited is not None:
            fill_exit(event, exited)
        self._shim.publisher.publish(self.id, event)

    # -- refusals ----------------------------------------------------------------------------

    def _no_exec(self, exec_id: str) -> ShimError:
        return ProcessNotFound(
            f"exec {exec_id} in {self.id}", found="no exec of that id", do="list its execs"
        )

    def _require_init(self, state: State, asked: str) -> None:
        if self.init.state is not state:
            raise WrongProcessState(
                asked, found=f"it is {self.init.state.name.lower()}", do="ask for its state first"
            )

    def _refuse_without_init(self) -> None:
        """Refuse an exec unless init is created, or runs and is not being paused."""
        state = "stopped" if self._exits.init_reaped else self.init.state.name.lower()
        if state == "running" and self._operations.has(Kind.PAUSE):
            state = "being paused"
        if self.init.child is None:
            state = "not restored yet"
        if state not in ("created", "running"):
            raise WrongProcessState(
                f"an exec in {self.id}",
                found=f"its init process is {state}",
                do="exec into a running container",
            )

    def _refuse_while_running(self, asked: str) -> None:
        if self.init.state in (State.RUNNING, State.PAUSED):
            found = f"it is {self.init.state.name.lower()}"
            raise WrongProcessState(asked, found=found, do="kill it first")

    def _refuse_while_starting(self, overdue: Sequence[Kind], asked: str) -> None:
        if Kind.START in overdue or Kind.START_EXEC in overdue:
            raise WrongProcessState(asked, found="it is being started", do="kill the container")


async def _close_stdio(process: Process) -> None:
    process.close_stdio()
