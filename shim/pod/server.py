"""The shim's server: it serves until no task is left.

One thread, one event loop. Signals: SIGCHLD reaps; SIGTERM and SIGINT shut the process down
(containers go on, and containerd cleans up after them); SIGUSR1 writes what the process is doing
to the log; SIGPIPE is an error code here and the default in children.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from api.errors import describe_bug
from shim import loop, resident, sockets, syscalls
from shim.context import ShimContext
from shim.pod.events import Publisher
from shim.pod.sandbox_service import SandboxService
from shim.pod.service import Lifetime, OwnSocket, TaskService
from shim.pod.ttrpc import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from shim.log import Log
    from shim.pod.container import Container
    from shim.reaper import Reaper

# Seconds of each step of the shutdown: containerd waits 3 s for it.
_GRACE: Final = 1.0
_HANGUP: Final = 2.0
_HANGING: Final = 1.5
_EVENTS: Final = 2.0
# Seconds between attempts to remove a socket that a start is just using.
_PAUSE: Final = 0.01

_MANY: Final = 256
_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def run(
    *,
    listener_fd: int,
    addressed: tuple[str, str],
    socket_path: str,
    log: Log,
    reaper: Reaper,
) -> NoReturn:
    """Serve until containerd asks for the end and no task is left.

    Args:
        listener_fd: the listening socket.
        addressed: containerd's namespace, and its socket for events.
        socket_path: the file of the listening socket, removed at the end.
        log: the shim's log.
        reaper: who may have a child already.
    """
    own_socket = OwnSocket(socket_path, sockets.identity(socket_path))
    try:
        syscalls.set_child_subreaper()
        listener = socket.socket(fileno=listener_fd)
        loop.run(serve, listener, own_socket, addressed, log, reaper)
    except BaseException as error:  # noqa: BLE001 - no caller is left to raise it to
        log.error("the shim failed", traceback=describe_bug(error))
        own_socket.remove()
    os._exit(1)


async def serve(
    listener: socket.socket,
    own_socket: OwnSocket,
    addressed: tuple[str, str],
    log: Log,
    reaper: Reaper,
    *,
    leave: Callable[[], None] = lambda: os._exit(0),
) -> None:
    """Serve until the end, and shut down in order.

    Args:
        listener: the listening socket.
        own_socket: its file.
        addressed: containerd's namespace, and its socket for events.
        log: the shim's log.
        reaper: of all children.
        leave: ends the process.
    """
    namespace, ttrpc_address = addressed
    async with loop.create_task_group() as tasks:
        publisher = Publisher(ttrpc_address, namespace, tasks, log)
        context = ShimContext(
            namespace=namespace,
            reaper=reaper,
            publisher=publisher,
            tasks=GuardedTasks(tasks, log),
            log=log,
        )
        ended = loop.Event()
        containers: dict[str, Container] = {}
        lifetime = Lifetime(context, own_socket, containers, ended.set)
        service = TaskService(context, containers, lifetime)
        services = [*service.services(), SandboxService(context, service).service()]
        server = Server(services, log=lambda event, fields: log.warning(event, **fields))
        with _signals(lambda number: _handle(number, context, service, ended)):
            reaper.reap()  # a worker may have ended before
            tasks.start_soon(_serve_until, server, listener, ended)
            context.tasks.start_soon(lifetime.end_when_unused)
            context.tasks.start_soon(resident.load_by_and_by, log)
            await ended.wait()
            # While it still listens: see sockets.retire.
            with loop.move_on_after(_GRACE):
                while not own_socket.remove():
                    await loop.sleep(_PAUSE)
            if lifetime.ends_after_hangup:
                with loop.move_on_after(_HANGUP):
                    await server.wait_deserted()
            # A request that waits for its runtime goes on when it is cancelled, and that may hang.
            with loop.move_on_after(_HANGING):
                await server.shutdown(_GRACE)
            if not await publisher.drain(_EVENTS):
                log.warning("events were not delivered before the end", count=publisher.waiting)
            publisher.close()
            # Not by leaving the group, which would wait for such a request. The delete verb
            # removes what is half made.
            leave()


class GuardedTasks:
    """Background tasks of containers, none of which ends the others when it fails.

    A task group ends with the first exception in it. One shim serves a whole pod: a bug that one
    container's output triggers must not end its neighbours.

    Args:
        group: the group.
        log: where a failure is logged, with its traceback.
    """

    __slots__ = ("_group", "_log")

    def __init__(self, group: loop.TaskGroup, log: Log) -> None:
        self._group = group
        self._log = log

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
    ) -> None:
        """Start one, without waiting for its first step."""
        self._group.start_soon(self._run, function, arguments)

    async def _run(
        self, function: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[Any, ...]
    ) -> None:
        try:
            await function(*arguments)
        except Exception as error:  # noqa: BLE001 - no error may end the pod
            self._log.error("a task of a container failed", traceback=describe_bug(error))


async def _serve_until(server: Server, listener: socket.socket, ended: loop.Event) -> None:
    try:
        await server.serve(listener)
    finally:
        ended.set()


@contextmanager
def _signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Have the loop call a function with the number of each signal that arrives.

    The interpreter's own handler writes the numbers into a pipe.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Before the handlers, which would lose what arrives in between.
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _pass) for number in _SIGNALS}

    def read(_: int) -> None:
        for number in os.read(reading, _MANY):
            if number in _SIGNALS:
                handle(number)

    loop.watch(reading, read)
    try:
        yield
    finally:
        loop.unwatch(reading)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(reading)
        os.close(writing)


def _pass(_: int, __: object) -> None:
    """Whoever reads the pipe does the work."""


def _handle(number: int, shim: ShimContext, service: TaskService, ended: loop.Event) -> None:
    if number == signal.SIGCHLD:
        shim.reaper.reap()
    elif number == signal.SIGUSR1:
        shim.tasks.start_soon(_tell_what_runs, service, shim.log)
    else:
        shim.log.info("ends by signal", signal=signal.Signals(number).name)
        ended.set()


async def _tell_what_runs(service: TaskService, log: Log) -> None:
    for line in service.describe():
        log.info("process", **line)
    for task in loop.get_running_tasks():
        log.info("task", name=task.name, at=repr(task.coro))
