"""Creating, holding and removing layers: real overlays in the test's own mount namespace."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from functools import partial
from pathlib import Path

import pytest

from shim import syscalls
from shim.errors import BundleUnusable
from shim.files import digest
from shim.mountinfo import mount_points_below
from shim.rootfs.mounts import mount_rootfs, unmount_rootfs
from shim.rootfs.overlay import Overlay, read_overlay
from shim.work import layers
from tests.unit.mounts.private_mounts import in_private_mount_namespace

NAME = "layer"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "layers")


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    for name in ("image/etc", "upper", "work"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "image/etc/passwd").write_text("of the image")
    options = ["index=off"]
    options += [f"{key}dir={tmp_path}/{key}" for key in ("work", "upper")]
    found = read_overlay([("overlay", "overlay", "", [*options, f"lowerdir={tmp_path}/image"])])
    assert found is not None
    return found


def fill(tree: int, _top: str = "") -> bytes:
    """Add a file next to one of the image, and replace that one."""
    try:
        assert os.listdir(f"/proc/self/fd/{tree}/etc") == ["passwd"]
        for name in ("etc/new", "etc/passwd"):
            with open(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, dir_fd=tree), "w") as f:
                f.write("of the layer")
        return b"what was done"
    finally:
        os.close(tree)


def contents(store: str) -> list[str]:
    return sorted(os.listdir(store))


def make(store: str, overlay: Overlay, name: str = NAME) -> layers.Layer:
    made = layers.make(store, name, overlay, fill)
    assert made is not None
    return made


@in_private_mount_namespace
def test_layer_is_what_was_written_and_no_more(
    store: str, overlay: Overlay, tmp_path: Path
) -> None:
    made = make(store, overlay)
    assert contents(store) == [NAME]
    assert contents(f"{store}/{NAME}") == ["fs", "inventory", "note"]
    assert made.note == b"what was done"
    assert contents(f"{made.files}/etc") == ["new", "passwd"]
    assert stat.S_IMODE(os.stat(f"{store}/{NAME}").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(store).st_mode) == 0o700
    assert mount_points_below(store) == []
    assert (tmp_path / "image/etc/passwd").read_text() == "of the image"
    assert os.listdir(tmp_path / "upper") == []
    mount = overlay.with_layer(made.files)
    assert mount is not None
    mount_rootfs([mount], str(tmp_path / "rootfs"))
    assert (tmp_path / "rootfs/etc/passwd").read_text() == "of the layer"
    (tmp_path / "rootfs/etc/new").write_text("of the container")
    assert (tmp_path / "upper/etc/new").read_text() == "of the container"
    unmount_rootfs(str(tmp_path / "rootfs"))
    with open(f"{made.files}/etc/new") as file:
        assert file.read() == "of the layer"
    made.close()


@in_private_mount_namespace
def test_top_of_a_layer_belongs_to_whom_the_tree_belongs(
    store: str, overlay: Overlay, tmp_path: Path
) -> None:
    os.chown(tmp_path / "upper", 7, 8)
    os.chmod(tmp_path / "upper", 0o705)
    fresh = read_overlay([overlay._mount])
    assert fresh is not None
    made = make(store, fresh)
    seen = os.stat(made.files)
    assert (seen.st_uid, seen.st_gid, stat.S_IMODE(seen.st_mode)) == (7, 8, 0o705)
    made.close()


@in_private_mount_namespace
def test_layer_is_found_again(store: str, overlay: Overlay) -> None:
    assert layers.find(store, NAME) is None
    make(store, overlay).close()
    os.utime(f"{store}/{NAME}", (1, 1))
    found = layers.find(store, NAME)
    assert found is not None
    assert found.note == b"what was done"
    assert os.stat(f"{store}/{NAME}").st_mtime > 1
    found.close()
    found.close()


@in_private_mount_namespace
def test_note_of_the_layer_that_was_used_last_is_known(store: str, overlay: Overlay) -> None:
    os.makedirs(store, 0o700)
    assert layers.note_used_last(store) == b""
    names = [layers.name_of(digest(text)) for text in (b"one", b"two")]
    for number, name in enumerate((*names, "00000000-of-another-boot")):
        made = layers.make(store, name, overlay, partial(_noted, number))
        assert made is not None
        made.close()
        os.utime(f"{store}/{name}", (number, number))
    assert layers.note_used_last(store) == b"1"
    os.utime(f"{store}/{names[0]}", (9, 9))
    assert layers.note_used_last(store) == b"0"
    os.chmod(store, 0o777)
    assert layers.note_used_last(store) == b""


def _noted(number: int, tree: int, _top: str) -> bytes:
    os.close(tree)
    return b"%d" % number


@in_private_mount_namespace
def test_of_two_who_make_the_same_the_first_wins(store: str, overlay: Overlay) -> None:
    first: list[layers.Layer] = []

    def slow(tree: int, _top: str) -> bytes:
        first.append(make(store, overlay))
        return fill(tree) + b"of the second"

    second = layers.make(store, NAME, overlay, slow)
    assert second is not None
    assert second.note == first[0].note
    assert contents(store) == [NAME]
    for layer in (second, *first):
        layer.close()


@in_private_mount_namespace
def test_nothing_is_left_of_one_that_could_not_be_made(
    store: str, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tree: int, _top: str) -> bytes:
        fill(tree)
        raise BundleUnusable("to fill", found="a full disk")

    with pytest.raises(BundleUnusable):
        layers.make(store, NAME, overlay, fail)
    assert contents(store) == []

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(syscalls, "mount", refuse)
    with pytest.raises(PermissionError):
        layers.make(store, NAME, overlay, fill)
    assert contents(store) == []
    assert mount_points_below(store) == []


@in_private_mount_namespace
def test_kernel_without_volatile_overlays_does_as_well(
    store: str, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = syscalls.mount

    def old(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        if data.endswith(",volatile"):
            raise OSError(errno.EINVAL, "Invalid argument")
        really(source, target, kind, flags, data)

    monkeypatch.setattr(syscalls, "mount", old)
    make(store, overlay).close()
    assert contents(store) == [NAME]


@in_private_mount_namespace
def test_directory_of_somebody_else_or_on_another_file_system_is_not_used(
    store: str, overlay: Overlay, tmp_path: Path
) -> None:
    make(store, overlay).close()
    os.chmod(store, 0o770)
    assert layers.find(store, NAME) is None
    assert layers.make(store, "other", overlay, fill) is None
    os.chmod(store, 0o700)
    os.chmod(f"{store}/{NAME}", 0o777)
    assert layers.find(store, NAME) is None
    os.chown(store, 7, 7)
    assert layers.make(store, "other", overlay, fill) is None
    (tmp_path / "tmpfs").mkdir()
    syscalls.mount("tmpfs", str(tmp_path / "tmpfs"), "tmpfs", 0)
    assert layers.make(str(tmp_path / "tmpfs"), NAME, overlay, fill) is None
    (tmp_path / "link").symlink_to(tmp_path / "tmpfs")
    assert layers.make(str(tmp_path / "link"), NAME, overlay, fill) is None


@in_private_mount_namespace
def test_least_recently_used_are_removed_and_none_that_is_held(
    store: str, overlay: Overlay
) -> None:
    names = [layers.name_of(digest(bytes([number]))) for number in range(5)]
    held = {name: make(store, overlay, name) for name in names}
    for age, name in enumerate(names):
        os.utime(f"{store}/{name}", (1000 - age, 1000 - age))
    for name in names[1:4]:
        held[name].close()
    layers.collect(store, most=2)
    assert contents(store) == sorted([*names[:2], names[4]])  # the last is held
    held[names[4]].close()
    layers.collect(store, most=2)
    assert contents(store) == sorted(names[:2])
    held[names[0]].close()


@in_private_mount_namespace
def test_layer_of_a_killed_shim_stays_while_it_is_mounted(
    store: str, overlay: Overlay, tmp_path: Path
) -> None:
    name = layers.name_of(digest(b"x"))
    made = make(store, overlay, name)
    mount = overlay.with_layer(made.files)
    assert mount is not None
    mount_rootfs([mount], str(tmp_path / "rootfs"))
    made.close()
    layers.collect(store, most=0)
    assert contents(store) == [name]
    unmount_rootfs(str(tmp_path / "rootfs"))
    layers.collect(store, most=0)
    assert contents(store) == []


@in_private_mount_namespace
def test_what_another_boot_or_a_killed_maker_left_is_removed(store: str, overlay: Overlay) -> None:
    kept = layers.name_of(digest(b"x"))
    make(store, overlay, kept).close()
    make(store, overlay, f"00000000-{digest(b'x')}").close()
    killed = f".new-{1:016x}"
    for name in (killed, f".old-{2:016x}"):
        os.makedirs(f"{store}/{name}/fs/deep")
    os.mkdir(f"{store}/{killed}/root")
    syscalls.mount("tmpfs", f"{store}/{killed}/root", "tmpfs", 0)
    os.mkdir(f"{store}/.new-{3:016x}")
    underway = os.open(f"{store}/.new-{3:016x}", os.O_RDONLY)
    fcntl.flock(underway, fcntl.LOCK_SH)
    layers.collect(store)
    assert contents(store) == sorted([f".new-{3:016x}", kept])
    os.close(underway)
    assert mount_points_below(store) == []


@in_private_mount_namespace
def test_what_else_is_in_the_directory_stays(store: str, overlay: Overlay) -> None:
    """A user may configure the root of a file system, with everything on it."""
    make(store, overlay, layers.name_of(digest(b"x"))).close()
    others = ["io.containerd.content.v1.content", "lost+found", "00000000-backup", ".new-x"]
    others += [f"00000000-{digest(b'x')}0", f".old-{1:016X}x", f"0000000-{digest(b'x')}"]
    for name in others:
        os.makedirs(f"{store}/{name}/blobs")
    layers.collect(store, most=0)
    assert contents(store) == sorted(others)
    assert all(contents(f"{store}/{name}") == ["blobs"] for name in others)


@in_private_mount_namespace
def test_container_does_not_wait_for_all_of_another_boot(store: str, overlay: Overlay) -> None:
    make(store, overlay, layers.name_of(digest(b"x"))).close()
    for number in range(2 * layers.AT_ONCE + 1):
        os.makedirs(f"{store}/{number:08x}-{digest(b'x')}/fs")
    left = []
    for _ in range(3):
        layers.collect(store)
        left.append(len(contents(store)) - 1)
    assert left == [layers.AT_ONCE + 1, 1, 0]


@in_private_mount_namespace
def test_one_that_cannot_be_removed_keeps_no_other(
    store: str, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:08x}-{digest(b'x')}" for number in range(3)]
    for age, name in enumerate(names):
        make(store, overlay, name).close()
        os.utime(f"{store}/{name}", (1000 - age, 1000 - age))
    really = os.rename

    def rename(old: str, new: str) -> None:
        if old.endswith(names[0]):
            raise PermissionError(errno.EPERM, "immutable")
        really(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(PermissionError):
        layers.collect(store)
    assert contents(store) == [names[0]]


@in_private_mount_namespace
def test_layer_stays_that_is_mounted_by_one_who_is_killed_while_it_is_looked_at(
    store: str, overlay: Overlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = layers.name_of(digest(b"x"))
    made = make(store, overlay, name)
    really = fcntl.flock

    def lock(fd: int, how: int) -> None:
        """Run a function before the collector takes its lock."""
        mount = overlay.with_layer(made.files)
        assert mount is not None
        mount_rootfs([mount], str(tmp_path / "rootfs"))
        made.close()
        really(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    layers.collect(store, most=0)
    assert contents(store) == [name]
    unmount_rootfs(str(tmp_path / "rootfs"))


@in_private_mount_namespace
def test_layer_that_is_being_removed_is_not_found(store: str, overlay: Overlay) -> None:
    make(store, overlay).close()
    remover = os.open(f"{store}/{NAME}", os.O_RDONLY)
    fcntl.flock(remover, fcntl.LOCK_EX)
    assert layers.find(store, NAME) is None
    os.close(remover)
    found = layers.find(store, NAME)
    assert found is not None
    found.close()
