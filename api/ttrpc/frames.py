"""Frames: ten bytes of header, then up to 4 MiB of data.

::

    0               4               8      9      10
    ┌───────────────┬───────────────┬──────┬──────┬──────────┄
    │ data length   │ stream id     │ type │ flags│ data
    └───────────────┴───────────────┴──────┴──────┴──────────┄
      big endian      big endian

Rules
- A frame that announces more than 4 MiB is reported as :class:`Oversized` with its header. Its data
  are dropped as they arrive, and never held.
- So a reader holds at most one header and 4 MiB, and only received bytes; an announced length
  reserves nothing.
- Types and flags are not checked here: a frame of an unknown type is still a frame.

Source: ttrpc PROTOCOL.md, "Message Frame" and "Message Types".
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from api.ttrpc.errors import MessageTooLarge

HEADER_SIZE: Final = 10
DATA_MAX: Final = 4 << 20

REQUEST: Final = 1
RESPONSE: Final = 2
DATA: Final = 3

REMOTE_CLOSED: Final = 1  # the sender of this flag will send no more data
REMOTE_OPEN: Final = 2  # … will send more data
NO_DATA: Final = 4  # this frame carries no message, not even an empty one

_HEADER: Final = Struct(">IIBB")
_pack: Final = _HEADER.pack
_unpack_from: Final = _HEADER.unpack_from


class Frame(NamedTuple):
    """One frame with its data; a named tuple, because every message needs one."""

    stream_id: int
    type: int
    flags: int
    data: bytes


class Oversized(NamedTuple):
    """The header of a frame whose data are being dropped.

    ``length`` is in bytes, as announced.
    """

    stream_id: int
    type: int
    flags: int
    length: int


def encode(stream_id: int, type_: int, flags: int, data: bytes = b"") -> bytes:
    """Return one frame, ready to send.

    Args:
        stream_id: 0 to 2³²-1.
        type_: ``REQUEST``, ``RESPONSE`` or ``DATA``.
        flags: ``REMOTE_CLOSED``, ``REMOTE_OPEN`` and ``NO_DATA``, or-ed.
        data: at most 4 MiB.

    Returns:
        The header and the data.

    Raises:
        MessageTooLarge: the data are longer than that.
    """
    length = len(data)
    if length > DATA_MAX:
        raise MessageTooLarge(
            f"send a message on stream {stream_id}",
            found=f"{length} bytes; ttrpc allows {DATA_MAX}",
        )
    return _pack(length, stream_id, type_, flags) + data


class FrameReader:
    """Cuts a byte stream into frames, however it is split."""

    __slots__ = ("_buffer", "_skip")

    def __init__(self) -> None:
        self._buffer = bytearray()
        # The missing bytes of an oversized frame.
        self._skip = 0

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far end inside a frame."""
        return bool(self._buffer or self._skip)

    def feed(self, received: bytes) -> list[Frame | Oversized]:
        """Process received bytes, and return the frames that are complete.

        Args:
            received: any number of bytes.

        Returns:
            The frames that these bytes completed, and the oversized ones they started, in order.
        """
        # Usually a whole frame comes in one piece: cut it out, without a copy through the buffer.
        source: bytes | bytearray = received
        if self._buffer:
            self._buffer += received
            source = self._buffer
        size = len(source)
        start = 0
        if self._skip:
            start = min(self._skip, size)
            self._skip -= start
        frames: list[Frame | Oversized] = []
        while size - start >= HEADER_SIZE:
            length, stream_id, type_, flags = _unpack_from(source, start)
            body = start + HEADER_SIZE
            if length > DATA_MAX:
                frames.append(Oversized(stream_id, type_, flags, length))
                start = min(body + length, size)
                self._skip = body + length - start
                continue
            end = body + length
            if end > size:
                break
            frames.append(Frame(stream_id, type_, flags, bytes(source[body:end])))
            start = end
        if source is received:
            self._buffer += received[start:]
        elif start:
            del self._buffer[:start]
        return frames
