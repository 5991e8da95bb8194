"""A ttrpc server on a unix socket.

It accepts connections, checks who connects, and leaves each connection to a :class:`Session`.
Everything runs in the caller's thread; nothing is started before :meth:`Server.serve`, and nothing
is left after it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import anyio
from anyio.abc import TaskGroup

from api.errors import describe_bug
from api.ttrpc.calls import MAX_CALLS
from api.ttrpc.errors import LocalProtocolError, PeerRejected
from api.ttrpc.service import Service
from api.ttrpc.session import Session
from api.ttrpc.sockets import ABORTED, PASSING, check_peer

_PAUSE: Final = 0.1  # seconds

_GRACE: Final = 5.0  # seconds


class Server:
    """Serves services.

    Args:
        services: the services; their names must differ.
        log: called with an event and its fields if something goes wrong that no client is told, or
            that a person should look at: a rejected peer, a handler's exception.
        max_calls: how many requests one connection may have in progress. Further ones are answered
            with RESOURCE_EXHAUSTED, except those that a service never refuses.

    Raises:
        LocalProtocolError: two services have the same name.
    """

    def __init__(
        self,
        services: Iterable[Service],
        *,
        log: Callable[[str, Mapping[str, object]], None] | None = None,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._services: dict[str, Service] = {}
        for service in services:
            if service.name in self._services:
                raise LocalProtocolError(f"serve {service.name}", found="it is served already")
            self._services[service.name] = service
        self._log = log or _drop
        self._max_calls = max_calls
        self._sessions: set[Session] = set()
        self._left = anyio.Event()
        self._serving: _Serving | None = None
        self._closing = False
        self._grace = _GRACE

    async def serve(self, listener: socket.socket) -> None:
        """Accept and serve connections until :meth:`close` or :meth:`shutdown` is called.

        Args:
            listener: a unix socket, bound and listening. It is closed when this returns; the caller
                has to remove its file.

        Raises:
            LocalProtocolError: the server is already running.
            OSError: the listener failed.
        """
        if self._serving is not None:
            raise LocalProtocolError("serve a listener", found="this server has one already")
        listener.setblocking(False)
        failure: OSError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                self._serving = _Serving(tasks.cancel_scope)
                with self._serving.accepting:
                    if not self._closing:
                        failure = await self._accept(listener, tasks)
                        tasks.cancel_scope.cancel()
                # From here a client is refused at once, rather than left waiting unaccepted.
                listener.close()
                scope = tasks.cancel_scope
                scope.deadline = min(scope.deadline, anyio.current_time() + self._grace)
        finally:
            listener.close()
            if self._serving is not None:
                self._serving.stopped.set()
                self._serving = None
        if failure is not None:
            raise failure

    def close(self, grace: float = _GRACE) -> None:
        """Start to stop, and return at once: for handlers, such as a ``Shutdown``, to call.

        No further connection is accepted and no request started. Idle connections are closed, and
        the others when their last request is answered. Then :meth:`serve` returns. Requests that
        have arrived by then and need not wait (a second ``Shutdown``) are still answered.

        Args:
            grace: seconds after which requests that are still in progress are cancelled without an
                answer.
        """
        if self._closing:
            return
        self._closing = True
        self._grace = grace
        if self._serving is not None:
            self._serving.accepting.cancel()
        for session in tuple(self._sessions):
            session.drain()

    async def shutdown(self, grace: float = _GRACE) -> None:
        """:meth:`close`, and wait until :meth:`serve` is about to return.

        Not for handlers, which would wait for themselves; they have to call :meth:`close`.

        Args:
            grace: seconds, as for :meth:`close`. A second call can only shorten this time.
        """
        self.close(grace)
        serving = self._serving
        if serving is not None:
            scope = serving.everything
            scope.deadline = min(scope.deadline, anyio.current_time() + grace)
            await serving.stopped.wait()

    async def wait_deserted(self) -> None:
        """Wait until no client is connected."""
        while self._sessions:
            self._left = anyio.Event()
            await self._left.wait()

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> OSError:
        """Accept connections until the listener fails; return how it failed."""
        is_short = False  # of descriptors, which is logged once until it is over
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                if error.errno in PASSING:
                    if not is_short:
                        self._log("cannot accept a connection now", {"error": str(error)})
                    is_short = True
                    await anyio.sleep(_PAUSE)
                elif error.errno not in ABORTED:
                    return error
                continue
            is_short = False
            try:
                peer = check_peer(sock)
            except PeerRejected as error:
                sock.close()
                self._log("a connection was rejected", {"error": str(error)})
                continue
            session = Session(sock, peer, self._services, self._log, self._max_calls)
            tasks.start_soon(self._run, session)

    async def _run(self, session: Session) -> None:
        self._sessions.add(session)
        if self._closing:
            session.drain()
        try:
            await session.run()
        except Exception as error:  # noqa: BLE001 - a bug that one client meets is not for all to pay
            self._log("a connection failed", {"traceback": describe_bug(error)})
        finally:
            self._sessions.discard(session)
            self._left.set()


class _Serving:
    """What ``close`` and ``shutdown`` must get at of a ``serve`` under way."""

    __slots__ = ("accepting", "everything", "stopped")

    def __init__(self, everything: anyio.CancelScope) -> None:
        self.everything = everything
        self.accepting = anyio.CancelScope()
        self.stopped = anyio.Event()


def _drop(_: str, __: Mapping[str, object]) -> None:
    """Drop a report: the caller wants none."""
