"""Requests for features other than GPUs on broken nodes; see also test_golden."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from hooks import engine
from hooks.edits.features import MOST_CHANNELS
from hooks.engine import Injection
from hooks.errors import DeviceNodeMissing, ImexChannelMissing, MigCapabilityMissing
from hooks.node.inventory import take_inventory
from hooks.requests.request import Request
from hooks.words import DEFAULT_CAPABILITIES, AllDevices, Devices, Feature, Void
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import FS, VERBS, Node, uuid_of

ALL = AllDevices()


@pytest.fixture
def full(node: Node) -> Node:
    """Make a node with every feature."""
    node.add_features()
    return node


def given(
    node: Node,
    rootfs: Path,
    *features: str,
    channels: tuple[int, ...] | None = (),
    devices: Devices = ALL,
) -> Injection:
    request = Request(
        devices, DEFAULT_CAPABILITIES, features=frozenset(features), imex_channels=channels
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
        engine.RootfsTarget(str(rootfs), f"{rootfs}-staging"),
        config=node.config,
    )


def devices(injection: Injection) -> set[str]:
    return {node["path"] for node in injection.spec["linux"]["devices"]}


def test_what_is_not_there_is_told_and_no_error(node: Node, rootfs: Path) -> None:
    every = (Feature.GDS, Feature.MOFED, Feature.GDRCOPY, Feature.NVSWITCH)
    injection = given(node, rootfs, *every)
    names = ("0", "1", "ctl", "-uvm", "-uvm-tools")
    assert devices(injection) == {f"/dev/nvidia{name}" for name in names}
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


@pytest.mark.parametrize("channel", [1, 8, MOST_CHANNELS, -1])
def test_channel_that_is_named_and_not_there_is_an_error(
    full: Node, rootfs: Path, channel: int
) -> None:
    before = sorted(os.listdir(rootfs))
    with raises(ImexChannelMissing) as caught:
        given(full, rootfs, channels=(0, channel))
    assert caught.value.code == "NVSHIM-E0110"
    assert f"IMEX channel {channel}" in str(caught.value)
    assert sorted(os.listdir(rootfs)) == before


def test_all_channels_of_a_node_without_any_is_no_error(node: Node, rootfs: Path) -> None:
    injection = given(node, rootfs, channels=None)
    assert "/dev/nvidia-caps-imex-channels/channel*" in str(injection.record["missing"])


@pytest.mark.parametrize("feature", [Feature.MIG_CONFIG, Feature.MIG_MONITOR])
def test_mig_that_cannot_be_configured_is_an_error(node: Node, rootfs: Path, feature: str) -> None:
    with raises(MigCapabilityMissing, match=feature) as caught:
        given(node, rootfs, feature)
    assert caught.value.code == "NVSHIM-E0111"
    node.write(node.proc / "driver/nvidia-caps/mig-minors", "config 1\nmonitor 2\n")
    with raises(MigCapabilityMissing, match="No such file"):
        given(node, rootfs, feature)


def test_management_leaves_excluded_gpus_out(full: Node, rootfs: Path) -> None:
    full.config = replace(full.config, excluded_gpus=(uuid_of(1),))
    found = devices(given(full, rootfs, Feature.MANAGEMENT, devices=Void()))
    assert "/dev/nvidia0" in found
    assert "/dev/nvidia1" not in found


def test_links_of_nested_nodes_lead_to_them(full: Node, rootfs: Path) -> None:
    given(full, rootfs, Feature.MOFED)
    link = full.dev / f"char/{VERBS}:192"
    assert os.readlink(link) == "../infiniband/uverbs0"
    assert stat.S_ISCHR(os.stat(link).st_mode)


def test_feature_needs_the_drivers_control_node(full: Node, rootfs: Path) -> None:
    (full.dev / "nvidiactl").unlink()
    with pytest.raises(DeviceNodeMissing):
        given(full, rootfs, Feature.GDS)
