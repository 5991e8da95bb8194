"""Marks of devices out of service: read from files, damaged or not, and matched with devices."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from hooks.config import Config
from hooks.node.drained import (
    DRIVER,
    Drain,
    driver_of,
    mark_drained,
    path_of,
    read_drains,
    reasons_by_device,
)
from hooks.node.inventory import load_inventory
from tests.unit.hooks.fake_node import Node, nvml_gpu, nvml_mig, uuid_of

WHY = '{"reason": "fan", "since": 1}'
SAID = "since 1970-01-01T00:00:01Z: fan"


@pytest.fixture
def divided(node: Node) -> Node:
    """Make a node: GPU 0 whole, GPU 1 with two MIG devices."""
    node.add_mig(1, 1, 0, (12, 13))
    node.add_mig(1, 2, 0, (21, 22))
    parts = [nvml_mig(0, 1, 0), nvml_mig(1, 2, 0)]
    node.take_inventory(nvml_gpu(0), nvml_gpu(1, mig=True, mig_devices=parts))
    return node


def mark(config: Config, device: str, content: str = WHY) -> None:
    with open(_made(config, device), "w", encoding="utf-8") as file:
        file.write(content)


def _made(config: Config, device: str) -> str:
    os.makedirs(config.drained, exist_ok=True)
    return path_of(config, device)


def out_of_service(node: Node) -> dict[str, str]:
    """Return the devices out of service by index, from the inventory that containers use."""
    inventory = load_inventory(node.config)
    assert inventory is not None
    found = {str(gpu.index): gpu.drained for gpu in inventory.gpus}
    found |= {f"{each.gpu}:{each.index}": each.drained for each in inventory.mig_devices}
    found["driver"] = inventory.drained
    return {name: why for name, why in found.items() if why}


def test_without_the_directory_everything_is_in_service(divided: Node) -> None:
    assert read_drains(divided.config) == ()
    assert out_of_service(divided) == {}


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (uuid_of(0), {"0": SAID}),
        (uuid_of(1), {"1": SAID, "1:0": SAID, "1:1": SAID}),
        (uuid_of(0x110, "MIG"), {"1:0": SAID}),
        (DRIVER, {"driver": SAID}),
        (uuid_of(9), {}),  # a card that was removed
    ],
)
def test_a_mark_takes_what_it_names_and_its_parts(
    divided: Node, device: str, found: dict[str, str]
) -> None:
    mark(divided.config, device)
    assert out_of_service(divided) == found


def test_a_gpu_without_a_uuid_goes_by_its_address(divided: Node) -> None:
    inventory = load_inventory(divided.config)
    assert inventory is not None
    fallen = tuple(replace(gpu, uuid="") for gpu in inventory.gpus)
    address = fallen[0].bus_id
    for drain in (Drain(address, since=1), Drain(uuid_of(0), bus_id=address, since=1)):
        gpus, _ = mark_drained(fallen, (), (drain,))
        assert [bool(gpu.drained) for gpu in gpus] == [True, False], drain
    # Its MIG device is not the whole GPU, and a GPU with a known UUID is another card.
    part = Drain(uuid_of(0x110, "MIG"), bus_id=address)
    assert not any(gpu.drained for gpu in mark_drained(fallen, (), (part,))[0])
    other = Drain(uuid_of(9), bus_id=address)
    assert not any(gpu.drained for gpu in mark_drained(inventory.gpus, (), (other,))[0])


def test_what_is_in_service_again_is_so_for_an_older_inventory_too(divided: Node) -> None:
    for device in (uuid_of(1), uuid_of(0)):
        mark(divided.config, device)
    before = load_inventory(divided.config)
    assert before is not None
    known, (other, _) = (before.gpus, before.mig_devices), read_drains(divided.config)
    assert other.device == uuid_of(0)
    gpus, parts = mark_drained(*known, (other,))
    assert [bool(gpu.drained) for gpu in gpus] == [True, False]
    assert not any(part.drained for part in parts)
    assert reasons_by_device(*known, (other,)) == {uuid_of(0): SAID}
    assert reasons_by_device(*known, ()) == {}


def test_a_gpu_that_was_drained_without_a_uuid_stays_so_when_it_has_one(divided: Node) -> None:
    inventory = load_inventory(divided.config)
    assert inventory is not None
    mark(divided.config, inventory.gpus[1].bus_id)
    assert out_of_service(divided) == {"1": SAID, "1:0": SAID, "1:1": SAID}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '"x"', '{"since": "soon"}', '{"since": [1]}', "\xff", "[" * 9999,
     '{"since": 1e999}', '{"since": NaN}', f'{{"since": 1{"0" * 400}}}'],
)  # fmt: skip
def test_a_damaged_mark_counts_all_the_same(divided: Node, content: str) -> None:
    with open(_made(divided.config, uuid_of(0)), "w", encoding="latin-1") as file:
        file.write(content)
    assert out_of_service(divided).keys() == {"0"}


def test_names_that_are_no_files_and_files_that_are_being_written(divided: Node) -> None:
    old = f"MIG-{uuid_of(1)}/1/0"
    mark(divided.config, old)
    mark(divided.config, DRIVER)
    with open(f"{divided.config.drained}/.{uuid_of(0)}.abcdefgh.new", "w", encoding="utf-8"):
        pass
    drains = read_drains(divided.config)
    assert [drain.device for drain in drains] == [old, DRIVER]
    assert driver_of(drains) == SAID
