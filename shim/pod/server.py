"""The shim's server: it serves until no task is left.

It has one thread and one event loop. Signals: SIGCHLD reaps; SIGTERM and SIGINT shut the process
down (containerd then runs `delete`, which ends its containers); SIGUSR1 logs the current activity;
SIGPIPE is an error code here and has its default action in children.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Final, NoReturn

from api.errors import describe_bug
from shim import loop, resident, sockets, syscalls
from shim.cgroup.moves import ExpectedMoves
from shim.children import Reaper
from shim.context import Moves, ShimContext
from shim.log import Log
from shim.pod.container import Container
from shim.pod.events import Publisher
from shim.pod.sandbox_service import SandboxService
from shim.pod.service import Lifetime, OwnSocket, TaskService
from shim.pod.ttrpc import Server

# Seconds of each step of the shutdown: containerd waits 3 s for it.
_GRACE: Final = 1.0
_HANGUP: Final = 2.0
_HANGING: Final = 1.5
_EVENTS: Final = 2.0
# Seconds between attempts to remove a socket that a start is using.
_PAUSE: Final = 0.01


def run(
    *,
    listener_fd: int,
    addressed: tuple[str, str],
    socket_path: str,
    log: Log,
    reaper: Reaper,
) -> NoReturn:
    """Serve until containerd asks the shim to exit and no task is left.

    Args:
        listener_fd: the listening socket.
        addressed: containerd's namespace, and its socket for events.
        socket_path: the file of the listening socket, which is removed at the end.
        log: the shim's log.
        reaper: the reaper, perhaps already with a child.
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
    moves: Moves | None = None,
) -> None:
    """Serve until the end, and shut down in order.

    Args:
        listener: the listening socket.
        own_socket: the file of the listening socket.
        addressed: containerd's namespace, and its socket for events.
        log: the shim's log.
        reaper: the reaper of all children.
        leave: ends the process.
        moves: prepares moves between cgroups; by default, a thread of this process does.
    """
    namespace, ttrpc_address = addressed
    ended = loop.Event()

    def report(error: Exception) -> None:
        log.error("a task of a container failed", traceback=describe_bug(error))

    def end(name: str) -> None:
        log.info("ends by signal", signal=name)
        ended.set()

    async with loop.create_task_group() as tasks:
        publisher = Publisher(ttrpc_address, namespace, tasks, log)
        context = ShimContext(
            namespace=namespace,
            reaper=reaper,
            publisher=publisher,
            tasks=loop.GuardedTasks(tasks, report),
            log=log,
            moves=moves or ExpectedMoves(),
        )
        containers: dict[str, Container] = {}
        lifetime = Lifetime(context, own_socket, containers, ended.set)
        service = TaskService(context, containers, lifetime)
        services = [*service.services(), SandboxService(context, service).service()]
        server = Server(services, log=lambda event, fields: log.warning(event, **fields))
        handlers: dict[int, Callable[[], object]] = {
            signal.SIGCHLD: reaper.reap,
            signal.SIGTERM: lambda: end("SIGTERM"),
            signal.SIGINT: lambda: end("SIGINT"),
            signal.SIGUSR1: lambda: context.tasks.start_soon(_tell_what_runs, service, log),
        }
        with loop.handle_signals(handlers):
            reaper.reap()  # a worker may have already ended
            tasks.start_soon(_serve_until, server, listener, ended)
            context.tasks.start_soon(lifetime.end_when_unused)
            context.tasks.start_soon(resident.load_by_and_by, log)
            await ended.wait()
            # While the socket still listens: see sockets.retire.
            with loop.move_on_after(_GRACE):
                while not own_socket.remove():
                    await loop.sleep(_PAUSE)
            if lifetime.ends_after_hangup:
                with loop.move_on_after(_HANGUP):
                    await server.wait_deserted()
            # A cancelled request still waits for its runtime, which may hang.
            with loop.move_on_after(_HANGING):
                await server.shutdown(_GRACE)
            if not await publisher.drain(_EVENTS):
                log.warning("events were not delivered before the end", count=publisher.waiting)
            publisher.close()
            # Exit inside the group: leaving it would wait for such a request. The delete verb
            # removes what is half created.
            leave()


async def _serve_until(server: Server, listener: socket.socket, ended: loop.Event) -> None:
    try:
        await server.serve(listener)
    finally:
        ended.set()


async def _tell_what_runs(service: TaskService, log: Log) -> None:
    for line in service.describe():
        log.info("process", **line)
    for task in loop.get_running_tasks():
        log.info("task", name=task.name, at=repr(task.coro))
