"""The device plugin as a process: a simulated node that changes, a kubelet that restarts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.cri_server import CriServer
from tests.harness.kubelet_plugins import KubeletPlugins, NotEnough
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.waiting import eventually
from tools.nodes import changed_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
SLICE: Final = "nvidia.com/mig-1g.5gb"
BY_VARIABLE: Final = {"plugin": {"deviceListStrategy": ["envvar"]}}


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[SimulatedNode]:
    """Return a node with two GPUs."""
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        keep_specs_in(f"{tmp_path}/cdi", node)
        yield node


def keep_specs_in(directory: str, node: SimulatedNode) -> None:
    with open(node.config_path, "a", encoding="utf-8") as file:
        file.write(f'\n[cdi]\nspec-dirs = ["{directory}"]\n')


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletPlugins]:
    """Return a kubelet that is not started yet."""
    kubelet = KubeletPlugins(str(tmp_path / "kubelet"))
    yield kubelet
    kubelet.stop()


@pytest.fixture
def agent(gpus: SimulatedNode, kubelet: KubeletPlugins, tmp_path: Path) -> NodeAgent:
    """Return an agent that is not started yet."""
    return NodeAgent(gpus, str(tmp_path), kubelet.socket)


def socket_of(kubelet: KubeletPlugins, resource: str) -> str:
    return f"{kubelet.directory}/{kubelet.plugins[resource].request.endpoint}"


def test_a_kubelet_comes_restarts_and_hands_nothing_out_twice(
    agent: NodeAgent, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    with agent:
        eventually(lambda: agent.said("node inventory"), "the agent has looked")
        kubelet.start()  # its directory did not exist until now
        ids = kubelet.wait_for(GPU, 2)
        assert ids == {gpu.uuid for gpu in agent.node.scenario.gpus}
        plugin = kubelet.plugins[GPU]
        assert plugin.request.version == "v1beta1"
        assert plugin.request.endpoint == "nvidia-gpu.sock"
        assert plugin.options().get_preferred_allocation_available
        assert {node.ID for each in plugin.devices.values() for node in each.topology.nodes} == {
            gpu.numa_node for gpu in agent.node.scenario.gpus
        }
        first = kubelet.allocate(GPU, 1, pod="one")
        (name,) = (each.name for each in first.cdi_devices)  # the default
        assert name.removeprefix("k8s.device-plugin.nvidia.com/gpu=") in ids
        spec = tmp_path / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json"
        assert name.partition("=")[2] in spec.read_text()
        spec.unlink()
        with pytest.raises(grpc.RpcError) as refused:
            plugin.allocate("GPU-unheard-of")
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        assert refused.value.details().startswith("NVSHIM-E2730 device-unknown: ")
        assert "\n" not in refused.value.details()

        kubelet.restart()
        kubelet.wait_for(GPU, 2)
        assert name.partition("=")[2] in spec.read_text(), "the missing spec is rewritten"
        kubelet.allocate(GPU, 1, pod="two")
        assert kubelet.given(GPU) == ids
        with pytest.raises(NotEnough):
            kubelet.allocate(GPU, 1, pod="three")
        # A kubelet that only loses its connection gets the list again, without a restart.
        before = len(kubelet.registrations)
        kubelet.plugins[GPU].close()
        eventually(lambda: len(kubelet.registrations) > before, "it is registered again")
        kubelet.wait_for(GPU, 2)

        assert agent.stop() == 0
        eventually(lambda: kubelet.plugins[GPU].ended, "the list stream has closed")
        assert os.listdir(kubelet.directory) == ["kubelet.sock"]


def test_a_kubelet_that_was_killed_is_registered_with_once_when_it_is_back(
    agent: NodeAgent, kubelet: KubeletPlugins
) -> None:
    """It restarts after 2.6 seconds, as Kubernetes 1.36 did, while the plugin retries."""
    kubelet.start()
    with agent:
        kubelet.wait_for(GPU, 2)
        for _ in range(2):
            kubelet.die()
            time.sleep(2.6)
            before = len(kubelet.registrations)
            kubelet.start()
            kubelet.wait_for(GPU, 2)
            time.sleep(2)  # there is no event to wait for
            assert len(kubelet.registrations) == before + 1


def _become_a_file(directory: Path) -> None:
    """Replace a directory, which the agent recreates if it is missing, by a file."""
    while not directory.is_file():
        with suppress(FileNotFoundError):
            os.rename(directory, f"{directory}.aside")
        shutil.rmtree(f"{directory}.aside", ignore_errors=True)
        with suppress(FileExistsError):
            directory.touch(exist_ok=False)


def test_a_spec_that_somebody_removes_is_there_again_and_before_it_is_named(
    agent: NodeAgent, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    spec = tmp_path / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json"
    kubelet.start()
    with agent:
        uuid = min(kubelet.wait_for(GPU, 2))
        content = spec.read_text()

        def is_there() -> bool:
            return spec.exists() and spec.read_text() == content

        spec.unlink()
        eventually(is_there, "the removed spec is rewritten")
        spec.write_text("{}")
        eventually(is_there, "the changed spec is rewritten")
        for _ in range(20):
            spec.unlink()
            (name,) = kubelet.plugins[GPU].allocate(uuid).cdi_devices
            assert name.name.partition("=")[2] in spec.read_text()
        _become_a_file(spec.parent)  # writing there fails
        with pytest.raises(grpc.RpcError) as refused:
            kubelet.plugins[GPU].allocate(uuid)
        assert refused.value.details().startswith("NVSHIM-E2706 cdi-device-unwritten: ")
        spec.parent.unlink()
        eventually(is_there, "it can be written again")
        assert kubelet.plugins[GPU].allocate(uuid).cdi_devices


def test_settings_change_while_the_kubelet_watches_and_bad_ones_change_nothing(
    agent: NodeAgent, kubelet: KubeletPlugins
) -> None:
    agent.configure(flags=BY_VARIABLE)
    kubelet.start()
    with agent:
        kubelet.wait_for(GPU, 2)
        whole = kubelet.plugins[GPU]
        many = {"replicas": 4, "name": GPU}
        agent.configure(
            flags=BY_VARIABLE,
            sharing={"timeSlicing": {"renameByDefault": True, "resources": [many]}},
        )
        kubelet.wait_for(SHARED, 8)
        eventually(lambda: whole.ended, "the plugin of the removed resource stops")
        assert whole.devices == {}, "the kubelet got an empty list"
        answer = kubelet.allocate(SHARED, 2, pod="one")
        # The preferred allocation spreads over the GPUs.
        assert set(answer.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == {
            gpu.uuid for gpu in agent.node.scenario.gpus
        }
        agent.configure(sharing={"timeSlicing": {"resources": [{"name": GPU, "replicas": "many"}]}})
        eventually(lambda: any("NVSHIM-E2723" in line for line in agent.faults()), "it is reported")
        assert kubelet.wait_for(SHARED, 8)
        assert not kubelet.plugins[SHARED].ended

        # A killed agent leaves its socket; the next agent replaces it.
        agent.kill()
        assert os.path.exists(socket_of(kubelet, SHARED))
        eventually(lambda: kubelet.plugins[SHARED].ended, "its connections are gone")
        agent.configure(flags=BY_VARIABLE, sharing={"timeSlicing": {
            "renameByDefault": True, "failRequestsGreaterThanOne": True, "resources": [many]
        }})  # fmt: skip
        agent.start()
        kubelet.wait_for(SHARED, 8)
        assert len(kubelet.given(SHARED)) == 2
        kubelet.allocate(SHARED, 1, pod="two")
        with pytest.raises(grpc.RpcError, match="NVSHIM-E2704"):
            kubelet.allocate(SHARED, 2, pod="three")
        assert len(kubelet.given(SHARED)) == 3


def test_devices_by_mounts_are_said_to_be_of_no_use_while_the_shim_looks_at_none(
    agent: NodeAgent, kubelet: KubeletPlugins
) -> None:
    word, key = "nvshim config set requests.accept-mounts auto", "requests.accept-mounts"
    nvshim("config", "set", key, "false", "--config", agent.node.config_path)
    agent.configure(flags={"plugin": {"deviceListStrategy": ["volume-mounts"]}})
    kubelet.start()
    with agent:
        kubelet.wait_for(GPU, 2)
        eventually(lambda: any(word in line for line in agent.faults()), "its status has it")
        assert [line for line in agent.said() if word in line["event"]], "its log has it"
        told = nvshim("doctor", "--only", "D105", "--config", agent.node.config_path, check=False)
        assert word in " ".join(told.stdout.split())
    eventually(lambda: kubelet.plugins[GPU].ended, "its connections are gone")
    nvshim("config", "set", key, "auto", "--config", agent.node.config_path)
    with agent:
        kubelet.wait_for(GPU, 2)
        mounts = kubelet.allocate(GPU, 1, pod="one").mounts
        assert mounts[0].container_path.startswith("/var/run/nvidia-container-devices/GPU-")
        assert not [line for line in agent.faults() if word in line]


def test_an_engine_gives_the_files_that_the_shim_gives(
    agent: NodeAgent, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    with open(agent.node.config_path, "a", encoding="utf-8") as file:
        file.write('[policy]\nsupported-driver-capabilities = ["utility"]\n')
    kubelet.start()
    with agent:
        kubelet.wait_for(GPU, 2)
    with open(tmp_path / "cdi/k8s.device-plugin.nvidia.com-gpu.json", encoding="utf-8") as file:
        by_engine = json.load(file)["containerEdits"]["mounts"]
    spec = {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}
    (tmp_path / "config.json").write_text(json.dumps(spec))
    words = ("explain", str(tmp_path / "config.json"), "-o", "json")
    told = nvshim(*words, "--config", agent.node.config_path).document
    by_shim = told["record"]["edits"]["mounts"]
    assert {each["hostPath"] for each in by_engine} == {each["source"] for each in by_shim}


def test_resources_come_and_go_without_a_word_to_the_others(
    gpus: SimulatedNode, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    changed_node(gpus, Scenario.parse({"gpus": 2, "model": "a100", "gpu": []}))
    keep_specs_in(f"{tmp_path}/cdi", gpus)
    # Without the driver's directory there are no events.
    agent = NodeAgent(gpus, str(tmp_path), kubelet.socket, "--poll", "1")
    agent.configure(flags={"migStrategy": "mixed", **BY_VARIABLE})
    kubelet.start()
    with agent:
        kubelet.wait_for(GPU, 2)
        whole = kubelet.plugins[GPU]
        before = os.stat(socket_of(kubelet, GPU)).st_ino
        cut = {"index": 1, "mig": ["1g.5gb", "1g.5gb"]}
        agent.change_node(Scenario.parse({"gpus": 2, "model": "a100", "gpu": [cut]}))
        slices = kubelet.wait_for(SLICE, 2)
        kubelet.wait_for(GPU, 1)
        assert kubelet.plugins[GPU] is whole
        assert os.stat(socket_of(kubelet, GPU)).st_ino == before
        answer = kubelet.allocate(SLICE, 1, pod="one")
        assert answer.envs["NVIDIA_VISIBLE_DEVICES"] in slices

        # Without a driver no device can be allocated, and none is forgotten.
        parked = f"{agent.node.driver_root}/usr/lib/parked"
        os.rename(f"{agent.node.driver_root}/usr/lib/x86_64-linux-gnu", parked)
        for resource in (GPU, SLICE):
            kubelet.wait_for(resource, 0)
            assert kubelet.devices(resource)
        with pytest.raises(grpc.RpcError, match="NVSHIM-E2705 device-gone"):
            kubelet.plugins[SLICE].allocate(*slices)
        os.rename(parked, f"{agent.node.driver_root}/usr/lib/x86_64-linux-gnu")
        # The devices are back; the health checks decide when they become healthy.
        eventually(lambda: is_given(kubelet, SLICE, *slices), "they can be allocated")
        assert kubelet.plugins[GPU] is whole
        assert not whole.ended


def test_a_gpu_in_mig_mode_is_announced_by_no_strategy_that_cannot_give_it(
    gpus: SimulatedNode, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    """Otherwise no pod could use it, and its Deployment would create pod after pod."""
    cut = [{"index": 1, "mig": ["1g.5gb"]}, {"index": 2, "mig": []}]
    changed_node(gpus, Scenario.parse({"gpus": 3, "model": "a100", "gpu": cut}))
    agent = NodeAgent(gpus, str(tmp_path), kubelet.socket)
    kubelet.start()
    with agent:
        (whole,) = kubelet.wait_for(GPU, 1)
        assert list(kubelet.devices(GPU)) == [whole]
        warned = [line["event"] for line in agent.said("migStrategy none announces whole GPUs")]
        assert [line.split()[:2] for line in warned] == [["GPU", "1"], ["GPU", "2"]]
        for ways in ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"):
            by = {"plugin": {"deviceListStrategy": ways}}
            agent.configure(flags={"migStrategy": "mixed", **by})
            kubelet.wait_for(SLICE, 1)
            for resource in (GPU, SLICE):
                kubelet.allocate(resource, 1, pod="one")
                kubelet.release("one")
            agent.configure(flags={"migStrategy": "none", **by})
            eventually(lambda: not kubelet.healthy(SLICE), "no MIG device is left")
            kubelet.allocate(GPU, 1, pod="one")
            kubelet.release("one")
        assert list(kubelet.devices(GPU)) == [whole]


# Files that users wrote for NVIDIA's plugin; k8s-device-plugin#1433 and #1786.
USERS: Final[dict[str, tuple[dict[str, Any], dict[str, int], list[str]]]] = {
    "a key one level too high": (
        {
            "flags": {"migStrategy": "none", "renameByDefault": True},
            "sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 8}]}},
        },
        {GPU: 16},
        ["flags.renameByDefault"],
    ),
    "a share for each step of memory": (
        {"sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 16384}]}}},
        {GPU: 32768},
        [],
    ),
    "each GPU shared differently": (
        {
            "sharing": {
                "timeSlicing": {
                    "resources": [
                        {"name": GPU, "rename": f"{GPU}.light", "devices": ["0"], "replicas": 2},
                        {"name": GPU, "rename": f"{GPU}.heavy", "devices": ["1"], "replicas": 8},
                    ]
                }
            }
        },
        {f"{GPU}.light": 2, f"{GPU}.heavy": 8},
        [],
    ),
}


@pytest.mark.parametrize("case", USERS)
def test_files_of_users_give_the_shares_that_they_ask_for(
    agent: NodeAgent, kubelet: KubeletPlugins, case: str
) -> None:
    tables, shares, noted = USERS[case]
    agent.configure(**tables)
    kubelet.start()
    with agent:
        for resource, count in shares.items():
            kubelet.wait_for(resource, count)
            kubelet.allocate(resource, 1, pod=resource)
        assert set(kubelet.plugins) == set(shares)
        assert agent.faults() == []
        notes = [line["event"].partition(" in ")[0] for line in agent.said("has no effect")]
        assert notes == noted


def test_mig_devices_that_are_made_again_by_hand_are_healthy(
    gpus: SimulatedNode, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    shapes = ["1g.5gb", "1g.5gb"]

    def cut(*shapes: str) -> Scenario:
        whole_or_cut = {"index": 1, "mig": list(shapes)}
        return Scenario.parse({"gpus": 2, "model": "a100", "gpu": [whole_or_cut]})

    changed_node(gpus, cut(*shapes))
    keep_specs_in(f"{tmp_path}/cdi", gpus)
    agent = NodeAgent(gpus, str(tmp_path), kubelet.socket, "--poll", "1")
    agent.configure(flags={"migStrategy": "mixed", **BY_VARIABLE})
    kubelet.start()
    with agent:
        before = kubelet.wait_for(SLICE, 2)
        for _ in range(2):
            agent.change_node(cut())
            eventually(lambda: not kubelet.devices(SLICE), "they are gone")
            agent.change_node(cut(*shapes))
            assert kubelet.wait_for(SLICE, 2) == before
        assert not agent.said("a device is unhealthy")


def starting(agent: NodeAgent, words: str) -> list[str]:
    return [line for line in agent.faults() if line.startswith(words)]


def is_given(kubelet: KubeletPlugins, resource: str, *ids: str) -> bool:
    try:
        return bool(kubelet.plugins[resource].allocate(*ids).envs)
    except grpc.RpcError:
        return False


def test_a_kubelet_that_refuses_and_a_plugin_that_was_here_first(
    agent: NodeAgent, kubelet: KubeletPlugins
) -> None:
    kubelet.versions = ("v1",)
    kubelet.start()
    path = f"{kubelet.directory}/nvidia-gpu.sock"
    other = socket.socket(socket.AF_UNIX)
    other.bind(path)
    other.listen()
    theirs = os.stat(path).st_ino
    with agent:
        (fault,) = eventually(
            lambda: starting(agent, "NVSHIM-E2710 other-plugin: "),
            "it reports that it does not serve",
        )
        assert "nvidia-gpu.sock" in fault
        assert os.stat(path).st_ino == theirs
        other.close()
        os.unlink(path)
        (fault,) = eventually(
            lambda: starting(agent, "NVSHIM-E2708 kubelet-refused: "),
            "the kubelet does not want it",
        )
        assert "requested API version 'v1beta1' is not supported by kubelet" in fault
        kubelet.versions = ("v1beta1",)
        kubelet.wait_for(GPU, 2)
        eventually(lambda: not agent.faults(), "no fault is left")


NAMES: Final = "k8s.device-plugin.nvidia.com/gpu="
ADAPTED: Final = "containers receive their devices by"


def told(kubelet: KubeletPlugins, pod: str) -> tuple[set[str], set[str]]:
    """Return how a container gets its GPU besides CDI: by a variable or annotations, and mounts."""
    answer = kubelet.allocate(GPU, 1, pod=pod)
    uuids = set(kubelet.assignments[-1].ids)
    kubelet.release(pod)
    by_variable = answer.envs.get("NVIDIA_VISIBLE_DEVICES", "")
    assert {each.name.removeprefix(NAMES) for each in answer.cdi_devices} == uuids
    ways = {"envvar"} if by_variable in uuids else set()
    ways |= {"annotations"} if any(NAMES in each for each in answer.annotations.values()) else set()
    return ways, {mount.container_path for mount in answer.mounts}


def test_an_engine_that_does_not_read_cdi_names_has_the_shim_told_as_well(
    gpus: SimulatedNode, kubelet: KubeletPlugins, tmp_path: Path
) -> None:
    """No setting is needed. While the engine restarts, the agent sets the shim's variable, too."""
    socket = str(tmp_path / "engine.sock")
    agent = NodeAgent(gpus, str(tmp_path), kubelet.socket, engine=socket)
    kubelet.start()
    with agent:
        kubelet.wait_for(GPU, 2)
        # The engine does not answer yet, so the agent sets both; one takes effect.
        assert told(kubelet, "one") == ({"envvar"}, set())
        with CriServer(socket, "1.7.24~ds1", cdi=False) as engine:
            assert told(kubelet, "two") == ({"envvar"}, set())
            said = "containerd 1.7.24~ds1 does not read CDI names of the CRI, or is not set to"
            eventually(lambda: agent.said(said), "the engine has answered")
            (line,) = agent.said(said)
            assert line["event"].endswith(f"{ADAPTED} envvar, cdi-cri")
            assert line["command"] == "nvshim configure containerd --enable-cdi"
            asked = engine.asked
            assert told(kubelet, "three") == ({"envvar"}, set())
            assert engine.asked == asked, "the agent's answer is valid until its restart"
            engine.restart("1.7.24~ds1", cdi=True)
            eventually(lambda: told(kubelet, "four") == (set(), set()), "the engine is known")
            engine.restart("1.6.20~ds1", cdi=None)
            assert told(kubelet, "five") == ({"envvar"}, set())
            engine.restart("1.7.1", cdi=True)
            assert told(kubelet, "six") == ({"envvar"}, set())
            engine.restart("2.1.9", cdi=True)
            eventually(lambda: told(kubelet, "seven") == (set(), set()), "the engine is known")
