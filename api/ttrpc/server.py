"""A ttrpc server on a unix socket.

It accepts connections, checks their peers, and passes each to a :class:`Session`. Everything runs
in the caller's thread, and only during :meth:`Server.serve`.
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
        log: called with an event and its fields for errors that no client sees, or that an operator
            should see: a rejected peer, a handler's exception.
        max_calls: the most requests of one connection in progress. More are answered with
            RESOURCE_EXHAUSTED, except those that a service never refuses.

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
            listener: a listening unix socket, closed when this returns; the caller removes its
                file.

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
                # From now on clients are refused at once, instead of waiting in the backlog.
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
        """Start to stop, and return at once. For handlers such as ``Shutdown``.

        No new connection is accepted, and no request started. Idle connections close now, the
        others after their last answer. Then :meth:`serve` returns. Until then, requests that need
        not wait (a second ``Shutdown``) are still answered.

        Args:
            grace: seconds after which remaining requests are cancelled without an answer.
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
        """Call :meth:`close`, and wait until :meth:`serve` is about to return.

        Not for handlers, which would wait for themselves; they must call :meth:`close`.

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
        """Accept connections until the listener fails; return its error."""
        is_short = False  # of descriptors; logged once per shortage
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
    """The parts of a running ``serve`` that ``close`` and ``shutdown`` need."""

    __slots__ = ("accepting", "everything", "stopped")

    def __init__(self, everything: anyio.CancelScope) -> None:
        self.everything = everything
        self.accepting = anyio.CancelScope()
        self.stopped = anyio.Event()


def _drop(_: str, __: Mapping[str, object]) -> None:
    """Drop a report, since the caller wants none."""
