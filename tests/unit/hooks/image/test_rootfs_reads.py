"""Reads in an image never reach files outside of it, and never block."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hooks.image.rootfs import Rootfs, components
from hooks.image.rootfs_errors import (
    FileTooLarge,
    KernelTooOld,
    NotARegularFile,
    PathRefused,
    RootfsUnavailable,
)
from tests.harness.raising import raises
from tests.unit.hooks.image.images import link, put

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for device nodes")


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Make a directory for an image, next to one with a secret."""
    put(str(tmp_path), "/outside/secret", b"secret")
    os.mkdir(tmp_path / "image")
    return str(tmp_path / "image")


@pytest.fixture
def rootfs(root: str) -> Iterator[Rootfs]:
    with Rootfs.open(root) as rootfs:
        yield rootfs


@pytest.mark.parametrize(
    "target",
    ["{outside}/secret", "../outside/secret", "../../../../../../../../{outside}/secret"],
)
def test_a_link_out_of_the_image_leads_nowhere(root: str, rootfs: Rootfs, target: str) -> None:
    outside = os.path.join(os.path.dirname(root), "outside")
    link(root, "/etc/file", target.format(outside=outside))
    assert rootfs.read_file("/etc/file") is None
    assert rootfs.stat("/etc/file") is None
    assert rootfs.real_path("/etc/file") is None


@pytest.mark.parametrize("target", ["/usr/etc", "usr/etc", "../../usr/etc", "/../usr/./etc"])
def test_a_link_is_followed_inside_the_image(root: str, rootfs: Rootfs, target: str) -> None:
    put(root, "/usr/etc/file", b"inside")
    link(root, "/etc", target)
    assert rootfs.read_file("/etc/file") == b"inside"
    assert rootfs.real_path("/etc/file") == "/usr/etc/file"
    assert rootfs.names("/etc") == ("file",)


def test_a_link_through_procfs_leads_nowhere(root: str, rootfs: Rootfs) -> None:
    """A magic link leads to the file of a descriptor, so the image must not be able to use one.

    The image has no procfs, so the test uses the machine's procfs as an image.
    """
    link(root, "/etc/file", "/proc/self/root/etc/passwd")
    assert rootfs.read_file("/etc/file") is None
    with Rootfs.open("/proc") as proc:
        assert proc.read_file("/self/status") is not None
        assert proc.read_file("/self/root/etc/passwd") is None
        assert proc.names("/self/cwd") is None


def test_what_is_not_there_is_none(root: str, rootfs: Rootfs) -> None:
    link(root, "/dangling", "nowhere")
    link(root, "/cycle", "cycle")
    put(root, "/file")
    for path in (
        "/nothing",
        "/no/such/file",
        "/dangling",
        "/cycle",
        "/file/below",
        "/" + "x" * 300,
    ):
        assert rootfs.read_file(path) is None, path
        assert rootfs.stat(path) is None, path
        assert rootfs.names(path) is None, path
        assert rootfs.real_path(path) is None, path
        assert rootfs.directory(path) is None, path


def test_a_link_itself_can_be_looked_at(root: str, rootfs: Rootfs) -> None:
    link(root, "/dangling", "nowhere")
    put(root, "/file")
    assert rootfs.read_link("/dangling") == "nowhere"
    assert rootfs.stat("/dangling", follow=False) is not None
    assert rootfs.read_link("/file") is None
    assert rootfs.read_link("/nothing") is None


def make_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("FIFO", os.mkfifo),
        ("directory", os.mkdir),
        ("character device", lambda path: os.mknod(path, 0o20666, os.makedev(1, 5))),
        ("block device", lambda path: os.mknod(path, 0o60666, os.makedev(7, 0))),
        ("socket", make_socket),
    ],
)
def test_what_is_no_file_is_not_opened(root: str, rootfs: Rootfs, kind: str, make: object) -> None:
    make(f"{root}/thing")  # type: ignore[operator]  # one of the functions above
    with pytest.raises(NotARegularFile, match=kind):
        rootfs.read_file("/thing")


def test_a_file_of_exactly_the_limit_is_read(root: str, rootfs: Rootfs) -> None:
    put(root, "/file", b"12345")
    assert rootfs.read_file("/file", 5) == b"12345"
    with pytest.raises(FileTooLarge):
        rootfs.read_file("/file", 4)


def test_a_huge_file_is_refused_by_its_size(root: str, rootfs: Rootfs) -> None:
    put(root, "/file")
    os.truncate(f"{root}/file", 5 << 30)
    with pytest.raises(FileTooLarge):
        rootfs.read_file("/file")


def test_a_file_that_lies_about_its_size_is_read_to_the_limit_only() -> None:
    """Files of procfs have no size; an endless one would be read for ever."""
    with Rootfs.open("/proc") as proc:
        assert len(proc.read_file("/self/maps") or b"") > 100
        with pytest.raises(FileTooLarge):
            proc.read_file("/self/maps", 100)


def test_a_directory_of_too_many_names_is_refused(root: str, rootfs: Rootfs) -> None:
    for number in range(10):
        put(root, f"/many/{number}")
    assert len(rootfs.names("/many", 10) or ()) == 10
    with pytest.raises(FileTooLarge):
        rootfs.names("/many", 9)


@pytest.mark.parametrize(
    ("path", "landing"),
    [
        ("/usr/lib64/nvidia/a", "/usr/lib/nvidia/a"),  # a link, then what is missing
        ("/usr/lib64", "/usr/lib"),
        ("/usr/lib", "/usr/lib"),
        ("/opt/new", "/opt/new"),
        ("/", "/"),
        ("/dangling", "/nowhere"),
        ("/dangling/below", "/nowhere/below"),
        ("/usr/relative/below", "/nowhere/below"),
        ("/usr/chain/below", "/nowhere/below"),
        ("/usr/outside", "/tmp/escaped"),
        ("/usr/proc", "/proc/self/root"),
        ("/usr/at-the-end", "/nowhere/below"),
        ("/cycle/below", None),
        ("/usr/turn/below", None),
        ("/usr/deeper", None),  # to itself, and on from there
        ("/usr/above-what-is-missing", None),
        ("/usr/above-a-file", None),
        ("/usr/not-utf-8", None),
        ("/usr/too-deep", None),
        ("/usr/link-0", None),  # of too many links
        ("/file/below", None),
        ("/up/below", "/below"),  # ".." of the root is the root
    ],
)
def test_where_a_path_would_be(root: str, rootfs: Rootfs, path: str, landing: str | None) -> None:
    os.makedirs(f"{root}/usr/lib")
    link(root, "/usr/lib64", "lib")
    link(root, "/dangling", "/nowhere")
    link(root, "/cycle", "/cycle")
    link(root, "/up", "../..")
    link(root, "/usr/relative", "../nowhere")
    link(root, "/usr/chain", "relative")
    link(root, "/usr/outside", "../../../../tmp/./escaped/")
    link(root, "/usr/proc", "/proc/self/root")
    link(root, "/usr/at-the-end", "/usr/../dangling/below")
    link(root, "/usr/turn", "turned")
    link(root, "/usr/turned", "turn")
    link(root, "/usr/deeper", "deeper/below")
    link(root, "/usr/above-what-is-missing", "/nowhere/../below")
    link(root, "/usr/above-a-file", "/file/../below")
    link(root, "/usr/not-utf-8", os.fsdecode(b"/nowhere/\xff"))
    link(root, "/usr/too-deep", "/nowhere" * 65)
    for number in range(41):
        link(root, f"/usr/link-{number}", f"link-{number + 1}")
    put(root, "/file")
    assert rootfs.landing(path) == landing


@pytest.mark.parametrize(
    "path", ["", "relative", "/a/../b", "/..", "/nul\0here", "/a" * 65, "/\ud800"]
)
def test_a_malformed_path_is_refused(rootfs: Rootfs, path: str) -> None:
    with pytest.raises(PathRefused):
        rootfs.read_file(path)
    with pytest.raises(PathRefused):
        rootfs.directory(path)


def test_the_names_on_the_way() -> None:
    assert components("//usr/./lib/") == ["usr", "lib"]
    assert components("/") == []


def test_names_that_are_not_utf_8_are_names(root: str, rootfs: Rootfs) -> None:
    put(root, "/" + os.fsdecode(b"\xff\xfe"), b"x")
    (name,) = rootfs.names("/") or ()
    assert rootfs.read_file("/" + name) == b"x"


def test_a_rootfs_that_is_no_directory_cannot_be_opened(root: str) -> None:
    put(root, "/file")
    for path in (f"{root}/file", f"{root}/nothing"):
        with raises(RootfsUnavailable):
            Rootfs.open(path)


def test_a_kernel_without_openat2_is_told(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that does not exist stands in for openat2 on an old kernel."""
    monkeypatch.setattr("hooks.image.openat2._SYS_OPENAT2", 100_000)
    with raises(KernelTooOld, match=r"Linux 5\.6"):
        Rootfs.open(root)


def test_no_descriptor_is_left_open(root: str, rootfs: Rootfs) -> None:
    put(root, "/file", b"x")
    os.mkfifo(f"{root}/fifo")
    before = os.listdir("/proc/self/fd")
    rootfs.read_file("/file")
    rootfs.stat("/file")
    rootfs.names("/")
    rootfs.landing("/a/b")
    with pytest.raises(NotARegularFile):
        rootfs.read_file("/fifo")
    with pytest.raises(FileTooLarge):
        rootfs.read_file("/file", 0)
    with pytest.raises(KeyError), Rootfs.open(root):
        raise KeyError
    assert os.listdir("/proc/self/fd") == before
