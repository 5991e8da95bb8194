"""The CDI specs of the device plugin's devices."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hooks.config import Config
from hooks.edits.grant import decide
from hooks.node.inventory import Inventory, take_inventory
from hooks.requests.naming import parse_names
from hooks.requests.request import Request
from integration.agent_errors import DeviceGone
from integration.node.services.dra.cdi import generate
from integration.node.services.dra.devices import devices_of
from integration.node.services.plugin.allocation import AllocationContext, allocate
from integration.node.services.plugin.cdi import keep_specs, path_of
from integration.node.services.plugin.resources import resources_of
from integration.node.values.resources import DeviceIds, DeviceList, Mig, Settings
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import Node, nvml_gpu, nvml_mig, uuid_of

VENDOR = "k8s.device-plugin.nvidia.com"
BY_CDI = Settings()


@pytest.fixture
def config(node: Node, tmp_path: Path) -> Config:
    return replace(node.config, cdi_spec_dirs=("/nonexistent", str(tmp_path / "cdi")))


@pytest.fixture
def inventory(node: Node) -> Inventory:
    """Return an inventory: GPU 0, and GPU 1 in MIG mode with one device."""
    node.add_mig(1, 1, 0, (12, 13))
    mig = nvml_gpu(1, mig=True, mig_devices=[nvml_mig(0, 1, 0)])
    return node.take_inventory(nvml_gpu(0), mig)


def spec_in(config: Config, kind: str = "gpu") -> Any:
    with open(path_of(kind, config), encoding="utf-8") as file:
        return json.load(file)


def test_there_is_a_device_for_each_id_that_a_kubelet_can_give(
    config: Config, inventory: Inventory
) -> None:
    specs = keep_specs(BY_CDI, inventory, config)
    mig = inventory.mig_devices[0].uuid
    names = {uuid_of(0), "0", mig, "1:0", "all"}
    assert specs.devices == {f"{VENDOR}/gpu={name}" for name in names}
    assert specs.fault == ""
    made = spec_in(config)
    assert made["kind"] == f"{VENDOR}/gpu"
    assert {each["name"] for each in made["devices"]} == names
    # It has no fields that older runtimes refuse.
    assert tuple(map(int, made["cdiVersion"].split("."))) <= (0, 5, 0)
    # A container that was allocated before the setting changed may restart, with its old names.
    by_index = Settings(device_id_strategy=DeviceIds.INDEX)
    assert keep_specs(by_index, inventory, config) == replace(specs, written=())


NAMED = (DeviceIds.UUID, DeviceIds.INDEX)


@pytest.mark.parametrize("ids", NAMED)
@pytest.mark.parametrize("mig", [Mig.NONE, Mig.MIXED])
@pytest.mark.parametrize("empty", [False, True], ids=["MIG devices", "no MIG device"])
def test_every_healthy_device_can_be_allocated_by_each_strategy(
    config: Config, node: Node, ids: DeviceIds, mig: Mig, empty: bool
) -> None:
    """GPU 2 is in MIG mode, with or without MIG devices, one of which the kernel does not list."""
    node.add_gpu(2)
    node.add_mig(2, 1, 0, (12, 13))
    parts = [] if empty else [nvml_mig(0, 1, 0), nvml_mig(1, 2, 0)]
    there = node.take_inventory(nvml_gpu(0), nvml_gpu(1), nvml_gpu(2, mig=True, mig_devices=parts))
    if empty:
        there = replace(there, mig_devices=())
    assert any(gpu.mig for gpu in there.gpus)
    expected = {"0", "1"} | ({"2:0"} if mig is Mig.MIXED and not empty else set())
    assert had_by_each_strategy(there, config, mig, ids) == by_each(*expected)


@pytest.mark.parametrize("ids", NAMED)
def test_mig_devices_that_are_announced_as_gpus_can_be_allocated(
    config: Config, node: Node, ids: DeviceIds
) -> None:
    parts = []
    for gpu in (0, 1):
        node.add_mig(gpu, gpu + 1, 0, (12 + 2 * gpu, 13 + 2 * gpu))
        parts.append(nvml_gpu(gpu, mig=True, mig_devices=[nvml_mig(0, gpu + 1, 0)]))
    there = node.take_inventory(*parts)
    had = had_by_each_strategy(there, config, Mig.SINGLE, ids)
    assert had == by_each("0:0", "1:0")
    # With no MIG strategy, no MIG devices are advertised or allocated.
    assert had_by_each_strategy(there, config, Mig.NONE, ids) == by_each()


@pytest.mark.parametrize("ids", NAMED)
def test_a_mig_device_whose_uuid_is_no_name_in_cdi_can_be_allocated(
    config: Config, inventory: Inventory, ids: DeviceIds
) -> None:
    """Drivers before 470 name a MIG device by its GPU and its instances."""
    uuid = f"MIG-{uuid_of(1)}/1/0"
    (part,) = inventory.mig_devices
    old = replace(inventory, mig_devices=(replace(part, uuid=uuid),))
    assert had_by_each_strategy(old, config, Mig.MIXED, ids) == by_each("0", "1:0")
    settings = Settings(Mig.MIXED, device_id_strategy=ids)
    specs = keep_specs(settings, old, config)
    shifted = replace(old, mig_devices=(replace(part, uuid=uuid, index=1),))
    ground = AllocationContext(settings, shifted, config, cdi_devices=specs.devices)
    resources = resources_of(old, settings)
    with raises(DeviceGone, match="has just become 1:1"):
        allocate(resources[1], [uuid], ground, token="token")


def test_such_a_mig_device_keeps_no_claim_from_another_device(
    config: Config, inventory: Inventory
) -> None:
    (part,) = inventory.mig_devices
    old = replace(inventory, mig_devices=(replace(part, uuid=f"MIG-{uuid_of(1)}/1/0"),))
    every = devices_of(old)
    template = generate("gpu.example.com", every, old, config)
    assert template is not None
    assert template.devices.keys() == {uuid_of(0)}
    assert generate("gpu.example.com", every[1:], old, config) is None


def by_each(*indices: str) -> dict[DeviceList, set[str]]:
    return {strategy: set(indices) for strategy in DeviceList}


def had_by_each_strategy(
    there: Inventory, config: Config, mig: Mig, ids: DeviceIds
) -> dict[DeviceList, set[str]]:
    """Allocate all healthy devices; return their indices by strategy."""
    had = by_each()
    for strategy in DeviceList:
        settings = Settings(mig, device_list_strategies=(strategy,), device_id_strategy=ids)
        specs = keep_specs(settings, there, config)
        ground = AllocationContext(settings, there, config, cdi_devices=specs.devices)
        for resource in resources_of(there, settings):
            for device in (each for each in resource.devices if each.is_healthy):
                allocate(resource, [device.id], ground, token="token")
                # The shim resolves the same name.
                name = device.index if ids is DeviceIds.INDEX else device.uuid
                named = parse_names([name], asked="a device").devices
                decide(Request(named, frozenset({"compute"})), there)
                had[strategy].add(device.index)
    return had


def test_a_spec_is_written_only_if_it_differs_and_removed_if_nobody_needs_it(
    config: Config, inventory: Inventory
) -> None:
    path = path_of("gpu", config)
    assert keep_specs(BY_CDI, inventory, config).written == (path,)
    assert keep_specs(BY_CDI, inventory, config).written == ()
    by_variable = Settings(device_list_strategies=(DeviceList.ENVVAR,))
    assert keep_specs(by_variable, inventory, config).written == (path,)
    assert os.listdir(os.path.dirname(path)) == []
    assert keep_specs(by_variable, inventory, config).written == ()
    keep_specs(BY_CDI, inventory, config)
    assert not keep_specs(BY_CDI, None, config).devices  # the driver was removed
    assert os.listdir(os.path.dirname(path)) == []


def test_what_the_node_has_nothing_of_has_no_spec(config: Config, inventory: Inventory) -> None:
    wanted = Settings(gds=True, mofed=True, gdrcopy=True, imex_channels=(0,))
    specs = keep_specs(wanted, inventory, config)
    assert os.listdir(config.cdi_spec_dirs[-1]) == [f"{VENDOR}-gpu.json"]
    assert specs.fault == ""


def test_nvidias_own_spec_is_replaced_and_a_strangers_is_not(
    config: Config, inventory: Inventory
) -> None:
    path = path_of("gpu", config)
    os.makedirs(os.path.dirname(path))
    for kind, is_replaced in ((f"{VENDOR}/gpu", True), ("vendor.com/device", False)):
        before = {"cdiVersion": "0.5.0", "kind": kind, "devices": []}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(before, file)
        specs = keep_specs(BY_CDI, inventory, config)
        assert (specs.fault == "") == is_replaced
        assert bool(specs.devices) == is_replaced
        assert (spec_in(config) == before) != is_replaced
    assert "NVSHIM-E2712" in specs.fault
    assert "vendor.com/device" in specs.fault


def test_while_nvml_does_not_answer_a_spec_stays_if_all_of_it_is_there(
    node: Node, config: Config, inventory: Inventory
) -> None:
    before = keep_specs(BY_CDI, inventory, config)
    mute = take_inventory(node.config, None)
    assert mute.nvml_failure
    assert keep_specs(BY_CDI, mute, config).devices == before.devices
    os.unlink(path_of("gpu", config))
    assert keep_specs(BY_CDI, mute, config).devices < before.devices


def test_what_is_out_of_service_or_lost_is_in_no_spec(config: Config, inventory: Inventory) -> None:
    """An empty spec is not an error either: the kubelet still gets the devices."""
    mig = inventory.mig_devices[0].uuid
    whole, cut = inventory.gpus
    drained = replace(inventory, gpus=(replace(whole, drained="fan"), cut))
    specs = keep_specs(BY_CDI, drained, config)
    assert specs.devices == {f"{VENDOR}/gpu={name}" for name in (mig, "1:0", "all")}
    assert specs.fault == ""
    parts = tuple(replace(each, drained="fan") for each in inventory.mig_devices)
    paths = (whole.path, cut.path)
    lost = replace(
        inventory.nodes,
        usable={p: n for p, n in inventory.nodes.usable.items() if p not in paths},
        faults=dict.fromkeys(paths, "it is lost"),
    )
    for nothing in (
        replace(drained, mig_devices=parts),
        replace(inventory, drained="570 comes"),
        replace(inventory, nodes=lost),
    ):
        keep_specs(BY_CDI, inventory, config)
        specs = keep_specs(BY_CDI, nothing, config)
        assert (specs.devices, specs.fault) == (frozenset(), "")
        assert os.listdir(config.cdi_spec_dirs[-1]) == []
