"""Frames: a header of ten bytes and data, in pieces of any size."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import Status
from api.ttrpc.errors import MessageTooLarge
from api.ttrpc.frames import DATA_MAX, Frame, FrameReader, Oversized, encode

# (frame, its bytes), written out by hand from PROTOCOL.md.
ENCODED = [
    (Frame(1, 1, 0, b""), "00000000 00000001 01 00"),
    (Frame(1, 1, 0, b"abc"), "00000003 00000001 01 00 616263"),
    (Frame(3, 2, 0, b"\x00"), "00000001 00000003 02 00 00"),
    (Frame(5, 3, 5, b""), "00000000 00000005 03 05"),
    (Frame(0xFFFFFFFF, 0xFF, 0xFF, b"z"), "00000001 ffffffff ff ff 7a"),
]

frames = st.builds(
    Frame,
    stream_id=st.integers(0, 2**32 - 1),
    type=st.integers(0, 255),
    flags=st.integers(0, 255),
    data=st.binary(max_size=40),
)


def _bytes(frame: Frame) -> bytes:
    return encode(frame.stream_id, frame.type, frame.flags, frame.data)


def _oversized(length: int, stream_id: int = 7) -> bytes:
    """Build an oversized frame, whose header ``encode`` refuses to write."""
    return length.to_bytes(4, "big") + encode(stream_id, 1, 2)[4:] + bytes(length)


@pytest.mark.parametrize(("frame", "text"), ENCODED)
def test_a_frame_is_written_as_the_protocol_says(frame: Frame, text: str) -> None:
    assert _bytes(frame) == bytes.fromhex(text)


@pytest.mark.parametrize(("frame", "text"), ENCODED)
def test_a_frame_is_read_as_the_protocol_says(frame: Frame, text: str) -> None:
    reader = FrameReader()
    assert reader.feed(bytes.fromhex(text)) == [frame]
    assert not reader.mid_frame


@given(st.lists(frames, max_size=6), st.data())
def test_any_split_of_any_frames_reads_the_same(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(_bytes, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader()
    received = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[begin:end])
    assert received == sent
    assert not reader.mid_frame


@given(st.integers(1, 64 << 10), st.integers(1, 3000), frames)
def test_an_oversized_frame_is_skipped_and_the_next_one_read(
    piece: int, excess: int, following: Frame
) -> None:
    length = DATA_MAX + excess
    stream = _oversized(length) + _bytes(following)
    # Small pieces at the start and the end, where errors are likely; one for the middle.
    edge = min(piece, 2000)
    middle = len(stream) - 3 * edge
    pieces = [stream[:edge], stream[edge:middle]]
    pieces += [stream[i : i + edge] for i in range(middle, len(stream), edge)]
    reader = FrameReader()
    received = [frame for part in pieces for frame in reader.feed(part)]
    assert received == [Oversized(7, 1, 2, length), following]
    assert not reader.mid_frame


def test_an_oversized_frame_is_known_by_its_header_alone() -> None:
    reader = FrameReader()
    assert reader.feed(_oversized(DATA_MAX + 1)[:10]) == [Oversized(7, 1, 2, DATA_MAX + 1)]
    assert reader.mid_frame


def test_the_data_of_an_oversized_frame_are_never_held() -> None:
    header, piece = _oversized(DATA_MAX + 1)[:4], bytes(64 << 10)
    header = (0xFFFFFFFF).to_bytes(4, "big") + encode(7, 1, 0)[4:]
    reader = FrameReader()
    reader.feed(header)
    tracemalloc.start()
    try:
        for _ in range(200):
            assert reader.feed(piece) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(piece)


def test_an_announced_length_reserves_nothing() -> None:
    tracemalloc.start()
    try:
        reader = FrameReader()
        reader.feed(DATA_MAX.to_bytes(4, "big") + encode(1, 1, 0)[4:] + b"x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000


def test_the_largest_frame_comes_through_in_pieces_and_leaves_nothing_behind() -> None:
    data = bytes(range(256)) * (DATA_MAX // 256)
    stream = encode(1, 1, 0, data)
    reader = FrameReader()
    received = [
        frame
        for begin in range(0, len(stream), 64 << 10)
        for frame in reader.feed(stream[begin : begin + (64 << 10)])
    ]
    assert received == [Frame(1, 1, 0, data)]
    assert not reader.mid_frame


@pytest.mark.parametrize("cut", [1, 9, 10, 12])
def test_a_reader_knows_that_it_is_in_the_middle_of_a_frame(cut: int) -> None:
    reader = FrameReader()
    assert reader.feed(encode(1, 1, 0, b"abc")[:cut]) == []
    assert reader.mid_frame


def test_more_than_4_mib_is_refused_before_it_is_sent() -> None:
    with pytest.raises(MessageTooLarge, match="4194305 bytes") as caught:
        encode(1, 1, 0, bytes(DATA_MAX + 1))
    assert caught.value.status == Status.RESOURCE_EXHAUSTED
