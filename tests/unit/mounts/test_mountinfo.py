"""Finding the mounts below a path in mountinfo."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import mountinfo

_LINE = b"36 35 98:0 /mnt1 %s rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        (b"/plain", b"/plain"),
        (rb"/a\040b", b"/a b"),
        (rb"/tab\011newline\012hash\043", b"/tab\tnewline\nhash#"),
        (rb"/back\134slash", rb"/back\slash"),
        (rb"/back\134040", rb"/back\040"),
        (rb"/lone\ ", b"/lone\\ "),
        (rb"/short\04", rb"/short\04"),
        (rb"/nine\099", rb"/nine\099"),
        (b"\\", b"\\"),
    ],
)
def test_the_kernels_escapes_are_undone(escaped: bytes, plain: bytes) -> None:
    assert mountinfo.unescape(escaped) == plain


@given(st.binary(max_size=20))
def test_whatever_the_kernel_escapes_comes_back(name: bytes) -> None:
    escaped = b"".join(
        b"\\%03o" % octet if octet in b" \t\n\\#" else bytes([octet]) for octet in name
    )
    assert mountinfo.unescape(escaped) == name


@given(st.binary(max_size=80))
def test_any_text_is_parsed(content: bytes) -> None:
    mountinfo.parse_mount_points(content)


def test_the_mount_points_are_in_the_fifth_field_and_may_be_no_text() -> None:
    content = _LINE % rb"/run/a\040b" + b"short line\n" + _LINE % b"/run/\xff"
    assert mountinfo.parse_mount_points(content) == ["/run/a b", os.fsdecode(b"/run/\xff")]


def test_only_what_is_at_or_below_is_selected_innermost_first() -> None:
    points = ["/", "/b", "/b/rootfs", "/b/rootfs", "/b/rootfs2", "/b/rootfs/x/y", "/b/rootfs/x"]
    assert mountinfo.select_below(points, "/b/rootfs") == [
        "/b/rootfs/x/y",
        "/b/rootfs/x",
        "/b/rootfs",
        "/b/rootfs",
    ]


def test_the_living_table_is_read() -> None:
    assert "/proc" in mountinfo.mount_points_below("/proc")
    assert mountinfo.mount_points_below("/proc/self/nothing") == []
