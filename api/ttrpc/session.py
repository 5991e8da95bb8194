"""One accepted connection: reads it, runs its handlers, sends their answers.

The rules are those of :mod:`api.ttrpc.calls`. What is kept for a client that does not read stays
bounded by :mod:`api.ttrpc.transport`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from api.ttrpc.calls import TURN, Call, Calls
from api.ttrpc.errors import ConnectionClosed
from api.ttrpc.events import Ended, RequestReceived, StreamFailed
from api.ttrpc.transport import Transport

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from api.ttrpc.calls import Log, Outcome
    from api.ttrpc.service import Credentials, Service


class Session:
    """A connection that has been accepted and whose peer may speak to us.

    Args:
        sock: the connection; closed by :meth:`run`.
        peer: its other end.
        services: by name.
        log: where failures of handlers are told.
        max_calls: requests at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Credentials,
        services: Mapping[str, Service],
        log: Log,
        max_calls: int,
    ) -> None:
        self._sock = sock
        self._log = log
        self._calls = Calls(services, peer, log, now=anyio.current_time, max_calls=max_calls)
        self._reading = anyio.CancelScope()

    async def run(self) -> None:
        """Serve the connection until its client is gone or, after :meth:`drain`, is answered."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._transport = Transport(self._sock, tasks)
                with self._reading:
                    await self._read()
                    tasks.cancel_scope.cancel()
                await self._transport.flushed()
        finally:
            self._sock.close()

    def drain(self) -> None:
        """Take no new requests, and end when those under way are answered."""
        self._calls.draining = True
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._calls.draining and not self._calls.by_stream:
            self._reading.cancel()

    async def _read(self) -> None:
        """Read until the client is gone."""
        transport, connection = self._transport, self._calls.connection
        try:
            while True:
                for event in connection.receive_data(await transport.receive()):
                    # The classes are final, and the chain is in the order of frequency.
                    if isinstance(event, RequestReceived):
                        self._accept(event)
                    elif isinstance(event, StreamFailed):
                        self._write(event.reply)
                        broken = self._calls.broken(event)
                        if broken is not None:
                            broken.scope.cancel()
                    elif isinstance(event, Ended):
                        if event.error:
                            self._log("a client broke off", {"error": str(event.error)})
                        return
                await transport.room()
        except ConnectionClosed:
            return

    def _accept(self, event: RequestReceived) -> None:
        """Answer a request, or start its task."""
        call = self._calls.accept(event, crowded=self._transport.crowded)
        if isinstance(call, bytes):
            self._write(call)
            return
        call.scope = anyio.CancelScope(deadline=call.context.deadline)
        self._tasks.start_soon(self._run, call)

    async def _run(self, call: Call) -> None:
        """Handle one request and answer it."""
        calls = self._calls
        try:
            outcome: Outcome | None = None
            with call.scope:
                outcome = await self._outcome(call)
            calls.unshare(call)  # later requests may get another answer
            # A stream that the peer has broken was answered; otherwise it was the deadline.
            if call.scope.cancelled_caught and calls.connection.is_live(call.stream_id):
                outcome = calls.too_late(call)
            if outcome is not None:
                await self._answer(call, outcome)
        finally:
            calls.ended(call)
            self._end_if_drained()

    async def _outcome(self, call: Call) -> Outcome | None:
        """What the handler makes of a request; None if nobody can be told."""
        try:
            # Requests of a client that leaves its answers unread wait here: one read of the
            # socket can hold a thousand of them, and their answers would have to be kept.
            await self._transport.room()
        except ConnectionClosed:
            return None
        try:
            outcome: Outcome | None = None
            with anyio.CancelScope(shield=call.method.name in call.service.shielded):
                outcome = await self._calls.handle(call)
        except anyio.get_cancelled_exc_class():
            # Ours has to go on; one that the handler let escape from a task of its own has not.
            if anyio.current_effective_deadline() == -math.inf:
                raise
            return self._calls.escaped(call)
        return outcome

    async def _answer(self, call: Call, outcome: Outcome) -> None:
        try:
            for number, stream_id in enumerate((call.stream_id, *(call.others or ()))):
                if number and number % TURN == 0:
                    await anyio.lowlevel.checkpoint()
                await self._transport.room()
                self._write(self._calls.answer(stream_id, outcome))
        except ConnectionClosed:
            return

    def _write(self, frame: bytes) -> None:
        try:
            if frame:
                self._transport.write(frame)
        except ConnectionClosed:
            # The reader learns it too and ends the connection with everything that runs on it.
            return
