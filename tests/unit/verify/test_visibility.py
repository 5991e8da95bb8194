"""Check what a container sees: every possible defect is reported, and nothing else."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from hooks.config import load_config
from integration.nvml.inventory import inventory_of
from integration.simulated import Scenario, SimulatedNode
from integration.verify.probe import Report, parse
from integration.verify.visibility import (
    expected_devices,
    faults_with_gpu,
    faults_without_gpu,
    gpu_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hooks.node.inventory import Inventory
    from integration.verify.visibility import ExpectedDevice

LIBCUDA: Final = "libcuda.so.535.309.01"
LIBRARY: Final = frozenset({LIBCUDA, "hosts"})


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    """Make a node with two GPUs, and one with MIG devices."""
    cut = {"index": 2, "mig": ["1g.5gb", "1g.5gb"]}
    scenario = Scenario.parse({"gpus": 3, "model": "a100", "gpu": [cut]})
    with SimulatedNode.create(str(tmp_path_factory.mktemp("sight") / "node"), scenario) as made:
        yield inventory_of(load_config(made.config_path))


def seen(
    node: Inventory, paths: Iterable[str], *, error: int = 0, closed: int = errno.EPERM
) -> Report:
    """Return the report of a container that has these nodes and cannot open the others."""
    usable = node.nodes.usable
    nodes = {path: ((usable[path].major, usable[path].minor), error) for path in paths}
    given = {number for number, _ in nodes.values()}
    numbers = {number: closed for number in gpu_numbers(node) if number not in given}
    return Report(nodes, numbers, LIBRARY)


def wanted(node: Inventory, name: str) -> ExpectedDevice:
    (found,) = [device for device in expected_devices(node) if device.name == name]
    return found


def test_what_containers_can_have_is_each_whole_gpu_and_each_mig_device(node: Inventory) -> None:
    names = [device.name for device in expected_devices(node)]
    assert names == ["GPU 0", "GPU 1", "MIG device 2:0", "MIG device 2:1"]
    assert [len(device.nodes) for device in expected_devices(node)] == [1, 1, 3, 3]
    lost, excluded, cut = node.gpus
    fewer = replace(
        node, gpus=(replace(lost, lost="off the bus"), replace(excluded, excluded=True), cut)
    )
    assert [device.name for device in expected_devices(fewer)] == names[2:]


@pytest.mark.parametrize("name", ["GPU 0", "MIG device 2:1"])
def test_a_container_with_its_device_and_no_other_is_right(node: Inventory, name: str) -> None:
    device = wanted(node, name)
    control = {"/dev/nvidiactl", "/dev/nvidia-uvm"}
    report = seen(node, {*device.nodes, *device.more, *control})
    assert faults_with_gpu(report, device, node, {}) == []


def test_a_node_under_another_name_is_known_by_its_number(node: Inventory) -> None:
    device = wanted(node, "GPU 0")
    report = seen(node, ["/dev/nvidia0"])
    assert faults_with_gpu(
        replace(report, nodes={"/dev/renamed": report.nodes["/dev/nvidia0"]}), device, node, {}
    ) == []  # fmt: skip
    other = seen(node, ["/dev/nvidia1"]).nodes["/dev/nvidia1"]
    assert faults_with_gpu(replace(report, nodes={"/dev/nvidia0": other}), device, node, {}) == [
        "/dev/nvidia0 is missing", "/dev/nvidia1 of another device is visible",
    ]  # fmt: skip


def test_of_a_mig_device_another_ones_capability_is_too_much(node: Inventory) -> None:
    first, second = wanted(node, "MIG device 2:0"), wanted(node, "MIG device 2:1")
    wrong = faults_with_gpu(seen(node, first.nodes | second.nodes), first, node, {})
    assert wrong == [
        f"{path} of another device is visible" for path in sorted(second.nodes - first.nodes)
    ]


@pytest.mark.parametrize(
    ("inside", "outside", "wrong"),
    [
        (0, 0, []),
        (errno.ENXIO, errno.ENXIO, []),
        (errno.EPERM, 0, ["/dev/nvidia0 cannot be opened: operation not permitted"]),
        (errno.EPERM, errno.ENXIO, ["/dev/nvidia0 cannot be opened: operation not permitted"]),
    ],
)
def test_a_node_opens_as_on_the_node_itself(
    node: Inventory, inside: int, outside: int, wrong: list[str]
) -> None:
    report = seen(node, ["/dev/nvidia0"], error=inside)
    on_node = {"/dev/nvidia0": outside}
    assert faults_with_gpu(report, wanted(node, "GPU 0"), node, on_node) == wrong


@pytest.mark.parametrize(
    ("error", "words"), [(0, "it opens"), (errno.ENXIO, "no such device or address")]
)
def test_another_device_that_a_node_of_ones_own_making_opens_is_told(
    node: Inventory, error: int, words: str
) -> None:
    report = seen(node, ["/dev/nvidia0"], closed=error)
    wrong = faults_with_gpu(report, wanted(node, "GPU 0"), node, {})
    assert f"/dev/nvidia1 can be opened by its device number ({words})" in wrong
    assert not any("/dev/nvidia0" in each for each in wrong)
    assert f"/dev/nvidia0 can be opened by its device number ({words})" in faults_without_gpu(
        seen(node, [], closed=error), node
    )


def test_without_the_drivers_library_a_gpu_is_of_no_use(node: Inventory) -> None:
    report = replace(seen(node, ["/dev/nvidia0"]), mounts=frozenset({"hosts"}))
    assert faults_with_gpu(report, wanted(node, "GPU 0"), node, {}) == [
        "the driver's libcuda is missing"
    ]
    # The file may be in a layer.
    layered = replace(report, files=frozenset({LIBCUDA}))
    assert faults_with_gpu(layered, wanted(node, "GPU 0"), node, {}) == []


def test_a_container_without_a_request_has_nothing_of_the_driver(node: Inventory) -> None:
    nothing = replace(seen(node, []), mounts=frozenset())
    assert faults_without_gpu(nothing, node) == []
    much = seen(node, ["/dev/nvidiactl"])
    assert faults_without_gpu(much, node) == [
        "/dev/nvidiactl is visible", f"{LIBCUDA} is mounted",
    ]  # fmt: skip
    library = f"libcuda.so.{node.driver.version}"
    layered = replace(nothing, files=frozenset({"libcuda.so.1", library}))
    assert faults_without_gpu(layered, node) == [f"{library} is visible"]


def test_what_the_program_says_is_read_and_other_words_are_not() -> None:
    text = (
        "node /dev/nvidia0 195:0 6\nnode /dev/null 1:3 0\nnumber 195:1 1\nmade 195:2 1\n"
        "mount libcuda.so.1\nmount a name\nfile libcuda.so.535\nend"
    )
    report = parse(text.splitlines())
    assert report.nodes == {"/dev/nvidia0": ((195, 0), 6), "/dev/null": ((1, 3), 0)}
    assert report.numbers == {(195, 1): 1}
    assert report.mounts == {"libcuda.so.1", "a name"}
    assert report.files == {"libcuda.so.535"}
