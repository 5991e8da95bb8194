"""A claim's sharing settings reach its containers: the MPS pipes and memory, and variables."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pytest

from api.proto import cri_pb2 as cri
from integration.cri.errors import CriRefused
from integration.node.options import DRA_DRIVER
from integration.node.services.dra.sharing import OURS
from tests.e2e.cri.test_cri_device_plugin import pods_with
from tests.e2e.cri.test_cri_dra import ALL, NODE, node, root
from tests.harness.cluster import Cluster
from tests.harness.kubelet_dra import KubeletDra
from tests.harness.mps_agent import end_daemons
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE
from tests.harness.waiting import eventually
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.simulated import SimulatedNode

__all__ = ["node", "root"]

MPS: Final = {"memoryLimit": "1Gi", "threadPercentage": 30}
# test_cri_dra.py covers claims with containerd's own shim.
HANDLERS: Final = ["nvidia", pytest.param("runc", marks=pytest.mark.thorough)]


@pytest.fixture
def mps(node: SimulatedNode) -> Iterator[Path]:
    """Yield mpsRoot, with a short path: socket addresses are limited."""
    directory = Path(tempfile.mkdtemp(prefix="mps-"))
    yield directory
    end_daemons(directory, node)
    shutil.rmtree(directory)


@pytest.mark.parametrize("handler", HANDLERS)
def test_containers_of_a_claim_are_clients_of_its_daemon(
    handler: str, node: SimulatedNode, root: str, mps: Path, shim_directory: str, tmp_path: Path
) -> None:
    with (
        Cluster(str(tmp_path / "account"), node=NODE) as cluster,
        KubeletDra(root) as kubelet,
        pods_with("trixie", node, shim_directory, cdi=str(tmp_path / "cdi")) as pods,
    ):
        agent = NodeAgent(
            node, str(tmp_path), f"{root}/nowhere", "--dra", "--node-name", NODE,
            "--api-server", "127.0.0.1", "--api-port", str(cluster.port), "--device-plugin", "no",
            "--service-account", cluster.service_account, "--pod-resources", "",
            engine=pods.containerd.address,
        )  # fmt: skip
        agent.configure(flags={"mpsRoot": str(mps)})
        with agent:
            eventually(lambda: len(cluster.published()) == 4, "the driver publishes the devices")
            gpus = sorted(each for each in cluster.published() if each.startswith("gpu-"))
            results = [
                {"request": "gpu", "driver": DRA_DRIVER, "pool": NODE, "device": each}
                for each in gpus
            ]
            parameters = {"apiVersion": OURS, "kind": "DeviceSharing", "mps": MPS}
            config = [{"opaque": {"driver": DRA_DRIVER, "parameters": parameters}}]
            uid = cluster.claim("claim", results, config=config)
            driver = kubelet.wait_for(DRA_DRIVER)
            answer = driver.prepare(("default", uid, "claim"))[uid]
            assert not answer.error
            devices = [
                cri.CDIDevice(name=name) for each in answer.devices for name in each.cdi_device_ids
            ]
            pod = pods.run(handler=handler)
            container = pod.start(*IDLE, image=GLIBC, env=ALL, CDI_devices=devices)

            def seen(command: str) -> list[str]:
                done = container.exec("sh", "-c", command)
                assert done.code == 0, done.stdout + done.stderr
                return done.lines

            (pipe,) = seen("echo $CUDA_MPS_PIPE_DIRECTORY")
            assert pipe.startswith(f"/mps/claims/{uid}-")
            assert "control" in seen(f"ls {pipe}")
            assert seen(f"touch {pipe}/mine 2>/dev/null || echo read-only") == ["read-only"]
            Path(mps, "shm", "of-the-daemon").touch()
            assert "of-the-daemon" in seen("ls /dev/shm")
            seen("touch /dev/shm/of-the-client")
            assert Path(mps, "shm", "of-the-client").exists()
            assert len(seen("ls -d /dev/nvidia[0-9]*")) == 2

            container.remove()
            assert driver.unprepare(("default", uid, "claim")) == {uid: ""}
            assert not list(mps.glob("claims/*/.lock"))


@pytest.mark.parametrize("handler", HANDLERS)
def test_containers_of_shares_know_their_part_and_the_shim_counts_them(
    handler: str, node: SimulatedNode, root: str, shim_directory: str, tmp_path: Path
) -> None:
    with open(node.config_path, "a", encoding="utf-8") as file:
        file.write("\n[sharing]\nholders = 2\n")
    with (
        Cluster(str(tmp_path / "account"), node=NODE) as cluster,
        KubeletDra(root) as kubelet,
        pods_with("trixie", node, shim_directory, cdi=str(tmp_path / "cdi")) as pods,
    ):
        agent = NodeAgent(
            node, str(tmp_path), f"{root}/nowhere", "--dra", "--node-name", NODE,
            "--api-server", "127.0.0.1", "--api-port", str(cluster.port), "--device-plugin", "no",
            "--service-account", cluster.service_account, "--pod-resources", "",
            "--dra-shares", "4", engine=pods.containerd.address,
        )  # fmt: skip
        with agent:
            eventually(lambda: len(cluster.published()) == 4, "the driver publishes the devices")
            devices = [each for one in cluster.slices() for each in one["spec"]["devices"]]
            gpu = next(each for each in devices if each["name"].startswith("gpu-"))
            # The shim's limit on containers is also the number of shares.
            assert gpu["capacity"]["gpu.nvidia.com/shares"]["value"] == "2"
            driver = kubelet.wait_for(DRA_DRIVER)

            def device_of(name: str) -> cri.CDIDevice:
                capacity = {"gpu.nvidia.com/memory": "5Gi", "gpu.nvidia.com/shares": "1"}
                result = {
                    "request": "gpu", "driver": DRA_DRIVER, "pool": NODE, "device": gpu["name"],
                    "shareID": str(uuid4()), "consumedCapacity": capacity,
                }  # fmt: skip
                uid = cluster.claim(name, [result])
                answer = driver.prepare(("default", uid, name))[uid]
                assert not answer.error
                (device,) = answer.devices
                return cri.CDIDevice(name=device.cdi_device_ids[0])

            given = [device_of("one"), device_of("two")]
            pod = pods.run(handler=handler)
            for number, device in enumerate(given):
                container = pod.start(
                    *IDLE, name=f"main-{number}", image=GLIBC, env=ALL, CDI_devices=[device]
                )
                done = container.exec("sh", "-c", "env | grep ^NVSHIM_GPU_SHARE_")
                assert done.lines[0].endswith(",memory=5120Mi,shares=1")
            where = (
                "--config",
                node.config_path,
                "--containerd-state",
                f"{pods.containerd.directory}/state",
            )
            found = nvshim("ps", "--gpus", *where, "-o", "json")
            held = [each for row in found.items for each in row["shares"]]
            assert {(each["memory_bytes"], each["shares"]) for each in held} == {(5 << 30, 1)}
            assert len({each["id"] for each in held}) == 2
            if handler == "nvidia":
                with pytest.raises(CriRefused, match="NVSHIM-E0228"):
                    pod.start(*IDLE, name="third", image=GLIBC, env=ALL, CDI_devices=given[:1])
