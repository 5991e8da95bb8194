"""The table of stream states; both cores follow it exactly."""

from __future__ import annotations

from itertools import product

import pytest

from api.proto import ttrpc_pb2
from api.ttrpc import streams
from api.ttrpc.connection import ClientConnection, ServerConnection
from api.ttrpc.errors import LocalProtocolError, StreamClosed
from api.ttrpc.events import FrameIgnored, StreamFailed
from api.ttrpc.frames import DATA, NO_DATA, REMOTE_CLOSED, REMOTE_OPEN, REQUEST, RESPONSE, encode
from api.ttrpc.streams import SENT_BY_SERVER, TRANSITIONS, Event, State
from tests.harness.raising import raises

LIVE = [State.UNARY, State.OPEN, State.CLIENT_CLOSED]
REQUESTS = {
    State.UNARY: (Event.REQUEST, 0),
    State.OPEN: (Event.REQUEST_OPEN, REMOTE_OPEN),
    State.CLIENT_CLOSED: (Event.REQUEST_CLOSED, REMOTE_CLOSED),
}
# The frame for each event, except requests.
ON_THE_WIRE = {
    Event.CLIENT_DATA: encode(1, DATA, 0, b"m"),
    Event.CLIENT_END: encode(1, DATA, REMOTE_CLOSED | NO_DATA),
    Event.SERVER_DATA: encode(1, DATA, 0, b"m"),
    Event.SERVER_END: encode(1, DATA, REMOTE_CLOSED | NO_DATA),
    Event.RESPONSE: encode(1, RESPONSE, 0, b""),
}
REMAINING = sorted(ON_THE_WIRE)


def _state(core: ClientConnection | ServerConnection) -> State:
    return core._streams.get(1, State.ENDED)


def _client_in(state: State) -> ClientConnection:
    client = ClientConnection()
    client.send_request("s", "m", b"", state=state)
    return client


def _server_in(state: State) -> ServerConnection:
    server = ServerConnection()
    request = ttrpc_pb2.Request(service="s", method="m").SerializeToString()
    server.receive_data(encode(1, REQUEST, REQUESTS[state][1], request))
    return server


def _send(core: ClientConnection | ServerConnection, event: Event) -> bytes:
    if isinstance(core, ClientConnection):
        return core.send_data(1, b"m") if event is Event.CLIENT_DATA else core.send_end(1)
    if event is Event.RESPONSE:
        return core.send_response(1, b"")
    return core.send_data(1, b"m") if event is Event.SERVER_DATA else core.send_end(1)


def test_the_printed_table_is_the_one_in_the_documentation() -> None:
    assert streams.__doc__ is not None
    documented = [line.strip() for line in streams.__doc__.splitlines()]
    for line in streams.table().splitlines():
        assert line in documented


def test_every_stream_begins_with_a_request_and_can_end() -> None:
    begun = {following for (state, _), following in TRANSITIONS.items() if state is State.IDLE}
    assert begun == set(LIVE)
    for state in LIVE:
        assert TRANSITIONS[state, Event.RESPONSE] is State.ENDED
        assert TRANSITIONS[state, Event.ABANDON] is State.ENDED
    assert not [event for state, event in TRANSITIONS if state is State.ENDED]


@pytest.mark.parametrize("state", LIVE)
def test_a_request_brings_both_sides_to_the_same_state(state: State) -> None:
    assert TRANSITIONS[State.IDLE, REQUESTS[state][0]] is state
    assert _state(_client_in(state)) is _state(_server_in(state)) is state


@pytest.mark.parametrize(("state", "event"), list(product(LIVE, REMAINING)))
def test_what_we_send_follows_the_table(state: State, event: Event) -> None:
    core = _server_in(state) if event in SENT_BY_SERVER else _client_in(state)
    following = TRANSITIONS.get((state, event))
    if following is None:
        with raises(LocalProtocolError):
            _send(core, event)
        assert _state(core) is state
    else:
        assert _send(core, event) == ON_THE_WIRE[event]
        assert _state(core) is following


@pytest.mark.parametrize(("state", "event"), list(product(LIVE, REMAINING)))
def test_what_we_receive_follows_the_table(state: State, event: Event) -> None:
    core = _client_in(state) if event in SENT_BY_SERVER else _server_in(state)
    (received,) = core.receive_data(ON_THE_WIRE[event])
    following = TRANSITIONS.get((state, event))
    if following is None:
        assert isinstance(received, StreamFailed)
        assert _state(core) is State.ENDED
    else:
        assert not isinstance(received, (StreamFailed, FrameIgnored))
        assert _state(core) is following


@pytest.mark.parametrize("event", REMAINING)
def test_nothing_can_be_sent_after_the_end(event: Event) -> None:
    core = (_server_in if event in SENT_BY_SERVER else _client_in)(State.OPEN)
    core.abandon(1)
    with raises(StreamClosed):
        _send(core, event)


@pytest.mark.parametrize("event", REMAINING)
def test_what_comes_after_the_end_is_late_and_not_wrong(event: Event) -> None:
    core = (_client_in if event in SENT_BY_SERVER else _server_in)(State.OPEN)
    core.abandon(1)
    (received,) = core.receive_data(ON_THE_WIRE[event])
    assert isinstance(received, FrameIgnored)
