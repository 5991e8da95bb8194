"""A container gets exactly the devices in the device plugin's answer."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from integration.cri.errors import CriRefused
from integration.simulated import Scenario, SimulatedNode
from tests.harness.api_server import ApiServer
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE, Pod, Pods, pods_of
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import OURS, STOCK, new_name
from tests.harness.waiting import eventually
from tools.cri.plugin import CriPlugin
from tools.images import GLIBC, PAUSE, glibc, pause
from tools.parts import Parts

GPU: Final = "nvidia.com/gpu"
SLICE: Final = "nvidia.com/mig-1g.5gb"
LISTED: Final = re.compile(r"\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)")
CUT: Final = {"index": 2, "mig": ["1g.5gb", "1g.5gb", "1g.5gb"]}
# The handler's settings decide which annotations containerd passes on.
HANDLERS: Final[dict[str, dict[str, Any]]] = {
    "nvidia": {"runtime_type": OURS, "container_annotations": ["cdi.k8s.io/*"]},
    "runc": {"runtime_type": STOCK},
}
APPLIED: Final = "settings of the device plugin"
PREFIX: Final = {GPU: "GPU-", SLICE: "MIG-"}


class Way(NamedTuple):
    """A way to pass devices to a container; whether the engine does it, with CDI."""

    strategies: tuple[str, ...]
    called: str = "uuid"
    nodes: bool = False
    by_engine: bool = False


# containerd 1.6 has no CDI; in 1.7 CDI is optional; in 2 it is always on.
WAYS: Final = {
    "installed": (
        Way(("envvar", "cdi-cri")),
        Way(("volume-mounts",), nodes=True),
        Way(("cdi-annotations",), "index"),
    ),
    "trixie": (Way(("cdi-cri",), by_engine=True),),
    UNSTABLE: (
        Way(("cdi-annotations",), "index", by_engine=True),
        Way(("cdi-cri",), by_engine=True),
        Way(("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"), nodes=True),
    ),
}
SHARING: Final = {
    "timeSlicing": {
        "resources": [{"name": GPU, "replicas": 2}, {"name": SLICE, "replicas": 2}],
    }
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    """Return a node with two whole GPUs, and one that is split into three MIG devices."""
    scenario = Scenario.parse({"gpus": 3, "model": "a100", "gpu": [CUT]})
    with SimulatedNode.create(str(tmp_path / "node"), scenario) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n')
        os.mkdir(tmp_path / "cdi")
        yield node


@pytest.fixture
def kubelet(node: SimulatedNode, tmp_path: Path) -> Iterator[KubeletPlugins]:
    with KubeletPlugins(str(tmp_path / "kubelet")) as kubelet:
        yield kubelet


@contextmanager
def pods_with(
    release: str, node: SimulatedNode, shim_directory: str, *, cdi: str
) -> Iterator[Pods]:
    """Return pods of a containerd that reads CDI specs from a directory, if it supports CDI."""
    known = (cdi,) if cdi and release != "installed" else ()
    plugin = CriPlugin(HANDLERS, PAUSE, "nvidia", cdi_directories=known)
    with pods_of(
        plugin,
        glibc(),
        pause(),
        shim_directory=shim_directory,
        shim_config=node.config_path,
        parts=Parts.named(release),
    ) as pods:
        yield pods


def apply(agent: NodeAgent, way: Way) -> None:
    """Switch the agent to another way to pass devices."""
    plugin = {
        "deviceListStrategy": list(way.strategies),
        "deviceIDStrategy": way.called,
        "passDeviceSpecs": way.nodes,
    }
    before = len(agent.said(APPLIED)) if agent.process is not None else None
    agent.configure(flags={"migStrategy": "mixed", "plugin": plugin}, sharing=SHARING)
    if before is not None:
        eventually(lambda: len(agent.said(APPLIED)) > before, f"{way} is active")


def wait_for(kubelet: KubeletPlugins, way: Way) -> None:
    """Wait until the plugin's answers pass devices in the new way; settings take effect earlier."""
    plugin = kubelet.plugins[SLICE]
    (first, *_) = sorted(plugin.devices)

    def is_given_so() -> bool:
        answer = plugin.allocate(first)
        names = [each.name for each in answer.cdi_devices] + list(answer.annotations.values())
        return (
            bool(answer.cdi_devices) == ("cdi-cri" in way.strategies)
            and bool(answer.devices) == way.nodes
            and all((PREFIX[SLICE] in name) == (way.called == "uuid") for name in names)
        )

    eventually(is_given_so, f"answers pass devices by {way}")


def give(pod: Pod, kubelet: KubeletPlugins, resource: str, count: int) -> Any:
    """Allocate devices to a container, check that it has only those, and return its spec."""
    name = new_name()
    answer = kubelet.allocate(resource, count, pod=name)
    given = {each.partition("::")[0] for each in kubelet.assignments[-1].ids}
    container = pod.start(*IDLE, image=GLIBC, granted=answer)
    done = container.exec("nvidia-smi", "-L")
    assert done.code == 0, done.stdout + done.stderr
    listed = set(LISTED.findall(done.stdout))
    # nvidia-smi lists the GPU of a MIG device as well.
    assert {each for each in listed if each.startswith(PREFIX[resource])} == given
    nodes = set(container.exec("sh", "-c", "ls -d /dev/nvidia[0-9]*").lines)
    if resource == SLICE:
        assert nodes == {"/dev/nvidia2"}
        assert len(container.exec("sh", "-c", "ls /dev/nvidia-caps").lines) == 2 * len(given)
    else:
        assert nodes <= {"/dev/nvidia0", "/dev/nvidia1"}
        assert len(nodes) == len(given)
        assert len(listed) == len(given)
    kubelet.release(name)
    with open(os.path.join(container.bundle, "config.json"), encoding="utf-8") as file:
        spec = json.load(file)
    for entries, key in ((spec["linux"]["devices"], "path"), (spec["mounts"], "destination")):
        assert [each for each, times in Counter(e[key] for e in entries).items() if times > 1] == []
    return spec


@pytest.mark.parametrize("release", of_releases(*WAYS))
def test_every_way_of_giving_gives_just_what_was_allocated(
    release: str, node: SimulatedNode, kubelet: KubeletPlugins, shim_directory: str, tmp_path: Path
) -> None:
    first, *others = WAYS[release]
    agent = NodeAgent(node, str(tmp_path), kubelet.socket)
    apply(agent, first)
    cdi = str(tmp_path / "cdi")
    with agent, pods_with(release, node, shim_directory, cdi=cdi) as pods:
        kubelet.wait_for(GPU, 4)
        kubelet.wait_for(SLICE, 6)
        pod = pods.run()
        give(pod, kubelet, GPU, 3)  # shares of both
        for way in (first, *others):
            if way is not first:
                apply(agent, way)
                wait_for(kubelet, way)
            give(pod, kubelet, SLICE, 1)
            if way.by_engine:
                # A runtime that does not know us gives the same devices.
                give(pods.run(handler="runc"), kubelet, GPU, 1)
        if not others:  # then only the engine has applied them
            refuse_another(pod, kubelet, node)


def test_pod_of_an_engine_that_reads_no_cdi_names_has_its_gpu_all_the_same(
    node: SimulatedNode, kubelet: KubeletPlugins, shim_directory: str, tmp_path: Path
) -> None:
    """containerd 1.7 does not read CDI names by default, and this configuration does not ask."""
    with pods_with("trixie", node, shim_directory, cdi="") as pods:
        engine = pods.containerd.address
        agent = NodeAgent(node, str(tmp_path), kubelet.socket, engine=engine)
        agent.configure(flags={"migStrategy": "mixed"})
        with agent:
            kubelet.wait_for(GPU, 2)
            give(pods.run(), kubelet, GPU, 1)


def test_a_pod_that_runs_without_its_gpu_says_so_everywhere(
    node: SimulatedNode, shim_directory: str, tmp_path: Path
) -> None:
    """A pod without our handler, on an engine without CDI names: Running, Ready, no GPU."""
    resources, name = str(tmp_path / "pod-resources.sock"), "main"
    with (
        KubeletPlugins(str(tmp_path / "kubelet"), pod_resources=resources) as kubelet,
        ApiServer(str(tmp_path / "service-account")) as api,
        pods_with("trixie", node, shim_directory, cdi="") as pods,
    ):
        containerd = pods.containerd
        state = containerd.bundle("x").rpartition("/io.containerd.")[0]
        where = ("--containerd-state", state, "--pod-resources", resources)
        agent = NodeAgent(
            node, str(tmp_path), kubelet.socket, *where, "--api-server", "127.0.0.1",
            "--api-port", str(api.port), "--service-account", api.service_account,
            engine=containerd.address,
        )  # fmt: skip
        agent.configure(flags={"migStrategy": "mixed"})
        api.is_forbidden = True
        checking = ("ledger", "check", "--config", node.config_path, *where)
        with agent:
            kubelet.wait_for(GPU, 2)
            pod = pods.run(handler="runc")
            answer = kubelet.allocate(GPU, 1, pod=pod.config.metadata.name)
            (uuid,) = kubelet.assignments[-1].ids
            # Until its image is pulled, it looks like any pod.
            assert nvshim(*checking).code == 0
            pod.start(*IDLE, image=GLIBC, name=name, granted=answer)
            title = f"tests/{pod.config.metadata.name}/{name}"
            (line,) = eventually(lambda: agent.said("runs without a device"), "the report")
            assert (line["container"], line["device"], line["level"]) == (title, uuid, "error")
            checked = nvshim(*checking, "-o", "wide", check=False)
            assert checked.code == 3
            assert title in checked.stdout
            refused = eventually(lambda: agent.said("NVSHIM-E2769"), "no right to events")
            assert "403" in refused[0]["event"]
            assert api.events == []
        # The old token has expired, and a new one is in its place.
        api.is_forbidden = False
        api.rotate("second")
        with agent:
            ((path, event),) = eventually(lambda: api.events, "an event of the pod")
            assert path == "/api/v1/namespaces/tests/events"
            assert event["involvedObject"] | {"fieldPath": ""} == {
                "apiVersion": "v1", "kind": "Pod", "namespace": "tests", "fieldPath": "",
                "name": pod.config.metadata.name, "uid": pod.config.metadata.uid,
            }  # fmt: skip
            assert (event["type"], event["reason"]) == ("Warning", "DeviceMissing")
            assert uuid in event["message"]
            assert event["metadata"]["namespace"] == "tests"
            wants = pods.run()
            wants.start(*IDLE, image=GLIBC, name=name, env={"NVIDIA_VISIBLE_DEVICES": "all"})
            eventually(lambda: len(api.events) > 1, "an event of the pod that was granted no GPU")
            denied = api.events[1][1]
            assert (denied["type"], denied["reason"]) == ("Warning", "DeviceDenied")
            assert denied["involvedObject"]["uid"] == wants.config.metadata.uid
            assert denied["involvedObject"]["fieldPath"] == f"spec.containers{{{name}}}"
            assert "NVIDIA_VISIBLE_DEVICES=all" in denied["message"]
            assert wants.config.metadata.uid in denied["message"]
            assert "kubelet_internal_checkpoint: nothing" in denied["message"]
            wants.remove()
            pod.remove()
            kubelet.release(pod.config.metadata.name)
            eventually(lambda: nvshim(*checking, check=False).code == 0, "nothing is amiss")
            assert len(api.events) == 2


def refuse_another(pod: Pod, kubelet: KubeletPlugins, node: SimulatedNode) -> None:
    """Limits also count containers that the engine gave devices: both GPUs are in use."""
    with open(node.config_path, "a", encoding="utf-8") as file:
        file.write('\n[sharing]\nholders = "exclusive"\n')
    answer = kubelet.allocate(GPU, 1, pod=new_name())
    with pytest.raises(CriRefused, match=r"NVSHIM-E0228 device-held: GPU [01] "):
        pod.start(*IDLE, image=GLIBC, granted=answer)
