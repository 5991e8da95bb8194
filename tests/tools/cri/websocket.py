"""A WebSocket, as far as streams of containers need one: the client's side, blocking.

Messages are whole and binary: whoever needs streams in one connection puts a number in front of
each (:mod:`.streaming`). No extension and no TLS, as the server listens on this machine.

Source: RFC 6455.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import struct
import time
from enum import IntEnum
from typing import Final, Self
from urllib.parse import urlsplit

from tests.tools.errors import StreamBroken, StreamRefused

_GUID: Final = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # section 1.3
_SHORTEST_FRAME: Final = 2
_LONGEST_HEAD: Final = 1 << 16
_LONGEST_MESSAGE: Final = 1 << 26
_TIMEOUT: Final = 10.0


class Opcode(IntEnum):
    """What a frame is, section 5.2."""

    CONTINUATION = 0x0
    TEXT = 0x1
    BINARY = 0x2
    CLOSE = 0x8
    PING = 0x9
    PONG = 0xA


class WebSocket:
    """An open connection. As a context it is closed at the end.

    Args:
        url: what to connect to, with the scheme http or ws.
        protocol: the subprotocol that is asked for, and has to be agreed to.
        timeout: seconds that opening it may take.

    Raises:
        StreamRefused: the server cannot be reached, or does not switch to this protocol.
    """

    def __init__(self, url: str, *, protocol: str, timeout: float = _TIMEOUT) -> None:
        self._url = url
        self._unread = bytearray()
        parts = urlsplit(url)
        try:
            self._socket = socket.create_connection(
                (parts.hostname or "", parts.port or 80), timeout
            )
        except OSError as error:
            raise StreamRefused(f"a stream from {url}", found=str(error)) from error
        try:
            self._shake_hands(parts.netloc, parts.path, parts.query, protocol)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: bytes) -> None:
        """Send one message.

        Raises:
            StreamBroken: the connection is gone.
        """
        self._send_frame(Opcode.BINARY, message)

    def receive(self, *, timeout: float = _TIMEOUT) -> bytes | None:
        """The next message; None when the server has ended the connection.

        Args:
            timeout: seconds to wait for it.

        Raises:
            TimeoutError: it did not come in time. What has come of it is not lost.
            StreamBroken: it is cut off, or not what RFC 6455 allows.
        """
        deadline = time.monotonic() + timeout
        message = b""
        taken = 0
        while True:
            frame = self._frame_at(taken)
            while frame is None:
                if not self._read_more(deadline):
                    if self._unread:
                        raise self._broken(f"it ended within a message of {len(self._unread)} B")
                    return None
                frame = self._frame_at(taken)
            final, opcode, payload, taken = frame
            match opcode:
                case Opcode.CLOSE:
                    return None
                case Opcode.PING:
                    self._send_frame(Opcode.PONG, payload)
                case Opcode.TEXT | Opcode.BINARY | Opcode.CONTINUATION:
                    message += payload
                    if final:
                        del self._unread[:taken]
                        return message

    def close(self) -> None:
        """Say goodbye, and close the connection. The server may be gone already."""
        try:
            self._send_frame(Opcode.CLOSE, b"")
        except StreamBroken:
            pass
        self._socket.close()

    def _shake_hands(self, host: str, path: str, query: str, protocol: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {path}{'?' if query else ''}{query} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            f"Sec-WebSocket-Protocol: {protocol}",
            "Sec-WebSocket-Version: 13",
            f"Origin: http://{host}",
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        while b"\r\n\r\n" not in self._unread and len(self._unread) < _LONGEST_HEAD:
            try:
                if not self._read_more(time.monotonic() + _TIMEOUT):
                    break
            except TimeoutError:
                break
        head, _, rest = bytes(self._unread).partition(b"\r\n\r\n")
        first, *headers = head.decode(errors="replace").split("\r\n")
        answer = {
            name.strip().lower(): value.strip()
            for name, _, value in (header.partition(":") for header in headers)
        }
        if first.split()[1:2] != ["101"]:
            said = rest.decode(errors="replace").strip()
            raise self._refused(f"{first or 'no answer'} {said}")
        accept = base64.b64encode(hashlib.sha1(f"{key}{_GUID}".encode()).digest())
        if answer.get("sec-websocket-accept") != accept.decode():
            raise self._refused("an answer to somebody else's key")
        if answer.get("sec-websocket-protocol") != protocol:
            raise self._refused(f"the protocol {answer.get('sec-websocket-protocol', 'none')!r}")
        del self._unread[: len(head) + 4]

    def _frame_at(self, start: int) -> tuple[bool, Opcode, bytes, int] | None:
        """A frame that has been read whole: is it final, what, its payload, where it ends."""
        head = self._unread[start : start + 2]
        if len(head) < _SHORTEST_FRAME:
            return None
        final, length, position = bool(head[0] & 0x80), head[1] & 0x7F, start + 2
        if head[0] & 0x70 or head[1] & 0x80:
            raise self._broken("a frame with reserved bits, or masked by the server")
        try:
            opcode = Opcode(head[0] & 0x0F)
        except ValueError:
            raise self._broken(f"a frame of kind {head[0] & 0x0F:#x}") from None
        for marker, layout in ((126, ">H"), (127, ">Q")):
            if length == marker:
                size = struct.calcsize(layout)
                if len(self._unread) < position + size:
                    return None
                (length,) = struct.unpack_from(layout, self._unread, position)
                position += size
                break
        if length > _LONGEST_MESSAGE:
            raise self._broken(f"a frame of {length} B")
        end = position + length
        if len(self._unread) < end:
            return None
        return final, opcode, bytes(self._unread[position:end]), end

    def _send_frame(self, opcode: Opcode, payload: bytes) -> None:
        length = len(payload)
        head = bytearray([0x80 | opcode])
        # A client masks what it sends, section 5.3.
        if length < 126:
            head.append(0x80 | length)
        elif length < 1 << 16:
            head += struct.pack(">BH", 0x80 | 126, length)
        else:
            head += struct.pack(">BQ", 0x80 | 127, length)
        mask = os.urandom(4)
        stream = (mask * (length // 4 + 1))[:length]
        masked = int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")
        try:
            self._socket.sendall(bytes(head) + mask + masked.to_bytes(length, "big"))
        except OSError as error:
            raise self._broken(str(error)) from error

    def _read_more(self, deadline: float) -> bool:
        """Read something; False at the end of the connection."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"nothing more came from {self._url}")
        self._socket.settimeout(left)
        try:
            chunk = self._socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        finally:
            self._socket.settimeout(_TIMEOUT)
        self._unread += chunk
        return bool(chunk)

    def _refused(self, found: str) -> StreamRefused:
        return StreamRefused(f"a stream from {self._url}", found=found)

    def _broken(self, found: str) -> StreamBroken:
        return StreamBroken(f"the stream from {self._url}", found=found)
