"""Which rootfs can have an additional layer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shim import syscalls
from shim.rootfs import overlay as overlays
from shim.rootfs.overlay import read_overlay
from tests.unit.mounts.private_mounts import in_private_mount_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from shim.rootfs.mounts import Mount


@pytest.fixture
def plain(tmp_path: Path) -> Mount:
    """Return containerd's mount: an image of two layers, and a fresh snapshot."""
    for name in ("image/1", "image/2", "upper", "work"):
        (tmp_path / name).mkdir(parents=True)
    options = [
        "index=off",
        f"workdir={tmp_path}/work",
        f"upperdir={tmp_path}/upper",
        f"lowerdir={tmp_path}/image/1:{tmp_path}/image/2",
    ]
    return ("overlay", "overlay", "", options)


def test_layer_goes_on_top_and_the_rest_stays(plain: Mount) -> None:
    overlay = read_overlay([plain])
    assert overlay is not None
    with_layer = overlay.with_layer("/layers/x/fs")
    assert with_layer is not None
    kind, source, target, options = with_layer
    assert (kind, source, target) == plain[:3]
    assert options[:3] == plain[3][:3]
    assert options[3] == plain[3][3].replace("lowerdir=", "lowerdir=/layers/x/fs:")


def test_layers_made_anew_at_their_paths_are_others(plain: Mount, tmp_path: Path) -> None:
    overlay = read_overlay([plain])
    assert overlay is not None
    before = overlay.identity()
    assert before is not None
    assert overlay.identity() == before
    (tmp_path / "image/1").rename(tmp_path / "old")
    (tmp_path / "image/1").mkdir()
    after = overlay.identity()
    assert after is not None
    assert after[0] != before[0]
    assert after[1] == before[1]


@in_private_mount_namespace
def test_layer_on_a_file_system_of_its_own_has_no_identity(plain: Mount, tmp_path: Path) -> None:
    """Lazy snapshotters mount one per layer; their servers may reuse its identity."""
    overlay = read_overlay([plain])
    assert overlay is not None
    syscalls.mount("tmpfs", str(tmp_path / "image/2"), "tmpfs", 0)
    assert overlay.identity() is None


@pytest.mark.parametrize(
    ("kind", "target", "changed"),
    [
        ("bind", "", {}),
        ("overlay", "etc", {}),
        ("overlay", "", {"index=off": "index=on"}),
        ("overlay", "", {"index=off": "userxattr"}),
        ("overlay", "", {"index=off": "metacopy=on"}),
        ("overlay", "", {"index=off": 'context="system_u:object_r:container_file_t:s0"'}),
        ("overlay", "", {"index=off": "ro"}),
        ("overlay", "", {"index=off": ""}),
        ("overlay", "", {"lowerdir=/": "lowerdir="}),
        ("overlay", "", {"lowerdir=": "lowerdir=\\"}),
        ("overlay", "", {"upperdir=": "lowerdir="}),
        ("overlay", "", {"/upper": "/no-such-directory"}),
    ],
)
def test_anything_that_is_not_plain_has_none(
    plain: Mount, kind: str, target: str, changed: dict[str, str]
) -> None:
    options = list(plain[3])
    for old, new in changed.items():
        options = [option.replace(old, new) for option in options]
    assert read_overlay([(kind, plain[1], target, options)]) is None


def test_more_than_one_mount_has_none(plain: Mount) -> None:
    assert read_overlay([]) is None
    assert read_overlay([plain, ("tmpfs", "tmpfs", "tmp", [])]) is None


@pytest.mark.parametrize("kind", ["file", "whiteout", "directory"])
def test_snapshot_in_which_something_was_written_has_none(
    plain: Mount, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "upper/x"
    match kind:
        case "file":
            path.touch()
        case "whiteout":
            os.mknod(path, 0o20000)
        case _:
            path.mkdir()
    assert read_overlay([plain]) is None


def test_snapshot_whose_attributes_would_be_inherited_has_none(
    plain: Mount, tmp_path: Path
) -> None:
    os.setxattr(tmp_path / "upper", "trusted.overlay.uuid", b"x" * 16)
    assert read_overlay([plain]) is not None
    os.setxattr(tmp_path / "upper", "trusted.x", b"y")
    assert read_overlay([plain]) is None


@pytest.mark.parametrize("feature", ["metacopy", "redirect_dir"])
def test_kernel_that_does_more_by_default_has_none(
    plain: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    parameters = tmp_path / "parameters"
    parameters.mkdir()
    monkeypatch.setattr(overlays, "_PARAMETERS", str(parameters))
    assert read_overlay([plain]) is not None  # on a kernel without these options
    (parameters / feature).write_text("N\n")
    assert read_overlay([plain]) is not None
    (parameters / feature).write_text("Y\n")
    assert read_overlay([plain]) is None


def test_layer_that_leaves_no_room_in_a_page_or_that_no_option_can_name(plain: Mount) -> None:
    overlay = read_overlay([plain])
    assert overlay is not None
    assert overlay.with_layer("/" + "x" * 4000) is None
    assert overlay.with_layer("/a:b") is None
    assert overlay.with_layer("/a,b") is None
