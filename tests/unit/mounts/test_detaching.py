"""A detached overlay ends with its last descriptor."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from shim.mountinfo import mount_points_below
from shim.rootfs.detaching import detach
from shim.rootfs.mounts import mount_rootfs, unmount_rootfs
from tests.unit.mounts.private_mounts import in_private_mount_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from shim.rootfs.mounts import Mount


def _overlay(directory: Path) -> Mount:
    for name in ("lower", "upper", "work", "rootfs", "rootfs/inner"):
        (directory / name).mkdir(parents=True)
    (directory / "lower" / "inner").mkdir()
    options = [
        "index=off",
        f"workdir={directory}/work",
        f"upperdir={directory}/upper",
        f"lowerdir={directory}/lower",
    ]
    return ("overlay", "overlay", "", options)


@in_private_mount_namespace
def test_it_is_gone_at_once_and_its_layers_can_be_mounted_anew(tmp_path: Path) -> None:
    mount = _overlay(tmp_path)
    rootfs = str(tmp_path / "rootfs")

    mount_rootfs([mount], rootfs)
    with open(f"{rootfs}/written", "w", encoding="utf-8") as file:
        file.write("kept")
    fd = detach(rootfs, [mount])
    assert fd is not None
    assert mount_points_below(rootfs) == []
    assert not os.get_inheritable(fd)
    mount_rootfs([mount], rootfs)
    os.close(fd)
    with open(f"{rootfs}/written", encoding="utf-8") as file:
        assert file.read() == "kept"
    unmount_rootfs(rootfs)


@pytest.mark.parametrize("use", ["an open file", "a mount in it"])
@in_private_mount_namespace
def test_one_that_is_used_is_left_as_it_is(tmp_path: Path, use: str) -> None:
    mount = _overlay(tmp_path)
    rootfs = str(tmp_path / "rootfs")

    mount_rootfs([mount], rootfs)
    with ExitStack() as used:
        if use == "an open file":
            used.callback(os.close, os.open(rootfs, os.O_RDONLY))
        else:
            mount_rootfs([("tmpfs", "tmpfs", "", [])], f"{rootfs}/inner")
        before = mount_points_below(rootfs)
        assert detach(rootfs, [mount]) is None
        assert mount_points_below(rootfs) == before
        unmount_rootfs(rootfs)


@in_private_mount_namespace
def test_nothing_but_a_single_overlay_whose_layers_the_kernel_shares_is_touched(
    tmp_path: Path,
) -> None:
    mount = _overlay(tmp_path)
    kind, source, target, options = mount
    rootfs = str(tmp_path / "rootfs")
    others: list[list[Mount]] = [
        [],
        [mount, mount],
        [("bind", source, target, options)],
        [(kind, source, "inner", options)],
        [(kind, source, target, options[1:])],
    ]

    assert detach(rootfs, [mount]) is None  # not mounted
    mount_rootfs([mount], rootfs)
    for mounted in others:
        assert detach(rootfs, mounted) is None
    assert mount_points_below(rootfs) == [rootfs]
    unmount_rootfs(rootfs)
