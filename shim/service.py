"""The Task service: containerd's requests, turned into calls of containers.

Handlers decode, call and encode; what happens and in which order is :mod:`shim.container`'s.
A request that changes something is shielded: a client that hangs up must not leave half a
container behind.

Source: containerd api/runtime/task/v2/shim.proto, docs/runtime-v2.md.
"""

from __future__ import annotations

import errno
import os

from api import aio, typeurl
from api.errors import Status
from api.proto import runc_options_pb2, task_pb2, task_types_pb2
from api.ttrpc import Service, ShuttingDown
from api.wellknown import Empty
from shim import sockets
from shim.container import Container, Surroundings
from shim.errors import InvalidInvocation, SystemRefused, TaskExists, TaskNotFound
from shim.invocation import check_id
from shim.options import read_options
from shim.process import Process, State, StdioUris

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, Final

    from api.ttrpc import Context

_STATUS: Final = {
    State.CREATED: task_types_pb2.CREATED,
    State.RUNNING: task_types_pb2.RUNNING,
    State.PAUSED: task_types_pb2.PAUSED,
    State.STOPPED: task_types_pb2.STOPPED,
    State.DELETED: task_types_pb2.STOPPED,
}

# What there may be enough of a moment later.
_SCARCE: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
)

# Seconds after which a shim tries again to end that could not take its socket away.
_AGAIN: Final = 0.2

# Seconds without a task after which nobody is expected to ask for the end any more; and after which
# a shim ends also if it has something to tell that nobody takes: its tasks were deleted, by a
# containerd that will not miss the events.
UNUSED: Final = 60.0
UNHEARD: Final = 600.0

# The two versions differ in the package's name alone; containerd 2 calls the second.
SERVICE_NAMES: Final = ("containerd.task.v2.Task", "containerd.task.v3.Task")


class OwnSocket:
    """The socket that this shim serves, with the containers that are announced at it.

    Args:
        path: where it is.
        identity: what :func:`shim.sockets.identity` said of it at the beginning.
    """

    def __init__(self, path: str, identity: tuple[int, int] | None) -> None:
        self._path = path
        self._identity = identity

    def forget(self, container_id: str) -> None:
        """A container has come, or will not come."""
        sockets.forget(self._path, container_id)

    def retire(self) -> bool:
        """Whether nobody is announced, or about to be; then the socket is gone."""
        return sockets.retire(self._path, self._identity)

    def remove(self) -> bool:
        """Remove it, whoever is announced; whether nobody has just been finding it."""
        return sockets.retire(self._path, self._identity, regardless=True)


class TaskService:
    """The tasks of this shim.

    Args:
        shim: what the containers share.
        own_socket: where this shim is found.
        shut_down: called when containerd has asked for it and no task is left.
    """

    def __init__(
        self, shim: Surroundings, own_socket: OwnSocket, shut_down: Callable[[], None]
    ) -> None:
        self._shim = shim
        self._own_socket = own_socket
        self._shut_down = shut_down
        # A task has its place from the moment that its Create is accepted.
        self._containers: dict[str, Container | None] = {}
        self._ending = False
        # Whether who has asked for the end has to have the answer before the connection ends.
        self.ends_after_hangup = False
        # Shutdown was asked for while all there was were tasks in the making.
        self._shutdown_deferred = False
        # Set, and replaced, when a task or the sandbox comes and when one is gone.
        self._turned = aio.Event()

    def services(self) -> list[Service]:
        """The service under both of its names."""
        handlers: dict[str, Callable[[Context, Any], Awaitable[Any]]] = {
            "Create": shielded(self.create),
            "Start": shielded(self.start),
            "Delete": shielded(self.delete),
            "Pause": shielded(self.pause),
            "Resume": shielded(self.resume),
            "Checkpoint": shielded(self.checkpoint),
            "Exec": self.exec,
            "Kill": shielded(self.kill),
            "Update": shielded(self.update),
            "Wait": self.wait,
        }
        immediate: dict[str, Callable[[Context, Any], Any]] = {
            "State": self.state,
            "Pids": self.pids,
            "Stats": self.stats,
            "ResizePty": self.resize_pty,
            "CloseIO": self.close_io,
            "Connect": self.connect,
            "Shutdown": self.shutdown,
        }
        handlers = {name: typed(name, handler) for name, handler in handlers.items()}
        immediate = {name: typed_at_once(name, handler) for name, handler in immediate.items()}
        descriptor = task_pb2.DESCRIPTOR.services_by_name["Task"]
        return [
            Service(
                descriptor,
                handlers,
                immediate=immediate,
                shared=("Wait",),
                vital=("Kill", "Delete"),
                name=name,
            )
            for name in SERVICE_NAMES
        ]

    async def create(
        self, _: Context, request: task_pb2.CreateTaskRequest
    ) -> task_pb2.CreateTaskResponse:
        """Make a container, from its bundle, with its init process waiting."""
        check_id(request.id)
        self._own_socket.forget(request.id)
        _refuse_zero_bytes("request", request)
        if self._ending:
            # It came when the reply to Shutdown was on its way: nobody would look after it.
            raise ShuttingDown(
                f"task {request.id}", found="a shim that is ending", do="create it once more"
            )
        if request.id in self._containers:
            raise TaskExists(f"task {request.id}", found="a task of that id", do="delete it first")
        options = read_options(request.options if request.HasField("options") else None)
        # For containerd's own shim, the daemon reads that option.
        checkpoint = request.checkpoint or options.criu_image_path
        uris = StdioUris(request.stdin, request.stdout, request.stderr, terminal=request.terminal)
        container = Container(self._shim, request.id, request.bundle, options, uris)
        rootfs_mounts = [(m.type, m.source, m.target, tuple(m.options)) for m in request.rootfs]
        self._containers[request.id] = None
        self._turn()
        sandbox = self._shim.sandbox
        try:
            if sandbox is not None:
                sandbox.enter(request.id, request.bundle, options)
            pid = await container.create(rootfs_mounts, checkpoint, request.parent_checkpoint)
        except BaseException:
            del self._containers[request.id]
            self._turn()
            if sandbox is not None:
                sandbox.leave(request.id)
            if self._shutdown_deferred:
                self._end_if_empty()
            raise
        self._shutdown_deferred = False
        self._containers[request.id] = container
        container.reports.created(container.init, container.bundle, rootfs_mounts, checkpoint)
        container.watch_init()
        return task_pb2.CreateTaskResponse(pid=pid)

    async def start(self, _: Context, request: task_pb2.StartRequest) -> task_pb2.StartResponse:
        """Start init, or an exec."""
        pid = await self._container(request.id).start(request.exec_id)
        return task_pb2.StartResponse(pid=pid)

    async def delete(self, _: Context, request: task_pb2.DeleteRequest) -> task_pb2.DeleteResponse:
        """Remove a container, or forget an exec."""
        if request.id not in self._containers:
            self._own_socket.forget(request.id)
        container = self._container(request.id)
        if request.exec_id:
            process = await container.delete_exec(request.exec_id)
        else:
            await container.delete()
            process = container.init
            self._containers.pop(request.id, None)
            self._turn()
            # Before anything that can fail: nobody can ask a second time.
            container.reports.deleted(container.init)
            if self._shim.sandbox is not None:
                self._shim.sandbox.leave(request.id)
        response = task_pb2.DeleteResponse(pid=process.pid)
        _fill_exit(response, process)
        return response

    async def exec(self, _: Context, request: task_pb2.ExecProcessRequest) -> Empty:
        """Add a process to a running container, to be started later."""
        check_id(request.exec_id)
        _refuse_zero_bytes("request", request)
        container = self._container(request.id)
        uris = StdioUris(request.stdin, request.stdout, request.stderr, terminal=request.terminal)
        await container.add_exec(request.exec_id, typeurl.unpack_json(request.spec), uris)
        return Empty()

    def state(self, _: Context, request: task_pb2.StateRequest) -> task_pb2.StateResponse:
        """How a process is."""
        container = self._container(request.id)
        process = container.process(request.exec_id)
        uris = process.uris
        response = task_pb2.StateResponse(
            id=request.id,
            bundle=container.bundle,
            pid=process.pid,
            status=_STATUS[process.state],
            stdin=uris.stdin,
            stdout=uris.stdout,
            stderr=uris.stderr,
            terminal=uris.terminal,
            exec_id=request.exec_id,
        )
        _fill_exit(response, process)
        return response

    async def wait(self, _: Context, request: task_pb2.WaitRequest) -> task_pb2.WaitResponse:
        """Answer when a process has ended."""
        process = self._container(request.id).process(request.exec_id)
        await process.wait()
        response = task_pb2.WaitResponse()
        _fill_exit(response, process)
        return response

    async def kill(self, _: Context, request: task_pb2.KillRequest) -> Empty:
        """Signal a process, or a whole container."""
        container = self._container(request.id)
        await container.kill(request.exec_id, request.signal, everyone=request.all)
        return Empty()

    async def pause(self, _: Context, request: task_pb2.PauseRequest) -> Empty:
        """Freeze a container."""
        await self._container(request.id).pause()
        return Empty()

    async def resume(self, _: Context, request: task_pb2.ResumeRequest) -> Empty:
        """Let a frozen container go on."""
        await self._container(request.id).resume()
        return Empty()

    async def checkpoint(self, _: Context, request: task_pb2.CheckpointTaskRequest) -> Empty:
        """Save a container in a directory."""
        _refuse_zero_bytes("request", request)
        options = request.options if request.HasField("options") else None
        await self._container(request.id).checkpoint(request.path, options)
        return Empty()

    def pids(self, _: Context, request: task_pb2.PidsRequest) -> task_pb2.PidsResponse:
        """The processes of a container; those of execs say of which."""
        response = task_pb2.PidsResponse()
        for pid, exec_id in self._container(request.id).pids().items():
            info = response.processes.add(pid=pid)
            if exec_id:
                details = runc_options_pb2.ProcessDetails(exec_id=exec_id)
                info.info.CopyFrom(typeurl.pack(details))
        return response

    def stats(self, _: Context, request: task_pb2.StatsRequest) -> task_pb2.StatsResponse:
        """What a container has used; a message of the host's version of cgroups."""
        return task_pb2.StatsResponse(stats=typeurl.pack(self._container(request.id).stats()))

    async def update(self, _: Context, request: task_pb2.UpdateTaskRequest) -> Empty:
        """Change a container's limits. Annotations are for runtimes that know any."""
        container = self._container(request.id)
        await container.update(typeurl.unpack_json(request.resources, typeurl.LINUX_RESOURCES))
        return Empty()

    def resize_pty(self, _: Context, request: task_pb2.ResizePtyRequest) -> Empty:
        """Tell a process's terminal its size."""
        process = self._container(request.id).process(request.exec_id)
        process.resize(request.width, request.height)
        return Empty()

    def close_io(self, _: Context, request: task_pb2.CloseIORequest) -> Empty:
        """No more input comes to a process."""
        process = self._container(request.id).process(request.exec_id)
        if request.stdin:
            process.close_stdin()
        return Empty()

    def connect(self, _: Context, request: task_pb2.ConnectRequest) -> task_pb2.ConnectResponse:
        """Which processes this shim and the task's init are. containerd's sign of life."""
        container = self._containers.get(request.id)
        pid = container.init.pid if container else 0
        return task_pb2.ConnectResponse(shim_pid=os.getpid(), task_pid=pid)

    def shutdown(self, _: Context, request: task_pb2.ShutdownRequest) -> Empty:
        """End this process, once no task or sandbox is left or announced; until then, nothing.

        containerd asks after every Delete. ``now`` changes nothing: there is nothing that the
        end of a shim without tasks would wait for but the delivery of events.
        """
        self.end_when_empty(request.id)
        return Empty()

    # -- what the sandbox of the pod needs -----------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether this process is about to end."""
        return self._ending

    @property
    def containers(self) -> list[Container]:
        """The tasks that there are, without those in the making."""
        return [container for container in self._containers.values() if container is not None]

    def sandbox_came(self, sandbox_id: str) -> None:
        """The sandbox that this shim was started for is there."""
        self._own_socket.forget(sandbox_id)
        self._turn()

    def end_when_empty(self, asked_for: str, *, after_hangup: bool = False) -> None:
        """End this process if nothing is left that it is for.

        Args:
            asked_for: the task or sandbox that is gone, or will not come.
            after_hangup: whether the process stays, for a moment, until its clients hang up.
        """
        self.ends_after_hangup = after_hangup
        self._own_socket.forget(asked_for)
        self._turn()
        # Nobody asks again if the last task in the making comes to nothing.
        self._shutdown_deferred = not any(self._containers.values())
        self._end_if_empty()

    def describe(self) -> list[dict[str, object]]:
        """What there is, for a person who asks: a line for each process of each container."""
        lines: list[dict[str, object]] = []
        for container_id, container in self._containers.items():
            if container is None:
                lines.append({"container": container_id, "state": "being created"})
            else:
                lines += container.describe()
        return lines

    async def end_when_unused(self) -> None:
        """End this process when it has been of no use for long and nothing is left to tell.

        A containerd that was killed between ``start`` and Create, or between Delete and
        Shutdown, does not ask for the end when it is back. One that does not come back takes no
        events: after :data:`UNHEARD` seconds they are given up.
        """
        unused = 0.0
        while True:
            turned = self._turned
            with aio.move_on_after(None if self._in_use else UNUSED):
                await turned.wait()
            unused = 0.0 if turned.is_set() else unused + UNUSED
            if unused and (not self._shim.publisher.waiting or unused >= UNHEARD):
                self._end_if_empty()

    @property
    def _in_use(self) -> bool:
        return bool(self._containers) or self._shim.sandbox is not None

    def _turn(self) -> None:
        turned, self._turned = self._turned, aio.Event()
        turned.set()

    def _end_if_empty(self) -> None:
        if self._in_use or self._ending:
            return
        if self._own_socket.retire():
            self._ending = True
            self._shut_down()
        else:
            self._shim.tasks.start_soon(self._end_later)

    async def _end_later(self) -> None:
        """Look again if nobody has come: not everybody who looks there looks for us."""
        turned = self._turned
        with aio.move_on_after(_AGAIN):
            await turned.wait()
        if not turned.is_set():
            self._end_if_empty()

    def _container(self, container_id: str) -> Container:
        container = self._containers.get(container_id)
        if container is None:
            raise TaskNotFound(
                f"task {container_id}", found="no task of that id here", do="list the tasks"
            )
        return container


def shielded(
    handler: Callable[[Context, Any], Awaitable[Any]],
) -> Callable[[Context, Any], Awaitable[Any]]:
    """A handler that goes on when its client hangs up: it would leave something half done."""

    async def finish(context: Context, request: Any) -> Any:
        with aio.CancelScope(shield=True):
            return await handler(context, request)

    return finish


def typed(
    method: str, handler: Callable[[Context, Any], Awaitable[Any]]
) -> Callable[[Context, Any], Awaitable[Any]]:
    """A handler whose system errors are told as ours, in one line."""

    async def answer(context: Context, request: Any) -> Any:
        try:
            return await handler(context, request)
        except OSError as error:
            raise _refused(method, request, error) from error

    return answer


def typed_at_once(
    method: str, handler: Callable[[Context, Any], Any]
) -> Callable[[Context, Any], Any]:
    """The same of a handler that answers at once."""

    def answer(context: Context, request: Any) -> Any:
        try:
            return handler(context, request)
        except OSError as error:
            raise _refused(method, request, error) from error

    return answer


def _refuse_zero_bytes(name: str, value: Any) -> None:
    """Refuse a string with a zero byte in it, where the kernel would take it to end.

    Args:
        name: what it is, for the message.
        value: of a field of a message, or a message, whose fields are all looked at.

    Raises:
        InvalidInvocation: there is one.
    """
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidInvocation(
                f"{name} {value!r}", found="a zero byte in it", do="leave that out"
            )
    elif hasattr(value, "ListFields"):
        for field, part in value.ListFields():
            _refuse_zero_bytes(field.name, part)
    elif not isinstance(value, bytes | int | float):
        for part in value:
            _refuse_zero_bytes(name, part)


def _refused(method: str, request: Any, error: OSError) -> SystemRefused:
    """What the kernel refused, as one line; TimeoutError and the like are OSErrors too."""
    where = f" ({error.filename})" if error.filename else ""
    scarce = error.errno in _SCARCE
    return SystemRefused(
        f"{method} of {getattr(request, 'id', '') or request.sandbox_id}",
        found=f"{os.strerror(error.errno).lower() if error.errno else error}{where}",
        do="look at the shim's limits and at what is full, and ask again" if scarce else "",
        status=Status.RESOURCE_EXHAUSTED if scarce else Status.UNKNOWN,
    )


def _fill_exit(
    response: task_pb2.DeleteResponse | task_pb2.StateResponse | task_pb2.WaitResponse,
    process: Process,
) -> None:
    if process.exit is not None:
        response.exit_status = process.exit.status
        response.exited_at.FromNanoseconds(process.exit.at)
