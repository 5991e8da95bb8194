"""CRI streams, with a server that sends what a test chooses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from websockets.http11 import Response
from websockets.sync.server import ServerConnection, serve

from tests.harness.raising import raises
from tools.cri.streaming import PROTOCOL, Ended, PortStream, ProcessStream
from tools.errors import StreamBroken, StreamRefused

Talk = Callable[[ServerConnection], None]
Served = Callable[..., str]

FAILURE = (
    b'{"metadata":{},"status":"Failure","message":"exit code 7","reason":"NonZeroExitCode",'
    b'"details":{"causes":[{"reason":"ExitCode","message":"7"}]}}'
)


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve clients, and return the address."""
    servers = []

    def start(talk: Talk, **how: object) -> str:
        how = {"subprotocols": [PROTOCOL], **how}
        server = serve(talk, "127.0.0.1", 0, compression=None, **how)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.socket.getsockname()[1]}/exec/token"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()


def saying(*messages: bytes) -> Talk:
    def talk(peer: ServerConnection) -> None:
        for message in messages:
            peer.send(message)

    return talk


@pytest.mark.parametrize(
    ("verdict", "code", "message"),
    [
        (b'{"metadata":{},"status":"Success"}', 0, ""),
        (FAILURE, 7, "exit code 7"),
        (b'{"status":"Failure","message":"no","details":{"causes":[{"message":"x"}]}}', -1, "no"),
    ],
)
def test_streamed_process_is_what_its_channels_say(
    served: Served, verdict: bytes, code: int, message: str
) -> None:
    talk = saying(b"\1", b"\2", b"", b"\1out", b"\2err", b"\1more", b"\3" + verdict)
    with ProcessStream(served(talk)) as stream:
        assert stream.wait() == Ended(code, b"outmore", b"err", message)


def test_input_and_size_have_their_channels(served: Served) -> None:
    heard = []

    def talk(peer: ServerConnection) -> None:
        heard.extend([peer.recv(), peer.recv()])
        peer.send(b"\1ready")

    with ProcessStream(served(talk)) as stream:
        stream.write(b"text")
        stream.resize(80, 24)
        assert stream.read_until(b"ready") == b"ready"
    assert heard == [b"\0text", b'\4{"Width": 80, "Height": 24}']


@pytest.mark.parametrize("last", [b"\3not json", b"\3[]", b"\1out", b"\7x"])
def test_end_of_a_process_that_is_not_told_is_an_error(served: Served, last: bytes) -> None:
    with ProcessStream(served(saying(last))) as stream, raises(StreamBroken):
        stream.wait()


@pytest.mark.parametrize("sent", [b"\x82\x85abcdabcde", b"\xf2\x00", b"\x83\x00"])
def test_frame_against_the_rules_is_an_error(served: Served, sent: bytes) -> None:
    url = served(lambda peer: peer.socket.sendall(sent))
    with ProcessStream(url) as stream, raises(StreamBroken, match="the stream from"):
        stream.wait()


def test_end_without_goodbye_is_one(served: Served) -> None:
    def talk(peer: ServerConnection) -> None:
        peer.send(b"\3" + b'{"status":"Success"}')
        peer.socket.shutdown(socket.SHUT_RDWR)

    with ProcessStream(served(talk)) as stream:
        assert stream.wait().exit_code == 0


def test_what_does_not_come_in_time_is_not_waited_for(served: Served) -> None:
    go_on = threading.Event()

    def talk(peer: ServerConnection) -> None:
        assert go_on.wait(10)
        peer.send(b"\1late")

    with ProcessStream(served(talk)) as stream:
        with pytest.raises(TimeoutError):
            stream.read_until(b"late", timeout=0.1)
        go_on.set()
        assert stream.read_until(b"late") == b"late"


def test_port_tells_its_number_before_its_data(served: Served) -> None:
    talk = saying(b"\0\x90\x1f", b"\1\x90\x1f", b"\0data", b"\0\x90\x1f")
    with PortStream(served(talk), 8080) as stream:
        assert [stream.read() for _ in range(3)] == [b"data", b"\x90\x1f", b""]


@pytest.mark.parametrize("sent", [[b"\0\x09\0"], [b"\0\x90\x1f", b"\1\x90\x1f", b"\1refused"]])
def test_port_that_is_another_or_fails_is_an_error(served: Served, sent: list[bytes]) -> None:
    with PortStream(served(saying(*sent)), 8080) as stream, raises(StreamBroken):
        stream.read()


def test_server_that_does_not_agree_is_quoted(served: Served) -> None:
    def refuse(peer: ServerConnection, _: object) -> Response:
        return peer.respond(404, "cannot find it")

    with raises(StreamRefused, match="404"):
        ProcessStream(served(saying(), process_request=refuse))
    with raises(StreamRefused, match="protocol"):
        ProcessStream(served(saying(), subprotocols=None))


def test_nobody_there_is_an_error() -> None:
    with socket.socket() as nobody:  # reserves the port, but does not listen
        nobody.bind(("127.0.0.1", 0))
        with raises(StreamRefused, match="refused"):
            PortStream(f"http://127.0.0.1:{nobody.getsockname()[1]}/x", 80)
