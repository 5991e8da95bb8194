"""Exec, attach and port-forward, through the URL that a server of the CRI gives.

Each message has the number of its channel in front. The subprotocol is Kubernetes' fourth: the
oldest that tells the exit code, and spoken by every containerd from 1.6 on. It has no way to
say that there is no more input; who needs that closes the connection, or types Ctrl-D.

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
    """A WebSocket to a server of this machine, without extensions.

    Args:
        url: what to connect to, with the scheme http.

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
        """Send something to a channel.

        Raises:
            StreamBroken: the connection is gone.
        """
        try:
            self._socket.send(bytes([channel]) + data)
        except ConnectionClosed as error:
            raise StreamBroken(f"the stream from {self._url}", found=str(error)) from error

    def receive(self, deadline: float) -> tuple[int, bytes] | None:
        """The next of a channel's messages; None when the server has ended the connection.

        Args:
            deadline: on the monotonic clock.

        Raises:
            TimeoutError: it did not come in time.
            StreamBroken: it is not what RFC 6455 allows.
        """
        try:
            while not (message := self._socket.recv(deadline - time.monotonic(), decode=False)):
                pass  # without even a channel it says nothing
        except ConnectionClosed as error:
            # Servers just hang up; what we have against what they sent, we have told them.
            if error.sent is None or isinstance(error, ConnectionClosedOK):
                return None
            raise StreamBroken(f"the stream from {self._url}", found=str(error)) from error
        return message[0], message[1:]


class Channel(IntEnum):
    """Channels of a process."""

    STDIN = 0
    STDOUT = 1
    STDERR = 2
    ERROR = 3  # how it ended
    RESIZE = 4


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process that was streamed ended."""

    exit_code: int  # 0 also if an attached client was let go with success
    stdout: bytes  # all that was written there; with a terminal, all
    stderr: bytes  # likewise
    message: str  # the server's words if it failed; else empty


class ProcessStream:
    """The stdio of a process: of an exec, or of a container that is attached to.

    Args:
        url: what Exec or Attach answered.
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
        """Give it input."""
        self._messages.send(Channel.STDIN, text)

    def resize(self, width: int, height: int) -> None:
        """Tell its terminal the size, in characters."""
        size = json.dumps({"Width": width, "Height": height}).encode()
        self._messages.send(Channel.RESIZE, size)

    def read_until(self, text: bytes, *, timeout: float = _TIMEOUT) -> bytes:
        """Everything of its stdout, once ``text`` is in it.

        Raises:
            TimeoutError: it is not in time.
            StreamBroken: the stream ended without it.
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
        """Take everything to the end.

        Raises:
            TimeoutError: there is no end in time.
            StreamBroken: the server does not say how it ended.
        """
        deadline = time.monotonic() + timeout
        while self._take(deadline):
            pass
        exit_code, message = self._verdict()
        stdout, stderr = (bytes(self._output[c]) for c in (Channel.STDOUT, Channel.STDERR))
        return Ended(exit_code, stdout, stderr, message)

    def _take(self, deadline: float) -> bool:
        """Take a message; False at the end."""
        message = self._messages.receive(deadline)
        if message is not None:
            # The first of each channel is empty: it tells that the channel is open.
            self._output[_channel(message[0], self._url)] += message[1]
        return message is not None

    def _verdict(self) -> tuple[int, str]:
        """The metav1.Status of the error channel, as an exit code and a message."""
        text = bytes(self._output[Channel.ERROR])
        try:
            status = json.loads(text)
            if status["status"] == "Success":
                return 0, ""
            causes = status.get("details", {}).get("causes", [])
            codes = [int(c["message"]) for c in causes if c.get("reason") == "ExitCode"]
            # Without one the server failed, and not the process.
            return (codes[0] if codes else -1), str(status.get("message", ""))
        except (ValueError, KeyError, TypeError) as error:
            raise StreamBroken(
                f"the end of {self._url}", found=f"no status but {text!r}"
            ) from error


class PortStream:
    """A connection to a port in a pod.

    Args:
        url: what PortForward answered, which was asked for this port alone.
        port: where a server listens in the pod.
    """

    _DATA: Final = 0
    _ERROR: Final = 1

    def __init__(self, url: str, port: int) -> None:
        self._url = url
        self._messages = _Messages(url)
        # The first message of both channels is the port, so that more than one can be told apart.
        self._greeted: set[int] = set()
        self._port = struct.pack("<H", port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.close()

    def write(self, data: bytes) -> None:
        """Send to the port."""
        self._messages.send(self._DATA, data)

    def read(self, *, timeout: float = _TIMEOUT) -> bytes:
        """What comes next from the port; empty at the end.

        Raises:
            TimeoutError: nothing came in time.
            StreamBroken: the server could not connect to the port; the message has its words.
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
