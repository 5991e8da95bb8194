"""A stream's life, as a table for both sides.

A stream is opened by a request and ends with a response, or with the server's last data.
Its state says which side may still send data::

    IDLE           not opened yet, or not an id that we know
    UNARY          one request, one response, nothing else
    OPEN           client and server may both send data
    CLIENT_CLOSED  the client has sent its last data; the server answers
    ENDED          its id is never used again

State by state, the events that may happen there and what they lead to::

    state          event           client    server    next state
    IDLE           REQUEST         sends     receives  UNARY
    IDLE           REQUEST_OPEN    sends     receives  OPEN
    IDLE           REQUEST_CLOSED  sends     receives  CLIENT_CLOSED
    UNARY          RESPONSE        receives  sends     ENDED
    UNARY          ABANDON         forgets   forgets   ENDED
    OPEN           CLIENT_DATA     sends     receives  OPEN
    OPEN           CLIENT_END      sends     receives  CLIENT_CLOSED
    OPEN           SERVER_DATA     receives  sends     OPEN
    OPEN           SERVER_END      receives  sends     ENDED
    OPEN           RESPONSE        receives  sends     ENDED
    OPEN           ABANDON         forgets   forgets   ENDED
    CLIENT_CLOSED  SERVER_DATA     receives  sends     CLIENT_CLOSED
    CLIENT_CLOSED  SERVER_END      receives  sends     ENDED
    CLIENT_CLOSED  RESPONSE        receives  sends     ENDED
    CLIENT_CLOSED  ABANDON         forgets   forgets   ENDED

Rules
- What is not in the table is a protocol error: a local one if we wanted to send it, a remote
  one if the peer sent it.
- The server's end is the end: once it has ended its side, the stream has ended even
  if the client has not finished (PROTOCOL.md has the client close first; servers in the field,
  the Go one among them, may finish early). What the client still sends then is late, not wrong.
- ``ABANDON`` is not on the wire: ttrpc has no reset. A client that has lost interest forgets
  the stream and drops what comes late; a server forgets a stream whose peer broke the rules.

Source: ttrpc PROTOCOL.md, "Streaming" and its state diagrams.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final


class State(IntEnum):
    """Who may still send on a stream; an IntEnum, since its hash is taken for every frame."""

    IDLE = auto()
    UNARY = auto()
    OPEN = auto()
    CLIENT_CLOSED = auto()
    ENDED = auto()


class Event(IntEnum):
    """What can happen to a stream, named by the side that does it."""

    REQUEST = auto()  # the client's, without flags
    REQUEST_OPEN = auto()  # … with "remote open": data follow
    REQUEST_CLOSED = auto()  # … with "remote closed": no data follow, but may come back
    CLIENT_DATA = auto()
    CLIENT_END = auto()  # data with "remote closed", or that flag alone
    SERVER_DATA = auto()
    SERVER_END = auto()
    RESPONSE = auto()
    ABANDON = auto()


TRANSITIONS: Final = {
    (State.IDLE, Event.REQUEST): State.UNARY,
    (State.IDLE, Event.REQUEST_OPEN): State.OPEN,
    (State.IDLE, Event.REQUEST_CLOSED): State.CLIENT_CLOSED,
    (State.UNARY, Event.RESPONSE): State.ENDED,
    (State.UNARY, Event.ABANDON): State.ENDED,
    (State.OPEN, Event.CLIENT_DATA): State.OPEN,
    (State.OPEN, Event.CLIENT_END): State.CLIENT_CLOSED,
    (State.OPEN, Event.SERVER_DATA): State.OPEN,
    (State.OPEN, Event.SERVER_END): State.ENDED,
    (State.OPEN, Event.RESPONSE): State.ENDED,
    (State.OPEN, Event.ABANDON): State.ENDED,
    (State.CLIENT_CLOSED, Event.SERVER_DATA): State.CLIENT_CLOSED,
    (State.CLIENT_CLOSED, Event.SERVER_END): State.ENDED,
    (State.CLIENT_CLOSED, Event.RESPONSE): State.ENDED,
    (State.CLIENT_CLOSED, Event.ABANDON): State.ENDED,
}

# Both sides keep the same table; an event is sent by the one and received by the other.
SENT_BY_SERVER: Final = frozenset({Event.SERVER_DATA, Event.SERVER_END, Event.RESPONSE})


def table() -> str:
    """Return the transitions as lines of text, as they stand in this module's docstring."""
    lines = [f"{'state':<15}{'event':<16}{'client':<10}{'server':<10}next state"]
    for (state, event), following in TRANSITIONS.items():
        client, server = _who(event)
        lines.append(f"{state.name:<15}{event.name:<16}{client:<10}{server:<10}{following.name}")
    return "\n".join(lines)


def _who(event: Event) -> tuple[str, str]:
    if event is Event.ABANDON:
        return "forgets", "forgets"
    return ("receives", "sends") if event in SENT_BY_SERVER else ("sends", "receives")
