"""The system calls for mount options."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import syscalls as sc
from shim.errors import MountOptionUnsupported
from shim.rootfs.mounts import compact_lowerdir, parse_options
from tests.harness.raising import raises


@pytest.mark.parametrize(
    ("options", "flags", "propagation", "data"),
    [
        ([], 0, 0, ""),
        (["defaults"], 0, 0, ""),
        (["ro"], sc.MS_RDONLY, 0, ""),
        (["ro", "rw"], 0, 0, ""),
        (["rw", "ro"], sc.MS_RDONLY, 0, ""),
        (["bind", "ro"], sc.MS_BIND | sc.MS_RDONLY, 0, ""),
        (["rbind", "rw"], sc.MS_BIND | sc.MS_REC, 0, ""),
        (["nosuid", "nodev", "noexec"], sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, 0, ""),
        (["rslave"], 0, sc.MS_SLAVE | sc.MS_REC, ""),
        (["rbind", "private"], sc.MS_BIND | sc.MS_REC, sc.MS_PRIVATE, ""),
        (["size=1m", "", "mode=755"], 0, 0, "size=1m,mode=755"),
        (
            ["index=off", "ro", "lowerdir=/a:/b", "volatile"],
            sc.MS_RDONLY,
            0,
            "index=off,lowerdir=/a:/b,volatile",
        ),
    ],
)
def test_options_become_flags_propagation_and_data(
    options: list[str], flags: int, propagation: int, data: str
) -> None:
    parsed = parse_options(options)
    assert (parsed.flags, parsed.propagation, parsed.data) == (flags, propagation, data)


def test_what_an_option_takes_away_is_remembered_until_another_gives_it_back() -> None:
    assert parse_options(["suid", "rw"]).cleared == sc.MS_NOSUID | sc.MS_RDONLY
    assert parse_options(["suid", "nosuid"]).cleared == 0


@pytest.mark.parametrize("option", ["rro", "X-containerd.mkdir.path=/x"])
def test_what_is_not_implemented_is_refused_by_name(option: str) -> None:
    with raises(MountOptionUnsupported, match=option.partition("=")[0]):
        parse_options(["ro", option])


@pytest.mark.parametrize(
    ("data", "directory", "shorter"),
    [
        ("lowerdir=/s/2/fs:/s/1/fs,index=off", "/s", "lowerdir=2/fs:1/fs,index=off"),
        ("upperdir=/s/9/fs,lowerdir=/s/2:/s/1", "/s", "upperdir=/s/9/fs,lowerdir=2:1"),
        ("lowerdir=/s/1/fs", "/s/1/fs", "lowerdir=."),
        ("lowerdir=/a:/b", "/", "lowerdir=a:b"),
        ("lowerdir=/s/1:/s/11", "/s", "lowerdir=1:11"),
        ("upperdir=/s/9", "", "upperdir=/s/9"),
        ("lowerdir=relative:/s/1", "", "lowerdir=relative:/s/1"),
        ("lowerdir=/s/1::/s/data", "", "lowerdir=/s/1::/s/data"),
        (r"lowerdir=/s/a\:b:/s/1", "", r"lowerdir=/s/a\:b:/s/1"),
    ],
)
def test_layers_are_named_from_their_common_directory(
    data: str, directory: str, shorter: str
) -> None:
    assert compact_lowerdir(data) == (directory, shorter)


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "snapshots", "1"]), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_shortened_layers_are_the_same_directories(layers: list[list[str]]) -> None:
    paths = ["/" + "/".join(parts) for parts in layers]
    directory, shorter = compact_lowerdir("lowerdir=" + ":".join(paths))
    relative = shorter.removeprefix("lowerdir=").split(":")
    assert [os.path.normpath(os.path.join(directory, r)) for r in relative] == paths
