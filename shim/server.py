"""The shim's long life: from the fork in ``start`` until no task is left.

One thread, one event loop. Signals: SIGCHLD reaps; SIGTERM and SIGINT end the process in good
order (containers go on, and containerd's clean-up deals with them); SIGUSR1 writes what the
process is doing to the log; SIGPIPE is an error code here and the default in children.
"""

from __future__ import annotations

import os

from api import aio
from api.errors import describe_bug
from api.ttrpc import DeferredService, Server
from shim import resident, sockets, spare, syscalls
from shim.container import Surroundings
from shim.events import Publisher
from shim.injection import look_ahead
from shim.log import Log
from shim.reaper import Reaper
from shim.service import OwnSocket, TaskService
from shim.spawn import reserve_numbers
from shim.tasks import GuardedTasks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, NoReturn

    from api.aio.groups import TaskStatus
    from api.ttrpc import Service

# The C module under socket: the public one imports selectors and makes enumerations.
if TYPE_CHECKING:
    import socket as _socket
else:
    import _socket

# The C module under signal: the public one makes enumerations of its numbers.
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

_SANDBOX: Final = "containerd.runtime.sandbox.v1.Sandbox"

# Seconds for what is still to be said: containerd waits 3 s for Shutdown's effect.
_GRACE: Final = 1.0
_HANGUP: Final = 2.0
_HANGING: Final = 1.5
_EVENTS: Final = 2.0
# Until a start that is just finding the socket has found it.
_PAUSE: Final = 0.01

_SIGNALS: Final = (_signal.SIGCHLD, _signal.SIGTERM, _signal.SIGINT, _signal.SIGUSR1)


def main(
    *,
    listener_fd: int,
    container_id: str,
    namespace: str,
    ttrpc_address: str,
    socket_path: str,
    debug: bool,
) -> NoReturn:
    """Serve until containerd asks for the end and no task is left.

    Args:
        listener_fd: the listening socket.
        container_id: the first container, for which this shim was started.
        namespace: containerd's namespace.
        ttrpc_address: where events are sent.
        socket_path: the file of the listening socket, removed at the end.
        debug: whether to log each step.
    """
    listener_fd = reserve_numbers(listener_fd)
    spare.keep()
    log = Log(os.getcwd(), debug=debug, shim=container_id, namespace=namespace)
    own_socket = OwnSocket(socket_path, sockets.identity(socket_path))
    try:
        syscalls.set_child_subreaper()
        listener = _socket.socket(fileno=listener_fd)

        async def serve_bundle() -> None:
            await serve(
                listener,
                own_socket,
                (namespace, ttrpc_address),
                log,
                lambda: os._exit(0),
                ahead=lambda: look_ahead(os.getcwd()),
            )

        aio.run(serve_bundle)
    except BaseException as error:  # noqa: BLE001 - there is nobody above to raise it to
        log.error("the shim failed", traceback=describe_bug(error))
        own_socket.remove()
    os._exit(1)


async def serve(
    listener: _socket.socket,
    own_socket: OwnSocket,
    addressed: tuple[str, str],
    log: Log,
    leave: Callable[[], None],
    *,
    ahead: Callable[[], None] | None = None,
) -> None:
    """Serve until the end, and take it in good order.

    Args:
        listener: the listening socket.
        own_socket: its file.
        addressed: containerd's namespace, and where events are sent.
        log: where is told what goes wrong.
        leave: ends the process.
        ahead: what can be done before anybody calls.
    """
    namespace, ttrpc_address = addressed
    reaper = Reaper()
    async with aio.create_task_group() as tasks:
        publisher = Publisher(ttrpc_address, namespace, tasks, log)
        surroundings = Surroundings(
            namespace=namespace,
            reaper=reaper,
            publisher=publisher,
            tasks=GuardedTasks(tasks, log),
            log=log,
        )
        ended = aio.Event()
        service = TaskService(surroundings, own_socket, ended.set)
        sandboxes = DeferredService(_SANDBOX, lambda: _sandbox_service(surroundings, service))
        services = [*service.services(), sandboxes]
        server = Server(services, log=lambda event, fields: log.warning(event, **fields))
        await tasks.start(_handle_signals, surroundings, service, ended)
        tasks.start_soon(_serve_until, server, listener, ended)
        surroundings.tasks.start_soon(service.end_when_unused)
        surroundings.tasks.start_soon(resident.load_by_and_by, log)
        if ahead is not None:
            await aio.checkpoint()  # until it listens
            ahead()
        await ended.wait()
        # While it still listens: see sockets.retire.
        with aio.move_on_after(_GRACE):
            while not own_socket.remove():
                await aio.sleep(_PAUSE)
        if service.ends_after_hangup:
            with aio.move_on_after(_HANGUP):
                await server.wait_deserted()
        # A request that waits for its runtime goes on when it is cancelled, and that may hang.
        with aio.move_on_after(_HANGING):
            await server.shutdown(_GRACE)
        if not await publisher.drain(_EVENTS):
            log.warning("events were not delivered before the end", count=publisher.waiting)
        # Not by leaving the group, which would wait for such a request. What is half made is
        # found by the delete verb.
        leave()


def _sandbox_service(surroundings: Surroundings, tasks: TaskService) -> Service:
    from shim.sandbox_service import SandboxService  # noqa: PLC0415 - most shims have none

    return SandboxService(surroundings, tasks).service()


async def _serve_until(server: Server, listener: _socket.socket, ended: aio.Event) -> None:
    try:
        await server.serve(listener)
    finally:
        ended.set()


async def _handle_signals(
    shim: Surroundings,
    service: TaskService,
    ended: aio.Event,
    *,
    task_status: TaskStatus[None],
) -> None:
    with aio.open_signal_receiver(*_SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            if number == _signal.SIGCHLD:
                shim.reaper.reap()
            elif number == _signal.SIGUSR1:
                shim.tasks.start_soon(_tell_what_runs, service, shim.log)
            else:
                shim.log.info("ends by signal", signal=_name_of(number))
                ended.set()


async def _tell_what_runs(service: TaskService, log: Log) -> None:
    for line in service.describe():
        log.info("process", **line)
    for task in aio.get_running_tasks():
        log.info("task", name=task.name, at=repr(task.coro))


def _name_of(number: int) -> str:
    from signal import Signals  # noqa: PLC0415 - see _signal

    return Signals(number).name
