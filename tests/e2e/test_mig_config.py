"""The agent applies the MIG layout in a Node label, and reports the result."""

from __future__ import annotations

import json
import threading
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import load_config
from hooks.node.drained import read_drains
from integration.node.services.mig_config import LABEL, STATE
from integration.node.state import claims_file
from integration.node.values.claims import Claim, ClaimDevice
from integration.simulated import Scenario, SimulatedNode
from tests.harness.api_server import ApiServer, refusal
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvidia_smi import nvidia_smi
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.http_server import Request

NODE: Final = "one"
GPU: Final = "nvidia.com/gpu"
SLICE: Final = "nvidia.com/mig-1g.10gb"
_MINORS: Final = 20
LAYOUTS: Final = """
version: v1
mig-configs:
  two: [{devices: [1], mig-enabled: true, mig-devices: {1g.10gb: 2}}]
  other: [{devices: [1], mig-enabled: true, mig-devices: {1g.10gb: 3}}]
  too-much: [{devices: [1], mig-enabled: true, mig-devices: {7g.80gb: 1, 1g.10gb: 1}}]
"""


class Cluster(ApiServer):
    """A cluster with one Node, whose changes can be watched."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._changed = threading.Condition()
        self._version = 1
        self._labels: dict[str, str] = {}
        self.states: list[str] = []

    def label(self, layout: str) -> None:
        """Set the Node's label, as an operator does."""
        self._put({LABEL: layout})

    def reasons(self) -> list[str]:
        return [event["reason"] for _, event in self.events]

    def messages(self) -> str:
        return "\n".join(event["message"] for _, event in self.events)

    def _put(self, labels: dict[str, str]) -> None:
        with self._changed:
            self._labels = {**self._labels, **labels}
            self._version += 1
            self._changed.notify_all()

    def _node(self) -> dict[str, Any]:
        metadata = {
            "name": NODE, "labels": deepcopy(self._labels), "resourceVersion": str(self._version),
        }  # fmt: skip
        return {"metadata": metadata}

    def answer(self, request: Request) -> tuple[int, Any]:
        path, _, query = request.path.partition("?")
        if path == "/api/v1/nodes" and "watch=1" in query and "metadata.name%3Done" in query:
            assert "resourceVersion=&" in query, "any version may be too old"
            return 200, self._watch()
        if path != f"/api/v1/nodes/{NODE}":
            return super().answer(request) if path.endswith("/events") else refusal(404)
        if request.method == "PATCH":
            labels = json.loads(request.body)["metadata"]["labels"]
            self.states += labels.values()
            assert labels.keys() == {STATE}, "it changes no other label"
            self._put(labels)
        return 200, self._node()

    def __exit__(self, *details: object) -> None:
        self.port = 0  # this stops the watches
        super().__exit__(*details)

    def _watch(self) -> Iterator[Any]:
        with self._changed:
            since, found = self._version, self._node()
        yield {"type": "ADDED", "object": found}
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}}
        while self.port:
            with self._changed:
                if self._version == since:
                    self._changed.wait(0.2)
                    continue
                since = self._version
                found = self._node()
            yield {"type": "MODIFIED", "object": found}


class Place:
    """A node with two GPUs and its agent, with a kubelet in a cluster."""

    def __init__(self, node: SimulatedNode, cluster: Cluster, directory: Path) -> None:
        self.node, self.cluster = node, cluster
        self.uuids = [gpu.uuid for gpu in node.scenario.gpus]
        self.kubelet = KubeletPlugins(str(directory / "kubelet"))
        layouts = directory / "layouts.yaml"
        layouts.write_text(LAYOUTS)
        self.agent = NodeAgent(
            *(node, str(directory), self.kubelet.socket, "--mig-config-file", str(layouts)),
            *("--api-server", "127.0.0.1", "--api-port", str(cluster.port), "--node-name", NODE),
            *("--service-account", cluster.service_account, "--containerd-state", node.dev),
        )
        plugin = {"deviceListStrategy": ["envvar"]}
        self.agent.configure(flags={"migStrategy": "mixed", "plugin": plugin})

    def comes_to(self, *states: str) -> None:
        """Wait until the agent has reported these states in order; forget them."""
        eventually(lambda: self.cluster.states == [*states], f"it is {states}", timeout=60)
        self.cluster.states.clear()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    scenario = Scenario.load("two")
    gpus = tuple(replace(gpu, minor=_MINORS + gpu.index) for gpu in scenario.gpus)
    with (
        SimulatedNode.create(str(tmp_path / "node"), replace(scenario, gpus=gpus)) as node,
        Cluster(str(tmp_path / "account")) as cluster,
    ):
        place = Place(node, cluster, tmp_path)
        with place.kubelet:
            yield place


def test_a_label_is_followed_and_answered_while_other_gpus_serve_on(place: Place) -> None:
    cluster = place.cluster
    cluster.label("two")
    with place.agent:
        place.comes_to("pending", "success")
        eventually(lambda: cluster.reasons() == ["MigLayoutApplied"], "the event follows")
        assert len(place.kubelet.wait_for(SLICE, 2)) == 2
        assert place.kubelet.wait_for(GPU, 1) == {place.uuids[0]}
        cluster.label("too-much")
        place.comes_to("failed")
        eventually(lambda: cluster.reasons()[-1] == "MigLayoutFailed", "the event follows")
        assert "NVSHIM-E2683 layout-impossible" in cluster.messages()


@pytest.mark.thorough
def test_claims_are_waited_for_and_an_event_names_them(place: Place) -> None:
    cluster, uuid = place.cluster, place.uuids[1]
    config = load_config(place.node.config_path)
    part = ClaimDevice("gpu", NODE, f"{uuid.lower()}-mig-1g10gb-19-6", uuid, uuid)
    claims_file.save(config, [Claim("uid", "default", "one", (part,))])
    with place.agent:
        for layout in ("two", "other"):  # a new label, while the first one waits
            cluster.label(layout)
            eventually(lambda: cluster.reasons() == ["MigLayoutWaits"], "it waits")
            assert cluster.messages() == f"the layout {layout} waits for claim default/one"
            cluster.events.clear()
        claims_file.save(config, [])
        place.comes_to("pending", "success")
        place.kubelet.wait_for(SLICE, 3)


def test_a_layout_that_waits_is_given_up_if_the_agent_is_killed(place: Place) -> None:
    uuid = place.uuids[1]
    config = load_config(place.node.config_path)
    part = ClaimDevice("gpu", NODE, f"{uuid.lower()}-mig-1g10gb-19-6", uuid, uuid)
    claims_file.save(config, [Claim("uid", "default", "one", (part,))])
    place.cluster.label("two")
    with place.agent:
        eventually(lambda: place.cluster.reasons() == ["MigLayoutWaits"], "it waits")
        assert [mark.device for mark in read_drains(config)] == [uuid]
        place.agent.kill()
        eventually(lambda: not read_drains(config), "the GPU is in service again")


@pytest.mark.thorough
def test_it_is_applied_again_after_a_boot(place: Place) -> None:
    place.cluster.label("two")
    with place.agent:
        place.comes_to("pending", "success")
    for step in ("-dci", "-dgi"):
        nvidia_smi(place.node, "mig", "-i", "1", step)
    with place.agent:
        place.comes_to("pending", "success")
        place.kubelet.wait_for(SLICE, 2)
