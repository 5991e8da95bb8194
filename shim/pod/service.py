"""The Task service: decodes containerd's requests, calls containers, encodes the answers.

:mod:`shim.pod.container` carries out operations, and :mod:`shim.pod.operations` decides their
order. Requests that change something are shielded: a client that hangs up must not leave half a
container behind.

The shim exits when it has no task and no sandbox, and none is announced:

- After every Delete, containerd asks it to exit (Shutdown). If tasks are left, nothing happens.
- ``start`` announces a container at the socket before it answers, so a shim with an announced
  container stays (:mod:`shim.sockets`).
- If Shutdown arrives while all tasks are still being created, and their Create fails, the shim then
  exits, because containerd does not ask again.
- If containerd was killed between ``start`` and Create, or between Delete and Shutdown, it does not
  ask after its restart. So a shim without a task for ``UNUSED`` seconds exits once its events are
  delivered, or after ``UNHEARD`` seconds even if some are not. Its tasks were deleted, so
  containerd does not need them.

Source: containerd api/runtime/task/v2/shim.proto, docs/runtime-v2.md.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty

from api import typeurl
from api.errors import Status
from api.proto import runc_options_pb2, task_pb2, task_types_pb2
from api.ttrpc import Context, Handler, ImmediateHandler, Service, ShuttingDown
from shim import loop, sockets
from shim.context import ShimContext
from shim.errors import (
    SCARCE,
    InvalidInvocation,
    NvshimError,
    SystemRefused,
    TaskExists,
    TaskNotFound,
    runtime_failed,
)
from shim.files import check_id
from shim.pod.container import Container
from shim.pod.process import State, fill_exit
from shim.runtime.options import read_options
from shim.stdio.uris import StdioUris

_STATUS: Final = {
    State.CREATED: task_types_pb2.CREATED,
    State.RUNNING: task_types_pb2.RUNNING,
    State.PAUSED: task_types_pb2.PAUSED,
    State.STOPPED: task_types_pb2.STOPPED,
    State.DELETED: task_types_pb2.STOPPED,
}

# Seconds: without a task, and then with undelivered events.
UNUSED: Final = 60.0
UNHEARD: Final = 600.0

# Seconds until a shim that could not remove its socket tries again to end.
_AGAIN: Final = 0.2

# The versions differ only in the package's name; containerd 2 calls the second.
SERVICE_NAMES: Final = ("containerd.task.v2.Task", "containerd.task.v3.Task")


class OwnSocket:
    """The shim's socket, and the containers that ``start`` has announced there.

    Args:
        path: the socket's file.
        identity: its :func:`shim.sockets.identity` when the shim started.
    """

    def __init__(self, path: str, identity: tuple[int, int] | None) -> None:
        self._path = path
        self._identity = identity

    def forget(self, container_id: str) -> None:
        """Drop an announcement, because the container was created, or will not be."""
        sockets.forget(self._path, container_id)

    def retire(self) -> bool:
        """Remove the socket unless a container is announced; return whether it is removed."""
        return sockets.retire(self._path, self._identity)

    def remove(self) -> bool:
        """Remove the socket despite announcements; return False if a ``start`` is using it."""
        return sockets.retire(self._path, self._identity, regardless=True)


class Lifetime:
    """Decides when the shim exits.

    Args:
        shim: the state that the shim's containers share.
        own_socket: the socket of this shim.
        containers: the shim's containers, including those that are being created.
        shut_down: ends the shim.

    Attributes:
        ending: whether the shim is about to exit.
        ends_after_hangup: whether the shim waits for its clients to hang up before it exits,
            because the client that requested this needs the answer first.
    """

    def __init__(
        self,
        shim: ShimContext,
        own_socket: OwnSocket,
        containers: Mapping[str, Container],
        shut_down: Callable[[], None],
    ) -> None:
        self.ending = False
        self.ends_after_hangup = False
        self._shim = shim
        self._own_socket = own_socket
        self._containers = containers
        self._shut_down = shut_down
        self._deferred = False
        # Set and replaced when a task or the sandbox is added or removed.
        self._changed = loop.Event()

    def forget(self, name: str) -> None:
        """Drop the announcement of a task or sandbox."""
        self._own_socket.forget(name)

    def changed(self) -> None:
        """Note that a task or the sandbox was added or removed."""
        changed, self._changed = self._changed, loop.Event()
        changed.set()

    def create_failed(self) -> None:
        """Note that a task was removed because its Create failed."""
        self.changed()
        if self._deferred:
            self._end_if_empty()

    def create_succeeded(self) -> None:
        """Note that a task exists, which containerd will delete."""
        self._deferred = False

    def end_when_empty(self, asked_for: str, *, after_hangup: bool = False) -> None:
        """End the shim if it has no task and no sandbox.

        Args:
            asked_for: the task or sandbox that was deleted, or will not be created.
            after_hangup: see ``ends_after_hangup``.
        """
        self.ends_after_hangup = after_hangup
        self.forget(asked_for)
        self.changed()
        self._deferred = not any(each.created for each in self._containers.values())
        self._end_if_empty()

    async def end_when_unused(self) -> None:
        """End the shim after a long time without a task, once its events are delivered."""
        unused = 0.0
        while True:
            changed = self._changed
            with loop.move_on_after(None if self._in_use else UNUSED):
                await changed.wait()
            unused = 0.0 if changed.is_set() else unused + UNUSED
            if unused and (not self._shim.publisher.waiting or unused >= UNHEARD):
                self._end_if_empty()

    @property
    def _in_use(self) -> bool:
        return bool(self._containers) or self._shim.sandbox is not None

    def _end_if_empty(self) -> None:
        if self._in_use or self.ending:
            return
        if self._own_socket.retire():
            self.ending = True
            self._shut_down()
        else:
            self._shim.tasks.start_soon(self._end_later)

    async def _end_later(self) -> None:
        """Try again later: the ``start`` that uses the socket may be for another shim."""
        changed = self._changed
        with loop.move_on_after(_AGAIN):
            await changed.wait()
        if not changed.is_set():
            self._end_if_empty()


class TaskService:
    """The tasks of this shim.

    Args:
        shim: the state that the shim's containers share.
        containers: the containers by id, each from the acceptance of its Create.
        lifetime: decides when the shim exits.
    """

    def __init__(
        self, shim: ShimContext, containers: dict[str, Container], lifetime: Lifetime
    ) -> None:
        self._shim = shim
        self._containers = containers
        self.lifetime = lifetime

    def services(self) -> list[Service]:
        """Return the service under both of its names."""
        return [service.bind(self) for service in _SERVICES]

    async def create(
        self, _: Context, request: task_pb2.CreateTaskRequest
    ) -> task_pb2.CreateTaskResponse:
        """Create a container from its bundle; its init process waits for Start."""
        check_id(request.id)
        self.lifetime.forget(request.id)
        _refuse_zero_bytes("request", request)
        if self.lifetime.ending:
            # It arrived during the answer to Shutdown.
            raise ShuttingDown(
                f"task {request.id}", found="a shim that is ending", do="create it once more"
            )
        if request.id in self._containers:
            raise TaskExists(f"task {request.id}", found="a task of that id", do="delete it first")
        options = read_options(request.options if request.HasField("options") else None)
        # For its own shim, containerd itself reads that option.
        checkpoint = request.checkpoint or options.criu_image_path
        uris = StdioUris(request.stdin, request.stdout, request.stderr, terminal=request.terminal)
        container = Container(self._shim, request.id, request.bundle, options, uris)
        self._containers[request.id] = container
        self.lifetime.changed()
        sandbox = self._shim.sandbox
        try:
            if sandbox is not None:
                sandbox.enter(request.id, request.bundle, options)
            pid = await container.create(request, checkpoint)
        except BaseException as error:
            del self._containers[request.id]
            if sandbox is not None:
                sandbox.leave(request.id)
            self.lifetime.create_failed()
            if isinstance(error, NvshimError):
                error.preface = runtime_failed("create")
            raise
        self.lifetime.create_succeeded()
        return task_pb2.CreateTaskResponse(pid=pid)

    async def start(self, _: Context, request: task_pb2.StartRequest) -> task_pb2.StartResponse:
        """Start init, or an exec."""
        pid = await self._container(request.id).start(request.exec_id)
        return task_pb2.StartResponse(pid=pid)

    async def delete(self, _: Context, request: task_pb2.DeleteRequest) -> task_pb2.DeleteResponse:
        """Remove a container or an exec."""
        if not request.exec_id:
            if request.id not in self._containers:
                self.lifetime.forget(request.id)
            await self._end_creation(request.id)
        container = self._container(request.id)
        if request.exec_id:
            process = await container.delete_exec(request.exec_id)
        else:
            await container.delete()
            process = container.init
            self._containers.pop(request.id, None)
            self.lifetime.changed()
            if self._shim.sandbox is not None:
                self._shim.sandbox.leave(request.id)
        response = task_pb2.DeleteResponse(pid=process.pid)
        fill_exit(response, process)
        return response

    async def exec(self, _: Context, request: task_pb2.ExecProcessRequest) -> Empty:
        """Add a process to a running container, to start later."""
        check_id(request.exec_id, "exec id")
        _refuse_zero_bytes("request", request)
        container = self._container(request.id)
        uris = StdioUris(request.stdin, request.stdout, request.stderr, terminal=request.terminal)
        await container.add_exec(request.exec_id, typeurl.unpack_json(request.spec), uris)
        return Empty()

    def state(self, _: Context, request: task_pb2.StateRequest) -> task_pb2.StateResponse:
        """Return the state of a process."""
        container = self._container(request.id)
        process = container.process(request.exec_id)
        uris, state = process.uris, process.state
        if state is State.RUNNING and container.init.state is State.PAUSED:
            state = State.PAUSED  # an exec, with its container
        response = task_pb2.StateResponse(
            id=process.id,
            bundle=container.bundle,
            pid=process.pid,
            status=_STATUS[state],
            stdin=uris.stdin,
            stdout=uris.stdout,
            stderr=uris.stderr,
            terminal=uris.terminal,
            exec_id=request.exec_id,
        )
        fill_exit(response, process)
        return response

    async def wait(self, _: Context, request: task_pb2.WaitRequest) -> task_pb2.WaitResponse:
        """Answer when the exit of a process is published."""
        process = self._container(request.id).process(request.exec_id)
        await process.wait()
        response = task_pb2.WaitResponse()
        fill_exit(response, process)
        return response

    async def kill(self, _: Context, request: task_pb2.KillRequest) -> Empty:
        """Signal a process, or a whole container."""
        if request.signal == signal.SIGKILL and not request.exec_id:
            await self._end_creation(request.id)
        container = self._container(request.id)
        await container.kill(request.exec_id, request.signal, everyone=request.all)
        return Empty()

    async def pause(self, _: Context, request: task_pb2.PauseRequest) -> Empty:
        """Freeze a container."""
        await self._container(request.id).pause()
        return Empty()

    async def resume(self, _: Context, request: task_pb2.ResumeRequest) -> Empty:
        """Thaw a container."""
        await self._container(request.id).resume()
        return Empty()

    async def checkpoint(self, _: Context, request: task_pb2.CheckpointTaskRequest) -> Empty:
        """Save a container in a directory."""
        _refuse_zero_bytes("request", request)
        options = request.options if request.HasField("options") else None
        await self._container(request.id).checkpoint(request.path, options)
        return Empty()

    def pids(self, _: Context, request: task_pb2.PidsRequest) -> task_pb2.PidsResponse:
        """Return the processes of a container; those of execs have the exec's id."""
        response = task_pb2.PidsResponse()
        for pid, exec_id in self._container(request.id).pids().items():
            info = response.processes.add(pid=pid)
            if exec_id:
                details = runc_options_pb2.ProcessDetails(exec_id=exec_id)
                info.info.CopyFrom(typeurl.pack(details))
        return response

    def stats(self, _: Context, request: task_pb2.StatsRequest) -> task_pb2.StatsResponse:
        """Return a container's usage, as the message for the host's version of cgroups."""
        return task_pb2.StatsResponse(stats=typeurl.pack(self._container(request.id).stats()))

    async def update(self, _: Context, request: task_pb2.UpdateTaskRequest) -> Empty:
        """Change a container's limits. The annotations in the request are for other runtimes."""
        container = self._container(request.id)
        await container.update(typeurl.unpack_json(request.resources, typeurl.LINUX_RESOURCES))
        return Empty()

    def resize_pty(self, _: Context, request: task_pb2.ResizePtyRequest) -> Empty:
        """Set the size of a process's terminal."""
        process = self._container(request.id).process(request.exec_id)
        process.resize(request.width, request.height)
        return Empty()

    def close_io(self, _: Context, request: task_pb2.CloseIORequest) -> Empty:
        """Close the input of a process."""
        process = self._container(request.id).process(request.exec_id)
        if request.stdin:
            process.close_stdin()
        return Empty()

    def connect(self, _: Context, request: task_pb2.ConnectRequest) -> task_pb2.ConnectResponse:
        """Return the pids of the shim and the task's init; containerd's liveness check."""
        container = self._containers.get(request.id)
        pid = container.init.pid if container and container.created else 0
        return task_pb2.ConnectResponse(shim_pid=os.getpid(), task_pid=pid)

    def shutdown(self, _: Context, request: task_pb2.ShutdownRequest) -> Empty:
        """End this process if no task or sandbox is left or announced; otherwise do nothing.

        containerd calls this after every Delete. ``now`` is ignored: a shim without tasks only
        waits for the delivery of its events.
        """
        self.lifetime.end_when_empty(request.id)
        return Empty()

    @property
    def containers(self) -> list[Container]:
        """The containers, including those being created."""
        return list(self._containers.values())

    def describe(self) -> list[dict[str, object]]:
        """Describe each process of each container in a line, for the log."""
        return [line for each in self._containers.values() for line in each.describe()]

    async def _end_creation(self, container_id: str) -> None:
        """Cancel a running Create whose client has given up.

        Raises:
            TaskNotFound: the Create was cancelled.
        """
        container = self._containers.get(container_id)
        if container is None or container.created:
            return
        undone = await container.cancel_create()
        if not container.created:  # it may have just succeeded
            found = "it was being created, which was cancelled"
            if not undone:
                found += "; its runtime or its file system does not let go of it yet"
            raise TaskNotFound(f"task {container_id}", found=found)

    def _container(self, container_id: str) -> Container:
        container = self._containers.get(container_id)
        if container is None or not container.created:
            raise TaskNotFound(
                f"task {container_id}", found="no task of that id here", do="list the tasks"
            )
        return container


def _refuse_zero_bytes(name: str, value: Any) -> None:
    """Refuse a field or message with a zero byte, at which the kernel would truncate it."""
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


def refused_by_system(error: BaseException, context: Context, request: Any) -> NvshimError | None:
    """Convert a handler's OSError (including TimeoutError and the like) to a typed error."""
    if not isinstance(error, OSError):
        return None
    where = f" ({error.filename})" if error.filename else ""
    scarce = error.errno in SCARCE
    refused = SystemRefused(
        f"{context.method} of {getattr(request, 'id', '') or request.sandbox_id}",
        found=f"{os.strerror(error.errno).lower() if error.errno else error}{where}",
        do="look at the shim's limits and at what is full, and ask again" if scarce else "",
        status=Status.RESOURCE_EXHAUSTED if scarce else Status.UNKNOWN,
    )
    if context.method == "Create":
        refused.preface = runtime_failed("create")
    return refused


# Created once, before a shim is forked.
_HANDLERS: Final[Mapping[str, Handler]] = {
    "Create": TaskService.create,
    "Start": TaskService.start,
    "Delete": TaskService.delete,
    "Pause": TaskService.pause,
    "Resume": TaskService.resume,
    "Checkpoint": TaskService.checkpoint,
    "Exec": TaskService.exec,
    "Kill": TaskService.kill,
    "Update": TaskService.update,
    "Wait": TaskService.wait,
}
_IMMEDIATE: Final[Mapping[str, ImmediateHandler]] = {
    "State": TaskService.state,
    "Pids": TaskService.pids,
    "Stats": TaskService.stats,
    "ResizePty": TaskService.resize_pty,
    "CloseIO": TaskService.close_io,
    "Connect": TaskService.connect,
    "Shutdown": TaskService.shutdown,
}
_SERVICES: Final = tuple(
    Service(
        task_pb2.DESCRIPTOR.services_by_name["Task"],
        _HANDLERS,
        immediate=_IMMEDIATE,
        shared=("Wait",),
        vital=("Kill", "Delete"),
        shielded=(_HANDLERS.keys() - {"Exec", "Wait"}),
        translate=refused_by_system,
        name=name,
    )
    for name in SERVICE_NAMES
)
