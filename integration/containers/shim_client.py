"""Use a shim without containerd: execute its verbs, call its API, receive its events.

containerd does not show a shim's answers. An installer may not use the node's containerd, and a
test does not need one. So the caller takes the place of containerd here.

Source: containerd docs/runtime-v2.md.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.abc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from api import typeurl
from api.errors import NvshimError, Status
from api.proto import events_pb2, events_service_pb2, task_pb2, types_pb2
from api.ttrpc import Context, RemoteError, Service
from api.ttrpc.client import Client, connect
from api.ttrpc.server import Server
from integration.containers.bundles import Container
from integration.timeouts import PATIENCE

TASK_V2: Final = "containerd.task.v2.Task"
_TASK_V3: Final = "containerd.task.v3.Task"

_EVENTS: Final = {
    name.full_name: getattr(events_pb2, name.name)
    for name in events_pb2.DESCRIPTOR.message_types_by_name.values()
}


class EventsServer:
    """The socket on which containerd receives events; it can close and open again.

    Args:
        path: the path of the socket.
        namespace: the only one from which events are accepted.

    Attributes:
        envelopes: the received events, in order.
        refused: kinds of events to answer with INVALID_ARGUMENT.
    """

    def __init__(self, path: str, namespace: str) -> None:
        self.envelopes: list[types_pb2.Envelope] = []
        self.refused: set[str] = set()
        self._path = path
        self._namespace = namespace
        self._server: Server | None = None

    @property
    def events(self) -> list[Message]:
        """The received events, in order."""
        decoded = []
        for envelope in self.envelopes:
            kind = _EVENTS[typeurl.full_name(envelope.event)]
            decoded.append(typeurl.unpack(envelope.event, kind))
        return decoded

    @property
    def names(self) -> list[str]:
        """The kinds of the received events, in order."""
        return [type(event).__name__ for event in self.events]

    def of(self, container_id: str) -> list[str]:
        """Return the kinds of one container's events, in order; execs with their id."""
        kinds = []
        for event in self.events:
            if event.container_id == container_id:  # type: ignore[attr-defined] # all have it
                exec_id = getattr(event, "exec_id", "") or getattr(event, "id", "")
                suffix = f" {exec_id}" if exec_id not in ("", container_id) else ""
                kinds.append(type(event).__name__ + suffix)
        return kinds

    async def until(self, name: str, *, count: int = 1, seconds: float = 60 * PATIENCE) -> None:
        """Wait until a number of events of a kind were received."""
        with anyio.fail_after(seconds):
            while self.names.count(name) < count:  # noqa: ASYNC110 - a wait of tests
                await anyio.sleep(0.01)

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Serve until :meth:`stop`."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen()
            descriptor = events_service_pb2.DESCRIPTOR.services_by_name["Events"]
            self._server = Server([Service(descriptor, {"Forward": self._forward})])
            task_status.started()
            await self._server.serve(listener)

    def stop(self) -> None:
        """Close the socket, like a containerd that restarts.

        Received events are answered first, so that no shim repeats them.
        """
        if self._server is not None:
            self._server.close()

    async def _forward(self, context: Context, request: events_service_pb2.ForwardRequest) -> Empty:
        from_elsewhere = context.values("containerd-namespace-ttrpc") != [self._namespace]
        from_elsewhere |= request.envelope.namespace != self._namespace
        if (
            from_elsewhere
            or typeurl.full_name(request.envelope.event).rpartition(".")[2] in self.refused
        ):
            raise RemoteError("an event", status=Status.INVALID_ARGUMENT, message="no", details=())
        self.envelopes.append(request.envelope)
        return Empty()


def verb_words(
    program: str, verb: str, *, namespace: str, address: str, container_id: str, bundle: str = ""
) -> list[str]:
    """Return the command line with which containerd executes a verb.

    Args:
        program: the shim's program.
        verb: "start" or "delete".
        namespace: the container's.
        address: containerd's gRPC address.
        container_id: the container.
        bundle: the bundle, for ``delete``.
    """
    words = [program, "-namespace", namespace, "-address", address]
    words += ["-publish-binary", "/bin/false", "-id", container_id]
    return [*words, *(["-bundle", bundle] if bundle else []), verb]


def execute_verb(
    words: Sequence[str], bundle: str, *, stdin: bytes = b"", environment: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes]:
    """Execute a verb as containerd does: in the bundle, with one pipe for stdout and stderr.

    Args:
        words: the command line.
        bundle: the working directory.
        stdin: the bytes on its standard input.
        environment: the complete environment.

    Raises:
        OSError: it cannot be executed.
        subprocess.TimeoutExpired: it did not exit within a minute and was killed.
    """
    return subprocess.run(
        words,
        cwd=bundle,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60 * PATIENCE,
        check=False,
        env=environment,
    )


async def call(
    client: Client, method: str, *, service: str = TASK_V2, timeout: float, **fields: Any
) -> Any:
    """Call a method of the Task service by its name and its request's fields.

    Args:
        client: a client of the shim.
        method: the method's name.
        service: the service's name.
        timeout: seconds.
        fields: the fields of the request.
    """
    described = task_pb2.DESCRIPTOR.services_by_name["Task"].methods_by_name[method]
    request = getattr(task_pb2, described.input_type.name)(**fields)
    name = described.output_type.name
    response = Empty if name == "Empty" else getattr(task_pb2, name)
    return await client.call(service, method, request, response, timeout=timeout)


async def kill(container: Container, number: signal.Signals, *, timeout: float) -> None:
    """Ask a shim to signal its container, as containerd does; SIGKILL goes to all its processes.

    Args:
        container: the container; its shim may also be containerd's own.
        number: the signal.
        timeout: seconds for the shim to answer.

    Raises:
        NvshimError: the shim refuses.
        OSError: its socket cannot be reached.
        TimeoutError: it does not answer.
    """
    everyone = number == signal.SIGKILL
    with anyio.fail_after(timeout):
        async with connect(container.address) as client:
            for service in (TASK_V2, _TASK_V3):
                try:
                    await call(
                        client, "Kill", service=service, timeout=timeout,
                        id=container.id, signal=number.value, all=everyone,
                    )  # fmt: skip
                except NvshimError as error:
                    # containerd's own shims since 2.0 serve the other version of the API.
                    if error.status != Status.UNIMPLEMENTED or service == _TASK_V3:
                        raise
                else:
                    return
