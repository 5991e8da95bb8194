"""Exec, attach and port-forward, through the URL from a CRI server.

Each message starts with the number of its channel. The subprotocol is Kubernetes' fourth: the
oldest with an exit code; every containerd from 1.6 on speaks it. It cannot signal the end of the
input: close the connection, or send Ctrl-D.

Source: k8s.io/apimachinery pkg/util/httpstream/wsstream, k8s.io/kubelet pkg/cri/streaming
(remotecommand/websocket.go, portforward/websocket.go).
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from integration.cri.errors import CriError
from tools.errors import StreamBroken, StreamRefused

PROTOCOL: Final = "v4.channel.k8s.io"

_TIMEOUT: Final = 10.0


class _Messages:
    """A WebSocket to a server on this machine, without extensions.

    Args:
        url: the server's address, with the scheme http.

    Raises:
        StreamRefused: the server cannot be reached, or does not speak the protocol.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        protocol = Subprotocol(PROTOCOL)
        try:
            self._socket = connect(
                url.replace("http:", "ws:", 1),
                subprotocols=[protocol], compression=None, proxy=None, legacy=True,
            )  # fmt: skip
        except (OSError, WebSocketException) as error:
            raise StreamRefused(f"a stream from {url}", found=str(error)) from error
        if self._socket.subprotocol != protocol:
            self._socket.close()
            raise StreamRefused(f"a stream from {url}", found=f"another protocol than {PROTOCOL}")
        self.close = self._socket.close

    def send(self, channel: int, data: bytes) -> None:
        """Send data to a channel.

        Raises:
            StreamBroken: the connection is closed.
        """
        try:
            self._socket.send(bytes([channel]) + data)
        except ConnectionClosed as error:
            raise StreamBroken(f"the stream from {self._url}", found=str(error)) from error

    def receive(self, deadline: float) -> tuple[int, bytes] | None:
        """Return a channel's next message; None when the server has closed the connection.

        Args:
            deadline: on the monotonic clock.

        Raises:
            TimeoutError: no message arrived in time.
            StreamBroken: the data violates RFC 6455.
        """
        try:
            while not (message := self._socket.recv(deadline - time.monotonic(), decode=False)):
                pass  # a message without a channel is empty
        except ConnectionClosed as error:
            # Servers just disconnect; we send a close frame only after a protocol error.
            if error.sent is None or isinstance(error, ConnectionClosedOK):
                return None
            raise StreamBroken(f"the stream from {self._url}", found=str(error)) from error
        return message[0], message[1:]


class Channel(IntEnum):
    """Channels of a process."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    ERROR = 3  # the exit status
    RESIZE = 4


@dataclass(frozen=True, slots=True)
class Ended:
    """How a streamed process exited."""

    exit_code: int  # also 0 if the server detached the client without an error
    stdout: bytes  # all of stdout; with a terminal, stderr too
    stderr: bytes  # all of stderr
    message: str  # the server's message if it failed; else empty


class ProcessStream:
    """The stdio of an exec, or of an attached container.

    Args:
        url: the answer of Exec or Attach.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._messages = _Messages(url)
        self._output = {channel: bytearray() for channel in Channel}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.close()

    def write(self, text: bytes) -> None:
        """Write to the input."""
        self._messages.send(Channel.STDIN, text)

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size, in characters."""
        size = json.dumps({"Width": width, "Height": height}).encode()
        self._messages.send(Channel.RESIZE, size)

    def read_until(self, text: bytes, *, timeout: float = _TIMEOUT) -> bytes:
        """Return all of stdout so far, once it contains ``text``.

        Raises:
            TimeoutError: it did not arrive in time.
            StreamBroken: the stream closed without it.
        """
        deadline = time.monotonic() + timeout
        stdout = self._output[Channel.STDOUT]
        while text not in stdout:
            if not self._take(deadline):
                raise StreamBroken(
                    f"{text!r} from {self._url}", found=f"the end, after {bytes(stdout)!r}"
                )
        return bytes(stdout)

    def wait(self, *, timeout: float = _TIMEOUT) -> Ended:
        """Read everything to the end.

        Raises:
            TimeoutError: the stream did not end in time.
            StreamBroken: the server sent no exit status.
        """
        deadline = time.monotonic() + timeout
        while self._take(deadline):
            pass
        exit_code, message = self._verdict()
        stdout, stderr = (bytes(self._output[c]) for c in (Channel.STDOUT, Channel.STDERR))
        return Ended(exit_code, stdout, stderr, message)

    def _take(self, deadline: float) -> bool:
        """Read a message; return False at the end."""
        message = self._messages.receive(deadline)
        if message is not None:
            # The first message of each channel is empty: the channel is open.
            self._output[_channel(message[0], self._url)] += message[1]
        return message is not None

    def _verdict(self) -> tuple[int, str]:
        """Parse the metav1.Status of the error channel; return an exit code and a message."""
        text = bytes(self._output[Channel.ERROR])
        try:
            status = json.loads(text)
            if status["status"] == "Success":
                return 0, ""
            causes = status.get("details", {}).get("causes", [])
            codes = [int(c["message"]) for c in causes if c.get("reason") == "ExitCode"]
            # Without an exit code the server failed, and not the process.
            return (codes[0] if codes else -1), str(status.get("message", ""))
        except (ValueError, KeyError, TypeError) as error:
            raise StreamBroken(
                f"the end of {self._url}", found=f"no status but {text!r}"
            ) from error


class PortStream:
    """A connection to a port in a pod.

    Args:
        url: the answer of PortForward for this port alone.
        port: where a server listens in the pod.
    """

    _DATA: Final = 0
    _ERROR: Final = 1

    def __init__(self, url: str, port: int) -> None:
        self._url = url
        self._messages = _Messages(url)
        # The first message of both channels is the port, to distinguish several ports.
        self._greeted: set[int] = set()
        self._port = struct.pack("<H", port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.close()

    def write(self, data: bytes) -> None:
        """Send data to the port."""
        self._messages.send(self._DATA, data)

    def read(self, *, timeout: float = _TIMEOUT) -> bytes:
        """Return the next data from the port; empty at the end.

        Raises:
            TimeoutError: nothing arrived in time.
            StreamBroken: the server could not connect to the port; the message has the reason.
        """
        deadline = time.monotonic() + timeout
        while True:
            message = self._messages.receive(deadline)
            if message is None:
                return b""
            number, data = message
            if number not in self._greeted:
                if number not in {self._DATA, self._ERROR} or data != self._port:
                    raise self._broken(f"{data!r} on channel {number} for a port's number")
                self._greeted.add(number)
            elif data and number == self._DATA:
                return data
            elif data:
                raise self._broken(data.decode(errors="replace"))

    def _broken(self, found: str) -> CriError:
        return StreamBroken(f"the port at {self._url}", found=found)


def _channel(number: int, url: str) -> Channel:
    try:
        return Channel(number)
    except ValueError:
        raise StreamBroken(f"the stream from {url}", found=f"a channel {number}") from None
