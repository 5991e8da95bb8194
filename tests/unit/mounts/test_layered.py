"""A container with a shared layer sees the same as if everything were written for it alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hooks import engine
from hooks.errors import RootfsError
from hooks.image.rootfs import Rootfs
from hooks.node.identity import what_changed
from shim import syscalls
from shim.log import Log
from shim.rootfs.mounts import mount_rootfs, unmount_rootfs
from shim.work import driver_files, layered, layers
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
    for name in ("smi", "debugdump", "persistenced", "cuda-mps-control"):
        node.write(node.driver / f"usr/bin/nvidia-{name}", name).chmod(0o755)
    node.write(node.driver / "etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    return node


class Container:
    """The bundle and snapshot of a container, with an image of two layers."""

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
        """Inject as the shim does; leave the rootfs mounted.

        Args:
            layer: whether the container has a layer.
            files: whether the layer contains the driver's files.
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
    """Return a function that makes containers of one image."""
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
    """Return everything that programs can see of the container's files, except times."""
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


def of_driver(done: engine.Injection) -> dict[str, str]:
    """Return the driver's files in a container's layer: the source of each, by path."""
    return {file["destination"]: file["source"] for file in done.record["driver_layer"]}


def mounted(done: engine.Injection) -> dict[str, str]:
    """Return the mounts that were added to its spec: the source of each, by path."""
    return {mount["destination"]: mount["source"] for mount in done.spec["mounts"][3:]}


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
    # Files that did not have to change keep their times from the image.
    changed = {path for path in files if (alone.upper / path[1:]).exists()}
    untouched = set(files) - changed
    assert times(second.rootfs, untouched) == times(alone.rootfs, untouched)
    assert changed
    assert os.listdir(first.upper) == os.listdir(second.upper) == []
    # The specs and records differ only in the path of the bundle.
    for done, each in ((made, first), (found, second)):
        whole = json.dumps({"spec": done.spec, "record": done.record})
        moved = json.loads(whole.replace(each.bundle, alone.bundle))
        wanted = json.loads(json.dumps({"spec": expected.spec, "record": expected.record}))
        assert moved["record"].pop("layered")
        assert not wanted["record"].pop("layered")
        for key in ("milliseconds", "char_links"):
            del moved["record"][key], wanted["record"][key]
        assert moved == wanted
        # Nothing is mounted from a shared path, because a container may make it writable.
        assert node.config.layers not in whole
        assert seen(Path(each.bundle, "nvidia")) == seen(Path(alone.bundle, "nvidia"))
    # Containers do not see each other's changes.
    path = next(path for path in sorted(changed) if files[path][0] & stat.S_IFMT(0o170000))
    target = first.rootfs / path[1:]
    if target.is_dir():
        (target / "mine").touch()
    else:
        target.unlink()
    assert seen(second.rootfs) == files
    # Its next start keeps its files, and everything is mounted again.
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


@pytest.mark.parametrize("build", IMAGES, ids=[image.__name__ for image in IMAGES])
@in_private_mount_namespace
def test_drivers_files_are_in_the_layer_instead_of_being_mounted(
    tmp_path: Path, node: Node, build: Callable[[str], str]
) -> None:
    alone, first, second = (container(tmp_path, build) for _ in range(3))
    expected = alone.inject(node, layer=False)
    made = first.inject(node, layer=True, files=True)
    again = second.inject(node, layer=True, files=True)
    files = of_driver(made)
    assert of_driver(again) == files
    assert any("libcuda.so." in place for place in files)
    assert any("nvidia-smi" in place for place in files)
    # Exactly the driver's files come from the layer, and not from mounts.
    for done in (made, again):
        ours = {place: each for place, each in mounted(done).items() if "/nvidia/" in each}
        assert files == {
            place: source
            for place, source in mounted(expected).items()
            if source.startswith(str(node.driver))
        }
        assert files.keys().isdisjoint(mounted(done))
        assert len(mounted(done)) == len(ours)
    # They match the driver's files, and everything else is as without a layer.
    places = {os.path.realpath(f"{alone.rootfs}{place}") for place in files}
    places = {place.removeprefix(str(alone.rootfs)) for place in places}
    for one in (first, second):
        for place, source in files.items():
            found, host = os.stat(f"{one.rootfs}{place}"), os.stat(source)
            assert Path(f"{one.rootfs}{place}").read_bytes() == Path(source).read_bytes()
            assert found.st_mode == host.st_mode
            assert found.st_mtime_ns == host.st_mtime_ns
        assert len(places) == len(files)
        inside, outside = (
            {path: what for path, what in seen(each.rootfs).items() if path not in places}
            for each in (one, alone)
        )
        assert inside == outside
        assert os.listdir(one.upper) == []
    # The driver's identity is checked at the start, as for mounted files.
    assert again.record["identity"] == expected.record["identity"]
    # Writes are invisible to other containers and to the host.
    place, source = next((p, s) for p, s in files.items() if "nvidia-smi" in p)
    before = Path(source).read_bytes()
    Path(f"{first.rootfs}{place}").write_bytes(b"evil")
    os.unlink(f"{second.rootfs}{place}")
    assert Path(source).read_bytes() == before
    third = container(tmp_path, build)
    third.inject(node, layer=True, files=True)
    assert Path(f"{third.rootfs}{place}").read_bytes() == before
    # The layer takes no disk space.
    assert os.listdir(node.config.layers) == [os.path.basename(os.path.dirname(_layer_of(third)))]
    assert os.stat(f"{third.rootfs}{place}").st_ino == os.stat(source).st_ino
    for each in (alone, first, second, third):
        unmount_rootfs(str(each.rootfs))


def _layer_of(one: Container) -> str:
    """Return the topmost lower directory of a container's rootfs."""
    for line in os.fsdecode(Path("/proc/thread-self/mountinfo").read_bytes()).split("\n")[:-1]:
        if line.split(" ")[4] == str(one.rootfs):
            return line.partition("lowerdir=")[2].partition(":")[0]
    message = "it is not mounted"
    raise AssertionError(message)


@in_private_mount_namespace
def test_whatever_the_image_has_at_the_place_of_a_file(tmp_path: Path, node: Node) -> None:
    """The driver's file replaces it, as a mount would."""
    smi, control = "/usr/bin/nvidia-smi", "/usr/bin/nvidia-cuda-mps-control"
    debugdump, manifest = "/usr/bin/nvidia-debugdump", "/etc/OpenCL/vendors/nvidia.icd"

    def build(root: str) -> str:
        images.debian(root)
        images.put(root, smi, b"of the image" * 200_000)
        images.put(root, "/opt/target", b"of the image")
        os.symlink("/opt/target", f"{root}{control}")
        os.mkdir(f"{root}{debugdump}")  # left by a bind mount with a missing source
        os.makedirs(f"{root}/opt/vendors")
        os.makedirs(f"{root}/etc/OpenCL")
        os.symlink("../../opt/vendors", f"{root}/etc/OpenCL/vendors")
        return root

    alone, layered_ = container(tmp_path, build), container(tmp_path, build)
    # The image's upper layer has removed a file of the lower one.
    images.put(str(tmp_path / "image/lower"), "/usr/bin/nvidia-persistenced", b"of the image")
    os.makedirs(tmp_path / "image/upper/usr/bin")
    os.mknod(tmp_path / "image/upper/usr/bin/nvidia-persistenced", stat.S_IFCHR, 0)
    expected = mounted(alone.inject(node, layer=False))
    done = layered_.inject(node, layer=True, files=True)
    files = of_driver(done)
    assert {smi, control, debugdump, manifest, "/usr/bin/nvidia-persistenced"} <= files.keys()
    for place, source in files.items():
        assert expected[place] == source
        assert Path(f"{layered_.rootfs}{place}").read_bytes() == Path(source).read_bytes()
    assert not os.path.islink(f"{layered_.rootfs}{control}")
    assert os.path.exists(f"{layered_.rootfs}/opt/vendors/nvidia.icd")
    assert Path(f"{layered_.rootfs}/opt/target").read_bytes() == b"of the image"
    for each in (alone, layered_):
        unmount_rootfs(str(each.rootfs))


@in_private_mount_namespace
def test_files_below_a_mount_of_the_container_and_with_more_rights_are_mounted(
    tmp_path: Path, node: Node
) -> None:
    one = container(tmp_path)
    one.spec["mounts"].append({"destination": "/etc", "type": "bind", "source": "/mine"})
    smi = node.driver / "usr/bin/nvidia-smi"
    smi.chmod(0o4755)
    os.setxattr(
        node.driver / "usr/bin/nvidia-debugdump",
        "security.capability",
        bytes.fromhex("0100000200200000000000000000000000000000"),
    )
    node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    done = one.inject(node, layer=True, files=True)
    there = mounted(done)
    assert there["/usr/bin/nvidia-smi"] == str(smi)
    assert "/usr/bin/nvidia-debugdump" in there
    assert any(place.startswith("/etc/") for place in there)
    assert not any(place.startswith("/etc/") for place in of_driver(done))
    assert any("libcuda.so." in place for place in of_driver(done))
    unmount_rootfs(str(one.rootfs))


@in_private_mount_namespace
def test_driver_on_another_file_system_is_copied_once(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    _elsewhere(node)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    first, second = container(tmp_path / "one"), container(tmp_path / "other")
    files = of_driver(first.inject(node, layer=True, files=True))
    assert of_driver(second.inject(node, layer=True, files=True)) == files
    copies = sorted((Path(node.config.layers) / ".files").iterdir())
    assert len(copies) == len(files)
    for place, source in files.items():
        one, other = (os.stat(f"{each.rootfs}{place}") for each in (first, second))
        assert one.st_ino == other.st_ino
        assert one.st_ino != os.stat(source).st_ino
        assert one.st_mtime_ns == os.stat(source).st_mtime_ns
        assert one.st_mode == os.stat(source).st_mode
        assert Path(f"{first.rootfs}{place}").read_bytes() == Path(source).read_bytes()
    # They are removed together with their layers.
    unmount_rootfs(str(first.rootfs))
    driver_files.sweep(node.config.layers)
    assert sorted((Path(node.config.layers) / ".files").iterdir()) == copies
    unmount_rootfs(str(second.rootfs))
    layers.collect(node.config.layers, most=0)
    driver_files.sweep(node.config.layers)
    assert list((Path(node.config.layers) / ".files").iterdir()) == []

    # They are not created on a disk that they would fill.
    def full(_: int) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1000, 300, 200, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "fstatvfs", full)
    monkeypatch.setattr(Rootfs, "is_writable", lambda _: True)
    third = container(tmp_path / "one")
    done = third.inject(node, layer=True, files=True)
    assert of_driver(done) == {}
    assert set(files) <= set(mounted(done))
    unmount_rootfs(str(third.rootfs))


def _elsewhere(node: Node) -> None:
    """Move the driver to another file system."""
    away = node.base / "away"
    node.driver.rename(away)
    node.driver.mkdir()
    syscalls.mount("tmpfs", str(node.driver), "tmpfs", 0)
    shutil.copytree(away, node.driver, symlinks=True, dirs_exist_ok=True)
    node.take_inventory(nvml_gpu(0), nvml_gpu(1))


@in_private_mount_namespace
def test_layers_of_a_driver_that_is_gone_are_removed_with_their_last_container(
    tmp_path: Path, node: Node
) -> None:
    used, unused = container(tmp_path), container(tmp_path)
    unused.spec["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=0"]
    used.inject(node, layer=True, files=True)
    old = os.path.dirname(_layer_of(used))
    unused.inject(node, layer=True, files=True)
    unmount_rootfs(str(unused.rootfs))
    assert len(os.listdir(node.config.layers)) == 2
    # The driver is replaced by another build of the same version.
    libcuda = next(node.driver.rglob("libcuda.so.*"))
    copy = libcuda.with_suffix(".new")
    shutil.copyfile(libcuda, copy)
    copy.rename(libcuda)
    node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    new = container(tmp_path)
    done = new.inject(node, layer=True, files=True)
    place = next(p for p, source in of_driver(done).items() if source == str(libcuda))
    assert os.stat(f"{new.rootfs}{place}").st_ino == os.stat(libcuda).st_ino
    assert os.stat(f"{used.rootfs}{place}").st_ino != os.stat(libcuda).st_ino
    kept = {os.path.basename(old), os.path.basename(os.path.dirname(_layer_of(new)))}
    assert set(os.listdir(node.config.layers)) == kept
    unmount_rootfs(str(used.rootfs))
    layers.remove_unused(old)
    kept.discard(os.path.basename(old))
    assert set(os.listdir(node.config.layers)) == kept
    layers.remove_unused(os.path.dirname(_layer_of(new)))
    assert set(os.listdir(node.config.layers)) == kept
    unmount_rootfs(str(new.rootfs))


@in_private_mount_namespace
def test_linking_the_drivers_files_changes_nothing_that_is_kept_of_the_node(
    tmp_path: Path, node: Node
) -> None:
    """The cached inventory stays valid, and a container that was created before starts."""
    alone, layered_ = container(tmp_path), container(tmp_path)
    before = alone.inject(node, layer=False)
    inventory = engine.load_inventory(node.config)
    layered_.inject(node, layer=True, files=True)
    assert what_changed(before.record) == ""
    again = engine.load_inventory(node.config)
    assert inventory is not None
    assert again is not None
    assert again.id == inventory.id
    # A change in place is detected, and so is a replaced file.
    libcuda = next(node.driver.rglob("libcuda.so.*"))
    with libcuda.open("ab") as file:
        file.write(b"x")
    assert "libcuda" in what_changed(before.record)
    assert engine.load_inventory(node.config) is None
    for each in (alone, layered_):
        unmount_rootfs(str(each.rootfs))
