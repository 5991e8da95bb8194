from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hooks.node.fingerprint import Fingerprint
from hooks.node.gpus import Gpu, MigDevice, Nodes, find_gpus, find_mig_devices, look_at_nodes
from hooks.node.nvml import parse_report
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
from tests.unit.hooks.golden import Golden


@dataclass(frozen=True)
class Case:
    """GPUs in procfs, as arguments of :meth:`Node.add_gpu`, and NVML's report, if any."""

    gpus: tuple[dict[str, Any], ...]
    told: tuple[dict[str, Any], ...] | None = None
    mig: tuple[tuple[int, int, int, tuple[int, int]], ...] = ()
    beside: str = ""  # a sysfs directory that does not belong to a GPU


def gpus(*minors: int) -> tuple[dict[str, Any], ...]:
    return tuple({"minor": minor} for minor in minors)


UNKNOWN = "GPU-????????-????-????-????-????????????"
FOUR = gpus(0, 1, 2, 3)
IN_MIG_MODE = nvml_gpu(
    3, "0000:01:00.0", mig=True,
    # NVML reports the last one, but the kernel does not list it.
    mig_devices=[nvml_mig(0, 1, 0), nvml_mig(1, 2, 0), nvml_mig(2, 7, 0)],
)  # fmt: skip
CASES: dict[str, Case] = {
    "in bus order": Case(
        (
            {"minor": 2, "bus": "0000:07:00.0"}, {"minor": 0, "bus": "10000:01:00.0"},
            {"minor": 1, "bus": "0000:0a:00.0"},
        )
    ),
    # The node is itself a container with one of the machine's GPUs.
    "NVML counts fewer": Case(FOUR, ({**nvml_gpu(2), "index": 0},)),
    # A lost GPU keeps its index, since NVML does not reuse it.
    "NVML leaves one out": Case(FOUR, (nvml_gpu(0), nvml_gpu(1), nvml_gpu(3))),
    # Impossible indices are ignored.
    "NVML counts more than there are": Case(FOUR, (nvml_gpu(1), {**nvml_gpu(2), "index": 4})),
    "NVML counts one twice": Case(FOUR, (nvml_gpu(1), {**nvml_gpu(2), "index": 1})),
    "excluded": Case(({"minor": 0, "excluded": "Yes"}, {"minor": 1})),
    "UUID unknown": Case(({"minor": 0, "uuid": UNKNOWN},)),
    "UUID that NVML knows": Case(({"minor": 0, "uuid": UNKNOWN},), (nvml_gpu(0),)),
    # Procfs wins over NVML.
    "UUID that NVML has otherwise": Case(
        gpus(0), (nvml_gpu(0, uuid=uuid_of(9), mig=True), nvml_gpu(5))
    ),
    "memory and MIG mode": Case(gpus(0), (nvml_gpu(0, memory=7, mig=True),)),
    "instances without NVML": Case(gpus(0, 1), mig=((1, 9, 0, (84, 85)),)),
    "MIG devices": Case(
        ({"minor": 3, "bus": "0000:01:00.0"}, {"minor": 0, "bus": "0000:02:00.0"}),
        (IN_MIG_MODE,),
        ((3, 1, 0, (12, 13)), (3, 2, 0, (21, 22))),
    ),
    "DRM nodes": Case(
        ({"minor": 1, "drm": True},), beside="bus/pci/devices/0000:11:00.0/drm/controlD65"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gpus_of_a_node(bare_node: Node, name: str) -> None:
    case = CASES[name]
    for gpu in case.gpus:
        bare_node.add_gpu(**gpu)
    for instance in case.mig:
        bare_node.add_mig(*instance)
    (bare_node.sys / case.beside).mkdir(exist_ok=True)
    report = None if case.told is None else parse_report(nvml_report(*case.told))
    found = find_gpus(Fingerprint(str(bare_node.driver)), bare_node.config, report)
    parts = find_mig_devices(bare_node.config, found)
    shown = {
        "gpus": [f"{g.index} {g.path} {g.bus_id} {g.uuid} {g.memory} {g.mig}" for g in found.gpus],
        "drm": [path for gpu in found.gpus for path in gpu.drm_paths],
        "mig": [f"{d.gpu}:{d.index} {d.uuid} {d.profile} {' '.join(d.paths)}" for d in parts],
        "notes": [*found.notes, *found.conflicts],
    }
    Golden("gpus.json").compare(name, {key: value for key, value in shown.items() if value})


def seen(node: Node) -> tuple[Gpu, ...]:
    return find_gpus(Fingerprint(str(node.driver)), node.config, None).gpus


def nodes(node: Node, *gpus: Gpu, mig: tuple[MigDevice, ...] = ()) -> Nodes:
    return look_at_nodes(node.config, gpus, mig)


def test_nodes_are_found_with_numbers_owner_and_mode(node: Node) -> None:
    node.add_gpu(2, drm=True)
    usable = nodes(node, *seen(node)).usable
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
