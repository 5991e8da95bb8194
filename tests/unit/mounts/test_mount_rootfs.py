"""Real mounts in the test's own mount namespace."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api.errors import NvshimError
from shim import syscalls
from shim.errors import (
    MountFailed,
    MountOptionsTooLong,
    MountOptionUnsupported,
    MountTargetUnusable,
)
from shim.mountinfo import mount_points_below, unescape
from shim.rootfs.mounts import mount_rootfs, unmount_rootfs
from shim.verbs.handover import UMASK
from tests.harness.raising import Kind, raises
from tests.unit.mounts.private_mounts import in_private_mount_namespace

if TYPE_CHECKING:
    from shim.rootfs.mounts import Mount

TMPFS: Mount = ("tmpfs", "tmpfs", "", ["size=1m"])


def _options_of(point: Path) -> set[str]:
    """Return the options of the topmost mount at a path, from the kernel."""
    found: set[str] = set()
    for line in os.fsdecode(Path("/proc/thread-self/mountinfo").read_bytes()).split("\n")[:-1]:
        fields = line.split(" ")
        if unescape(os.fsencode(fields[4])) == os.fsencode(point):
            optional = fields[6 : fields.index("-")]
            found = {*fields[5].split(","), *(name.partition(":")[0] for name in optional)}
    return found


def _layers(directory: Path, count: int) -> list[str]:
    """Make the layer directories of an image, each with a file that identifies it."""
    layers = [directory / f"{index}" / "fs" for index in range(count)]
    for index, layer in enumerate(layers):
        layer.mkdir(parents=True)
        (layer / f"from-{index}").touch()
    return [str(layer) for layer in layers]


def _overlay_options(directory: Path, layers: list[str]) -> list[str]:
    for name in ("upper", "work"):
        (directory / name).mkdir()
    return [
        f"workdir={directory}/work",
        f"upperdir={directory}/upper",
        "lowerdir=" + ":".join(layers),
    ]


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    return tmp_path / "bundle with space" / "rootfs"


@pytest.fixture(autouse=True)
def _bundle(rootfs: Path) -> None:
    rootfs.parent.mkdir()


@in_private_mount_namespace
def test_a_missing_rootfs_is_made_and_mounted_on(rootfs: Path) -> None:
    os.umask(UMASK)  # of this thread only
    mount_rootfs([TMPFS], str(rootfs))
    assert mount_points_below(str(rootfs)) == [str(rootfs)]
    (rootfs / "file").write_text("x")
    unmount_rootfs(str(rootfs))
    assert mount_points_below(str(rootfs)) == []
    assert os.listdir(rootfs) == []
    assert stat.S_IMODE(rootfs.stat().st_mode) == 0o711


@in_private_mount_namespace
def test_nothing_to_mount_touches_nothing(rootfs: Path) -> None:
    mount_rootfs([], str(rootfs))
    assert not rootfs.exists()


@in_private_mount_namespace
def test_a_bind_mount_takes_ro_and_keeps_what_its_source_forbids(
    rootfs: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    syscalls.mount("tmpfs", str(source), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV)
    mount_rootfs([("bind", str(source), "", ["rbind", "ro"])], str(rootfs))
    assert {"ro", "nosuid", "nodev"} <= _options_of(rootfs)
    assert "rw" in _options_of(source)
    with pytest.raises(OSError, match="Read-only"):
        (rootfs / "file").touch()
    unmount_rootfs(str(rootfs))


@in_private_mount_namespace
def test_an_option_can_allow_what_the_source_forbids(rootfs: Path, tmp_path: Path) -> None:
    syscalls.mount("tmpfs", str(tmp_path), "tmpfs", syscalls.MS_NOSUID)
    rootfs.parent.mkdir()
    (tmp_path / "source").mkdir()
    mount_rootfs([("bind", str(tmp_path / "source"), "", ["bind", "suid", "nodev"])], str(rootfs))
    assert "nosuid" not in _options_of(rootfs)
    assert "nodev" in _options_of(rootfs)


@in_private_mount_namespace
def test_propagation_is_set_on_the_new_mount_alone(rootfs: Path, tmp_path: Path) -> None:
    mount_rootfs([("bind", str(tmp_path), "", ["rbind", "rw", "rshared"])], str(rootfs))
    assert "shared" in _options_of(rootfs)
    assert "shared" not in _options_of(Path("/"))


@in_private_mount_namespace
def test_an_overlay_of_layers_is_writable_in_its_upper_directory(
    rootfs: Path, tmp_path: Path
) -> None:
    layers = _layers(tmp_path, 3)
    options = _overlay_options(tmp_path, layers)
    mount_rootfs([("overlay", "overlay", "", options)], str(rootfs))
    assert {p.name for p in rootfs.iterdir()} == {"from-0", "from-1", "from-2"}
    (rootfs / "new").write_text("x")
    assert (tmp_path / "upper" / "new").read_text() == "x"


@in_private_mount_namespace
def test_layers_beyond_a_page_are_mounted_and_our_directory_stays(
    rootfs: Path, tmp_path: Path
) -> None:
    # On its own tmpfs, since overlays may not stack on the machine's own overlay.
    syscalls.mount("tmpfs", str(tmp_path), "tmpfs", 0)
    rootfs.parent.mkdir()
    layers = _layers(tmp_path / ("d" * 60), 60)
    options = _overlay_options(tmp_path, layers)
    assert len(",".join(options)) > os.sysconf("SC_PAGE_SIZE")
    before = os.getcwd()
    mount_rootfs([("overlay", "overlay", "", options)], str(rootfs))
    assert len(os.listdir(rootfs)) == 60
    assert os.getcwd() == before
    unmount_rootfs(str(rootfs))


LAYERS = ":".join(f"/layers/{index:0200}" for index in range(40))
# A mount that fails, after one that succeeds.
UNMOUNTABLE: dict[str, tuple[Mount, Kind[NvshimError], str]] = {
    "layers beyond a page even when shortened": (
        ("overlay", "overlay", "", [f"lowerdir={LAYERS}"]), MountOptionsTooLong, "too many layers",
    ),
    "long option of no overlay": (
        ("tmpfs", "tmpfs", "", ["x" * 5000]), MountOptionsTooLong, "long",
    ),
    "layer that is missing": (
        ("overlay", "overlay", "", ["lowerdir=/missing/layer"]),
        MountFailed, "there is no /missing/layer",
    ),
    "unsupported option": (("bind", "/", "", ["bind", "rro"]), MountOptionUnsupported, "rro"),
    "target that is missing": (("tmpfs", "tmpfs", "missing", []), MountTargetUnusable, "missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNMOUNTABLE)
@in_private_mount_namespace
def test_a_failure_undoes_the_mounts_before_it(rootfs: Path, name: str) -> None:
    mount, error, words = UNMOUNTABLE[name]
    with raises(error, match=words):
        mount_rootfs([TMPFS, TMPFS, mount], str(rootfs))
    assert mount_points_below(str(rootfs)) == []
    assert rootfs.exists() != (error is MountOptionUnsupported), "refused before all else"


@pytest.mark.parametrize("kind", ["link", "file", "in a missing bundle"])
@in_private_mount_namespace
def test_a_rootfs_that_is_no_directory_is_refused(rootfs: Path, tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "link":
        rootfs.symlink_to(elsewhere)
    elif kind == "file":
        rootfs.touch()
    else:
        rootfs.parent.rmdir()
    with raises(MountTargetUnusable):
        mount_rootfs([TMPFS], str(rootfs))
    assert mount_points_below(str(elsewhere)) == []


@in_private_mount_namespace
def test_a_target_below_the_rootfs_cannot_lead_out_of_it(rootfs: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "inside").mkdir(parents=True)
    (image / "out").symlink_to("/inside")
    (image / "up").symlink_to("../../../..")
    bind: Mount = ("bind", str(image), "", ["rbind"])
    mount_rootfs(
        [bind, ("tmpfs", "tmpfs", "out", []), ("tmpfs", "tmpfs", "/up/inside", [])], str(rootfs)
    )
    inside = str(rootfs / "inside")
    assert mount_points_below(str(rootfs)) == [inside, inside, str(rootfs)]


@in_private_mount_namespace
def test_everything_below_is_unmounted_also_stacked_and_strangely_named(rootfs: Path) -> None:
    mount_rootfs([TMPFS, TMPFS], str(rootfs))
    for name in ("a", "a/b", "tab\t and \\040", "nächste"):
        (rootfs / name).mkdir()
        syscalls.mount("tmpfs", str(rootfs / name), "tmpfs", 0)
    assert len(mount_points_below(str(rootfs))) == 6
    unmount_rootfs(str(rootfs))
    assert mount_points_below(str(rootfs)) == []
    unmount_rootfs(str(rootfs))


@in_private_mount_namespace
def test_a_neighbour_with_the_same_beginning_stays_mounted(rootfs: Path) -> None:
    neighbour = rootfs.with_name("rootfs2")
    mount_rootfs([TMPFS], str(rootfs))
    mount_rootfs([TMPFS], str(neighbour))
    unmount_rootfs(str(rootfs))
    assert mount_points_below(str(neighbour)) == [str(neighbour)]


@in_private_mount_namespace
def test_the_path_may_lead_through_a_link_but_not_be_one(rootfs: Path, tmp_path: Path) -> None:
    mount_rootfs([TMPFS], str(rootfs))
    (tmp_path / "link").symlink_to(rootfs)
    unmount_rootfs(str(tmp_path / "link"))
    assert mount_points_below(str(rootfs)) == [str(rootfs)]
    (tmp_path / "parent").symlink_to(rootfs.parent)
    unmount_rootfs(str(tmp_path / "parent" / "rootfs"))
    assert mount_points_below(str(rootfs)) == []


@in_private_mount_namespace
def test_what_is_busy_for_a_moment_is_waited_for(rootfs: Path) -> None:
    mount_rootfs([TMPFS], str(rootfs))
    user = (rootfs / "file").open("w")
    closed_at: list[float] = []

    def close_soon() -> None:
        time.sleep(0.02)
        user.close()
        closed_at.append(time.monotonic())

    thread = threading.Thread(target=close_soon)
    thread.start()
    unmount_rootfs(str(rootfs))
    thread.join()
    assert closed_at
    assert mount_points_below(str(rootfs)) == []


@in_private_mount_namespace
def test_what_stays_busy_is_detached(rootfs: Path) -> None:
    mount_rootfs([TMPFS], str(rootfs))
    with (rootfs / "file").open("w") as user:
        unmount_rootfs(str(rootfs))
        assert mount_points_below(str(rootfs)) == []
        user.write("still writable for who had it open")
