from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from api.errors import NvshimError
from hooks.edits.grant import Grant, decide
from hooks.errors import (
    AmbiguousDevice,
    DeviceNodeMissing,
    MigModeGpu,
    MigUnknown,
    NoGpus,
    OutOfService,
    UnknownDevice,
)
from hooks.node.inventory import Inventory, take_inventory
from hooks.requests.request import Request, read_request
from hooks.words import DEFAULT_CAPABILITIES, NoDevices
from tests.harness.raising import Kind, raises
from tests.unit.hooks.fake_node import Node, nvml_gpu, nvml_mig, uuid_of


@pytest.fixture
def mixed(node: Node) -> Node:
    """Return an inventory: GPU 0 whole, GPU 1 with two MIG devices, GPU 2 in MIG mode with none."""
    node.add_gpu(2)
    node.add_mig(1, 1, 0, (12, 13))
    node.add_mig(1, 2, 0, (21, 22))
    return node


def taken(node: Node) -> Inventory:
    first, second = nvml_mig(0, 1, 0), nvml_mig(1, 2, 0)
    divided = nvml_gpu(1, mig=True, mig_devices=[first, second])
    return node.take_inventory(nvml_gpu(0), divided, nvml_gpu(2, mig=True))


def granted(inventory: Inventory, devices: str) -> Grant:
    request: Any = read_request({"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={devices}"]}})
    return decide(request, inventory)


def names(grant: Grant) -> list[str]:
    return [str(g.index) for g in grant.gpus] + [f"{d.gpu}:{d.index}" for d in grant.mig_devices]


@pytest.mark.parametrize(
    ("devices", "gets"),
    [
        ("none", []),
        ("all", ["0", "1:0", "1:1"]),
        ("0", ["0"]),
        (uuid_of(0), ["0"]),
        (f"{uuid_of(0).upper()},0", ["0"]),
        ("1:1", ["1:1"]),
        ("1:1,1:0", ["1:1", "1:0"]),
        (f"{uuid_of(0x110, 'MIG')},0", ["0", "1:0"]),
        (f"{uuid_of(0x110, 'MIG')},1:0", ["1:0"]),
        ("0-0", ["0"]),
        ("GPU-00000000-AAAA", ["0"]),
        ("MIG-00000110", ["1:0"]),
        ("0000:10:00.0", ["0"]),
        ("00000000:10:00.0,0", ["0"]),
        ("10:00.0,0,GPU-00000000", ["0"]),
        (f"MIG-{uuid_of(1)}/2/0,1:1", ["1:1"]),
        (f"mig-{uuid_of(1).lower()}/1/0", ["1:0"]),
        ("nvidia.com/gpu=0,1:1", ["0", "1:1"]),
    ],
)
def test_request_gets(mixed: Node, devices: str, gets: list[str]) -> None:
    assert names(granted(taken(mixed), devices)) == gets


@pytest.mark.parametrize(
    ("devices", "error", "says"),
    [
        ("7", UnknownDevice, "0, 1, 2"),
        (uuid_of(9), UnknownDevice, uuid_of(2)),
        ("1:5", UnknownDevice, "1:0, 1:1"),
        ("0:0", UnknownDevice, "GPU 0 has no MIG devices"),
        ("9:0", UnknownDevice, "there is no GPU 9; this node has 0, 1, 2"),
        (uuid_of(9, "MIG"), UnknownDevice, uuid_of(0x110, "MIG")),
        ("0,7", UnknownDevice, "GPU 7"),
        ("1", MigModeGpu, "1:0, 1:1"),
        (uuid_of(1), MigModeGpu, "1:0, 1:1"),
        ("2", MigModeGpu, "turn MIG mode off"),
        ("0000:11:00.0", MigModeGpu, "1:0, 1:1"),
        ("GPU-00000001", MigModeGpu, "1:0, 1:1"),
        ("0-1", MigModeGpu, "1:0, 1:1"),
        ("GPU-0000000", AmbiguousDevice, f"{uuid_of(0)}, {uuid_of(1)}, {uuid_of(2)}"),
        ("MIG-000001", AmbiguousDevice, uuid_of(0x110, "MIG")),
        ("GPU-1", UnknownDevice, uuid_of(0)),
        ("MIG-1", UnknownDevice, uuid_of(0x110, "MIG")),
        ("0000:13:00.0", UnknownDevice, "0000:10:00.0"),
        ("0001:10:00.0", UnknownDevice, "0000:10:00.0"),
        (f"MIG-{uuid_of(1)}/7/0", UnknownDevice, f"MIG-{uuid_of(1)}/1/0"),
        (f"MIG-{uuid_of(0)}/1/0", UnknownDevice, f"MIG-{uuid_of(1)}/1/0"),
        ("0-2,7", MigModeGpu, "GPU 1"),
    ],
)
def test_request_that_cannot_be_met_says_what_could_be(
    mixed: Node, devices: str, error: Kind[NvshimError], says: str
) -> None:
    with raises(error) as caught:
        granted(taken(mixed), devices)
    assert says in str(caught.value)


def test_gpu_in_mig_mode_without_devices_is_noted(mixed: Node) -> None:
    assert "GPU 2" in granted(taken(mixed), "all").notes[0]


@pytest.mark.parametrize("node_name", ["nvidia0", "nvidiactl"])
def test_named_gpu_without_its_nodes_is_an_error(mixed: Node, node_name: str) -> None:
    (mixed.dev / node_name).unlink()
    with pytest.raises(DeviceNodeMissing, match=node_name) as caught:
        granted(taken(mixed), "0")
    assert "create its nodes" in caught.value.do


def test_a_lost_gpu_is_an_error_that_advises_a_reset(mixed: Node) -> None:
    inventory = taken(mixed)
    path = inventory.gpus[0].path
    usable = {name: node for name, node in inventory.nodes.usable.items() if name != path}
    nodes = replace(inventory.nodes, usable=usable, faults={path: "lost"}, lost=frozenset({path}))
    with pytest.raises(DeviceNodeMissing) as caught:
        granted(replace(inventory, nodes=nodes), "0")
    assert caught.value.do.startswith("reset the GPU")


@pytest.mark.parametrize(
    "node_name", ["nvidia1", "nvidia-caps/nvidia-cap12", "nvidia-caps/nvidia-cap13"]
)
def test_mig_device_needs_its_gpus_node_and_both_capabilities(mixed: Node, node_name: str) -> None:
    (mixed.dev / node_name).unlink()
    with pytest.raises(DeviceNodeMissing, match=node_name):
        granted(taken(mixed), "1:0")


def test_mig_device_whose_capabilities_the_kernel_does_not_list_is_an_error(mixed: Node) -> None:
    (mixed.proc / "driver/nvidia-caps/mig-minors").unlink()
    with pytest.raises(DeviceNodeMissing, match="mig-minors"):
        granted(taken(mixed), "1:0")


def test_all_leaves_out_what_has_no_node_and_notes_it(mixed: Node) -> None:
    (mixed.dev / "nvidia0").unlink()
    (mixed.dev / "nvidia-caps/nvidia-cap13").unlink()
    grant = granted(taken(mixed), "all")
    assert names(grant) == ["1:1"]
    assert any("nvidia0" in note for note in grant.notes)
    assert any("nvidia-cap13" in note for note in grant.notes)


def test_all_of_nothing_is_an_error(bare_node: Node) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    with pytest.raises(NoGpus, match="has no GPU"):
        granted(take_inventory(bare_node.config, None), "all")


def test_all_of_gpus_without_nodes_is_an_error(node: Node) -> None:
    for name in ("nvidia0", "nvidia1"):
        (node.dev / name).unlink()
    with pytest.raises(DeviceNodeMissing, match="nvidia1"):
        granted(take_inventory(node.config, None), "all")


def test_mig_device_is_unknown_and_not_absent_when_nvml_failed(mixed: Node) -> None:
    inventory = take_inventory(mixed.config, b'{"error": "GPU is lost"}')
    with pytest.raises(MigUnknown, match="GPU is lost"):
        granted(inventory, "1:0")
    with pytest.raises(MigModeGpu, match="GPU is lost"):
        granted(inventory, "1")
    assert names(granted(inventory, "0")) == ["0"]
    assert "GPU is lost" in granted(inventory, "all").notes[0]


def test_none_needs_no_gpu_but_a_loaded_module(bare_node: Node) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    inventory = take_inventory(bare_node.config, None)
    request = Request(NoDevices(), DEFAULT_CAPABILITIES)
    assert decide(request, inventory) == Grant(DEFAULT_CAPABILITIES)
    (bare_node.proc / "devices").unlink()
    with pytest.raises(DeviceNodeMissing, match="not loaded"):
        decide(request, take_inventory(bare_node.config, None))


@pytest.mark.parametrize(
    ("marked", "devices", "gets"),
    [
        ("1:0", "all", ["0", "1:1"]),
        ("1:0", "1:1", ["1:1"]),
        ("1", "all", ["0"]),
        ("0", "all", ["1:0", "1:1"]),
        ("0", "none", []),
    ],
)
def test_what_is_out_of_service_is_left_out_of_all(
    mixed: Node, marked: str, devices: str, gets: list[str]
) -> None:
    grant = granted(_drained(taken(mixed), marked), devices)
    assert names(grant) == gets
    if devices == "all":
        which = f"MIG device {marked} " if ":" in marked else f"GPU {marked} "
        told = [note for note in grant.notes if "is out of service fan" in note]
        assert [note.startswith(which) for note in told] == [True]


@pytest.mark.parametrize(
    ("marked", "devices"), [("1:0", "1:0"), ("1", "1:0"), ("0", "0"), ("0", uuid_of(0))]
)
def test_what_is_out_of_service_cannot_be_named(mixed: Node, marked: str, devices: str) -> None:
    with pytest.raises(OutOfService, match="is out of service fan"):
        granted(_drained(taken(mixed), marked), devices)


def _drained(inventory: Inventory, marked: str) -> Inventory:
    """Return an inventory with a device out of service, a GPU together with its MIG devices."""
    gpus = (replace(g, drained="fan" * (str(g.index) == marked)) for g in inventory.gpus)
    parts = (
        replace(d, drained="fan" * (marked in {str(d.gpu), f"{d.gpu}:{d.index}"}))
        for d in inventory.mig_devices
    )
    return replace(inventory, gpus=tuple(gpus), mig_devices=tuple(parts))
