"""Containers with AMD and Intel GPUs, alone and together with NVIDIA's, on simulated nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.cgroup import is_v2, read_cgroup
from tests.harness.runtime import Runtime
from tools.containerd import Completed
from tools.images import GLIBC


@pytest.fixture(scope="module")
def others(workshop: str) -> Iterator[SimulatedNode]:
    """Return a node without NVIDIA's driver: an AMD GPU, a partitioned one, and an Intel GPU."""
    table = {"nvidia": False, "amd": ["mi210", "mi300x/2"], "intel": ["flex170"]}
    with SimulatedNode.create(f"{workshop}/others", Scenario.parse(table)) as node:
        yield node


@pytest.fixture(scope="module")
def mixed(workshop: str) -> Iterator[SimulatedNode]:
    """Return a node with two NVIDIA GPUs and one AMD GPU."""
    table = {"gpus": 2, "amd": ["rx7900"]}
    with SimulatedNode.create(f"{workshop}/mixed", Scenario.parse(table)) as node:
        yield node


@pytest.fixture
def on(runtime: Runtime, shim_config: str) -> Iterator[Any]:
    """Return a function that selects a node; the shim reads its configuration per container."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    before = Path(shim_config).read_text()

    def choose(node: SimulatedNode) -> Runtime:
        Path(shim_config).write_text(Path(node.config_path).read_text())
        return runtime

    yield choose
    Path(shim_config).write_text(before)


def run(runtime: Runtime, *command: str, **asked: str) -> Completed:
    flags = [word for name, value in asked.items() for word in ("--env", f"{name}={value}")]
    return runtime.run(*command, image=GLIBC, flags=flags)


LOOK = "cd /dev; ls -d kfd dri/card* dri/renderD* nvidia[0-9]* 2>/dev/null; ls dri/by-path"


def test_amd_gpu_is_there_without_nvidias_driver(on: Any, others: SimulatedNode) -> None:
    done = run(on(others), "sh", "-c", LOOK, AMD_VISIBLE_DEVICES="0")
    assert done.lines == [
        "dri/card0", "dri/renderD128", "kfd", "pci-0000:60:00.0-card", "pci-0000:60:00.0-render",
    ]  # fmt: skip
    opened = run(
        on(others), "probe", "open", "/dev/kfd", "/dev/dri/renderD128", AMD_VISIBLE_DEVICES="0"
    )
    # A simulated node has no kernel module: ENXIO means that it may be opened.
    assert [line.split()[1] for line in opened.lines] == ["ENXIO", "ENXIO"]


def test_user_of_an_exec_may_open_its_amd_gpu_and_no_other(on: Any, others: SimulatedNode) -> None:
    groups = {str(os.stat(f"{others.dev}/{name}").st_gid) for name in ("kfd", "dri/card0")}
    container = on(others).start_idle(image=GLIBC, flags=["--env", "AMD_VISIBLE_DEVICES=1"])
    assert groups <= set(container.exec("id", "-G", flags=["--user", "1000:1000"]).stdout.split())
    if not is_v2():
        rules = read_cgroup(container.pid, "devices", v1="devices.list", v2="").splitlines()
        drm = sorted(rule for rule in rules if rule.split()[1].startswith("226:"))
        assert drm == ["c 226:1 rwm", "c 226:129 rwm"], "no other GPU's, and no other partition's"


def test_partitions_and_intel_gpus_are_given_one_by_one(on: Any, others: SimulatedNode) -> None:
    script = "ls /dev/dri | grep -v by-path"
    done = run(on(others), "sh", "-c", script, AMD_VISIBLE_DEVICES="2", INTEL_VISIBLE_DEVICES="all")
    assert done.lines == ["card2", "card3", "renderD130", "renderD131"]
    alone = run(on(others), "sh", "-c", f"{script}; ls /dev/kfd", INTEL_VISIBLE_DEVICES="0")
    assert alone.lines == ["card3", "renderD131"]
    named = on(others).run(
        "sh", "-c", script, image=GLIBC,
        flags=["--annotation", "cdi.k8s.io/pod=amd.com/gpu=1,intel.com/gpu=0000:40:00.0"],
    )  # fmt: skip
    assert named.lines == ["card1", "card3", "renderD129", "renderD131"]


def test_node_with_two_vendors_gives_each_its_own(on: Any, mixed: SimulatedNode) -> None:
    done = run(
        on(mixed), "sh", "-c", f"{LOOK}; nvidia-smi -L",
        NVIDIA_VISIBLE_DEVICES="1", NVIDIA_DRIVER_CAPABILITIES="utility,graphics",
        AMD_VISIBLE_DEVICES="all",
    )  # fmt: skip
    assert done.lines[:5] == [
        "dri/card1", "dri/card2", "dri/renderD129", "dri/renderD130", "kfd",
    ]  # fmt: skip
    assert done.lines[5] == "nvidia1"
    links = [line for line in done.lines if line.startswith("pci-")]
    assert {name.rsplit("-", 1)[0] for name in links} == {"pci-0000:2a:00.0", "pci-0000:60:00.0"}
    assert mixed.scenario.gpus[1].uuid in done.lines[-1]


@pytest.mark.parametrize(
    ("asked", "code", "named"),
    [
        ({"AMD_VISIBLE_DEVICES": "7"}, "NVSHIM-E0653", "0000:60:00.0"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, "NVSHIM-E0102", "libcuda"),
    ],
)
def test_request_that_cannot_be_met_is_a_typed_error(
    on: Any, others: SimulatedNode, asked: dict[str, str], code: str, named: str
) -> None:
    done = run(on(others), "true", **asked)
    assert done.code == 1
    assert code in done.stderr
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_asked_is_nothing_given(on: Any, others: SimulatedNode) -> None:
    done = run(on(others), "sh", "-c", "ls /dev", AMD_VISIBLE_DEVICES="none")
    assert not {"kfd", "dri"} & set(done.lines)
