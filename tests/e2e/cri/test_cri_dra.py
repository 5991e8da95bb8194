"""A pod's containers get exactly the devices that its claim was prepared with."""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING, Final

import pytest

from api.proto import cri_pb2 as cri
from hooks.config import load_config
from integration.node.options import DRA_DRIVER
from integration.nvml.inventory import inventory_of
from integration.simulated import Scenario, SimulatedNode
from tests.e2e.cri.test_cri_device_plugin import LISTED, pods_with
from tests.harness.cluster import Cluster
from tests.harness.kubelet_dra import KubeletDra
from tests.harness.node_agent import NodeAgent
from tests.harness.pods import IDLE, Pod
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.waiting import eventually
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from api.proto import dra_pb2

NODE: Final = "node-1"
CUT: Final = {"index": 2, "mig": ["1g.5gb", "1g.5gb"]}
# Next to the two existing devices, which start at the first slices.
COULD_BE: Final = 5 + 5 + 3 + 2 + 1
METADATA: Final = (
    f"/var/run/kubernetes.io/dra-device-attributes/resourceclaims/*/gpu/{DRA_DRIVER}-metadata.json"
)
UUID: Final = re.compile(r'"gpu.nvidia.com/uuid": {\s*"string": "([^"]+)"')
ALL: Final = {"NVIDIA_VISIBLE_DEVICES": "all"}  # as CUDA images set it


@pytest.fixture
def root() -> Iterator[str]:
    """Yield the kubelet's directory, with a short path: socket addresses are limited."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as directory:
        yield directory


@pytest.fixture
def node(tmp_path: Path, root: str) -> Iterator[SimulatedNode]:
    """Return a node with two whole GPUs, and one that is split into two MIG devices."""
    scenario = Scenario.parse({"gpus": 3, "model": "a100", "gpu": [CUT]})
    with SimulatedNode.create(str(tmp_path / "node"), scenario) as node:
        with open(node.config_path, encoding="utf-8") as file:
            text = file.read().replace("[node]\n", f'[node]\nkubelet-root = "{root}"\n', 1)
        with open(node.config_path, "w", encoding="utf-8") as file:
            file.write(f'{text}\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n')
        os.mkdir(tmp_path / "cdi")
        yield node


def seen_in(pod: Pod, answer: dra_pb2.NodePrepareResourceResponse) -> tuple[set[str], set[str]]:
    """Return the UUIDs and the nodes in a container whose image asks for all GPUs."""
    names = [name for device in answer.devices for name in device.cdi_device_ids]
    devices = [cri.CDIDevice(name=name) for name in names]
    container = pod.start(*IDLE, image=GLIBC, env=ALL, CDI_devices=devices)
    done = container.exec("nvidia-smi", "-L")
    assert done.code == 0, done.stdout + done.stderr
    nodes = set(container.exec("sh", "-c", "ls -d /dev/nvidia[0-9]*").lines)
    uuids = {each.lower() for each in LISTED.findall(done.stdout)}
    metadata = container.exec("sh", "-c", f"cat {METADATA}")
    described = UUID.findall(metadata.stdout)
    assert len(described) == len(answer.devices), metadata.stderr
    assert {each.lower() for each in described} <= uuids
    assert container.exec("sh", "-c", f"for each in {METADATA}; do : > $each; done").code != 0
    return uuids, nodes


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
# With runc's handler containerd applies the spec; the CDI tests cover that.
@pytest.mark.parametrize("handler", ["nvidia", pytest.param("runc", marks=pytest.mark.thorough)])
def test_containers_of_a_claim_have_its_devices_and_no_others(
    release: str, handler: str, node: SimulatedNode, root: str, shim_directory: str, tmp_path: Path
) -> None:
    cdi = str(tmp_path / "cdi")
    with (
        Cluster(str(tmp_path / "account"), node=NODE) as cluster,
        KubeletDra(root) as kubelet,
        pods_with(release, node, shim_directory, cdi=cdi) as pods,
    ):
        agent = NodeAgent(
            node, str(tmp_path), f"{root}/nowhere", "--dra", "--dra-metadata", "--node-name", NODE,
            "--api-server", "127.0.0.1", "--api-port", str(cluster.port),
            "--service-account", cluster.service_account, "--pod-resources", "",
            engine=pods.containerd.address,
        )  # fmt: skip
        with agent:
            eventually(lambda: len(cluster.published()) == 4, "the driver publishes the devices")
            whole, _ = sorted(each for each in cluster.published() if each.startswith("gpu-"))
            part, _ = sorted(each for each in cluster.published() if each.startswith("mig-"))
            driver = kubelet.wait_for(DRA_DRIVER)

            def prepared(*devices: str) -> dra_pb2.NodePrepareResourceResponse:
                results = [
                    {"request": "gpu", "driver": DRA_DRIVER, "pool": NODE, "device": each}
                    for each in devices
                ]
                uid = cluster.claim(devices[0], results)
                answer = driver.prepare(("default", uid, devices[0]))[uid]
                assert not answer.error
                return answer

            one, other = prepared(whole), prepared(part)
            pod = pods.run(handler=handler)
            uuids, nodes = seen_in(pod, one)
            assert uuids == {whole}
            assert len(nodes) == 1
            uuids, nodes = seen_in(pod, other)
            assert part in uuids
            assert not [each for each in uuids if each.startswith("mig-") and each != part]
            assert nodes == {"/dev/nvidia2"}
            # A container restarts from files on the node; the agent may be down.
            agent.kill()
            assert seen_in(pods.run(handler=handler), one)[0] == {whole}
            agent.start()
            # Both claims in one container.
            one.MergeFrom(other)
            uuids, nodes = seen_in(pods.run(handler=handler), one)
            assert {whole, part} <= uuids
            assert len(nodes) == 2


def test_a_container_has_the_mig_device_that_was_made_for_its_claim(
    node: SimulatedNode, root: str, shim_directory: str, tmp_path: Path
) -> None:
    cdi = str(tmp_path / "cdi")
    with (
        Cluster(str(tmp_path / "account"), node=NODE) as cluster,
        KubeletDra(root) as kubelet,
        pods_with("trixie", node, shim_directory, cdi=cdi) as pods,
    ):
        agent = NodeAgent(
            node, str(tmp_path), f"{root}/nowhere", "--dra", "--dra-mig", "--node-name", NODE,
            "--api-server", "127.0.0.1", "--api-port", str(cluster.port),
            "--service-account", cluster.service_account, "--pod-resources", "",
            engine=pods.containerd.address,
        )  # fmt: skip
        with agent:
            eventually(lambda: len(cluster.published()) == 4 + COULD_BE, "all is published")
            (name,) = (each for each in cluster.published() if each.endswith("-mig-3g20gb-9-4"))
            driver = kubelet.wait_for(DRA_DRIVER)
            result = {"request": "gpu", "driver": DRA_DRIVER, "pool": NODE, "device": name}
            uid = cluster.claim("claim", [result])
            answer = driver.prepare(("default", uid, "claim"))[uid]
            assert not answer.error
            # The simulated NVML in a container knows only the scenario's instances.
            made = inventory_of(load_config(node.config_path), fresh=True).mig_devices[-1]
            assert made.profile == "3g.20gb"
            pod = pods.run(handler="nvidia")
            names = [name for device in answer.devices for name in device.cdi_device_ids]
            devices = [cri.CDIDevice(name=name) for name in names]
            container = pod.start(*IDLE, image=GLIBC, env=ALL, CDI_devices=devices)
            done = container.exec("sh", "-c", "ls -d /dev/nvidia[0-9]* /dev/nvidia-caps/*")
            assert set(done.lines) == {"/dev/nvidia2", *made.paths}
            pod.remove()
            assert driver.unprepare(("default", uid, "claim")) == {uid: ""}
