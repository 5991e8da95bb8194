"""A node whose agent shares GPUs as claims request: by time slices, MPS and shares."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from integration.node.options import DRA_DRIVER
from integration.node.services.dra.sharing import OURS
from integration.simulated import Scenario, SimulatedNode
from tests.harness.cluster import Cluster
from tests.harness.dra_node import NODE, Place
from tests.harness.mps_agent import PROGRAM, end_daemons, processes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.kubelet_dra import Reference


__all__ = ["Sharing", "sharing_node", "tidy"]

# Logs its arguments, and rejects the GPUs that a file names.
NVIDIA_SMI: Final = """#!/bin/sh
echo "$@" >> {state}/smi-calls
if grep -q "$3" {state}/smi-refuses 2>/dev/null; then echo "Not Supported"; exit 3; fi
"""


class ShareCluster(Cluster):
    """An API server that drops the fields of consumable capacity while its feature gate is off."""

    gate = True

    def _kept(self, code: int, kind: str, body: Any) -> tuple[int, Any]:
        if not self.gate:
            for device in body["spec"].get("devices", ()):
                device.pop("allowMultipleAllocations", None)
                for each in device.get("capacity", {}).values():
                    each.pop("requestPolicy", None)
        return super()._kept(code, kind, body)


class Sharing(Place):
    """A node whose agent shares GPUs as claims request."""

    cluster: ShareCluster
    mps: Path

    def part(self, name: str, device: str, memory: str, shares: int = 1, **more: Any) -> Reference:
        """Allocate a claim with a share of a GPU."""
        capacity = {"gpu.nvidia.com/memory": memory, "gpu.nvidia.com/shares": str(shares)}
        share = {"shareID": str(uuid4()), "consumedCapacity": capacity}
        result = {"request": "gpu", **self.result(device, **share)}
        config = []
        if more:
            parameters = {"apiVersion": OURS, "kind": "DeviceSharing", **more}
            config = [{"opaque": {"driver": DRA_DRIVER, "parameters": parameters}}]
        return "default", self.cluster.claim(name, [result], config=config), name

    def status(self) -> list[dict[str, Any]]:
        """Return the claims in the agent's status file."""
        found: list[dict[str, Any]] = self.agent.status()["claims"]
        return found

    def end_agent(self) -> None:
        """Stop the agent, as its update does."""
        assert self.agent.process is not None
        self.agent.process.terminate()
        self.agent.process.wait()

    def called(self) -> list[str]:
        """Return the arguments of the calls of nvidia-smi."""
        with suppress(FileNotFoundError):
            return Path(self.node.state, "smi-calls").read_text("ascii").splitlines()
        return []

    def shared(self, name: str, *devices: str, **parameters: Any) -> Reference:
        """Allocate a claim with a configuration."""
        parameters = {"apiVersion": OURS, "kind": "DeviceSharing", **parameters}
        opaque = {"driver": DRA_DRIVER, "parameters": parameters}
        config = [{"source": "FromClaim", "requests": [], "opaque": opaque}]
        return self.claim(name, *devices, config=config)

    def modes(self) -> set[str]:
        """Return the GPUs in exclusive compute mode."""
        found = set()
        for gpu in self.node.scenario.gpus:
            with suppress(FileNotFoundError):
                path = Path(self.node.state, f"nvml-compute-mode-{gpu.uuid}")
                if path.read_text("ascii") == "3":
                    found.add(gpu.uuid)
        return found

    def daemons(self) -> dict[str, int]:
        """Return the pids of the claims' control daemons, by name."""
        found = {}
        for lock in self.mps.glob("*/*/.lock"):
            told = {"pid": 0}
            with suppress(ValueError, FileNotFoundError):  # it is being written or removed
                told = json.loads(lock.read_text("ascii"))
            if told["pid"] in processes(self.mps):
                found[str(lock.parent.relative_to(self.mps))] = int(told["pid"])
        return found

    def log(self, name: str) -> str:
        return (self.mps / name / "log/control.log").read_text("utf-8")

    def environment(self, claim: Reference) -> set[str]:
        """Return all variables that the devices of a claim set."""
        with open(self.spec(claim), encoding="utf-8") as file:
            devices = json.load(file)["devices"]
        return {word for each in devices for word in each["containerEdits"].get("env", ())}


@contextmanager
def sharing_node(shares: int) -> Iterator[Sharing]:
    """Run a node whose GPUs have this many shares."""
    cut = {"index": 2, "mig": ["1g.5gb", "1g.5gb"]}
    scenario = Scenario.parse({"gpus": 3, "model": "a100", "gpu": [cut]})
    with (
        tempfile.TemporaryDirectory(prefix="node-") as directory,
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,
        tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as mps,
        SimulatedNode.create(f"{directory}/node", scenario) as node,
    ):
        os.mkdir(f"{directory}/cdi")
        with open(node.config_path, encoding="utf-8") as file:
            text = file.read()
        with open(node.config_path, "w", encoding="utf-8") as file:
            file.write(text.replace("[node]\n", f'[node]\nkubelet-root = "{root}"\n', 1))
            file.write(f'\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
        smi = Path(node.driver_root, "usr/bin/nvidia-smi")
        smi.unlink()  # a link to a file that other nodes share
        smi.write_text(NVIDIA_SMI.format(state=node.state), encoding="ascii")
        smi.chmod(0o755)
        with ShareCluster(f"{directory}/account", node=NODE) as cluster:
            place = Sharing(directory, root, node, cluster)
            place.mps = Path(mps)
            place.agent = place.new_agent("--dra-shares", str(shares))
            place.agent.configure(flags={"mpsRoot": mps})
            try:
                with place.kubelet, place.plugins, place.agent:
                    found = place.published(4)
                    place.gpus = sorted(each for each in found if each.startswith("gpu-"))
                    place.parts = sorted(each for each in found if each.startswith("mig-"))
                    yield place
            finally:
                end_daemons(place.mps, node)


def tidy(place: Sharing) -> None:
    """Restore the initial state for the next test."""
    program = Path(place.node.driver_root, PROGRAM)
    if (own := Path(f"{program}.own")).exists():
        own.rename(program)
    place.tidy(4)
    for name in ("smi-calls", "smi-refuses"):
        Path(place.node.state, name).unlink(missing_ok=True)
