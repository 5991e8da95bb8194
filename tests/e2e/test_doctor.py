"""``nvshim doctor`` on a node where a real containerd runs a container with a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.cgroup import is_v2
from tests.harness.nvshim import nvshim
from tests.harness.runtime import Runtime, new_name
from tools.containerd import PrivateContainerd
from tools.images import GLIBC
from tools.nodes import changed_node

NEWER: Final = "550.54.14"
OF_CONTAINERS: Final = ("D100", "D101", "D102", "D103")


@pytest.fixture
def node(workshop: str, configure: Callable[..., None]) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/sick", Scenario.load("two")) as node:
        configure(node=node)
        yield node


def doctor(node: SimulatedNode, containerd: PrivateContainerd, *words: str) -> dict[str, Any]:
    done = nvshim(
        *("doctor", "-o", "json", "--config", node.config_path),
        *("--containerd-config", f"{containerd.directory}/config.toml", *words),
        check=False,
    )
    document: dict[str, Any] = done.document
    assert done.code == (0 if document["healthy"] else 3), done.stderr
    return document


def only(*codes: str) -> list[str]:
    return [word for code in codes for word in ("--only", code)]


def found(document: dict[str, Any]) -> dict[str, str]:
    return {f["code"].removeprefix("NVSHIM-"): f["found"] for f in document["findings"]}


def test_a_running_container_is_judged_by_what_it_was_given(
    runtime: Runtime, node: SimulatedNode, containerd: PrivateContainerd
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim keeps no record")
    container = runtime.start_idle(image=GLIBC, flags=["--env", "NVIDIA_VISIBLE_DEVICES=0"])
    whole = doctor(node, containerd)
    # The shim and its fork server run, the cgroup allows the grant, the GPU exists.
    sick = found(whole).keys() & {*OF_CONTAINERS, "D001", "D002", "D004", "D009", "D030"}
    assert not sick, whole
    # Other fork servers of this machine may be stopped by other tests.
    servers = [f for f in whole["findings"] if f["code"] == "NVSHIM-D096"]
    assert not [f for f in servers if containerd.address in f["found"]], whole
    if not is_v2():
        _deny(container.pid, "c 195:0 rwm")
        denied = found(doctor(node, containerd, *only("D100")))
        assert denied == {
            "D100": f"{containerd.namespace}/{container.name}: its cgroup does not allow "
            "/dev/nvidia0"
        }
        assert container.exec("sh", "-c", "exec 3</dev/nvidia0").code != 0
    # One GPU is removed, and the driver is updated.
    scenario = replace(node.scenario, gpus=node.scenario.gpus[1:], driver=NEWER)
    changed_node(node, scenario)
    after = found(doctor(node, containerd, *only("D101", "D102")))
    assert NEWER in after["D101"]
    assert node.scenario.gpus[0].uuid in after["D102"]


def test_containerd_s_configuration_is_judged_by_its_own_word(
    containerd: PrivateContainerd, node: SimulatedNode, tmp_path: Path
) -> None:
    codes = ("D030", "D031", "D032", "D035", "D037", "D038", "D046")
    # This configuration has no CRI, and no handler that would need it.
    assert found(doctor(node, containerd, *only(*codes))) == {}
    path = tmp_path / "config.toml"
    # No containerd runs with this file, so the doctor asks the installed one.
    table = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes'
    path.write_text(
        f"version = 2\n{table}.nvidia]\n"
        f'runtime_type = "io.containerd.nvidia.v1"\n{table}.broken]\n'
        f'runtime_type = "io.containerd.{new_name("no")}.v1"\n'
    )
    seen = found(doctor(node, containerd, "--containerd-config", str(path), *only(*codes)))
    assert set(seen) == {"D037"}
    path.write_text("version = 2\n[grpc]\naddress = 7\n")
    seen = found(doctor(node, containerd, "--containerd-config", str(path), *only(*codes)))
    assert "containerd exited with 1" in seen["D030"]


def _deny(pid: int, rule: str) -> None:
    with open(f"/proc/{pid}/cgroup", encoding="ascii") as file:
        paths = {line.split(":")[1]: line.rstrip("\n").split(":", 2)[2] for line in file}
    with open(f"/sys/fs/cgroup/devices{paths['devices']}/devices.deny", "w") as deny:
        deny.write(rule)
    assert os.path.exists(f"/proc/{pid}")
