"""The client's WebSocket against a server that speaks, stutters and lies."""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tools.cri.streaming import Ended, PortStream, ProcessStream
from tests.tools.cri.websocket import WebSocket
from tests.tools.errors import StreamBroken, StreamRefused

Talk = Callable[[socket.socket], None]
Serve = Callable[..., str]

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def frame(payload: bytes, opcode: int = 2, *, final: bool = True) -> bytes:
    """A frame as a server sends it: not masked."""
    head = bytes([(0x80 if final else 0) | opcode])
    if len(payload) < 126:
        return head + bytes([len(payload)]) + payload
    if len(payload) < 1 << 16:
        return head + struct.pack(">BH", 126, len(payload)) + payload
    return head + struct.pack(">BQ", 127, len(payload)) + payload


def received(peer: socket.socket) -> tuple[int, bytes]:
    """A frame as a client sends it: masked."""
    stream = peer.makefile("rb", buffering=0)

    def take(count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = stream.read(count - len(data))
            assert chunk
            data += chunk
        return data

    opcode, length = take(2)
    assert length & 0x80
    length &= 0x7F
    if length == 126:
        (length,) = struct.unpack(">H", take(2))
    elif length == 127:
        (length,) = struct.unpack(">Q", take(8))
    mask, payload = take(4), take(length)
    return opcode & 0x0F, bytes(b ^ mask[i % 4] for i, b in enumerate(payload))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve one client, and return where."""
    threads = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def start(talk: Talk, **changed: Any) -> str:
            thread = threading.Thread(target=_accept, args=(listener, talk, changed))
            thread.start()
            threads.append(thread)
            return f"http://127.0.0.1:{listener.getsockname()[1]}/exec/token"

        yield start
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def _accept(listener: socket.socket, talk: Talk, changed: dict[str, Any]) -> None:
    peer, _ = listener.accept()
    with peer:
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.recv(4096)
        lines = head.decode().split("\r\n")
        asked = dict(line.split(": ", 1) for line in lines[1:] if line)
        accept = hashlib.sha1((asked["Sec-WebSocket-Key"] + GUID).encode()).digest()
        headers = {
            "Upgrade": "websocket",
            "Sec-WebSocket-Accept": base64.b64encode(accept).decode(),
            "Sec-WebSocket-Protocol": asked["Sec-WebSocket-Protocol"],
            **changed.get("headers", {}),
        }
        first = changed.get("first", "HTTP/1.1 101 Switching Protocols")
        text = "\r\n".join([first, *(f"{k}: {v}" for k, v in headers.items()), "", ""])
        peer.sendall(text.encode() + changed.get("body", b""))
        talk(peer)


def _nothing(_: socket.socket) -> None:
    pass


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 300_000])
def test_messages_of_all_sizes_go_both_ways(serve: Serve, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    def echo(peer: socket.socket) -> None:
        opcode, payload = received(peer)
        assert opcode == 2
        peer.sendall(frame(payload))

    with WebSocket(serve(echo), protocol="p") as web:
        web.send(message)
        assert web.receive() == message
        assert web.receive() is None


def test_message_in_fragments_with_a_ping_between_is_one(serve: Serve) -> None:
    answers = []

    def talk(peer: socket.socket) -> None:
        whole = frame(b"one ", final=False) + frame(b"hello", 9) + frame(b"two", 0)
        for position in range(len(whole)):
            peer.sendall(whole[position : position + 1])
        answers.append(received(peer))

    with WebSocket(serve(talk), protocol="p") as web:
        assert web.receive() == b"one two"
        assert web.receive() is None  # so the other end has read its answer
    assert answers == [(10, b"hello")]


def test_message_that_comes_with_the_handshake_is_not_lost(serve: Serve) -> None:
    with WebSocket(serve(_nothing, body=frame(b"early")), protocol="p") as web:
        assert web.receive() == b"early"


def test_goodbye_is_the_end(serve: Serve) -> None:
    def talk(peer: socket.socket) -> None:
        peer.sendall(frame(b"", 8))

    with WebSocket(serve(talk), protocol="p") as web:
        assert web.receive() is None


@pytest.mark.parametrize(
    "sent", [b"\x82\x05abc", b"\x82\x85abcdabcde", b"\xf2\x00", b"\x83\x00", frame(b"", 2)[:1]]
)
def test_frame_that_is_cut_off_or_against_the_rules_is_an_error(serve: Serve, sent: bytes) -> None:
    def talk(peer: socket.socket) -> None:
        peer.sendall(sent)

    with WebSocket(serve(talk), protocol="p") as web, pytest.raises(StreamBroken):
        web.receive()


def test_frame_that_would_fill_the_memory_is_refused(serve: Serve) -> None:
    def talk(peer: socket.socket) -> None:
        peer.sendall(struct.pack(">BBQ", 0x82, 127, 1 << 40))

    with (
        WebSocket(serve(talk), protocol="p") as web,
        pytest.raises(StreamBroken, match=str(1 << 40)),
    ):
        web.receive()


def test_what_has_come_before_the_time_is_up_is_not_lost(serve: Serve) -> None:
    go_on = threading.Event()

    def talk(peer: socket.socket) -> None:
        peer.sendall(frame(b"late")[:3])
        assert go_on.wait(10)
        peer.sendall(frame(b"late")[3:])

    with WebSocket(serve(talk), protocol="p") as web:
        with pytest.raises(TimeoutError):
            web.receive(timeout=0.1)
        go_on.set()
        assert web.receive() == b"late"


@pytest.mark.parametrize(
    "changed",
    [
        {"first": "HTTP/1.1 404 Not Found", "body": b"cannot find it"},
        {"headers": {"Sec-WebSocket-Accept": "somebody else's"}},
        {"headers": {"Sec-WebSocket-Protocol": "another"}},
        {"first": "garbage"},
    ],
)
def test_server_that_does_not_agree_is_quoted(serve: Serve, changed: dict[str, Any]) -> None:
    with pytest.raises(StreamRefused) as refused:
        WebSocket(serve(_nothing, **changed), protocol="p")
    assert changed.get("body", b"").decode() in str(refused.value)


def test_nobody_there_is_an_error() -> None:
    with socket.socket() as nobody:  # keeps the port from others, and does not listen
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(StreamRefused, match="refused"):
            WebSocket(f"http://127.0.0.1:{port}/x", protocol="p")


FAILURE = (
    b'{"metadata":{},"status":"Failure","message":"exit code 7","reason":"NonZeroExitCode",'
    b'"details":{"causes":[{"reason":"ExitCode","message":"7"}]}}'
)


@pytest.mark.parametrize(
    ("verdict", "code", "message"),
    [
        (b'{"metadata":{},"status":"Success"}', 0, ""),
        (FAILURE, 7, "exit code 7"),
        (b'{"status":"Failure","message":"no","details":{"causes":[{"message":"x"}]}}', -1, "no"),
    ],
)
def test_streamed_process_is_what_its_channels_say(
    serve: Serve, verdict: bytes, code: int, message: str
) -> None:
    def talk(peer: socket.socket) -> None:
        for text in (b"\1", b"\2", b"\1out", b"\2err", b"\1more", b"\3" + verdict):
            peer.sendall(frame(text))

    with ProcessStream(serve(talk)) as stream:
        assert stream.wait() == Ended(code, b"outmore", b"err", message)


@pytest.mark.parametrize("last", [b"\3not json", b"\3[]", b"\1out", b"\7x"])
def test_end_of_a_process_that_is_not_told_is_an_error(serve: Serve, last: bytes) -> None:
    def talk(peer: socket.socket) -> None:
        peer.sendall(frame(last))

    with ProcessStream(serve(talk)) as stream, pytest.raises(StreamBroken):
        stream.wait()


def test_port_tells_its_number_before_its_data(serve: Serve) -> None:
    def talk(peer: socket.socket) -> None:
        for text in (b"\0\x90\x1f", b"\1\x90\x1f", b"\0data", b"\0\x90\x1f"):
            peer.sendall(frame(text))

    with PortStream(serve(talk), 8080) as stream:
        assert [stream.read() for _ in range(3)] == [b"data", b"\x90\x1f", b""]


@pytest.mark.parametrize("sent", [[b"\0\x09\0"], [b"\0\x90\x1f", b"\1\x90\x1f", b"\1refused"]])
def test_port_that_is_another_or_fails_is_an_error(serve: Serve, sent: list[bytes]) -> None:
    def talk(peer: socket.socket) -> None:
        for text in sent:
            peer.sendall(frame(text))

    with PortStream(serve(talk), 8080) as stream, pytest.raises(StreamBroken):
        stream.read()
