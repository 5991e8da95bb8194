"""A node whose agent is a driver of dynamic resource allocation, with a kubelet and an API server.

    with dra_node(directory, root, {"gpus": 3}, devices=3) as place:
        claim = place.claim("one", place.gpus[0])
        place.driver.prepare(claim)

All but the driver of the GPUs, the kubelet and the API server is real: the agent is a process.
"""

from __future__ import annotations

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
from tests.harness.waiting import eventually

__all__ = ["NODE", "Place", "dra_node", "dra_node_of"]

NODE: Final = "node-1"


class Place:
    """A node with a kubelet and an API server, and an agent that is a driver.

    Attributes:
        gpus: the names of the whole GPUs.
        parts: those of the MIG devices.
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
        """Start the agent after it was killed, and wait until the kubelet knows it."""
        before = self.driver
        self.agent.start()
        eventually(
            lambda: self.kubelet.drivers.get(DRA_DRIVER) not in {None, before},
            "it is registered again",
        )

    def published(self, count: int) -> set[str]:
        """Wait until so many devices are published; their names."""
        eventually(lambda: len(self.cluster.published()) == count, f"{count} devices are published")
        return self.cluster.published()

    def claim(self, name: str, *devices: str, **more: Any) -> Reference:
        """Have a claim be allocated."""
        results = [{"request": "gpu", **self.result(each)} for each in devices]
        return "default", self.cluster.claim(name, results, **more), name

    def result(self, device: str, **more: Any) -> dict[str, Any]:
        return {"driver": DRA_DRIVER, "pool": NODE, "device": device, **more}

    def spec(self, reference: Reference) -> str:
        """The path of a claim's CDI spec."""
        return f"{self.cdi}/k8s.{DRA_DRIVER}-claim_{reference[1]}.json"


def dra_node(
    directory: str,
    root: str,
    scenario: dict[str, Any],
    *,
    devices: int,
    flags: tuple[str, ...] = (),
) -> AbstractContextManager[Place]:
    """A node with its agent, once that has published; arguments as :func:`dra_node_of` has them."""
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
    """A node with its agent, once that has published.

    Args:
        kind: of which it is.
        directory: for its files.
        root: the kubelet's directory. It is short: the path of a socket may not be long.
        scenario: what the node has.
        devices: how many of them are published.
        flags: further ones for the agent.
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
