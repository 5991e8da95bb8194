"""The links in /dev/char, in a directory that stands in for /dev."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hooks import engine
from hooks.node.host_setup import CharLinks, link_nodes
from hooks.plan import Device
from tests.unit.hooks.fake_node import NVIDIA, Node, nvml_gpu

GPU = Device("/dev/nvidia0", NVIDIA, 0)
CONTROL = Device("/dev/nvidiactl", NVIDIA, 255)
CAP = Device("/dev/nvidia-caps/nvidia-cap3", 240, 3)


@pytest.fixture
def dev(node: Node) -> Path:
    """Make the device nodes of one GPU and of a capability."""
    node.add_node("nvidia-caps/nvidia-cap3", 240, 3)
    return node.dev


def links(dev: Path) -> dict[str, str]:
    return {path.name: os.readlink(path) for path in (dev / "char").iterdir()}


def test_links_are_made_as_udev_makes_them_and_only_for_what_is_given(
    dev: Path, usual_umask: None
) -> None:
    assert link_nodes(str(dev), [GPU, CONTROL, CAP]).made == ("195:0", "195:255", "240:3")
    assert links(dev) == {
        "195:0": "../nvidia0",
        "195:255": "../nvidiactl",
        "240:3": "../nvidia-caps/nvidia-cap3",
    }
    for device in (GPU, CONTROL, CAP):
        number = f"{device.major}:{device.minor}"
        assert os.stat(dev / "char" / number).st_rdev == os.makedev(device.major, device.minor)
    assert (dev / "char").stat().st_mode & 0o777 == 0o755


def test_node_of_a_driver_container_s_own_dev_is_linked_by_its_whole_path(
    dev: Path, tmp_path: Path
) -> None:
    own = tmp_path / "container/dev"
    own.mkdir(parents=True)
    (dev / "nvidia0").rename(own / "nvidia0")
    assert link_nodes(str(dev), [GPU]).made == ()
    done = link_nodes(str(dev), [GPU, CONTROL], {"/dev/nvidia0": str(own / "nvidia0")})
    assert done.made == ("195:0", "195:255")
    assert links(dev) == {"195:0": str(own / "nvidia0"), "195:255": "../nvidiactl"}
    assert link_nodes(str(dev), [GPU], {"/dev/nvidia0": str(own / "nvidia0")}) == CharLinks()


def test_links_that_are_there_are_left_alone(dev: Path, node: Node) -> None:
    other = node.add_node("other-name", NVIDIA, 0)
    (dev / "char").mkdir()
    (dev / "char/195:0").symlink_to(other)
    node.add_node("char/195:255", NVIDIA, 255)
    before = sorted((p.name, p.lstat().st_ino) for p in (dev / "char").iterdir())
    assert link_nodes(str(dev), [GPU, CONTROL]) == CharLinks()
    assert sorted((p.name, p.lstat().st_ino) for p in (dev / "char").iterdir()) == before


@pytest.mark.parametrize("stale", ["../nvidia9", "../nvidiactl", "..", "195:0"])
def test_links_that_lead_elsewhere_are_replaced(dev: Path, stale: str) -> None:
    (dev / "char").mkdir()
    (dev / "char/195:0").symlink_to(stale)
    assert link_nodes(str(dev), [GPU]).made == ("195:0",)
    assert links(dev) == {"195:0": "../nvidia0"}


def _no_link(dev: Path) -> None:
    (dev / "char").mkdir()
    (dev / "char/195:0").write_text("somebody's")


def _no_directory(dev: Path) -> None:
    (dev / "char").write_text("somebody's")


def _other_device(dev: Path) -> None:
    (dev / "nvidia0").unlink()
    os.mknod(dev / "nvidia0", 0o20666, os.makedev(1, 3))


def _link_for_node(dev: Path) -> None:
    (dev / "nvidia0").rename(dev / "elsewhere")
    (dev / "nvidia0").symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_no_link, "is no link"),
        (_no_directory, "Not a directory"),
        (_other_device, "not device 195:0"),
        (_link_for_node, "not device 195:0"),
    ],
)
def test_what_cannot_be_linked_is_told_and_changes_nothing(
    dev: Path, change: Callable[[Path], None], why: str
) -> None:
    change(dev)
    before = {str(p): p.lstat().st_ino for p in dev.rglob("*")} | {str(dev / "char"): 0}
    done = link_nodes(str(dev), [GPU])
    assert done.made == ()
    [(name, reason)] = done.failed
    assert name == "195:0"
    assert why in reason
    assert {str(p): p.lstat().st_ino for p in dev.rglob("*")} | {str(dev / "char"): 0} == before


def test_many_may_link_at_once(dev: Path) -> None:
    (dev / "char").mkdir()
    done: list[CharLinks] = []
    start = threading.Barrier(8)

    def link() -> None:
        start.wait()
        done.extend(link_nodes(str(dev), [GPU, CONTROL]) for _ in range(50))

    for round_ in range(4):
        (dev / "char/195:0").unlink(missing_ok=True)
        if round_ % 2:
            (dev / "char/195:0").symlink_to("../gone")
        threads = [threading.Thread(target=link) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert links(dev) == {"195:0": "../nvidia0", "195:255": "../nvidiactl"}
    assert len(done) == 4 * 8 * 50
    assert all(result.failed == () for result in done)


@pytest.mark.parametrize("wanted", [True, False])
def test_engine_links_what_it_gives_if_it_is_configured_to(
    node: Node, tmp_path: Path, wanted: bool
) -> None:
    spec = {
        "process": {"args": ["true"], "env": ["NVIDIA_VISIBLE_DEVICES=0"]},
        "linux": {"resources": {}},
    }
    rootfs = tmp_path / "rootfs"
    node.elves.write(rootfs / "usr/lib64/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2")
    (rootfs / "lib64").symlink_to("usr/lib64")
    config = replace(node.config, char_links=wanted)
    done = engine.inject(
        spec,
        engine.read_request(spec),
        node.take_inventory(nvml_gpu(0), nvml_gpu(1)),
        engine.RootfsTarget(str(rootfs), str(tmp_path / "staging")),
        config=config,
    )
    given = {f"{d['major']}:{d['minor']}" for d in done.spec["linux"]["devices"]}
    assert "195:0" in given
    assert "195:1" not in given
    assert (set(links(node.dev)) if wanted else set()) == (given if wanted else set())
    assert wanted == (node.dev / "char").exists()
    assert set(done.record["char_links"]["made"]) == (given if wanted else set())
    assert done.record["char_links"]["failed"] == {}
