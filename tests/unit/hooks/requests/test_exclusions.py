from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from hooks.edits.exclusions import refuse_excluded
from hooks.edits.grant import decide
from hooks.edits.planning import arches_of, make_plan
from hooks.errors import GpuExcluded, NoGpus
from hooks.image.layout import unseen_layout
from hooks.node.inventory import Inventory, load_inventory, take_inventory
from hooks.plan import Device
from hooks.requests.request import Request, read_request
from hooks.words import CAPABILITIES, AllDevices
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import CAPS, DRM, NVIDIA, Node, nvml_gpu, nvml_mig, uuid_of

ADDRESS = "0000:20:00.0"


@pytest.fixture
def full(bare_node: Node) -> Node:
    """Return an inventory: three GPUs with DRM nodes; the last is in MIG mode."""
    bare_node.add_kernel()
    bare_node.add_driver()
    for minor in range(3):
        bare_node.add_gpu(minor, f"0000:{0x10 * (minor + 1):02x}:00.0", drm=True)
    bare_node.add_mig(2, 1, 0, (12, 13))
    return bare_node


def taken(node: Node, *excluded: str) -> Inventory:
    node.config = replace(node.config, excluded_gpus=excluded)
    gpus = [nvml_gpu(n, f"0000:{0x10 * (n + 1):02x}:00.0") for n in range(2)]
    mig = nvml_gpu(2, "0000:30:00.0", mig=True, mig_devices=[nvml_mig(0, 1, 0, "1g.10gb+gfx")])
    return node.take_inventory(*gpus, mig)


def planned(inventory: Inventory, devices: str = "all") -> set[str]:
    environment = [f"NVIDIA_VISIBLE_DEVICES={devices}", "NVIDIA_DRIVER_CAPABILITIES=all"]
    grant = decide(read_request({"process": {"env": environment}}), inventory)
    plan = make_plan(grant, inventory, unseen_layout(arches_of(grant, inventory)))
    return {device.path for device in plan.devices}


@pytest.mark.parametrize("name", [uuid_of(1), ADDRESS])
def test_all_is_all_but_the_excluded(full: Node, name: str) -> None:
    everything = planned(taken(full))
    inventory = taken(full, name)
    left = planned(inventory)
    assert everything - left == {"/dev/nvidia1", "/dev/dri/card1", "/dev/dri/renderD129"}
    assert not any("exclude" in note for note in inventory.notes)
    notes = decide(Request(AllDevices(), CAPABILITIES), inventory).notes
    assert any("GPU 1" in note and "excluded" in note for note in notes)


def test_indices_of_the_others_stay(full: Node) -> None:
    inventory = taken(full, uuid_of(0))
    assert [gpu.index for gpu in inventory.gpus] == [0, 1, 2]
    assert "/dev/nvidia1" in planned(inventory, "1")
    assert "/dev/nvidia0" not in planned(inventory, "1")


@pytest.mark.parametrize("named", ["1", uuid_of(1), f"0,{uuid_of(1)}"])
def test_naming_an_excluded_gpu_is_an_error(full: Node, named: str) -> None:
    with raises(GpuExcluded, match="exclude-gpus"):
        planned(taken(full, ADDRESS), named)


@pytest.mark.parametrize("named", ["2:0", uuid_of(0x110, "MIG"), "2"])
def test_mig_devices_of_an_excluded_gpu_go_with_it(full: Node, named: str) -> None:
    inventory = taken(full, uuid_of(2))
    with raises(GpuExcluded):
        planned(inventory, named)
    left = planned(inventory)
    assert not any("caps" in path or path.endswith(("nvidia2", "card2")) for path in left)


def test_no_node_of_an_excluded_gpu_is_usable(full: Node) -> None:
    nodes = taken(full, uuid_of(2)).nodes
    withheld = {path for path, fault in nodes.faults.items() if "excluded" in fault}
    assert withheld == {
        "/dev/nvidia2", "/dev/dri/card2", "/dev/dri/renderD130",
        "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13",
    }  # fmt: skip
    assert not withheld & set(nodes.usable)


def test_node_whose_gpus_are_all_excluded_has_none(full: Node) -> None:
    inventory = taken(full, *(uuid_of(n) for n in range(3)))
    with pytest.raises(NoGpus, match="excluded"):
        planned(inventory)
    assert "/dev/nvidiactl" in planned(inventory, "none")


def test_change_of_the_configuration_holds_at_once(full: Node) -> None:
    taken(full)
    full.config = replace(full.config, excluded_gpus=(ADDRESS,))
    inventory = load_inventory(full.config)
    assert inventory is not None
    assert [gpu.excluded for gpu in inventory.gpus] == [False, True, False]
    full.config = replace(full.config, excluded_gpus=())
    inventory = load_inventory(full.config)
    assert inventory is not None
    assert not any(gpu.excluded for gpu in inventory.gpus)


def test_exclusion_of_no_gpu_is_noted(full: Node) -> None:
    inventory = taken(full, uuid_of(9), "0000:99:00.0")
    assert not any(gpu.excluded for gpu in inventory.gpus)
    for name in (uuid_of(9), "0000:99:00.0"):
        assert any(name in note for note in inventory.notes)


def test_gpu_of_unknown_uuid_may_be_the_excluded_one(full: Node) -> None:
    information = full.proc / f"driver/nvidia/gpus/{ADDRESS}/information"
    information.write_text(information.read_text().replace(uuid_of(1), "GPU-????????-????"))
    full.config = replace(full.config, excluded_gpus=(uuid_of(1),))
    inventory = take_inventory(full.config, None)
    assert [gpu.excluded for gpu in inventory.gpus] == [False, True, False]
    assert any("not known" in note for note in inventory.notes)


def of_file(major: int, minor: int, **fields: Any) -> Device:
    return Device("/dev/whatever", major, minor, reason="a CDI file", **fields)


FOREIGN = {
    "its own": of_file(NVIDIA, 2),
    "of its MIG device": of_file(CAPS, 13),
    "of the direct rendering manager": of_file(DRM, 130),
}


@pytest.mark.parametrize("which", FOREIGN)
@pytest.mark.parametrize("with_inventory", [True, False])
def test_cdi_file_cannot_give_an_excluded_gpu_away(
    full: Node, which: str, with_inventory: bool
) -> None:
    inventory = taken(full, uuid_of(2))
    seen = inventory if with_inventory else None
    others = [of_file(NVIDIA, 1), of_file(NVIDIA, 255), of_file(1, 3), of_file(NVIDIA, 2, kind="b")]
    refuse_excluded(others, full.config, seen)
    with raises(GpuExcluded, match="/dev/whatever"):
        refuse_excluded([*others, FOREIGN[which]], full.config, seen)
    refuse_excluded(FOREIGN.values(), replace(full.config, excluded_gpus=()), seen)


def test_gpu_of_another_vendor_is_excluded_by_its_address(full: Node) -> None:
    (full.sys / "bus/pci/devices/0000:a0:00.0/drm/renderD140").mkdir(parents=True)
    full.add_node("dri/renderD140", DRM, 140)
    config = replace(full.config, excluded_gpus=("0000:a0:00.0",))
    refuse_excluded([of_file(DRM, 128)], config, None)
    with raises(GpuExcluded, match="0000:a0:00"):
        refuse_excluded([of_file(DRM, 140)], config, None)
    os.unlink(full.dev / "dri/renderD140")
    refuse_excluded([of_file(DRM, 140)], config, None)
