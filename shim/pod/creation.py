"""A container's resources on the node: Create creates them, Delete and a failed Create remove them.

In the order of creation, these are: records in the bundle, the mounted rootfs, the injection, the
stdio of init, and the low-level runtime's container. :class:`Resources` owns and removes them. If
the runtime already had a container with that name, it belongs to another client, and stays.

A Create can be cancelled while it waits for anything: a mount, a worker, a logger, the runtime. It
is then undone, like a failed one.

mount(2) and umount(2) wait for the server of a FUSE or network file system: for the layers of an
overlay, the source of a bind mount, the file of a loop device. They cannot be interrupted without
ending the process, so calls that may hang run in a thread. Other calls run directly, because a
thread costs time and memory.
- A mount may take :data:`MOUNTING` seconds. If the kernel completes it later, it is unmounted.
- An unmount may take :data:`UNMOUNTING` seconds. A second Delete waits for the same one.
- Overlays that :func:`shim.rootfs.detaching.detach` detaches disappear at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from shim import bundle as bundle_files
from shim import files, loop, syscalls
from shim.bundle import (
    cgroups_path_of,
    has_own_pid_namespace,
    has_user_namespace,
    root_of,
    root_path_of,
)
from shim.cgroup import cgroup
from shim.cgroup.cgroup import Cgroup
from shim.checkpoint.checkpoint import Calls, Saved
from shim.children import Child
from shim.context import ShimContext
from shim.errors import (
    BundleUnusable,
    ContainerLeft,
    KilledWhileStarting,
    MountFailed,
    NvshimError,
    ProcessFinished,
    RuntimeFailed,
    RuntimeMisbehaved,
    UnmountFailed,
)
from shim.loop import Tasks
from shim.mountinfo import may_hang, sees_served
from shim.pod import fd_reserve
from shim.pod.causes import forget_cause
from shim.pod.process import Process
from shim.rootfs import detaching, mounts
from shim.rootfs.mounts import Mount
from shim.runtime import orphans
from shim.runtime.options import RuntimeOptions, with_cgroup_driver
from shim.runtime.runtime import LowLevelRuntime
from shim.stdio import Stdio, open_stdio
from shim.work.injection import Injection, prefilter_once

Result = TypeVar("Result")

# Seconds; the last is for a killed process to die before the runtime deletes it.
MOUNTING: Final = 30.0
UNMOUNTING: Final = 10.0
_DYING: Final = 10.0


class Resources:
    """One container's resources on the node.

    Args:
        shim: the state that the shim's containers share.
        container_id: the container.
        bundle: its bundle directory.
        options: options of its runtime.

    Attributes:
        runtime: calls its low-level runtime.
        injection: the injection into it; None if it requests nothing.
        has_gpus: whether it may have GPUs, from any source.
        cgroup: its cgroup, once it has an init process.
        own_pid_namespace: whether all its processes die with its init.
        saved: the checkpoint that Start restores; None for all other containers.
    """

    def __init__(
        self, shim: ShimContext, container_id: str, bundle: str, options: RuntimeOptions
    ) -> None:
        self._shim = shim
        self._id = container_id
        self._bundle = bundle
        self._root = os.path.join(options.root, shim.namespace)
        self._rootfs = Rootfs(shim, os.path.join(bundle, bundle_files.ROOTFS))
        self._init_pid_file = os.path.join(bundle, bundle_files.INIT_PID)
        self._use(options)
        self._making = loop.CancelScope()
        self._runtime_called = False
        self._init_pid = 0
        self.injection: Injection | None = None
        self.has_gpus = False
        self.cgroup: Cgroup | None = None
        self.own_pid_namespace = True
        self.saved: Saved | None = None

    # -- making ------------------------------------------------------------------------------

    async def make(
        self, init: Process, wanted: Sequence[Mount], checkpoint: str, parent: str
    ) -> None:
        """Create all resources, up to the init process, which waits for Start.

        Args:
            init: the init process.
            wanted: containerd's mounts for the rootfs, in order.
            checkpoint: the directory of a checkpoint; then init does not exist before
                :meth:`restore`.
            parent: the directory of an earlier checkpoint that it builds on.

        Raises:
            KilledWhileStarting: :meth:`cancel` was called; the attempt was undone completely.
            NvshimError, OSError: the cause of the failure; the attempt was undone completely.
        """
        ours = not self._runtime_has_it()
        try:
            await self._make(init, wanted, checkpoint, parent)
        except BaseException as error:
            self._shim.log.error("create failed", id=self._id, error=str(error))
            with loop.CancelScope(shield=True):
                await self._undo(init, made=ours and self._runtime_called)
            raise

    def cancel(self) -> None:
        """Cancel a running :meth:`make`, whatever it waits for."""
        self._making.cancel()

    async def _make(
        self, init: Process, wanted: Sequence[Mount], checkpoint: str, parent: str
    ) -> None:
        with self._making:
            self._shim.moves.expect()
            if checkpoint:
                self.saved = Saved(checkpoint, parent)
            spec = bundle_files.read_spec(self._bundle)
            if self._shim.sandbox is not None and self._shim.sandbox.admit(spec):
                bundle_files.write_spec(self._bundle, spec)
            self.own_pid_namespace = has_own_pid_namespace(spec)
            self._use(with_cgroup_driver(self._options, spec), mapped=has_user_namespace(spec))
            record = bundle_files.RuntimeRecord(
                self._options.binary_name, self._root, systemd_cgroup=self._options.systemd_cgroup
            )
            bundle_files.write_runtime_record(self._bundle, record)
            await self._mount(spec, wanted)
            await self._rootfs.check(spec, self._bundle)
            await self.open_stdio(init)
            if self.saved is None:
                self._runtime_called = True
                await self._make_init(init)
            return
        raise KilledWhileStarting(
            f"to create {self._id}",
            found="it was killed or deleted before it was made",
            do="if it hung, look for what holds its runtime or its file system up",
        )

    async def open_stdio(self, process: Process) -> Stdio:
        """Open the stdio of init or an exec."""
        owner = (self._options.io_uid, self._options.io_gid)
        stdio = await open_stdio(self._shim, process, bundle=self._bundle, owner=owner)
        process.attach(stdio)
        return stdio

    async def start_stdio(self, stdio: Stdio) -> None:
        """Start to pass data on, once the process exists."""
        if sees_served(self._init_pid):
            stdio.use_threads()
        await stdio.started()

    def adopt(self, pid_file: str) -> Child:
        """Take over a process that the runtime has created.

        Raises:
            RuntimeMisbehaved: the file does not contain the pid of a child of ours.
        """
        try:
            # Otherwise we would signal a foreign process.
            return self._shim.reaper.register(bundle_files.read_pid(pid_file))
        except (BundleUnusable, ChildProcessError, OverflowError) as error:
            raise RuntimeMisbehaved(
                f"the pid of a process of {self._id}",
                found=f"{self._options.binary_name} succeeded and left no pid of it in {pid_file}",
                do="check that it is an OCI runtime with runc's command line",
            ) from error

    async def _mount(self, spec: dict[str, Any], wanted: Sequence[Mount]) -> None:
        """Mount the rootfs; for a container with GPUs, a worker does this and injects them."""
        found = prefilter_once(self._bundle, spec)
        if found.failure:
            self._shim.log.warning("the configuration may name more places", why=found.failure)
        self.has_gpus = found.lists_nodes
        if found.needs_worker:
            self.injection = Injection(self._shim.reaper, self._bundle, self._shim.log)
            saved = None if self.saved is None else self.saved.record.driver_layer
            provided = self.injection.provide(found, wanted, self._options.binary_name, saved)
            await self._rootfs.mount(wanted, provided)
            self.has_gpus |= not self.injection.is_empty
        else:
            await self._rootfs.mount(wanted)

    def _use(self, options: RuntimeOptions, *, mapped: bool = False) -> None:
        self._options = options
        self.runtime = LowLevelRuntime(
            self._shim.reaper,
            options,
            container_id=self._id,
            root=self._root,
            bundle=self._bundle,
            mapped=mapped,
        )

    async def _make_init(self, init: Process) -> None:
        """Let the runtime create or restore init, and take it over."""
        stdio = init.stdio
        if stdio is None:
            message = "stdio is opened before init is made"
            raise AssertionError(message)
        self._shim.moves.expect()
        with self._shim.reaper.window():
            if self.saved is None:
                await self.runtime.create(stdio.child(), pid_file=self._init_pid_file)
            else:
                await self.criu().restore(self.saved, stdio.child(), pid_file=self._init_pid_file)
            init.child = self.adopt(self._init_pid_file)
        self.runtime.made(init.child)
        if self.injection is not None:
            await self.injection.made(init.pid)
        if self.has_gpus:
            stdio.keep_stderr()
        self._init_pid = init.pid
        await self.start_stdio(stdio)
        self.cgroup = cgroup.of(init.pid)

    # -- restoring ---------------------------------------------------------------------------

    def criu(self) -> Calls:
        """Return the runtime calls that need CRIU."""
        return Calls(self.runtime, self._options, self._id, self._bundle)

    async def restore(self, init: Process) -> None:
        """Restore init from the checkpoint.

        Raises:
            NvshimError, OSError: the cause of the failure; the restore may be repeated.
        """
        ours = not self._runtime_has_it()
        try:
            await self._make_init(init)
        except BaseException as error:
            self._shim.log.error("restore failed", id=self._id, error=str(error))
            with loop.CancelScope(shield=True):
                await self._undo_restore(init, delete=ours and self._runtime_has_it())
            raise

    async def _undo_restore(self, init: Process, *, delete: bool) -> None:
        await self._end_init(init)
        init.child = None
        with self._logged("undoing restore"):
            if delete:
                # Left by a runtime that was killed in its work.
                root = os.path.join(self._root, self._id, bundle_files.RESTORED_ROOT)
                await detaching.unmount(root)
                await self._delete_by_force("undoing restore")
            files.remove(self._init_pid_file)

    # -- removing ----------------------------------------------------------------------------

    async def remove_from_runtime(self, init: Process) -> None:
        """Kill the container's remaining processes, and make the runtime forget it.

        Raises:
            NvshimError: the runtime failed; the removal may be repeated.
        """
        if init.child is None:
            return  # never restored; the runtime's container of that name belongs to another client
        await self._end_init(init)
        if init.child.exit is not None:
            await init.wait()  # until the exit is published, the runtime may be killing the rest
        try:
            await self.runtime.delete()
        except ProcessFinished:
            return  # an earlier Delete got this far
        except RuntimeFailed:
            # The runtime also forgets what it has saved and ended. crun words that differently.
            if self._runtime_has_it():
                raise
            return
        if self._runtime_has_it():
            raise ContainerLeft(
                f"to delete {self._id}",
                found=f"{self._options.binary_name} succeeded and left {self._root}/{self._id}",
                do="delete it with that runtime, and ask again",
            )

    async def remove_rootfs(self) -> None:
        """Unmount the rootfs, and remove the injection.

        Raises:
            UnmountFailed: it is still mounted; it may be tried again.
        """
        await self._rootfs.unmount()
        if self.injection is not None:
            self.injection.release()
        if self.has_gpus:
            forget_cause(self._shim, self._id)

    async def kill_all(self) -> None:
        """Kill all processes of the container."""
        try:
            await self.runtime.kill(signal.SIGKILL, everyone=True)
        except (NvshimError, OSError) as error:
            # crun refuses to signal a container whose init is gone.
            self._shim.log.debug("kill --all failed", id=self._id, why=str(error))
            # Publishing the exit must not depend on this.
            with self._logged("killing what is left"):
                self.signal_cgroup(signal.SIGKILL)

    def signal_cgroup(self, signum: int) -> None:
        """Signal all processes of the container without its runtime."""
        if self.cgroup is not None:
            with fd_reserve.released():
                self.cgroup.signal(signum)

    async def _undo(self, init: Process, *, made: bool) -> None:
        """Remove what a failed :meth:`make` has created."""
        init.close_stdio()
        await self._end_init(init)
        if made:
            await self._delete_by_force("undoing create")
        with self._logged("undoing create: unmount"):
            await self._rootfs.unmount()
        with self._logged("undoing create: files"):
            if self.injection is not None:
                self.injection.undo()
            files.remove(self._init_pid_file)

    async def _end_init(self, init: Process) -> None:
        """Kill init if it lives, and wait until the last of its threads is gone.

        A runtime that deletes by force does not wait for this. If the kernel is slow to empty the
        cgroup, the runtime silently leaves it behind.
        """
        if init.child is not None:
            init.child.kill()
            with loop.move_on_after(_DYING):
                await init.child.wait()

    async def _delete_by_force(self, doing: str) -> None:
        """Make the runtime delete the container; if the runtime is killed, remove its remains."""
        with self._logged(f"{doing}: delete"):
            if self._runtime_has_it():
                await self.runtime.delete(force=True)
        with self._logged(f"{doing}: remains"):
            path = cgroups_path_of(bundle_files.read_spec(self._bundle))
            record = bundle_files.read_runtime_record(self._bundle)
            if record and (self._runtime_has_it() or orphans.has_cgroup(path, self._id)):
                end = partial(orphans.end_container, cgroup_path=path, ask_runtime=False)
                for problem in await in_thread(partial(end, record, self._id, 0)):
                    self._shim.log.warning("a container is left", id=self._id, why=problem)

    def _runtime_has_it(self) -> bool:
        """Whether the runtime has a state of the container, even of one half created."""
        return os.path.lexists(os.path.join(self._root, self._id))

    @contextmanager
    def _logged(self, step: str) -> Iterator[None]:
        """Log a step's failure, so that the next step follows nevertheless."""
        try:
            yield
        except (NvshimError, OSError) as error:
            self._shim.log.warning(step, id=self._id, why=str(error))


class _ThreadedCall:
    """A possibly long call in a thread, which continues when its caller stops waiting.

    Attributes:
        done: set when the call has ended.
        undo: called if the call succeeds after its caller has given up.
    """

    def __init__(self, tasks: Tasks, work: Callable[[], None]) -> None:
        self.done = loop.Event()
        self.undo: Callable[[], None] | None = None
        self._work = work
        self._error: Exception | None = None
        tasks.start_soon(self._run)

    async def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it ended in time, or raise the call's error."""
        with loop.move_on_after(seconds):
            await self.done.wait()
        if self._error is not None:
            raise self._error
        return self.done.is_set()

    async def _run(self) -> None:
        try:
            await in_thread(self._work)
            if self.undo is not None:
                await in_thread(self.undo)
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            self._error = error
        finally:
            self.done.set()


class Rootfs:
    """The rootfs of one container.

    Args:
        shim: the state that the shim's containers share.
        path: where it is mounted.
    """

    def __init__(self, shim: ShimContext, path: str) -> None:
        self.path = path
        self._shim = shim
        self._mounted: Sequence[Mount] = ()
        self._may_hang = False
        self._unmounting: _ThreadedCall | None = None

    async def mount(
        self, wanted: Sequence[Mount], by_worker: Awaitable[Sequence[Mount]] | None = None
    ) -> None:
        """Mount it.

        Args:
            wanted: the mounts, in order.
            by_worker: mounts it instead, and returns the mounts.

        Raises:
            NvshimError: it is not mounted, and will not be mounted later.
        """
        self._may_hang = may_hang(wanted)  # also if the worker fails half way
        if by_worker is not None:
            wanted = await by_worker
        elif self._may_hang:
            await self._mount_in_thread(wanted)
        else:
            mounts.mount_rootfs(wanted, self.path)
        self._mounted = wanted

    async def check(self, spec: dict[str, Any], bundle: str) -> None:
        """Check that the container's root is a directory, once everything is mounted.

        Raises:
            BundleUnusable: it is not.
            MountFailed: its file system does not answer.
        """
        path = root_path_of(spec, bundle)
        elsewhere = path != self.path and may_hang([("", path, "", ())])
        if not self._may_hang and not elsewhere:
            root_of(spec, bundle)
            return
        # The kernel mounts the top of a file system without asking its server.
        with loop.move_on_after(MOUNTING):
            await in_thread(lambda: root_of(spec, bundle))
            return
        raise MountFailed(
            f"to look at the rootfs {path}",
            found=f"stat(2) had not returned after {MOUNTING:.0f} s",
            do="look for a FUSE or network file system that does not answer",
        )

    async def unmount(self) -> None:
        """Unmount everything at and below its path, if anything is mounted there.

        Raises:
            UnmountFailed: it is still mounted; it may be tried again.
        """
        if not self._may_hang:
            overlay = detaching.detach(self.path, self._mounted)
            if overlay is not None:
                # Closing it writes the overlay's data to disk. No client waits for that.
                _ThreadedCall(self._shim.tasks, lambda: os.close(overlay))
            await detaching.unmount(self.path)
            return
        call = self._unmounting
        if call is None:
            call = _ThreadedCall(self._shim.tasks, lambda: mounts.unmount_rootfs(self.path))
            self._unmounting = call
        try:
            if not await call.wait(UNMOUNTING):
                raise UnmountFailed(
                    f"to unmount {self.path}",
                    found=f"umount(2) had not returned after {UNMOUNTING:.0f} s",
                    do="look for a FUSE or network file system that does not answer, and ask again",
                )
        finally:
            if call.done.is_set():
                self._unmounting = None

    async def _mount_in_thread(self, wanted: Sequence[Mount]) -> None:
        call = _ThreadedCall(self._shim.tasks, lambda: mounts.mount_rootfs(wanted, self.path))
        try:
            await call.wait(MOUNTING)
        except loop.Cancelled:
            pass  # if that mount has delayed the Create, the error says so
        if not call.done.is_set():
            call.undo = lambda: self._detach(len(wanted))
            raise MountFailed(
                f"to mount {', '.join(repr(source) for _, source, _, _ in wanted)} at {self.path}",
                found=f"mount(2) had not returned after {MOUNTING:.0f} s, or before the"
                " container was killed",
                do="look for a FUSE or network file system that does not answer",
            )

    def _detach(self, count: int) -> None:
        """Undo only the late mounts, not those of another process."""
        for _ in range(count):
            syscalls.umount(self.path, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run a possibly long call in a thread, or directly if no thread can be started."""
    started: list[bool] = []

    def start() -> Result:
        started.append(True)
        return work()

    try:
        return await loop.run_in_thread(start)
    except RuntimeError:
        if started:
            raise
        return work()
