"""A TCP proxy in front of a server that can fail as networks do.

    with Front(server.port) as front:
        ...  # a client that connects to front.port
        front.be("hold")

======= =========================================================================
passes  connections are forwarded to the server
hold    connections are accepted, but carry no data, old or new
reset   connections end with a RST, old and new
drop    SYNs are dropped because the listen queue is full; old connections hold
======= =========================================================================

Source: tcp(7), listen(2); SO_LINGER in socket(7), and SO_ATTACH_FILTER.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import Final, Self

__all__ = ["Front"]

_HOST: Final = "127.0.0.1"
_LINGER: Final = struct.pack("ii", 1, 0)
_SO_ATTACH_FILTER: Final = 26
# A struct sock_fprog with the one instruction "return 0": no segment reaches the socket.
_INSTRUCTION: Final = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_NOTHING: Final = struct.pack("HP", 1, ctypes.addressof(_INSTRUCTION))
_POLL: Final = 0.005
_QUEUE: Final = 128
_CHUNK: Final = 1 << 16


class Front:
    """A proxy. It runs while the context is open.

    Attributes:
        port: the port on which it listens.
        accepted: how many connections it has accepted.
    """

    def __init__(self, behind: int) -> None:
        self.port = 0
        self.accepted = 0
        self._behind = behind
        self._mode = "passes"
        self._listener = socket.socket()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._held: list[socket.socket] = []
        self._stop = threading.Event()
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._run)

    def be(self, mode: str) -> None:
        """Switch to another mode."""
        with self._changing:
            self._mode = mode
            for each in self._held:
                each.close()
            self._held = []
            if mode in {"reset", "passes"}:
                self._end()
            self._listener.listen(0 if mode == "drop" else _QUEUE)
            if mode == "drop":
                self._held = [_begun(self.port) for _ in range(4)]

    def vanish(self) -> None:
        """Drop all that clients send on their present connections, as if the host were gone."""
        with self._changing:
            for client, _ in self._pairs:
                client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _NOTHING)

    def __enter__(self) -> Self:
        self._listener.bind((_HOST, 0))
        self._listener.listen(_QUEUE)
        self.port = self._listener.getsockname()[1]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()
        self._end()
        for each in self._held:
            each.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changing:
                pairs = list(self._pairs)
                ready = [] if self._mode == "drop" else [self._listener]
                if self._mode == "passes":
                    ready += [each for pair in pairs for each in pair]
                found, _, _ = select.select(ready, [], [], 0)
                for each in found:
                    if each is self._listener:
                        self._accept()
                for pair in pairs:
                    for one, other in (pair, pair[::-1]):
                        if one in found and not _passed_on(one, other):
                            self._close(pair)
                            break
            if not found:
                self._stop.wait(_POLL)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.accepted += 1
        if self._mode == "reset":
            _reset(client)
            return
        server = socket.socket()
        if self._mode == "passes":
            server.connect((_HOST, self._behind))
        self._pairs.append((client, server))

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        if pair in self._pairs:
            self._pairs.remove(pair)
            for each in pair:
                each.close()

    def _end(self) -> None:
        for client, server in self._pairs:
            _reset(client)
            server.close()
        self._pairs = []


def _begun(port: int) -> socket.socket:
    """Return a socket that is connecting, and may never be connected."""
    begun = socket.socket()
    begun.setblocking(False)
    with suppress(BlockingIOError):
        begun.connect((_HOST, port))
    return begun


def _passed_on(one: socket.socket, other: socket.socket) -> bool:
    try:
        data = one.recv(_CHUNK)
        other.sendall(data)
    except OSError:
        return False
    return bool(data)


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    client.close()
