"""The protocol core without I/O: its answers to good peers and to hostile ones."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from hypothesis import given
from hypothesis import strategies as st

from api.errors import Status
from api.proto import ttrpc_pb2
from api.ttrpc import (
    ClientConnection,
    ConnectionClosed,
    DataReceived,
    Ended,
    Event,
    FrameIgnored,
    LocalProtocolError,
    MessageTooLarge,
    RemoteProtocolError,
    RequestReceived,
    ResponseReceived,
    ServerConnection,
    StreamFailed,
    UndecodableMessage,
)
from api.ttrpc.frames import (
    DATA,
    DATA_MAX,
    NO_DATA,
    REMOTE_CLOSED,
    REMOTE_OPEN,
    REQUEST,
    RESPONSE,
    FrameReader,
    encode,
)
from api.ttrpc.streams import State
from tests.harness.raising import is_error, raises

INVALID = Status.INVALID_ARGUMENT
EXHAUSTED = Status.RESOURCE_EXHAUSTED
LARGEST = 2**32 - 1


def _request(stream_id: int = 1, flags: int = 0, **fields: Any) -> bytes:
    fields = {"service": "s", "method": "m", "payload": b"p"} | fields
    return encode(stream_id, REQUEST, flags, ttrpc_pb2.Request(**fields).SerializeToString())


def _response(stream_id: int = 1, **fields: Any) -> bytes:
    return encode(stream_id, RESPONSE, 0, ttrpc_pb2.Response(**fields).SerializeToString())


def _oversized(stream_id: int, type_: int, flags: int = 0) -> bytes:
    length = DATA_MAX + 1
    return length.to_bytes(4, "big") + encode(stream_id, type_, flags)[4:] + bytes(length)


def _statuses(replies: bytes) -> list[tuple[int, int]]:
    """Return the stream and code of each response."""
    reader = FrameReader()
    answers = []
    for frame in reader.feed(replies):
        assert frame.type == RESPONSE
        assert not isinstance(frame, (str, bytes))
        response = ttrpc_pb2.Response.FromString(frame.data)  # type: ignore[union-attr]  # ours are never oversized
        answers.append((frame.stream_id, response.status.code))
    assert not reader.mid_frame
    return answers


# Errors of a client: its bytes, and the (stream, code) of each answer.
HOSTILE: dict[str, tuple[bytes, list[tuple[int, int]]]] = {
    "even id": (_request(2), [(2, INVALID)]),
    "id zero": (_request(0), [(0, INVALID)]),
    "data on an even id": (encode(4, DATA, 0, b"x"), [(4, INVALID)]),
    "id reused while alive": (_request(1) + _request(1), [(1, INVALID)]),
    "id going down": (_request(5) + _request(3), [(3, INVALID)]),
    "both open and closed": (_request(1, REMOTE_OPEN | REMOTE_CLOSED), [(1, INVALID)]),
    "no request message": (encode(1, REQUEST, 0, b"\xff\xff\xff"), [(1, INVALID)]),
    "text that is not UTF-8": (encode(1, REQUEST, 0, b"\x0a\x01\xff"), [(1, INVALID)]),
    "data before a request": (encode(1, DATA, 0, b"x"), [(1, INVALID)]),
    "data on a unary stream": (_request(1) + encode(1, DATA, 0, b"x"), [(1, INVALID)]),
    "data after the last": (
        _request(1, REMOTE_CLOSED) + encode(1, DATA, 0, b"x"),
        [(1, INVALID)],
    ),
    '"no data" with data': (
        _request(1, REMOTE_OPEN) + encode(1, DATA, NO_DATA, b"x"),
        [(1, INVALID)],
    ),
    "oversized request": (_oversized(1, REQUEST), [(1, EXHAUSTED)]),
    "oversized data": (_request(1, REMOTE_OPEN) + _oversized(1, DATA), [(1, EXHAUSTED)]),
    "oversized data on an even id": (_oversized(2, DATA), [(2, INVALID)]),
    "oversized late data": (
        _request(1) + encode(1, DATA, 0, b"x") + _oversized(1, DATA),
        [(1, INVALID)],
    ),
    "oversized unknown type": (_oversized(1, 9), []),
    "a response": (_response(1), []),
    "an unknown type": (encode(1, 77, 0, b"x"), []),
    "type zero": (encode(1, 0, 0), []),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_answered_and_the_connection_lives_on(name: str) -> None:
    stream, answers = HOSTILE[name]
    server = ServerConnection()
    events = server.receive_data(stream)
    replies = b"".join(event.reply for event in events if isinstance(event, StreamFailed))
    assert _statuses(replies) == answers
    for stream_id, _ in answers:
        assert not server.is_live(stream_id)
    (event,) = server.receive_data(_request(101))
    assert isinstance(event, RequestReceived)


def test_an_id_is_used_up_by_a_refused_request() -> None:
    server = ServerConnection()
    server.receive_data(_oversized(7, REQUEST))
    (event,) = server.receive_data(_request(7))
    assert isinstance(event, StreamFailed)


def test_flags_that_a_later_protocol_may_define_change_nothing() -> None:
    (event,) = ServerConnection().receive_data(_request(1, 0xF8 | REMOTE_OPEN))
    assert isinstance(event, RequestReceived)
    assert event.state is State.OPEN


def test_the_largest_id_is_an_id() -> None:
    (event,) = ServerConnection().receive_data(_request(LARGEST))
    assert isinstance(event, RequestReceived)


def test_nothing_is_kept_of_streams_that_have_ended() -> None:
    server = ServerConnection()
    for stream_id in range(1, 2001, 2):
        server.receive_data(_request(stream_id))
        server.send_response(stream_id, b"")
        server.receive_data(encode(stream_id, DATA, 0, b"late"))
    assert server.live == 0


def test_a_request_arrives_as_it_was_sent() -> None:
    client, server = ClientConnection(), ServerConnection()
    metadata = (("k", "1"), ("K", "2"), ("k", "1"), ("ü", ""))
    stream_id, stream = client.send_request(
        "a.Service", "Method", b"\x00payload", timeout_nano=5, metadata=metadata
    )
    assert server.receive_data(stream) == [
        RequestReceived(stream_id, "a.Service", "Method", b"\x00payload", 5, metadata, State.UNARY)
    ]


def test_ids_are_odd_and_grow() -> None:
    client = ClientConnection()
    assert [client.send_request("s", "m", b"")[0] for _ in range(4)] == [1, 3, 5, 7]


def test_a_request_that_is_too_large_uses_no_id() -> None:
    client = ClientConnection()
    with pytest.raises(MessageTooLarge):
        client.send_request("s", "m", bytes(DATA_MAX))
    assert client.live == 0
    assert client.send_request("s", "m", b"")[0] == 1


def test_a_connection_whose_ids_are_used_up_says_that_it_is_over() -> None:
    client = ClientConnection()
    client._last_id = LARGEST
    with pytest.raises(ConnectionClosed, match="no stream ids left"):
        client.send_request("s", "m", b"")


def test_a_response_arrives_as_it_was_sent() -> None:
    client, server = ClientConnection(), ServerConnection()
    server.receive_data(client.send_request("s", "m", b"")[1])
    assert client.receive_data(server.send_response(1, b"answer")) == [
        ResponseReceived(1, b"answer", Status.OK, "", ())
    ]


def test_a_status_arrives_with_message_and_details() -> None:
    client, server = ClientConnection(), ServerConnection()
    server.receive_data(client.send_request("s", "m", b"")[1])
    detail = AnyMessage(type_url="t", value=b"v")
    frame = server.send_error(1, Status.NOT_FOUND, "no such thing", [detail])
    assert client.receive_data(frame) == [
        ResponseReceived(1, b"", Status.NOT_FOUND, "no such thing", (detail,))
    ]


def test_a_status_too_large_for_a_message_loses_its_details_and_keeps_its_code() -> None:
    client, server = ClientConnection(), ServerConnection()
    server.receive_data(client.send_request("s", "m", b"")[1])
    detail = AnyMessage(type_url="t", value=bytes(DATA_MAX))
    (event,) = client.receive_data(server.send_error(1, Status.NOT_FOUND, "x" * 999, [detail]))
    assert isinstance(event, ResponseReceived)
    assert event.code == Status.NOT_FOUND
    assert event.details == ()
    assert event.message.startswith("xxx")


def test_a_response_that_is_too_large_leaves_the_stream_to_be_answered_otherwise() -> None:
    server = ServerConnection()
    server.receive_data(_request(1))
    with pytest.raises(MessageTooLarge):
        server.send_response(1, bytes(DATA_MAX))
    assert _statuses(server.send_error(1, EXHAUSTED, "too large")) == [(1, EXHAUSTED)]


def test_a_stream_carries_messages_both_ways_and_ends() -> None:
    client, server = ClientConnection(), ServerConnection()
    stream_id, request = client.send_request("s", "m", b"", state=State.OPEN)
    server.receive_data(request)
    assert server.receive_data(client.send_data(stream_id, b"up")) == [
        DataReceived(stream_id, b"up", end=False)
    ]
    assert client.receive_data(server.send_data(stream_id, b"")) == [
        DataReceived(stream_id, b"", end=False)
    ]
    assert client.may_send(stream_id)
    assert server.receive_data(client.send_end(stream_id)) == [
        DataReceived(stream_id, None, end=True)
    ]
    assert not client.may_send(stream_id)
    assert client.receive_data(server.send_end(stream_id)) == [
        DataReceived(stream_id, None, end=True)
    ]
    assert client.live == server.live == 0


def test_the_last_message_may_come_with_the_end() -> None:
    server = ServerConnection()
    server.receive_data(_request(1, REMOTE_OPEN))
    assert server.receive_data(encode(1, DATA, REMOTE_CLOSED, b"last")) == [
        DataReceived(1, b"last", end=True)
    ]


def test_a_client_judges_each_answer_by_itself() -> None:
    client = ClientConnection()
    for _ in range(4):
        client.send_request("s", "m", b"")
    events = client.receive_data(
        encode(1, RESPONSE, 0, b"\xff\xff")
        + encode(3, DATA, 0, b"x")
        + _oversized(5, RESPONSE)
        + _response(7, payload=b"fine")
    )
    assert [type(event) for event in events] == [StreamFailed] * 3 + [ResponseReceived]
    errors = [event.error for event in events if isinstance(event, StreamFailed)]
    assert len(errors) == 3
    assert is_error(errors[0], UndecodableMessage)
    assert type(errors[1]) is RemoteProtocolError
    assert not is_error(errors[1], UndecodableMessage)
    assert type(errors[2]) is MessageTooLarge
    assert client.live == 0


@pytest.mark.parametrize(
    "frame",
    [
        _response(3),
        _response(2),
        encode(3, DATA, 0, b"x"),
        encode(0, DATA, 0, b"x"),
        _request(1),
        _request(2),
    ],
)
def test_an_answer_to_what_was_never_asked_ends_the_connection(frame: bytes) -> None:
    client = ClientConnection()
    client.send_request("s", "m", b"")
    events = client.receive_data(_response(1) + frame + _response(1))
    assert [type(event) for event in events] == [ResponseReceived, Ended]
    assert isinstance(events[-1], Ended)
    assert isinstance(events[-1].error, RemoteProtocolError)
    with raises(LocalProtocolError):
        client.receive_data(b"more")


def test_a_client_ignores_types_of_a_later_protocol() -> None:
    client = ClientConnection()
    client.send_request("s", "m", b"")
    (event,) = client.receive_data(encode(1, 9, 0, b"x"))
    assert isinstance(event, FrameIgnored)
    assert client.live == 1


@pytest.mark.parametrize("core", [ClientConnection, ServerConnection])
def test_the_end_between_frames_is_orderly(core: type[ClientConnection]) -> None:
    assert core().receive_data(b"") == [Ended(None)]


@pytest.mark.parametrize("core", [ClientConnection, ServerConnection])
@pytest.mark.parametrize("cut", [_request()[:5], _request()[:-1], _oversized(1, 9)[:-1]])
def test_the_end_inside_a_frame_is_the_peers_fault(
    core: type[ClientConnection], cut: bytes
) -> None:
    connection = core()
    connection.receive_data(cut)
    (event,) = connection.receive_data(b"")
    assert isinstance(event, Ended)
    assert isinstance(event.error, RemoteProtocolError)


@pytest.mark.parametrize("state", [State.IDLE, State.ENDED])
def test_no_stream_begins_in_a_state_that_has_no_request(state: State) -> None:
    with raises(LocalProtocolError):
        ClientConnection().send_request("s", "m", b"", state=state)


# Any frames, but mostly plausible ones, so that streams get opened.
_flags = st.sampled_from([0, REMOTE_CLOSED, REMOTE_OPEN, NO_DATA, NO_DATA | REMOTE_CLOSED, 3, 255])
_ids = st.integers(0, 9)
_any_frame = st.one_of(
    st.builds(_request, _ids, _flags),
    st.builds(_response, _ids, payload=st.binary(max_size=3)),
    st.builds(encode, _ids, st.integers(0, 5), _flags, st.binary(max_size=8)),
)


def _comparable(events: list[Event]) -> list[object]:
    """Return events with their errors as type and text, since equal errors differ as objects."""
    return [
        tuple((type(v), str(v)) if isinstance(v, Exception) else v for v in (type(event), *event))
        for event in events
    ]


def _server() -> ServerConnection:
    return ServerConnection()


def _client() -> ClientConnection:
    client = ClientConnection()
    for state in (State.UNARY, State.OPEN, State.CLIENT_CLOSED):
        client.send_request("s", "m", b"", state=state)
    return client


@pytest.mark.parametrize("make", [_server, _client])
@given(frames=st.lists(_any_frame, max_size=10), data=st.data())
def test_any_split_of_any_frames_gives_the_same_events(
    make: Any, frames: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    whole, split = make(), make()
    expected = whole.receive_data(stream) if stream else []
    received: list[Event] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        ended = any(isinstance(event, Ended) for event in received)
        if begin < end and not ended:
            received += split.receive_data(stream[begin:end])
    assert _comparable(received) == _comparable(expected)
    assert split.live == whole.live


@pytest.mark.parametrize("make", [_server, _client])
@given(garbage=st.binary(max_size=200))
def test_garbage_raises_nothing_and_holds_nothing(make: Any, garbage: bytes) -> None:
    connection = make()
    before = connection.live
    for event in connection.receive_data(garbage) if garbage else []:
        assert not isinstance(event, RequestReceived) or connection.is_live(event.stream_id)
    assert connection.live <= before + len(garbage) // 10  # a frame has at least 10 bytes
