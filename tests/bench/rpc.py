"""Calls to a shim, one after another, by a client with little overhead.

It has no event loop, so that only the shim is measured.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Final, Self

from api.proto import task_pb2
from api.ttrpc.connection import ClientConnection
from api.ttrpc.events import ResponseReceived
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tests.harness.runtime import Container

SERVICE: Final = "containerd.task.v2.Task"
"""The Task service, which every shim of containerd 1.6 and later has."""

_PATIENCE: Final = 20.0 * PATIENCE


class CallFailed(Exception):
    """A shim answered with an error, or not at all."""


class Shim:
    """A connection to a shim.

    Args:
        address: the socket's address, as ``start`` prints it and as the bundle's file has it.

    Raises:
        OSError: the socket has no listener.
    """

    def __init__(self, address: str) -> None:
        self._protocol = ClientConnection()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(_PATIENCE)
            self._socket.connect(address.removeprefix("unix://"))
        except BaseException:
            self._socket.close()
            raise

    @classmethod
    def of(cls, container: Container) -> Self:
        """Connect to the shim that serves a container."""
        bundle = container.runtime.containerd.bundle(container.name)
        with open(os.path.join(bundle, "address"), encoding="ascii") as file:
            return cls(file.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, method: str, **fields: Any) -> Any:
        """Call a method of the Task service.

        Raises:
                CallFailed: the shim returned an error, or closed the connection.
        """
        described = task_pb2.DESCRIPTOR.services_by_name["Task"].methods_by_name[method]
        request: Message = getattr(task_pb2, described.input_type.name)(**fields)
        payload = self.exchange(method, request.SerializeToString())
        # The Task service's file does not define Empty.
        kind = getattr(task_pb2, described.output_type.name, None)
        return None if kind is None else kind.FromString(payload)

    def exchange(self, method: str, payload: bytes) -> bytes:
        """Call a method with an encoded request; return the encoded response."""
        stream, frame = self._protocol.send_request(SERVICE, method, payload)
        self._socket.sendall(frame)
        while True:
            for event in self._protocol.receive_data(self._socket.recv(65536)):
                if not isinstance(event, ResponseReceived) or event.stream_id != stream:
                    raise CallFailed(f"{method}: {event}")
                if event.code:
                    raise CallFailed(f"{method}: {event.message}")
                return event.payload
