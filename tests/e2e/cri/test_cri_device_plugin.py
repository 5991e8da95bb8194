"""What the device plugin answers goes into a container of a pod, which has just those devices."""

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
# What containerd hands on of a container's annotations is a setting of the handler.
HANDLERS: Final[dict[str, dict[str, Any]]] = {
    "nvidia": {"runtime_type": OURS, "container_annotations": ["cdi.k8s.io/*"]},
    "runc": {"runtime_type": STOCK},
}
APPLIED: Final = "settings of the device plugin"
PREFIX: Final = {GPU: "GPU-", SLICE: "MIG-"}


class Way(NamedTuple):
    """A way of giving devices; whether the engine does it, by CDI."""

    strategies: tuple[str, ...]
    called: str = "uuid"
    nodes: bool = False
    by_engine: bool = False


# containerd 1.6, which knows no CDI; 1.7, where it is switched on; 2, where it always is.
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
    """Two whole GPUs, and one that is cut into three."""
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
    """Pods of a containerd that reads CDI specs from a directory, if it knows CDI."""
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
    """Have the agent give devices in another way."""
    plugin = {
        "deviceListStrategy": list(way.strategies),
        "deviceIDStrategy": way.called,
        "passDeviceSpecs": way.nodes,
    }
    before = len(agent.said(APPLIED)) if agent.process is not None else None
    agent.configure(flags={"migStrategy": "mixed", "plugin": plugin}, sharing=SHARING)
    if before is not None:
        eventually(lambda: len(agent.said(APPLIED)) > before, f"{way} is in force")


def give(pod: Pod, kubelet: KubeletPlugins, resource: str, count: int) -> Any:
    """Have devices given to a container, and see that it has them and no other; its spec."""
    name = new_name()
    answer = kubelet.allocate(resource, count, pod=name)
    given = {each.partition("::")[0] for each in kubelet.assignments[-1].ids}
    container = pod.start(*IDLE, image=GLIBC, granted=answer)
    done = container.exec("nvidia-smi", "-L")
    assert done.code == 0, done.stdout + done.stderr
    listed = set(LISTED.findall(done.stdout))
    # Of a MIG device its GPU is listed as well.
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
            give(pod, kubelet, SLICE, 1)
            if way.by_engine:
                # Any other runtime gives the same, which knows nothing of us.
                give(pods.run(handler="runc"), kubelet, GPU, 1)
        if not others:  # then the engine alone has given them
            refuse_another(pod, kubelet, node)


def test_pod_of_an_engine_that_reads_no_cdi_names_has_its_gpu_all_the_same(
    node: SimulatedNode, kubelet: KubeletPlugins, shim_directory: str, tmp_path: Path
) -> None:
    """containerd 1.7 is not told to read them; nobody has set anything."""
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
    """It names no handler of ours, and its engine reads no CDI names: Running, Ready, no GPU."""
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
            # Until its image is there it is as any pod.
            assert nvshim(*checking).code == 0
            pod.start(*IDLE, image=GLIBC, name=name, granted=answer)
            title = f"tests/{pod.config.metadata.name}/{name}"
            (line,) = eventually(lambda: agent.said("runs without a device"), "it is said")
            assert (line["container"], line["device"], line["level"]) == (title, uuid, "error")
            checked = nvshim(*checking, "-o", "wide", check=False)
            assert checked.code == 3
            assert title in checked.stdout
            refused = eventually(lambda: agent.said("NVSHIM-E2769"), "it may make no events")
            assert "403" in refused[0]["event"]
            assert api.events == []
        # The token that it had is not good any more, and another one is there.
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
            eventually(lambda: len(api.events) > 1, "an event of the pod that nobody granted a GPU")
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
    """What the engine gives is limited like what we give: both GPUs have their containers."""
    with open(node.config_path, "a", encoding="utf-8") as file:
        file.write('\n[sharing]\nholders = "exclusive"\n')
    answer = kubelet.allocate(GPU, 1, pod=new_name())
    with pytest.raises(CriRefused, match=r"NVSHIM-E0228 device-held: GPU [01] "):
        pod.start(*IDLE, image=GLIBC, granted=answer)
