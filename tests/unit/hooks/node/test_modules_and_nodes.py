"""Loading missing kernel modules, and creating missing device nodes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hooks import engine
from hooks.edits.grant import decide
from hooks.errors import DeviceNodeMissing
from hooks.node.device_nodes import MadeNodes
from hooks.node.host_setup import load_commands, make_missing
from hooks.node.inventory import look_again, take_inventory
from hooks.requests.request import Request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    Capability,
    GpuIndex,
    NamedDevices,
)
from tests.unit.hooks.fake_node import CAPS, NVIDIA, UVM, Node, nvml_gpu, nvml_mig

PARAMETERS = "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n"


@pytest.fixture
def node(node: Node) -> Node:
    node.write(node.proc / "driver/nvidia/params", PARAMETERS)
    put_gpu(node)
    return node


def put_gpu(node: Node, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = node.sys / "bus/pci/devices/0000:10:00.0"
    node.write(device / "vendor", f"{vendor}\n")
    node.write(device / "class", f"{kind}\n")


def load(node: Node, *modules: str) -> None:
    for module in modules:
        (node.sys / "module" / module).mkdir(parents=True)


def names(commands: tuple[tuple[str, ...], ...]) -> list[str]:
    return [command[-1] for command in commands]


# --- modules


def test_modules_are_loaded_that_the_capabilities_need(node: Node) -> None:
    assert names(load_commands(node.config, {Capability.UTILITY})) == ["nvidia"]
    assert names(load_commands(node.config, DEFAULT_CAPABILITIES)) == ["nvidia", "nvidia-uvm"]
    assert names(load_commands(node.config, CAPABILITIES)) == [
        "nvidia", "nvidia-uvm", "nvidia-modeset",
    ]  # fmt: skip


def test_loaded_modules_are_not_loaded_again(node: Node) -> None:
    load(node, "nvidia", "nvidia_modeset")
    assert names(load_commands(node.config, CAPABILITIES)) == ["nvidia-uvm"]
    load(node, "nvidia_uvm")
    assert load_commands(node.config, CAPABILITIES) == ()


def test_nothing_is_loaded_if_the_operator_says_so(node: Node) -> None:
    assert load_commands(replace(node.config, load_modules=False), CAPABILITIES) == ()


@pytest.mark.parametrize(("vendor", "kind"), [("0x1002", "0x030000"), ("0x10de", "0x040300")])
def test_nothing_is_loaded_on_a_node_without_a_gpu(node: Node, vendor: str, kind: str) -> None:
    put_gpu(node, vendor, kind)
    assert load_commands(node.config, CAPABILITIES) == ()


def test_modules_are_those_of_the_driver_root(node: Node) -> None:
    everywhere = replace(node.config, driver_root=None)
    assert load_commands(everywhere, ())[0] == ("modprobe", "--", "nvidia")
    assert load_commands(replace(everywhere, driver_root="/"), ()) == load_commands(everywhere, ())
    commands = load_commands(replace(everywhere, driver_root="/run/nvidia/driver"), ())
    assert commands[0] == ("modprobe", "-d", "/run/nvidia/driver", "--", "nvidia")


@pytest.mark.skipif(not shutil.which("modprobe"), reason="needs kmod")
def test_command_is_one_that_modprobe_understands(node: Node, tmp_path: Path) -> None:
    modules = tmp_path / "lib/modules" / os.uname().release
    modules.mkdir(parents=True)
    for name in ("modules.order", "modules.builtin.modinfo"):
        (modules / name).write_text("")
    (modules / "modules.builtin").write_text("kernel/drivers/video/nvidia.ko\n")
    subprocess.run(["depmod", "-b", tmp_path], check=True)
    load(node, "nvidia_uvm")
    config = replace(node.config, driver_root=str(tmp_path))
    (command,) = load_commands(config, DEFAULT_CAPABILITIES)
    subprocess.run(command, check=True)
    (modules / "modules.builtin").write_text("")
    subprocess.run(["depmod", "-b", tmp_path], check=True)
    failed = subprocess.run(command, check=False, capture_output=True)
    assert failed.returncode == 1


# --- nodes


def make(node: Node, capabilities: frozenset[str] = DEFAULT_CAPABILITIES) -> MadeNodes:
    return make_missing(node.config, take_inventory(node.config, None), capabilities)


def test_missing_nodes_are_made_as_the_module_says(node: Node) -> None:
    missing = {
        "nvidiactl": (NVIDIA, 255),
        "nvidia1": (NVIDIA, 1),
        "nvidia-uvm": (UVM, 0),
        "nvidia-uvm-tools": (UVM, 1),
    }
    for name in missing:
        (node.dev / name).unlink()
    inventory = take_inventory(node.config, None)
    made = make_missing(node.config, inventory, DEFAULT_CAPABILITIES)
    assert set(made.made) == {f"{node.dev}/{name}" for name in missing}
    assert made.failed == ()
    for name, numbers in missing.items():
        seen = os.lstat(node.dev / name)
        assert (os.major(seen.st_rdev), os.minor(seen.st_rdev)) == numbers
        assert (seen.st_mode, seen.st_uid, seen.st_gid) == (stat.S_IFCHR | 0o660, 0, 44)
    assert look_again(node.config, inventory).nodes.faults == {}
    assert [name for name in os.listdir(node.dev) if name.startswith(".")] == []
    assert make(node) == MadeNodes()


def test_node_that_another_shim_has_made_meanwhile_counts(node: Node, tmp_path: Path) -> None:
    (node.dev / "nvidia1").unlink()
    slower = take_inventory(node.config, None)
    assert make(node).made == (f"{node.dev}/nvidia1",)
    made = make_missing(node.config, slower, DEFAULT_CAPABILITIES)
    assert made == MadeNodes(found=(f"{node.dev}/nvidia1",))
    (tmp_path / "rootfs").mkdir()
    spec = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]}, "linux": {}}
    request = engine.read_request(spec, node.config)
    inventory = engine.make_nodes(request, slower, node.config)
    assert inventory.made == made
    target = engine.RootfsTarget(str(tmp_path / "rootfs"), str(tmp_path / "staging"))
    injection = engine.inject(spec, request, inventory, target, config=node.config)
    assert "/dev/nvidia1" in {device["path"] for device in injection.spec["linux"]["devices"]}


def test_nodes_of_excluded_gpus_are_not_made(node: Node) -> None:
    for name in ("nvidia0", "nvidia1"):
        (node.dev / name).unlink()
    node.config = replace(node.config, excluded_gpus=("0000:11:00.0",))
    assert make(node).made == (f"{node.dev}/nvidia0",)


def test_nodes_of_capabilities_that_are_not_asked_for_are_not_made(node: Node) -> None:
    for name in ("nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
        (node.dev / name).unlink()
    assert make(node, frozenset({Capability.UTILITY})) == MadeNodes()


def test_node_whose_module_is_not_loaded_is_not_made(node: Node) -> None:
    (node.dev / "nvidia-modeset").unlink()
    graphics = frozenset({Capability.GRAPHICS})
    assert make(node, graphics) == MadeNodes()
    load(node, "nvidia_modeset")
    assert make(node, graphics).made == (f"{node.dev}/nvidia-modeset",)
    (node.dev / "nvidia-uvm").unlink()
    devices = node.proc / "devices"
    devices.write_text(devices.read_text().replace("nvidia-uvm", "other"))
    assert make(node) == MadeNodes()


def test_capability_nodes_have_the_mode_that_procfs_says(node: Node) -> None:
    node.add_mig(1, 1, 0, (12, 13))
    below = node.proc / "driver/nvidia/capabilities/gpu1/mig/gi1"
    node.write(below / "access", "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    node.write(below / "ci0/access", "DeviceFileMode: 256\nDeviceFileModify: 1\n")
    shutil.rmtree(node.dev / "nvidia-caps")
    mig = nvml_gpu(1, mig=True, mig_devices=[nvml_mig(0, 1, 0)])
    inventory = node.take_inventory(nvml_gpu(0), mig)
    made = make_missing(node.config, inventory, DEFAULT_CAPABILITIES)
    assert len(made.made) == 2
    for minor, mode in ((12, 0o444), (13, 0o400)):
        seen = os.lstat(node.dev / f"nvidia-caps/nvidia-cap{minor}")
        assert seen.st_rdev == os.makedev(CAPS, minor)
        assert stat.S_IMODE(seen.st_mode) == mode


def put_stale(node: Node, name: str, major: int, minor: int) -> None:
    (node.dev / name).unlink()
    node.add_node(name, major, minor)


def test_a_node_with_a_number_of_another_time_is_made_anew(node: Node) -> None:
    """For example nvidia-uvm's, which may get another major number when it is reloaded."""
    devices = node.proc / "devices"
    devices.write_text(devices.read_text().replace(f"{UVM} nvidia-uvm", f"{UVM + 5} nvidia-uvm"))
    put_stale(node, "nvidia1", NVIDIA, 7)
    names = ("nvidia-uvm", "nvidia-uvm-tools", "nvidia1")
    stale = take_inventory(node.config, None)
    assert stale.nodes.wrong == {f"/dev/{name}" for name in names}
    made = make(node)
    assert set(made.made) == {f"{node.dev}/{name}" for name in names}
    assert os.lstat(node.dev / "nvidia-uvm").st_rdev == os.makedev(UVM + 5, 0)
    assert os.lstat(node.dev / "nvidia1").st_rdev == os.makedev(NVIDIA, 1)
    assert make_missing(node.config, stale, DEFAULT_CAPABILITIES).found == made.made
    assert look_again(node.config, stale).nodes.wrong == frozenset()
    assert [name for name in os.listdir(node.dev) if name.startswith(".")] == []


def test_a_stale_node_that_stays_is_an_error_that_names_it(node: Node) -> None:
    put_stale(node, "nvidia-uvm", UVM + 5, 0)
    inventory = take_inventory(node.config, None)
    with pytest.raises(DeviceNodeMissing, match=f"nvidia-uvm is device {UVM + 5}:0, not {UVM}:0"):
        decide(Request(NamedDevices((GpuIndex(0),)), DEFAULT_CAPABILITIES), inventory)
    utility = frozenset({Capability.UTILITY})
    assert decide(Request(NamedDevices((GpuIndex(0),)), utility), inventory).gpus


def test_what_is_no_device_is_never_touched(node: Node) -> None:
    (node.dev / "nvidia0").unlink()
    (node.dev / "nvidia0").write_text("a file")
    (node.dev / "nvidia1").unlink()
    (node.dev / "nvidia1").symlink_to("nowhere")
    assert make(node) == MadeNodes()
    assert (node.dev / "nvidia0").read_text() == "a file"


@pytest.mark.parametrize("text", ["", PARAMETERS.replace("Files: 1", "Files: 0")])
def test_none_is_made_where_the_module_is_not_there_or_says_no(node: Node, text: str) -> None:
    (node.dev / "nvidia0").unlink()
    node.write(node.proc / "driver/nvidia/params", text)
    assert make(node) == MadeNodes()


def test_none_is_made_if_the_operator_says_so(node: Node) -> None:
    (node.dev / "nvidia0").unlink()
    config = replace(node.config, make_nodes=False)
    inventory = take_inventory(config, None)
    assert make_missing(config, inventory, DEFAULT_CAPABILITIES) == MadeNodes()


def test_what_stands_in_the_way_is_told(node: Node) -> None:
    node.add_mig(1, 1, 0, (12, 13))
    shutil.rmtree(node.dev / "nvidia-caps")
    (node.dev / "nvidia-caps").write_text("")
    mig = nvml_gpu(1, mig=True, mig_devices=[nvml_mig(0, 1, 0)])
    inventory = node.take_inventory(nvml_gpu(0), mig)
    made = make_missing(node.config, inventory, DEFAULT_CAPABILITIES)
    assert made.made == ()
    assert dict(made.failed)[f"{node.dev}/nvidia-caps/nvidia-cap12"] == "Not a directory"
