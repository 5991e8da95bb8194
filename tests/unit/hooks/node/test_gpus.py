from __future__ import annotations

from typing import Any

import pytest

from hooks.node.gpus import Gpu, MigDevice, Nodes, find_gpus, find_mig_devices, look_at_nodes
from hooks.node.nvml import parse_report
from hooks.node.witness import Witness
from tests.unit.hooks.fake_node import (
    DRM,
    NVIDIA,
    UVM,
    Node,
    nvml_gpu,
    nvml_mig,
    nvml_report,
    put_link,
    uuid_of,
)


def seen(node: Node, *told: dict[str, Any]) -> tuple[tuple[Gpu, ...], list[str]]:
    report = parse_report(nvml_report(*told)) if told else None
    found = find_gpus(Witness(str(node.driver)), node.config, report)
    return found.gpus, [*found.notes, *found.conflicts]


def test_index_is_the_place_in_bus_order_and_minor_is_the_nodes(bare_node: Node) -> None:
    bare_node.add_gpu(2, "0000:07:00.0")
    bare_node.add_gpu(0, "10000:01:00.0")
    bare_node.add_gpu(1, "0000:0a:00.0")
    gpus, notes = seen(bare_node)
    assert [(g.index, g.minor, g.bus_id) for g in gpus] == [
        (0, 2, "0000:07:00.0"),
        (1, 1, "0000:0a:00.0"),
        (2, 0, "10000:01:00.0"),
    ]
    assert gpus[0].path == "/dev/nvidia2"
    assert notes == []


def test_index_is_nvmls_where_it_counts_fewer(bare_node: Node) -> None:
    """As in a node that is itself a container with one of the machine's GPUs."""
    for number in range(4):
        bare_node.add_gpu(number)
    gpus, _ = seen(bare_node, {**nvml_gpu(2), "index": 0})
    assert [(g.index, g.minor) for g in gpus] == [(0, 2), (1, 0), (2, 1), (3, 3)]
    # A lost one keeps the number that NVML does not give to another.
    gpus, _ = seen(bare_node, nvml_gpu(0), nvml_gpu(1), nvml_gpu(3))
    assert [(g.index, g.minor) for g in gpus] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    # Numbers that cannot be true are nobody's.
    for told in ({**nvml_gpu(2), "index": 4}, {**nvml_gpu(2), "index": 1}):
        gpus, _ = seen(bare_node, nvml_gpu(1), told)
        assert [(g.index, g.minor) for g in gpus] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_excluded_gpu_has_no_index(bare_node: Node) -> None:
    bare_node.add_gpu(0, excluded="Yes")
    bare_node.add_gpu(1)
    gpus, notes = seen(bare_node)
    assert [(g.index, g.minor) for g in gpus] == [(0, 1)]
    assert "excluded" in notes[0]


def test_uuid_unknown_to_procfs_is_nvmls(bare_node: Node) -> None:
    bare_node.add_gpu(0, uuid="GPU-????????-????-????-????-????????????")
    assert seen(bare_node)[0][0].uuid == ""
    assert seen(bare_node, nvml_gpu(0))[0][0].uuid == uuid_of(0)


def test_procfs_holds_where_nvml_says_otherwise(bare_node: Node) -> None:
    bare_node.add_gpu(0)
    gpus, notes = seen(bare_node, nvml_gpu(0, uuid=uuid_of(9), mig=True), nvml_gpu(5))
    assert [(g.uuid, g.mig, g.memory) for g in gpus] == [(uuid_of(0), False, None)]
    assert len(notes) == 2


def test_nvml_adds_memory_and_mig_mode(bare_node: Node) -> None:
    bare_node.add_gpu(0)
    gpu = seen(bare_node, nvml_gpu(0, memory=7, mig=True))[0][0]
    assert (gpu.memory, gpu.mig) == (7, True)


def test_gpu_with_instances_in_procfs_is_in_mig_mode_without_nvml(bare_node: Node) -> None:
    bare_node.add_gpu(0)
    bare_node.add_gpu(1)
    bare_node.add_mig(1, 9, 0, (84, 85))
    assert [g.mig for g in seen(bare_node)[0]] == [False, True]


def test_mig_devices_have_the_capability_nodes_of_their_gpus_minor(bare_node: Node) -> None:
    bare_node.add_gpu(3, "0000:01:00.0")
    bare_node.add_gpu(0, "0000:02:00.0")
    bare_node.add_mig(3, 1, 0, (12, 13))
    bare_node.add_mig(3, 2, 0, (21, 22))
    told = nvml_gpu(
        3,
        "0000:01:00.0",
        mig=True,
        mig_devices=[nvml_mig(0, 1, 0), nvml_mig(1, 2, 0), nvml_mig(2, 7, 0)],
    )
    report = parse_report(nvml_report(told))
    found = find_gpus(Witness(str(bare_node.driver)), bare_node.config, report)
    devices = find_mig_devices(bare_node.config, found)
    assert [(d.gpu, d.index, d.caps, d.profile) for d in devices] == [
        (0, 0, (12, 13), "1g.10gb"),
        (0, 1, (21, 22), "1g.10gb"),
        (0, 2, (), "1g.10gb"),  # NVML tells of an instance that the kernel does not list
    ]
    assert devices[0].paths == ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")


def test_drm_nodes_are_those_of_the_gpus_bus_address(bare_node: Node) -> None:
    bare_node.add_gpu(1, drm=True)
    (bare_node.sys / "bus/pci/devices/0000:11:00.0/drm/controlD65").mkdir()
    gpu = seen(bare_node)[0][0]
    assert gpu.drm_paths == ("/dev/dri/card1", "/dev/dri/renderD129")


def nodes(node: Node, *gpus: Gpu, mig: tuple[MigDevice, ...] = ()) -> Nodes:
    return look_at_nodes(node.config, gpus, mig)


def test_nodes_are_found_with_numbers_owner_and_mode(node: Node) -> None:
    node.add_gpu(2, drm=True)
    gpus, _ = seen(node)
    usable = nodes(node, *gpus).usable
    assert (usable["/dev/nvidia2"].major, usable["/dev/nvidia2"].minor) == (NVIDIA, 2)
    assert (usable["/dev/nvidia-uvm"].major, usable["/dev/nvidia-uvm"].minor) == (UVM, 0)
    render = usable["/dev/dri/renderD130"]
    assert (render.major, render.minor, render.mode, render.gid) == (DRM, 130, 0o660, 44)


def test_newer_modules_name_in_proc_devices_will_do(node: Node) -> None:
    text = (node.proc / "devices").read_text().replace("nvidia-frontend", "nvidia")
    (node.proc / "devices").write_text(text)
    assert "/dev/nvidiactl" in nodes(node).usable


def swap(node: Node, major: int, minor: int) -> None:
    (node.dev / "nvidiactl").unlink()
    node.add_node("nvidiactl", major, minor)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda n: (n.dev / "nvidiactl").unlink(), "No such file"),
        (lambda n: ((n.dev / "nvidiactl").unlink(), n.write(n.dev / "nvidiactl")), "no character"),
        (lambda n: put_link(n.dev / "nvidiactl", "/dev/null"), "no character"),
        (lambda n: swap(n, 1, 3), "1:3, not 195:255"),
        (lambda n: swap(n, NVIDIA, 0), "195:0, not 195:255"),
        (lambda n: n.write(n.proc / "devices", "Character devices:\n  1 mem\n"), "not loaded"),
        (lambda n: (n.proc / "devices").unlink(), "not loaded"),
    ],
)  # fmt: skip
def test_node_that_is_not_what_it_should_be_is_a_fault(node: Node, fault: Any, says: str) -> None:
    fault(node)
    looked = nodes(node)
    assert "/dev/nvidiactl" not in looked.usable
    assert says in looked.faults["/dev/nvidiactl"]


def test_block_device_of_the_same_number_lends_no_major(node: Node) -> None:
    node.write(node.proc / "devices", "Character devices:\n\nBlock devices:\n195 nvidia\n")
    assert nodes(node).majors == frozenset()
