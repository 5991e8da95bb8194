"""A container with a layer sees what it would see if everything were written for it alone."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hooks import engine
from hooks.errors import RootfsError
from shim.log import Log
from shim.rootfs.mounts import mount_rootfs, unmount_rootfs
from shim.work import layered, layers
from tests.unit.hooks.fake_node import Node, nvml_gpu
from tests.unit.hooks.image import images
from tests.unit.mounts.private_mounts import in_private_mount_namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.requests.request import Request
    from shim.rootfs.mounts import Mount

ENVIRONMENT = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all"]


@pytest.fixture
def node(node: Node) -> Node:
    node.write(node.proc / "driver/nvidia/params", "ModifyDeviceFiles: 1\n")
    node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    return node


class Container:
    """One container's bundle and snapshot, of an image of two layers."""

    def __init__(self, base: Path, image: Path) -> None:
        self.bundle = str(base / "bundle")
        self.rootfs = base / "bundle/rootfs"
        self.upper = base / "upper"
        for name in ("upper", "work", "bundle"):
            (base / name).mkdir(parents=True)
        layers = f"lowerdir={image}/upper:{image}/lower"
        options = ["index=off", f"workdir={base}/work", f"upperdir={base}/upper", layers]
        self.mounts: list[Mount] = [("overlay", "overlay", "", options)]
        self.spec: dict[str, Any] = {
            "root": {"path": "rootfs"},
            "process": {"args": ["true"], "env": ENVIRONMENT, "user": {"uid": 0, "gid": 0}},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
            ],
            "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
        }

    def inject(self, node: Node, *, layer: bool, files: bool = False) -> engine.Injection:
        """Do what the shim does; leaves the rootfs mounted.

        Args:
            layer: whether the container has a layer.
            files: whether that has the driver's files.
        """
        config = replace(node.config, driver_layer=files)
        request: Request = engine.read_request(self.spec)
        inventory = engine.load_inventory(config)
        assert inventory is not None
        inventory = engine.make_nodes(request, inventory, config)
        staging, found = f"{self.bundle}/nvidia", None
        if layer:
            found = layered.prepare(
                self.bundle,
                self.spec,
                self.mounts,
                request=request,
                inventory=inventory,
                config=config,
                log=Log(self.bundle, debug=False),
            )
            assert found is not None
        mount_rootfs(self.mounts if found is None else [found[0]], str(self.rootfs))
        rootfs = str(self.rootfs)
        target = (
            engine.RootfsTarget(rootfs, staging)
            if found is None
            else engine.LayerTarget(found[2], rootfs, staging)
        )
        done = engine.inject(self.spec, request, inventory, target, config=config)
        if found is not None:
            found[1].close()
        return done


def container(base: Path, build: Callable[[str], str] = images.debian) -> Container:
    """One of an image that is made at the first call."""
    image = base / "image"
    if not image.exists():
        (image / "lower").mkdir(parents=True)
        (image / "upper").mkdir()
        build(str(image / "lower"))
        # The second layer changes something, removes something, and has attributes.
        images.put(str(image / "upper"), "/etc/nsswitch.conf", b"files")
        os.chmod(image / "upper/etc", 0o751)
        os.setxattr(image / "upper/etc", "user.of", b"the image")
        if (image / "lower/etc/ld.so.conf").exists():
            os.mknod(image / "upper/etc/ld.so.conf", stat.S_IFCHR, 0)
    return Container(base / f"container-{len(list(base.iterdir()))}", image)


def seen(root: Path) -> dict[str, Any]:
    """All that programs in the container could see of its files, but for when they were made."""
    found: dict[str, Any] = {}
    for path, (mode, uid, gid, content) in images.tree(str(root)).items():
        whole = str(root) + path
        attributes = {
            name: os.getxattr(whole, name, follow_symlinks=False)
            for name in os.listxattr(whole, follow_symlinks=False)
        }
        status = os.lstat(whole)
        size = status.st_size if not stat.S_ISDIR(mode) else 0
        found[path] = mode, uid, gid, content, attributes, size, status.st_nlink == 1
    return found


def times(root: Path, paths: set[str]) -> dict[str, int]:
    return {path: os.lstat(str(root) + path).st_mtime_ns for path in paths}


IMAGES = [images.debian, images.fedora, images.alpine, images.scratch]


@pytest.mark.parametrize("build", IMAGES, ids=[image.__name__ for image in IMAGES])
@in_private_mount_namespace
def test_both_ways_show_the_same(tmp_path: Path, node: Node, build: Callable[[str], str]) -> None:
    alone, first, second = (container(tmp_path, build) for _ in range(3))
    expected = alone.inject(node, layer=False)
    made = first.inject(node, layer=True)
    found = second.inject(node, layer=True)
    files = seen(alone.rootfs)
    assert seen(first.rootfs) == seen(second.rootfs) == files
    # What nobody had to touch looks as old as the image has it.
    changed = {path for path in files if (alone.upper / path[1:]).exists()}
    untouched = set(files) - changed
    assert times(second.rootfs, untouched) == times(alone.rootfs, untouched)
    assert changed
    assert os.listdir(first.upper) == os.listdir(second.upper) == []
    # The spec and the record differ in where the bundle is, and in nothing else.
    for done, each in ((made, first), (found, second)):
        whole = json.dumps({"spec": done.spec, "record": done.record})
        moved = json.loads(whole.replace(each.bundle, alone.bundle))
        wanted = json.loads(json.dumps({"spec": expected.spec, "record": expected.record}))
        assert moved["record"].pop("layered")
        assert not wanted["record"].pop("layered")
        for key in ("milliseconds", "char_links"):
            del moved["record"][key], wanted["record"][key]
        assert moved == wanted
        # Nothing is mounted from where others have it: a container may make it writable.
        assert node.config.layers not in whole
        assert seen(Path(each.bundle, "nvidia")) == seen(Path(alone.bundle, "nvidia"))
    # What one container does to its files no other sees.
    path = next(path for path in sorted(changed) if files[path][0] & stat.S_IFMT(0o170000))
    target = first.rootfs / path[1:]
    if target.is_dir():
        (target / "mine").touch()
    else:
        target.unlink()
    assert seen(second.rootfs) == files
    # Its next start goes on with what it has, and everything is there again.
    unmount_rootfs(str(first.rootfs))
    again = Container.__new__(Container)
    again.__dict__ |= first.__dict__
    again.inject(node, layer=False)
    assert set(files) <= set(seen(again.rootfs))
    for each in (alone, second, again):
        unmount_rootfs(str(each.rootfs))


@in_private_mount_namespace
def test_image_that_is_refused_is_refused_the_same_and_leaves_no_layer(
    tmp_path: Path, node: Node
) -> None:
    def hostile(root: str) -> str:
        images.debian(root)
        os.makedirs(f"{root}/etc/ld.so.cache/directory-in-the-way")
        return root

    one, other = container(tmp_path, hostile), container(tmp_path, hostile)
    with pytest.raises(RootfsError) as alone:
        one.inject(node, layer=False)
    with pytest.raises(RootfsError) as with_layer:
        other.inject(node, layer=True)
    assert str(alone.value) == str(with_layer.value)
    assert os.listdir(node.config.layers) == []
    assert os.listdir(other.upper) == []
    unmount_rootfs(str(one.rootfs))


@in_private_mount_namespace
def test_other_image_and_other_request_have_other_layers(tmp_path: Path, node: Node) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        made = container(tmp_path / name)
        made.inject(node, layer=True)
        unmount_rootfs(str(made.rootfs))
    fewer = container(tmp_path / "one")
    fewer.spec["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=0"]
    fewer.inject(node, layer=True)
    unmount_rootfs(str(fewer.rootfs))
    assert len(os.listdir(node.config.layers)) == 3


@in_private_mount_namespace
def test_damaged_note_is_not_used(tmp_path: Path, node: Node) -> None:
    first, second = container(tmp_path), container(tmp_path)
    first.inject(node, layer=True)
    (layer,) = Path(node.config.layers).iterdir()
    (layer / "note").write_bytes(b"x")
    with pytest.raises(AssertionError):
        second.inject(node, layer=True)
    layers.collect(node.config.layers, most=1)
    unmount_rootfs(str(first.rootfs))
