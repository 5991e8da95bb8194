"""One container: its processes, and the order in which things happen to them.

Order
- Create is published before anything else of the container, Delete after everything.
- A process's start is published before its exit, also when it died before Start returned.
- The exits of execs are published before init's: containerd tears the task down on that one.
  Once init has been reaped no new exec starts, and if the container has no pid namespace of
  its own, what is left of it is killed first.

Everything that Create makes (mounts, stdio, the runtime's container, files in the bundle) is
undone in one place, by success of Delete and by failure of Create alike.
"""

from __future__ import annotations

import json
import os

from api import aio
from shim import bundle as bundle_files
from shim import cgroup, detaching, mounts, oom, spare
from shim.errors import (
    ContainerLeft,
    InvalidSignal,
    MountFailed,
    NvshimError,
    ProcessExists,
    ProcessFinished,
    ProcessNotFound,
    ProgramNotFound,
    ProgramTimeout,
    RuntimeFailed,
    RuntimeMisbehaved,
    TaskNotFound,
    WrongProcessState,
)
from shim.injection import Injector
from shim.ocispec import cgroups_path_of, has_own_pid_namespace, has_user_namespace, root_of
from shim.options import with_cgroup_driver
from shim.process import Event, Process, State, StdioUris, Underway
from shim.reports import Reports
from shim.runtime import LowLevelRuntime
from shim.stdio import open_stdio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any, Final, TypeVar

    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.message import Message

    from shim.cgroup import Cgroup
    from shim.checkpoint import Calls, Saved
    from shim.events import Publisher
    from shim.log import Log
    from shim.oom import OomWatch
    from shim.options import RuntimeOptions
    from shim.reaper import Child, Reaper
    from shim.sandbox import Sandbox
    from shim.stdio.stdio import Stdio
    from shim.tasks import Tasks

    Result = TypeVar("Result")

# The C module under signal: the public one makes enumerations of its numbers.
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

_PID_FILE_LIMIT: Final = 32

_SIGNALS: Final = range(1, 65)

_KILLED: Final = 128 + _signal.SIGKILL

# Seconds that a process may take to die of SIGKILL, before the runtime is asked what it thinks.
_DYING: Final = 10.0

# Seconds that the start of a process is waited for by what has to come after it.
_LATE: Final = 5.0


class Surroundings:
    """What all containers of this shim share."""

    __slots__ = ("log", "namespace", "publisher", "reaper", "sandbox", "tasks")

    def __init__(
        self, *, namespace: str, reaper: Reaper, publisher: Publisher, tasks: Tasks, log: Log
    ) -> None:
        self.namespace = namespace
        self.reaper = reaper
        self.publisher = publisher
        self.tasks = tasks
        self.log = log
        # The sandbox of the pod, where this shim holds it.
        self.sandbox: Sandbox | None = None


class Container:
    """A container and its processes.

    Args:
        shim: what it shares with the shim's other containers.
        container_id: its id.
        bundle: its bundle directory.
        options: how its runtime is called.
        uris: the stdio of its init process.
    """

    def __init__(
        self,
        shim: Surroundings,
        container_id: str,
        bundle: str,
        options: RuntimeOptions,
        uris: StdioUris,
    ) -> None:
        self.id = container_id
        self.bundle = bundle
        self.init = Process(container_id, "", uris)
        self.reports = Reports(shim.publisher, container_id)
        self._shim = shim
        self._execs: dict[str, Process] = {}
        self._exec_specs: dict[str, dict[str, Any]] = {}
        self._root = os.path.join(options.root, shim.namespace)
        self._use(options)
        self._injector = Injector(shim.reaper, bundle, shim.log)
        self._rootfs = os.path.join(bundle, bundle_files.ROOTFS)
        self._mounted: Sequence[mounts.Mount] = ()
        self._own_pid_namespace = True
        self._cgroup: Cgroup | None = None
        self._init_reaped = False
        self._pausing = False
        self._freezing = aio.Lock()
        self._deleting = aio.Lock()
        self._updating = aio.Lock()
        self._kills = Underway()
        self._oom: OomWatch | None = None
        self._watching = aio.CancelScope()
        self._checkpointing = aio.Lock()
        # A checkpoint is under way that is to end init.
        self._ends_by_checkpoint = False
        self._saved: Saved | None = None

    # -- create and start ------------------------------------------------------------------

    async def create(
        self, rootfs_mounts: Sequence[mounts.Mount], checkpoint: str = "", parent: str = ""
    ) -> int:
        """Make the container, with its init process waiting to be started.

        Args:
            rootfs_mounts: what containerd wants mounted at the bundle's rootfs, in order.
            checkpoint: the directory of a checkpoint: then the container has no process before
                Start restores it.
            parent: the directory of an earlier one that it builds on.

        Returns:
            The pid of the init process; 0 if it is to be restored.

        Raises:
            NvshimError: whatever stood in the way; nothing is left of the attempt.
        """
        # What the runtime has already is somebody else's container, and not to be undone.
        ours = not self._runtime_has_it()
        called = False
        try:
            if checkpoint:
                from shim.checkpoint import Saved  # noqa: PLC0415 - few are restored

                self._saved = Saved(checkpoint, parent)
            spec = bundle_files.read_spec(self.bundle)
            if self._shim.sandbox is not None and self._shim.sandbox.admit(spec):
                bundle_files.write_spec(self.bundle, spec)
            self._own_pid_namespace = has_own_pid_namespace(spec)
            self._use(with_cgroup_driver(self._options, spec), mapped=has_user_namespace(spec))
            self._record_for_cleanup()
            await self._mount_rootfs(spec, rootfs_mounts)
            await self._injector.inject(spec, root_of(spec, self.bundle), self._options.binary_name)
            stdio = await self._open_stdio(self.init)
            if self._saved is None:
                called = True
                await self._make_init(stdio)
        except BaseException as error:
            self._shim.log.error("create failed", id=self.id, error=str(error))
            with aio.CancelScope(shield=True):
                await self._undo_create(made=ours and called)
            raise
        return self.init.pid

    async def _mount_rootfs(self, spec: dict[str, Any], wanted: Sequence[mounts.Mount]) -> None:
        """Mount what containerd wants, with a layer of what the container is given on top."""
        layered = await self._injector.prepare(spec, wanted)
        if layered is not None:
            try:
                mounts.mount_rootfs(layered, self._rootfs)
            except MountFailed as error:
                self._shim.log.warning("mounted without a layer", id=self.id, why=str(error))
                self._injector.forgo_layer()
            else:
                self._mounted = layered
                return
        mounts.mount_rootfs(wanted, self._rootfs)
        self._mounted = wanted

    def _use(self, options: RuntimeOptions, *, mapped: bool = False) -> None:
        self._options = options
        self._runtime = LowLevelRuntime(
            self._shim.reaper,
            options,
            container_id=self.id,
            root=self._root,
            bundle=self.bundle,
            mapped=mapped,
        )

    async def _make_init(self, stdio: Stdio) -> None:
        """Let the runtime make init, anew or as it was saved, and take it over."""
        pid_file = os.path.join(self.bundle, bundle_files.INIT_PID)
        with self._shim.reaper.window():
            if self._saved is None:
                await self._runtime.create(stdio.child(), pid_file=pid_file)
            else:
                await self._criu().restore(self._saved, stdio.child(), pid_file=pid_file)
            self.init.child = self._adopt(pid_file)
        self._runtime.made(self.init.child)
        self._injector.made(self.init.pid)
        await self._injector.cover_proc(self.init.pid)
        await stdio.started()
        self._cgroup = cgroup.of(self.init.pid)

    def watch_init(self) -> None:
        """Tell the exit of init when it comes. To be called once Create has been published."""
        if self.init.child is not None:
            self._watch_memory()
            self._shim.tasks.start_soon(self._publish_exit_of_init)

    async def start(self, exec_id: str) -> int:
        """Start init, or an exec that was added.

        Args:
            exec_id: which exec; empty for init.

        Returns:
            The pid.
        """
        process = self.process(exec_id)
        async with process.starting:
            if process.state is not State.CREATED:
                raise WrongProcessState(
                    f"to start {process.id}",
                    found=f"it is {process.state.name.lower()}",
                    do="a process is started once",
                )
            if exec_id:
                process.begin()
                try:
                    await self._start_exec(process)
                except Exception as error:
                    process.never_ends(
                        WrongProcessState(
                            f"to wait for {exec_id} in {self.id}",
                            found=f"it could not be started: {error}",
                        )
                    )
                    raise
            else:
                self._injector.refuse_changed(self.id)
                await self._start_init(process)
        return process.pid

    async def _start_init(self, process: Process) -> None:
        if self._saved is not None and process.stdio is not None:
            if self._deleting.locked():
                # The runtime, which would refuse, does not know of it yet.
                raise WrongProcessState(f"to start {self.id}", found="it is being deleted")
            await self._restore(process.stdio)
            self._init_started()
            self.watch_init()
        else:
            await self._runtime.start()
            self._init_started()

    def _init_started(self) -> None:
        self.init.advance(Event.STARTED)
        self.reports.started(self.init)

    # -- checkpoint and restore --------------------------------------------------------------

    async def checkpoint(self, path: str, options: AnyMessage | None) -> None:
        """Save the container in a directory.

        Args:
            path: the directory.
            options: of type containerd.runc.v1.CheckpointOptions; None for the defaults.

        Raises:
            WrongProcessState: it does not run.
            NvshimError: it could not be saved; it goes on, and what was written is gone.

        Nothing waits for a checkpoint: if init ends while one is under way, and not by it, the
        runtime and CRIU are killed.
        """
        from shim import criu  # noqa: PLC0415 - few are saved

        request = criu.read_options(options)
        async with self._checkpointing:
            if self.init.state is not State.PAUSED:
                self._require_init(State.RUNNING, f"a checkpoint of {self.id}")
            uris = self.init.uris
            paths = [
                uri if uri.startswith("/") and not uris.terminal else None
                for uri in (uris.stdin, uris.stdout, uris.stderr)
            ]
            files = criu.external_files(self.init.pid, self.pids(), paths)
            over = aio.CancelScope()
            self._shim.tasks.start_soon(self._end_checkpoint, os.pidfd_open(self.init.pid), over)
            self._ends_by_checkpoint = request.exit
            try:
                try:
                    await self._injector.uncover_proc(self.init.pid)
                    await self._criu().save(path, request, files)
                finally:
                    if self.init.child is not None and self.init.child.exit is None:
                        await self._injector.cover_proc(self.init.pid)
                self.reports.checkpointed(path)
            finally:
                over.cancel()
                self._ends_by_checkpoint = False

    async def _end_checkpoint(self, init: int, over: aio.CancelScope) -> None:
        """End the checkpoint that is under way when init ends.

        While CRIU traces init, its end is told to CRIU alone; a pidfd tells everybody.

        Args:
            init: a pidfd of it; closed here.
            over: cancelled when the checkpoint is over.
        """
        try:
            with over:
                await aio.wait_readable(init)
                if self._ends_by_checkpoint:
                    await aio.sleep(_LATE)
                self._runtime.end_calls("checkpoint")
        finally:
            os.close(init)

    async def _restore(self, stdio: Stdio) -> None:
        ours = not self._runtime_has_it()
        try:
            await self._make_init(stdio)
        except BaseException as error:
            self._shim.log.error("restore failed", id=self.id, error=str(error))
            with aio.CancelScope(shield=True):
                await self._undo_restore(delete=ours and self._runtime_has_it())
            raise

    async def _undo_restore(self, *, delete: bool) -> None:
        """Leave what there was before: the container may be restored again, or deleted."""
        await self._end_init()
        self.init.child = None
        try:
            if delete:
                # Of a runtime that was killed in its work.
                root = os.path.join(self._root, self.id, bundle_files.RESTORED_ROOT)
                await detaching.unmount(root)
                await self._runtime.delete(force=True)
                await self._end_cgroup()
            bundle_files.remove(os.path.join(self.bundle, bundle_files.INIT_PID))
        except (NvshimError, OSError) as error:
            self._shim.log.warning("undoing restore", id=self.id, why=str(error))

    async def _end_cgroup(self) -> None:
        """End what a runtime that was killed in its work has made without writing it down."""
        from shim import remains  # noqa: PLC0415 - for what hardly ever happens

        path = cgroups_path_of(bundle_files.read_spec(self.bundle))
        if not remains.has_cgroup(path, self.id):
            return
        for problem in await _in_thread(lambda: remains.end_cgroup(path, self.id)):
            self._shim.log.warning("a cgroup is left", id=self.id, why=problem)

    def _criu(self) -> Calls:
        from shim.checkpoint import Calls  # noqa: PLC0415 - few are saved or restored

        return Calls(self._runtime, self._options, self.id, self.bundle)

    # -- execs -----------------------------------------------------------------------------

    async def add_exec(self, exec_id: str, spec: dict[str, Any], uris: StdioUris) -> None:
        """Reserve an exec, to be started later.

        While init is being started, it waits: the container's program may run, and say so,
        before the runtime has returned.

        Args:
            exec_id: its id, unique in this container.
            spec: the OCI process to run; whether it has a terminal is not taken from it.
            uris: its stdio, and whether that is a terminal.

        Raises:
            ProcessExists: the id is taken.
            WrongProcessState: init has ended.
        """
        await _none_is_starting([self.init])
        # An exit of that id would be taken for init's: events tell them apart by nothing else.
        if exec_id in self._execs or exec_id == self.id:
            found = "the container's own id" if exec_id == self.id else "an exec of that id"
            raise ProcessExists(f"exec {exec_id} in {self.id}", found=found, do="choose another")
        self._refuse_unless_running()
        # Clients of containerd may leave it out of the spec; that of the request counts.
        process = {**spec, "terminal": uris.terminal}
        self._exec_specs[exec_id] = self._injector.edit_process(process)
        self._execs[exec_id] = Process(self.id, exec_id, uris)
        self.reports.exec_added(exec_id)

    async def _start_exec(self, process: Process) -> None:
        self._refuse_unless_running()
        # Named so that no exec's id makes it another file's name: "init" is a fine id.
        path = os.path.join(self.bundle, f"exec.{process.exec_id}")
        process_file, pid_file = f"{path}.json", f"{path}.pid"
        try:
            bundle_files.write(process_file, json.dumps(self._exec_specs[process.exec_id]).encode())
            stdio = await self._open_stdio(process)
            with self._shim.reaper.window():
                await self._runtime.execute(
                    stdio.child(), process_file=process_file, pid_file=pid_file
                )
                process.child = self._adopt(pid_file)
            await stdio.started()
        except BaseException:
            process.close_stdio()
            _kill(process.child)
            process.child = None
            raise
        finally:
            for file in (process_file, pid_file):
                bundle_files.remove(file)
        process.advance(Event.STARTED)
        self.reports.exec_started(process)
        self._shim.tasks.start_soon(self._publish_exit_of_exec, process)

    # -- what is asked of a running container ------------------------------------------------

    def process(self, exec_id: str) -> Process:
        """Init, or an exec.

        Raises:
            ProcessNotFound: there is no exec of that id.
        """
        process = self._execs.get(exec_id) if exec_id else self.init
        if process is None:
            raise self._no_exec(exec_id)
        return process

    def _no_exec(self, exec_id: str) -> ProcessNotFound:
        return ProcessNotFound(
            f"exec {exec_id} in {self.id}", found="no exec of that id", do="list its execs"
        )

    async def kill(self, exec_id: str, signum: int, *, everyone: bool) -> None:
        """Signal a process, or all processes of the container.

        Raises:
            InvalidSignal: there is no such signal.
            ProcessFinished: it has ended already.
            WrongProcessState: it does not exist yet.
        """
        process = self.process(exec_id)
        if signum not in _SIGNALS:
            raise InvalidSignal(
                f"signal {signum} to {process.id}", found="signals 1 to 64", do="use one of them"
            )
        if process.state in (State.STOPPED, State.DELETED):
            raise ProcessFinished(f"signal {signum} to {process.id}", found="it has ended")
        if not exec_id and process.child is None:
            if signum == _signal.SIGKILL and process.starting.locked():
                # CRIU may hang, and there is nothing else to be killed yet.
                self._runtime.end_calls("restore")
                return
            raise ProcessNotFound(
                f"signal {signum} to {self.id}",
                found="it is to be restored from a checkpoint, and has no process yet",
                do="start it",
            )
        if not exec_id:
            self._ends_by_checkpoint &= signum != _signal.SIGKILL
            with self._kills:
                await self._kill_container(signum, everyone=everyone)
            return
        if process.child is None:
            raise WrongProcessState(
                f"signal {signum} to {process.id}", found="it was never started", do="start it"
            )
        if process.child.exit is not None:
            raise ProcessFinished(f"signal {signum} to {process.id}", found="it has ended")
        # Ours and not reaped yet, so the pid is still its own.
        os.kill(process.child.pid, signum)

    async def _kill_container(self, signum: int, *, everyone: bool) -> None:
        try:
            await self._runtime.kill(signum, everyone=everyone)
        except (ProgramNotFound, ProgramTimeout, OSError) as error:
            # A container whose runtime was removed, hangs, or cannot be started for want of
            # descriptors or processes, must still be possible to stop.
            self._shim.log.warning("signalled without the runtime", id=self.id, why=str(error))
            if everyone:
                self._kill_all_in_cgroup(signum)
            elif self.init.child is not None and self.init.child.exit is None:
                os.kill(self.init.child.pid, signum)

    async def pause(self) -> None:
        """Freeze the container.

        Raises:
            WrongProcessState: it does not run.
        """
        asked = f"to pause {self.id}"
        async with self._freezing:
            self._require_init(State.RUNNING, asked)
            # A runtime that is frozen in the middle of an exec would not return before Resume.
            self._pausing = True
            try:
                with aio.move_on_after(_LATE):
                    await _none_is_starting(list(self._execs.values()))
                self._require_init(State.RUNNING, asked)
                await self._freeze(asked)
            finally:
                self._pausing = False
            if self.init.state is State.RUNNING:  # it may have died meanwhile
                self.init.advance(Event.PAUSED)
                self.reports.paused()

    async def _freeze(self, asked: str) -> None:
        try:
            await self._runtime.pause()
        except ProcessFinished as error:
            if self.init.child is None or self.init.child.exit is not None:
                raise
            # runc says of a paused container that it does not run.
            raise WrongProcessState(
                asked, found=error.found, do="resume it, if somebody else has paused it"
            ) from error

    async def resume(self) -> None:
        """Let a frozen container go on.

        Raises:
            WrongProcessState: it is not paused.
        """
        async with self._freezing:
            self._require_init(State.PAUSED, f"to resume {self.id}")
            await self._runtime.resume()
            if self.init.state is State.PAUSED:
                self.init.advance(Event.RESUMED)
                self.reports.resumed()

    def pids(self) -> dict[int, str]:
        """The pids in the container, each with the id of the exec that it is, or empty.

        Init's is among them until the container is deleted. It is 0, as State has it, while
        the container is to be restored: a containerd that comes back takes an error or an
        empty answer for the sign that there is no task, and deletes it.
        """
        if self.init.child is None:
            return {0: ""}
        named = {p.pid: p.exec_id for p in self._execs.values() if p.state is State.RUNNING}
        # Also when it has ended: a containerd that comes back takes a shim without processes
        # for one that never had a task, and deletes it with the exit that nobody has read.
        if self.init.pid:
            named[self.init.pid] = ""
        inside = self._cgroup.pids() if self._cgroup else []
        return {pid: named.get(pid, "") for pid in sorted({*inside, *named})}

    def describe(self) -> list[dict[str, object]]:
        """What there is, for a person who asks: init and each exec, and calls of the runtime."""
        lines: list[dict[str, object]] = [
            {
                "container": self.id,
                "exec": process.exec_id,
                "state": process.state.name.lower(),
                "pid": process.pid,
                "starting": process.starting.locked(),
            }
            for process in (self.init, *self._execs.values())
        ]
        calls = self._runtime.calls()
        return lines + [{"container": self.id, "call": verb, "pid": pid} for pid, verb in calls]

    def stats(self) -> Message:
        """What the container has used.

        Returns:
            The message of the version of cgroups that has the controllers.

        Raises:
            CgroupNotFound: it has no cgroup of its own, or not any more.
        """
        from shim import stats  # noqa: PLC0415 - most containers are never asked

        pid = 0 if self._init_reaped else self.init.pid
        return stats.read(self._cgroup, container_id=self.id, pid=pid)

    async def update(self, limits: dict[str, Any]) -> None:
        """Change the container's limits.

        Args:
            limits: the OCI spec's ``linux.resources``; what is not in it stays as it is.

        Raises:
            InvalidResources: they are malformed.
            WrongProcessState: it has ended.
        """
        from shim import resources  # noqa: PLC0415 - limits are rarely changed

        document = resources.encode(limits)
        # The runtime reads its record, changes the cgroup, and writes its record.
        async with self._updating:
            if self.init.state in (State.STOPPED, State.DELETED):
                raise WrongProcessState(
                    f"to update {self.id}", found="it has ended", do="update a running container"
                )
            await self._runtime.update(document)

    # -- the end -----------------------------------------------------------------------------

    async def delete_exec(self, exec_id: str) -> Process:
        """Forget an exec that has ended or was never started.

        Raises:
            WrongProcessState: it runs.
            ProcessNotFound: another Delete was faster.
        """
        process = self.process(exec_id)
        async with process.starting:
            if process.state is State.DELETED:
                raise self._no_exec(exec_id)
            process.advance(Event.DELETED)
        # Its id is taken until its output has been passed on.
        if process.stdio is not None:
            await process.stdio.drain()
        process.close_stdio()
        process.never_ends(self._no_exec(exec_id))
        del self._execs[exec_id]
        del self._exec_specs[exec_id]
        return process

    async def delete(self) -> None:
        """Remove the container; init has ended or was never started.

        Raises:
            WrongProcessState: it runs.
            TaskNotFound: another Delete was faster.
            NvshimError: the runtime or an unmount failed; Delete may be asked again.
        """
        async with self._deleting:
            if self.init.state is State.DELETED:
                raise TaskNotFound(f"task {self.id}", found="it was deleted a moment ago")
            # A client that is told of the exit deletes at once, and closes the connection under
            # a Kill whose runtime has done its work and not ended yet.
            with aio.move_on_after(_LATE):
                await self._kills.none()
            async with self.init.starting:
                await self._delete_from_runtime()
            # Of one that was never started; of others it is known.
            if self.init.child is not None:
                await self.init.wait()
            if self.init.stdio is not None:
                await self.init.stdio.drain()
            overlay = detaching.detach(self._rootfs, self._mounted)
            if overlay is not None:
                self._shim.tasks.start_soon(_close, overlay)
            await detaching.unmount(self._rootfs)
            self._injector.release()
            self.init.advance(Event.DELETED)
        for process in (self.init, *self._execs.values()):
            process.never_ends(self._no_exec(process.exec_id))
            # A fifo whose names are gone ends with its last descriptor, on its disk. Nobody has
            # to wait for that.
            if process.stdio is not None:
                self._shim.tasks.start_soon(_close_stdio, process)

    async def _delete_from_runtime(self) -> None:
        if self.init.state in (State.RUNNING, State.PAUSED):
            raise WrongProcessState(
                f"to delete {self.id}", found="it is running", do="kill it first"
            )
        if self.init.child is None:
            return  # never restored; what the runtime may have of that name is somebody else's
        with aio.move_on_after(_LATE):
            async with self._checkpointing:
                pass  # one that init's end has ended
        await self._end_init()
        try:
            await self._runtime.delete()
        except ProcessFinished:
            return  # an earlier Delete came this far
        except RuntimeFailed:
            # What it has saved and ended it has forgotten too. crun has other words for that.
            if self._runtime_has_it():
                raise
            return
        if self._runtime_has_it():
            raise ContainerLeft(
                f"to delete {self.id}",
                found=f"{self._options.binary_name} succeeded and left {self._root}/{self.id}",
                do="delete it with that runtime, and ask again",
            )

    async def _end_init(self) -> None:
        """Kill init if it lives, and wait until the last of its threads is gone.

        A runtime that deletes by force does not wait so long, and leaves the cgroup behind
        without a word if the kernel is slow to empty it.
        """
        child = self.init.child
        if child is not None:
            _kill(child)
            with aio.move_on_after(_DYING):
                await child.wait()

    # -- inside --------------------------------------------------------------------------------

    async def _publish_exit_of_exec(self, process: Process) -> None:
        if process.child is not None:
            exit_ = await process.child.wait()
            if exit_.status == _KILLED and self._out_of_memory():
                self.reports.out_of_memory()
        self.reports.exited(process)
        if process.stdio is not None:
            await self._as_far_as_possible(process.stdio.let_go())

    async def _publish_exit_of_init(self) -> None:
        out_of_memory = killed = False
        if self.init.child is not None:
            killed = (await self.init.child.wait()).status == _KILLED
            # At once: systemd removes the cgroup when it is empty.
            out_of_memory = self._out_of_memory(init_killed=killed)
        self._watching.cancel()
        self._init_reaped = True
        # A Start that is under way has its event first. Execs that are being started fail
        # by themselves: the runtime finds no init.
        await self._settle([self.init])
        if killed and self._ends_by_checkpoint:
            # That is told first, if it comes to its end in time.
            with aio.move_on_after(_LATE):
                async with self._checkpointing:
                    pass
        self._runtime.end_calls("checkpoint")
        if out_of_memory:
            self.reports.out_of_memory()
        if not self._own_pid_namespace:
            await self._kill_remains()
        execs = list(self._execs.values())
        await self._settle(execs)
        running = [process for process in execs if process.state is State.RUNNING]
        if running and not self._own_pid_namespace:
            await self._kill_remains()  # what was being started while the others were killed
            for process in running:
                _kill(process.child)  # also without a cgroup
        for process in running:
            await process.wait()
        if self.init.stdio is not None:
            await self._as_far_as_possible(self.init.stdio.ended())
        self.reports.exited(self.init)

    async def _as_far_as_possible(self, last_words: Awaitable[None]) -> None:
        """What is done for output must not keep an exit from being told (no descriptor is free)."""
        try:
            await last_words
        except OSError as error:
            self._shim.log.warning("output may be lost", id=self.id, why=str(error))

    async def _settle(self, processes: Sequence[Process]) -> None:
        """Wait until no Start of these is under way.

        Init has ended, so it has succeeded or will fail; a runtime that hangs is not waited for.
        """
        with aio.move_on_after(_LATE) as patience:
            await _none_is_starting(processes)
        if patience.cancelled_caught:
            self._runtime.end_pointless_calls()
            await _none_is_starting(processes)

    def _watch_memory(self) -> None:
        """Tell when the container runs out of memory, from now until init has ended."""
        try:
            self._oom = oom.watch(self._cgroup)
        except OSError as error:
            self._shim.log.warning("running out of memory is not told", id=self.id, why=str(error))
        if self._oom is not None:
            self._shim.tasks.start_soon(self._follow_memory, self._oom)

    async def _follow_memory(self, watch: OomWatch) -> None:
        with self._watching:
            await oom.follow(watch, self.reports.out_of_memory)

    def _out_of_memory(self, *, init_killed: bool = False) -> bool:
        if self._oom is None or self._init_reaped:
            return False
        return self._oom.news(init_killed=init_killed)

    async def _kill_remains(self) -> None:
        try:
            await self._runtime.kill(_signal.SIGKILL, everyone=True)
        except (NvshimError, OSError) as error:
            # crun refuses to signal a container whose init is gone.
            self._shim.log.debug("kill --all failed", id=self.id, why=str(error))
            self._kill_all_in_cgroup(_signal.SIGKILL)

    def _kill_all_in_cgroup(self, signum: int) -> None:
        if self._cgroup is not None:
            with spare.lent():
                self._cgroup.signal(signum)

    def _refuse_unless_running(self) -> None:
        if self._init_reaped or self._pausing or self.init.state is not State.RUNNING:
            state = "stopped" if self._init_reaped else self.init.state.name.lower()
            state = "being paused" if state == "running" else state
            raise WrongProcessState(
                f"an exec in {self.id}",
                found=f"its init process is {state}",
                do="exec into a running container",
            )

    def _require_init(self, state: State, asked: str) -> None:
        if self.init.state is not state:
            raise WrongProcessState(
                asked, found=f"it is {self.init.state.name.lower()}", do="ask for its state first"
            )

    async def _open_stdio(self, process: Process) -> Stdio:
        owner = (self._options.io_uid, self._options.io_gid)
        stdio = await open_stdio(self._shim, process, bundle=self.bundle, owner=owner)
        process.attach(stdio)
        return stdio

    def _adopt(self, pid_file: str) -> Child:
        try:
            with open(pid_file, encoding="ascii") as file:
                pid = int(file.read(_PID_FILE_LIMIT))
            # One that is not our child's would be signalled in its place.
            return self._shim.reaper.register(pid)
        except (FileNotFoundError, ChildProcessError, ValueError, OverflowError) as error:
            raise RuntimeMisbehaved(
                f"the pid of a process of {self.id}",
                found=f"{self._options.binary_name} succeeded and left no pid of it in {pid_file}",
                do="check that it is an OCI runtime with runc's command line",
            ) from error

    def _record_for_cleanup(self) -> None:
        """Leave in the bundle what the delete verb needs if this process is killed."""
        record = {
            "binary": self._options.binary_name,
            "root": self._root,
            "systemd_cgroup": self._options.systemd_cgroup,
        }
        path = os.path.join(self.bundle, bundle_files.OPTIONS)
        bundle_files.write(path, json.dumps(record).encode())
        path = os.path.join(self.bundle, bundle_files.RUNTIME)
        bundle_files.write(path, self._options.binary_name.encode())

    def _runtime_has_it(self) -> bool:
        """Whether the runtime keeps a state of the container, be it of one half made."""
        return os.path.lexists(os.path.join(self._root, self.id))

    async def _undo_create(self, *, made: bool) -> None:
        """Leave what there was before.

        Args:
            made: whether the runtime may have made something, which is not somebody else's.
        """
        self.init.close_stdio()
        await self._end_init()
        if made:
            try:
                if self._runtime_has_it():
                    await self._runtime.delete(force=True)
            except (NvshimError, OSError) as error:
                self._shim.log.warning("undoing create: delete", id=self.id, why=str(error))
            try:
                await self._end_cgroup()
            except (NvshimError, OSError) as error:
                self._shim.log.warning("undoing create: cgroup", id=self.id, why=str(error))
        try:
            await detaching.unmount(self._rootfs)
            self._injector.forgo_layer()
        except (NvshimError, OSError) as error:
            self._shim.log.warning("undoing create: unmount", id=self.id, why=str(error))
        try:
            self._injector.undo()
            bundle_files.remove(os.path.join(self.bundle, bundle_files.INIT_PID))
        except (NvshimError, OSError) as error:
            self._shim.log.warning("undoing create: files", id=self.id, why=str(error))


async def _none_is_starting(processes: Sequence[Process]) -> None:
    for process in processes:
        async with process.starting:
            pass


async def _close_stdio(process: Process) -> None:
    process.close_stdio()


async def _close(descriptor: int) -> None:
    """Close what it may take long to close."""
    await _in_thread(lambda: os.close(descriptor))


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Do what may take long without holding up the pod, if a thread is to be had."""
    try:
        return await aio.run_in_thread(work)
    except RuntimeError:
        return work()


def _kill(child: Child | None) -> None:
    """End a process that was not reaped yet; so its pid is still its own."""
    if child is not None and child.exit is None:
        os.kill(child.pid, _signal.SIGKILL)
