"""Changes in one directory of an image are atomic, and never follow a link."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hooks.image.directory import Directory
from hooks.image.rootfs import Rootfs
from hooks.image.rootfs_errors import (
    DirectoryInTheWay,
    FileTooLarge,
    NotARegularFile,
    PathRefused,
    RootfsIo,
)
from tests.harness.own_process import restored
from tests.harness.raising import raises
from tests.unit.hooks.image.images import link, put, tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change owners")


@pytest.fixture
def root(tmp_path: Path, usual_umask: None) -> str:
    put(str(tmp_path), "/outside/canary", b"canary")
    os.makedirs(tmp_path / "image" / "etc")
    return str(tmp_path / "image")


@pytest.fixture
def etc(root: str) -> Iterator[Directory]:
    with Rootfs.open(root) as rootfs:
        directory = rootfs.directory("/etc")
        assert directory is not None
        with directory:
            yield directory


def mode_and_owner(path: str) -> tuple[int, int, int]:
    status = os.lstat(path)
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid


def test_a_new_file_is_readable_to_all_whatever_the_umask(root: str, etc: Directory) -> None:
    with restored():
        os.umask(0o077)
        etc.write_file("file", b"data")
        etc.create_empty("empty")
        etc.create_empty("another")
        etc.make_directory("directory").close()
    assert mode_and_owner(f"{root}/etc/file") == (0o644, 0, 0)
    assert mode_and_owner(f"{root}/etc/empty") == (0o644, 0, 0)
    assert mode_and_owner(f"{root}/etc/another") == (0o644, 0, 0)
    assert mode_and_owner(f"{root}/etc/directory") == (0o755, 0, 0)


def test_the_umask_of_the_process_and_its_other_threads_stays(
    root: str, etc: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that set it and set it back would leave it at what one of them set."""
    monkeypatch.delattr(os, "umask")
    assert etc.create_empty("one")
    assert etc.create_empty("two")
    etc.write_file("file", b"data")
    etc.make_directory("directory").close()
    assert mode_and_owner(f"{root}/etc/two") == (0o644, 0, 0)


def test_new_things_belong_to_the_owner_of_their_directory(root: str, etc: Directory) -> None:
    """In a user namespace the image belongs to the container's root, another user on the host."""
    os.chown(f"{root}/etc", 100_000, 100_001)
    etc.write_file("file", b"data")
    etc.create_empty("empty")
    etc.make_link("link", "file")
    etc.make_directory("directory").close()
    for name in ("file", "empty", "link", "directory"):
        assert mode_and_owner(f"{root}/etc/{name}")[1:] == (100_000, 100_001), name


@pytest.mark.parametrize("what", ["empty", "link", "directory"])
def test_what_is_put_in_the_place_of_a_new_thing_is_not_given_away(
    root: str, etc: Directory, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The directory's owner may rename files in it, to get ownership of a file of root."""
    os.chown(f"{root}/etc", 100_000, 100_001)
    put(root, "/etc/secret", b"not for him")
    put(root, "/etc/kept/secret", b"not for him")
    os.chmod(f"{root}/etc/kept", 0o700)

    def swapping(make: Callable[..., None]) -> Callable[..., None]:
        def made(*arguments: object, **more: object) -> None:
            make(*arguments, **more)
            os.rename(f"{root}/etc/{what}", f"{root}/etc/aside")
            os.rename(f"{root}/etc/{kept}", f"{root}/etc/{what}")

        return made

    kept = "kept" if what == "directory" else "secret"
    call = {"empty": "mknod", "link": "symlink", "directory": "mkdir"}[what]
    monkeypatch.setattr(os, call, swapping(getattr(os, call)))
    if what == "directory":
        etc.make_directory(what).close()
    elif what == "link":
        etc.make_link(what, "target")
    else:
        etc.create_empty(what)
    before = (0o700, 0, 0) if what == "directory" else (0o644, 0, 0)
    assert mode_and_owner(f"{root}/etc/{what}") == before


def test_a_replaced_file_keeps_mode_and_owner_but_no_set_user_id(root: str, etc: Directory) -> None:
    put(root, "/etc/file", b"old")
    os.chown(f"{root}/etc/file", 7, 8)
    os.chmod(f"{root}/etc/file", 0o4750)
    etc.write_file("file", b"new")
    assert mode_and_owner(f"{root}/etc/file") == (0o750, 7, 8)
    assert etc.read_file("file") == b"new"


def test_a_link_is_replaced_and_not_followed(root: str, etc: Directory) -> None:
    outside = os.path.join(os.path.dirname(root), "outside")
    link(root, "/etc/file", f"{outside}/canary")
    link(root, "/etc/link", f"{outside}/canary")
    before = tree(outside)
    etc.write_file("file", b"new")
    etc.make_link("link", "target")
    assert etc.read_file("file") == b"new"
    assert etc.read_link("link") == "target"
    assert mode_and_owner(f"{root}/etc/file") == (0o644, 0, 0)
    assert tree(outside) == before


def test_a_file_gives_way_to_a_link(root: str, etc: Directory) -> None:
    put(root, "/etc/libcuda.so.1", b"old")
    etc.make_link("libcuda.so.1", "libcuda.so.535")
    assert etc.read_link("libcuda.so.1") == "libcuda.so.535"


def test_a_directory_is_never_replaced(root: str, etc: Directory) -> None:
    os.mkdir(f"{root}/etc/directory")
    for change in (
        lambda: etc.write_file("directory", b"x"),
        lambda: etc.make_link("directory", "x"),
        lambda: etc.make_directory("directory"),
        lambda: etc.remove("directory"),
    ):
        with pytest.raises(DirectoryInTheWay):
            change()
    assert not etc.create_empty("directory")
    assert not etc.create_link("directory", "x")
    assert os.listdir(f"{root}/etc") == ["directory"]


def test_an_unfinished_file_is_not_left_behind(root: str, etc: Directory) -> None:
    put(root, "/etc/file", b"old")
    with pytest.raises(TypeError):
        etc.write_file("file", "not bytes")  # type: ignore[arg-type]  # fails after it was made
    assert tree(f"{root}/etc").keys() == {"/file"}
    assert etc.read_file("file") == b"old"


def test_a_full_file_system_is_an_error_of_one_line(root: str) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", f"{root}/etc"]
    subprocess.run(mount, check=True)
    try:
        put(root, "/etc/file", b"old")
        with Rootfs.open(root) as rootfs:
            directory = rootfs.directory("/etc")
            assert directory is not None
            with directory, raises(RootfsIo, match="No space left on device"):
                directory.write_file("file", bytes(1 << 20))
            assert rootfs.read_file("/etc/file") == b"old"
            assert rootfs.names("/etc") == ("file",)
    finally:
        subprocess.run(["umount", f"{root}/etc"], check=True)


def test_removing_what_is_not_there_is_no_error(root: str, etc: Directory) -> None:
    put(root, "/etc/file")
    etc.remove("file")
    etc.remove("file")
    assert os.listdir(f"{root}/etc") == []


def test_reading_follows_no_link(root: str, etc: Directory) -> None:
    put(root, "/etc/file", b"12345")
    link(root, "/etc/link", "file")
    assert etc.read_file("file") == b"12345"
    with pytest.raises(NotARegularFile, match="symbolic link"):
        etc.read_file("link")
    with pytest.raises(FileTooLarge):
        etc.read_file("file", 4)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0b"])
def test_only_single_names_are_taken(root: str, etc: Directory, name: str) -> None:
    for change in (
        lambda: etc.stat(name),
        lambda: etc.read_file(name),
        lambda: etc.read_link(name),
        lambda: etc.names(name),
        lambda: etc.write_file(name, b""),
        lambda: etc.create_empty(name),
        lambda: etc.make_link(name, "x"),
        lambda: etc.make_directory(name),
        lambda: etc.remove(name),
        lambda: etc.remove_directory(name),
        lambda: etc.rename("x", name),
        lambda: etc.rename(name, "x"),
    ):
        with pytest.raises(PathRefused):
            change()
    assert os.listdir(f"{root}/etc") == []


def test_the_open_directory_is_the_directory_whatever_becomes_of_its_path(
    root: str, etc: Directory
) -> None:
    outside = os.path.join(os.path.dirname(root), "outside")
    before = tree(outside)
    os.rename(f"{root}/etc", f"{root}/moved")
    os.symlink(outside, f"{root}/etc")
    etc.write_file("file", b"data")
    etc.make_link("link", "file")
    assert tree(outside) == before
    assert sorted(os.listdir(f"{root}/moved")) == ["file", "link"]
