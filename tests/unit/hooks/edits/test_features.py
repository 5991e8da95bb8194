"""What is asked beside GPUs: which nodes and files a container gets for it, and which not."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hooks import engine
from hooks.edits.features import MOST_CHANNELS
from hooks.engine import Injection
from hooks.errors import DeviceNodeMissing, ImexChannelMissing, MigCapabilityMissing
from hooks.node.inventory import take_inventory
from hooks.requests.request import Request
from hooks.words import DEFAULT_CAPABILITIES, AllDevices, Capability, Feature, Void
from tests.unit.hooks.fake_node import Node, uuid_of

IMEX, FS, SWITCH, GDR, VERBS, MISC = 500, 501, 502, 503, 231, 10

DEVICES = f"""Character devices:
 {MISC} misc
195 nvidia-frontend
226 drm
{VERBS} infiniband_verbs
234 nvidia-caps
{IMEX} nvidia-caps-imex-channels
{FS} nvidia-fs
{SWITCH} nvidia-nvswitch
{GDR} gdrdrv
508 nvidia-uvm

Block devices:
  8 sd
"""


@pytest.fixture
def full(node: Node) -> Node:
    """A node with something of everything, and something wrong beside each."""
    node.write(node.proc / "devices", DEVICES)
    node.write(node.proc / "misc", " 63 vga_arbiter\n 58 rdma_cm\n")
    node.write(node.proc / "driver/nvidia-caps/mig-minors", "config 1\nmonitor 2\n")
    for name, major, minor in (
        ("nvidia-fs0", FS, 0),
        ("nvidia-fs10", FS, 10),
        ("nvidia-fs2", FS, 2),
        ("infiniband/uverbs0", VERBS, 192),
        ("infiniband/rdma_cm", MISC, 58),
        ("infiniband/issm0", VERBS, 64),
        ("gdrdrv", GDR, 0),
        ("nvidia-nvswitchctl", SWITCH, 255),
        ("nvidia-nvswitch0", SWITCH, 0),
        ("nvidia-nvlink", 504, 0),
        ("nvidia-caps/nvidia-cap1", 234, 1),
        ("nvidia-caps/nvidia-cap2", 234, 2),
        ("nvidia-caps-imex-channels/channel0", IMEX, 0),
        ("nvidia-caps-imex-channels/channel7", IMEX, 7),
    ):
        node.add_node(name, major, minor, 0o660 if "verbs" in name else 0o666, gid=9)
    node.add_node("nvidia-fs3", 8, 3)  # of another driver
    node.add_node("nvidia-caps-imex-channels/channel8", IMEX, 9)
    node.write(node.driver / "etc/cufile.json", "{}")
    (node.driver / "run/udev").mkdir(parents=True)
    return node


def given(
    node: Node, rootfs: Path, *features: str, channels: tuple[int, ...] | None = (), **more: Any
) -> Injection:
    request = Request(
        more.pop("devices", AllDevices()),
        frozenset(more.pop("capabilities", DEFAULT_CAPABILITIES)),
        features=frozenset(features),
        imex_channels=channels,
    )
    spec = {
        "process": {"env": [], "user": {"uid": 0, "gid": 0}},
        "mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}],
        "linux": {},
    }
    return engine.inject(
        spec,
        request,
        take_inventory(node.config, None),
        rootfs=str(rootfs),
        staging=f"{rootfs}-staging",
        config=node.config,
    )


GPUS = {
    "/dev/nvidia0",
    "/dev/nvidia1",
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
}


def devices(injection: Injection) -> set[str]:
    paths = [node["path"] for node in injection.spec["linux"]["devices"]]
    assert len(paths) == len(set(paths))
    return set(paths)


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        (Feature.GDS, {"/dev/nvidia-fs0", "/dev/nvidia-fs2", "/dev/nvidia-fs10"}),
        (Feature.MOFED, {"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"}),
        (Feature.GDRCOPY, {"/dev/gdrdrv"}),
        (Feature.NVSWITCH, {"/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch0"}),
        (Feature.MIG_CONFIG, {"/dev/nvidia-caps/nvidia-cap1"}),
        (Feature.MIG_MONITOR, {"/dev/nvidia-caps/nvidia-cap2"}),
    ],
)
def test_feature_brings_its_nodes_and_no_others(
    full: Node, rootfs: Path, feature: str, expected: set[str]
) -> None:
    injection = given(full, rootfs, feature)
    assert devices(injection) == expected | GPUS
    rules = injection.spec["linux"]["resources"]["devices"]
    assert len(rules) == len(expected | GPUS)
    assert all(rule["allow"] and rule["type"] == "c" for rule in rules)
    without_gpu = given(full, rootfs, feature, devices=Void())
    assert devices(without_gpu) == expected
    links = without_gpu.record["char_links"]
    assert links["failed"] == {}


def test_nothing_of_the_driver_comes_with_a_feature_alone(full: Node, rootfs: Path) -> None:
    injection = given(full, rootfs, Feature.GDRCOPY, devices=Void())
    assert injection.spec["mounts"][1:] == []
    assert "env" not in str(injection.record["edits"]["mounts"])


def test_node_that_not_everybody_may_open_brings_its_group(full: Node, rootfs: Path) -> None:
    injection = given(full, rootfs, Feature.MOFED)
    assert injection.spec["process"]["user"]["additionalGids"] == [9]


def test_storage_brings_its_files(full: Node, rootfs: Path) -> None:
    mounts = {m["destination"]: m for m in given(full, rootfs, Feature.GDS).spec["mounts"]}
    assert mounts["/etc/cufile.json"]["source"] == f"{full.driver}/etc/cufile.json"
    assert mounts["/run/udev"]["source"] == f"{full.driver}/run/udev"
    assert "ro" in mounts["/run/udev"]["options"]


def test_what_is_not_there_is_told_and_no_error(node: Node, rootfs: Path) -> None:
    every = (Feature.GDS, Feature.MOFED, Feature.GDRCOPY, Feature.NVSWITCH)
    injection = given(node, rootfs, *every)
    assert devices(injection) == GPUS
    missing = {entry["what"] for entry in injection.record["missing"]}
    assert {
        "/dev/nvidia-fs*", "/dev/gdrdrv", "/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch*",
        "/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm",
    } <= missing  # fmt: skip
    assert not [m for m in injection.spec["mounts"] if m["destination"] == "/run/udev"]


def test_node_of_another_driver_is_not_given_and_told(full: Node, rootfs: Path) -> None:
    missing = {m["what"]: m["sought"] for m in given(full, rootfs, Feature.GDS).record["missing"]}
    assert missing["/dev/nvidia-fs3"] == [f"{full.dev}/nvidia-fs3 is device 8:3, not {FS}:*"]


def test_misc_device_of_another_minor_is_not_given(full: Node, rootfs: Path) -> None:
    full.write(full.proc / "misc", " 232 kvm\n 59 rdma_cm\n")
    assert "/dev/infiniband/rdma_cm" not in devices(given(full, rootfs, Feature.MOFED))
    full.write(full.proc / "misc", " 232 kvm\n")
    assert "/dev/infiniband/rdma_cm" not in devices(given(full, rootfs, Feature.MOFED))


def test_channels_are_those_that_are_named_or_all_that_there_are(full: Node, rootfs: Path) -> None:
    directory = "/dev/nvidia-caps-imex-channels"
    named = given(full, rootfs, channels=(7,))
    assert devices(named) - GPUS == {f"{directory}/channel7"}
    every = given(full, rootfs, channels=None)
    assert devices(every) - GPUS == {f"{directory}/channel0", f"{directory}/channel7"}
    assert f"{directory}/channel8" in {m["what"] for m in every.record["missing"]}


@pytest.mark.parametrize("channel", [1, 8, MOST_CHANNELS, -1])
def test_channel_that_is_named_and_not_there_is_an_error(
    full: Node, rootfs: Path, channel: int
) -> None:
    before = sorted(os.listdir(rootfs))
    with pytest.raises(ImexChannelMissing) as caught:
        given(full, rootfs, channels=(0, channel))
    assert caught.value.code == "NVSHIM-E0110"
    assert f"IMEX channel {channel}" in str(caught.value)
    assert sorted(os.listdir(rootfs)) == before


def test_all_channels_of_a_node_without_any_is_no_error(node: Node, rootfs: Path) -> None:
    injection = given(node, rootfs, channels=None)
    assert "/dev/nvidia-caps-imex-channels/channel*" in str(injection.record["missing"])


@pytest.mark.parametrize("feature", [Feature.MIG_CONFIG, Feature.MIG_MONITOR])
def test_mig_that_cannot_be_configured_is_an_error(node: Node, rootfs: Path, feature: str) -> None:
    with pytest.raises(MigCapabilityMissing, match=feature) as caught:
        given(node, rootfs, feature)
    assert caught.value.code == "NVSHIM-E0111"
    node.write(node.proc / "driver/nvidia-caps/mig-minors", "config 1\nmonitor 2\n")
    with pytest.raises(MigCapabilityMissing, match="No such file"):
        given(node, rootfs, feature)


def test_management_brings_every_node_of_the_driver_and_no_graphics(
    full: Node, rootfs: Path
) -> None:
    full.add_library("libnvidia-eglcore.so.535.261.03", None)
    for other in ("mine", "nvidia-nvlink9"):  # the driver's by its numbers, and not by its name
        full.add_node(other, 195, 9)
    injection = given(full, rootfs, Feature.MANAGEMENT, devices=Void())
    assert devices(injection) == GPUS | {
        "/dev/nvidia-modeset", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2",
        "/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-caps-imex-channels/channel7",
        "/dev/nvidia-caps-imex-channels/channel8",
    }  # fmt: skip
    names = {os.path.basename(mount["destination"]) for mount in injection.spec["mounts"]}
    assert {"libcuda.so.535.261.03", "libnvidia-ml.so.535.261.03"} <= names
    assert "libnvidia-eglcore.so.535.261.03" not in names


def test_management_leaves_excluded_gpus_out(full: Node, rootfs: Path) -> None:
    full.config = replace(full.config, excluded_gpus=(uuid_of(1),))
    found = devices(given(full, rootfs, Feature.MANAGEMENT, devices=Void()))
    assert "/dev/nvidia0" in found
    assert "/dev/nvidia1" not in found


def test_management_beside_gpus_gives_nothing_twice(full: Node, rootfs: Path) -> None:
    injection = given(
        full, rootfs, Feature.MANAGEMENT, capabilities=[Capability.UTILITY, Capability.COMPUTE]
    )
    assert devices(injection) >= GPUS
    rules = injection.spec["linux"]["resources"]["devices"]
    numbers = [(rule["major"], rule["minor"]) for rule in rules]
    assert len(numbers) == len(set(numbers))
    destinations = [mount["destination"] for mount in injection.spec["mounts"]]
    assert len(destinations) == len(set(destinations))


def test_links_of_nested_nodes_lead_to_them(full: Node, rootfs: Path) -> None:
    given(full, rootfs, Feature.MOFED)
    link = full.dev / f"char/{VERBS}:192"
    assert os.readlink(link) == "../infiniband/uverbs0"
    assert stat.S_ISCHR(os.stat(link).st_mode)


def test_feature_needs_the_drivers_control_node(full: Node, rootfs: Path) -> None:
    (full.dev / "nvidiactl").unlink()
    with pytest.raises(DeviceNodeMissing):
        given(full, rootfs, Feature.GDS)
