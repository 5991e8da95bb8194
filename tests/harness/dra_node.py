"""A node whose agent is a DRA driver, with a kubelet and an API server.

    with dra_node(directory, root, {"gpus": 3}, devices=3) as place:
        claim = place.claim("one", place.gpus[0])
        place.driver.prepare(claim)

Only the GPU driver, the kubelet and the API server are simulated. The agent is a real process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeVar

from integration.node.options import DRA_DRIVER
from integration.simulated import Scenario, SimulatedNode
from tests.harness.cluster import Cluster
from tests.harness.kubelet_dra import Driver, KubeletDra, Reference
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.waiting import eventually

__all__ = ["NODE", "Place", "dra_node", "dra_node_of"]

NODE: Final = "node-1"


class Place:
    """A node with a kubelet, an API server and an agent that is a DRA driver.

    Attributes:
        gpus: the names of the whole GPUs.
        parts: the names of the MIG devices.
    """

    def __init__(self, directory: str, root: str, node: SimulatedNode, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cdi = f"{directory}/cdi"
        self.root = root
        pod_resources = f"{self.root}/pod-resources/kubelet.sock"
        self.plugins = KubeletPlugins(f"{self.root}/device-plugins", pod_resources=pod_resources)
        self.kubelet = KubeletDra(self.root)
        self.node = node
        self._directory = directory
        self.agent = self.new_agent()
        self.gpus = sorted(gpu.uuid.lower() for gpu in node.scenario.gpus if not gpu.mig)
        self.parts: list[str] = []

    def new_agent(
        self, *more: str, engine: str = "/nowhere", log: str = "agent.log", dra: bool = True
    ) -> NodeAgent:
        more = (*(["--dra"] if dra else []), *more)
        return NodeAgent(
            *(self.node, self._directory, self.plugins.socket, "--node-name", NODE),
            *("--pod-resources", self.plugins.pod_resources or ""),
            *("--api-server", "127.0.0.1", "--api-port", str(self.cluster.port)),
            *("--service-account", self.cluster.service_account, *more),
            engine=engine,
            log=log,
        )

    @property
    def driver(self) -> Driver:
        return self.kubelet.wait_for(DRA_DRIVER)

    def start_again(self) -> None:
        """Start the agent after it was killed, and wait until it is registered."""
        before = self.kubelet.drivers.get(DRA_DRIVER)  # none if it was killed before it registered
        self.agent.start()
        eventually(
            lambda: self.kubelet.drivers.get(DRA_DRIVER) not in {None, before},
            "it is registered again",
        )

    def published(self, count: int) -> set[str]:
        """Wait until this many devices are published; return their names."""
        eventually(lambda: len(self.cluster.published()) == count, f"{count} devices are published")
        return self.cluster.published()

    def claim(self, name: str, *devices: str, **more: Any) -> Reference:
        """Allocate a claim."""
        results = [{"request": "gpu", **self.result(each)} for each in devices]
        return "default", self.cluster.claim(name, results, **more), name

    def result(self, device: str, **more: Any) -> dict[str, Any]:
        return {"driver": DRA_DRIVER, "pool": NODE, "device": device, **more}

    def refusal(self, reference: Reference) -> str:
        """Prepare a claim; return the error, empty if it is prepared."""
        return self.driver.prepare(reference)[reference[1]].error

    def have(self, *claims: Reference) -> None:
        """Prepare claims."""
        for claim in claims:
            refusal = self.refusal(claim)
            assert not refusal, f"{claim[2]}: {refusal}"

    def give_back(self, *claims: Reference) -> None:
        """Unprepare claims."""
        assert self.driver.unprepare(*claims) == dict.fromkeys((uid for _, uid, _ in claims), "")

    def uuid(self, name: str) -> str:
        """Return the UUID of a device."""
        kind, _, rest = name.partition("-")
        return f"{kind.upper()}-{rest}"

    def drain(self, *names: str) -> None:
        """Take GPUs out of service."""
        for name in names:
            nvshim("drain", "--config", self.node.config_path, self.uuid(name))

    def undrain(self, *names: str) -> None:
        """Return GPUs to service."""
        for name in names:
            nvshim("undrain", "--config", self.node.config_path, self.uuid(name))

    def note(self, claim: Reference, name: str, *, times: int = 1) -> None:
        """Write the kubelet's checkpoint of a pod's claim and its device."""
        told = {
            "PoolName": NODE, "DeviceName": name, "ShareID": None, "RequestNames": ["gpu"],
            "CDIDeviceIDs": [f"k8s.{DRA_DRIVER}/claim={claim[1]}-{name}"],
        }  # fmt: skip
        info = {
            "ClaimUID": claim[1], "ClaimName": claim[2], "Namespace": "default",
            "PodUIDs": {"a": {}}, "DriverState": {DRA_DRIVER: {"Devices": [told] * times}},
        }  # fmt: skip
        data = {"kind": "DRACheckpoint", "ClaimInfoStateList": [info]}
        with open(f"{self.root}/dra_manager_state", "w", encoding="utf-8") as file:
            json.dump({"Data": json.dumps(data), "Checksum": 1}, file)

    def tidy(self, devices: int) -> None:
        """Undo all changes, so that the next test finds the initial state."""
        self.cluster.refuse = lambda *_: None
        self.give_back(*self.cluster.claims())
        for _, _, name in self.cluster.claims():
            self.cluster.remove_claim(name)
        for assignment in list(self.plugins.assignments):
            self.plugins.release(assignment.pod)
        self.published(devices)
        self.agent.forget()

    def spec(self, reference: Reference) -> str:
        """Return the path of a claim's CDI spec."""
        return f"{self.cdi}/k8s.{DRA_DRIVER}-claim_{reference[1]}.json"

    def file(self, what: str, reference: Reference) -> str:
        """Return the path of a claim's "spec", or of the "state" of all claims."""
        return self.spec(reference) if what == "spec" else f"{self.node.state}/dra.json"


def dra_node(
    directory: str,
    root: str,
    scenario: dict[str, Any],
    *,
    devices: int,
    flags: tuple[str, ...] = (),
) -> AbstractContextManager[Place]:
    """Run a node with its agent, once that has published; for arguments see :func:`dra_node_of`."""
    return dra_node_of(Place, directory, root, scenario, devices=devices, flags=flags)


_P = TypeVar("_P", bound=Place)


@contextmanager
def dra_node_of(
    kind: type[_P],
    directory: str,
    root: str,
    scenario: dict[str, Any],
    *,
    devices: int,
    flags: tuple[str, ...] = (),
) -> Iterator[_P]:
    """Run a node with its agent, once that has published.

    Args:
        kind: the class of the node.
        directory: for its files.
        root: the kubelet's directory. It is short, as the paths of sockets are limited.
        scenario: the node's hardware.
        devices: how many devices the agent publishes.
        flags: further flags of the agent.
    """
    with SimulatedNode.create(f"{directory}/node", Scenario.parse(scenario)) as node:
        os.mkdir(f"{directory}/cdi")
        with open(node.config_path, encoding="utf-8") as file:
            text = file.read()
        with open(node.config_path, "w", encoding="utf-8") as file:
            line = f'[node]\nkubelet-root = "{root}"\n'
            file.write(text.replace("[node]\n", line, 1))
            file.write(f'\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
        with Cluster(f"{directory}/account", node=NODE) as cluster:
            place = kind(directory, root, node, cluster)
            if flags:
                place.agent = place.new_agent(*flags)
            place.agent.configure(flags={"plugin": {"deviceListStrategy": ["envvar"]}})
            with place.kubelet, place.plugins, place.agent:
                found = place.published(devices)
                place.gpus = sorted(each for each in found if each.startswith("gpu-"))
                place.parts = sorted(each for each in found if each.startswith("mig-"))
                yield place
