"""Device health: the real agent, a GPU that falls off the bus, and the reports of it."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.gpu_agent import GpuAgent, gpu_agent
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.nvshim import nvshim
from tests.harness.waiting import eventually
from tools.images import GLIBC
from tools.nodes import changed_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.harness.runtime import Runtime

RESOURCE: Final = "nvidia.com/gpu"
UNHEARD: Final = "NVML does not deliver its events"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    directory = tmp_path_factory.mktemp("health")
    with SimulatedNode.create(str(directory / "node"), Scenario.load("two")) as made:
        with open(made.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
            file.write("[health]\nquiet = 0.5\nlongest-quiet = 0.5\n")
        yield made


@pytest.fixture
def node(two: SimulatedNode) -> Iterator[SimulatedNode]:
    """Return the node, healthy, and without stored health."""
    yield two
    for pattern in ("nvml-*", "health.json"):
        for path in Path(two.state).glob(pattern):
            path.unlink()


def test_a_gpu_falls_off_the_bus_under_a_container_and_comes_back(
    runtime: Runtime, node: SimulatedNode, tmp_path: Path, configure: Callable[[str], None]
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    with open(node.config_path, encoding="utf-8") as file:
        configure(file.read())
    container = runtime.start_idle(image=GLIBC, flags=("--env", "NVIDIA_VISIBLE_DEVICES=0"))
    title = container.name
    kubelet_directory = str(tmp_path / "kubelet")
    options = (
        "--containerd-state", f"{runtime.containerd.directory}/state",
        "--kubelet-socket", f"{kubelet_directory}/kubelet.sock",
        "--pod-resources", f"{kubelet_directory}/none.sock",
    )  # fmt: skip
    with KubeletPlugins(kubelet_directory) as kubelet, gpu_agent(node, tmp_path, *options) as it:
        both = kubelet.wait_for(RESOURCE, 2)
        lost, other = node.scenario.gpus[0].uuid, node.scenario.gpus[1].uuid
        assert both == {lost, other}

        def is_known() -> bool:
            """An application error does not make the GPU unhealthy, and its container is known."""
            it.xid(0, 31, "Ch 1, MMU Fault", pid=container.pid)
            return any(
                line.get("container") == title and line["known"] == "by its process"
                for line in it.said("XID 31")
            )

        eventually(is_known, "the owner is known")
        assert not it.said("a device is unhealthy")  # that would have been logged before
        eventually(lambda: it.states() == ["healthy", "healthy"], "it is written")

        it.nvml("faults", "gpu0=error:15")
        it.xid(0, 79, "GPU has fallen off the bus.", pid=container.pid)
        assert kubelet.wait_for(RESOURCE, 1) == {other}
        # It stays in the list, so that the kubelet sets allocatedResourcesStatus of its pods.
        told_of = {name: each.health for name, each in kubelet.devices(RESOURCE).items()}
        assert told_of == {lost: "Unhealthy", other: "Healthy"}
        (line,) = eventually(lambda: it.said("XID 79"), "it is reported")
        assert (line["container"], line["known"]) == (title, "by its process")
        assert (line["severity"], line["gpu"]) == ("fatal", lost)
        assert "reboot the node" in line["do"]
        eventually(lambda: it.states() == ["unhealthy", "healthy"], "it is written")
        assert it.listed() == ["unhealthy", "healthy"]

        def listed() -> Any:
            status, rows = it.nvshim("list", "--health")
            assert status == 3
            (row,) = [row for row in rows if row["uuid"] == lost]
            return row["xid"] and row

        row = eventually(listed, "with its error")
        assert (row["xid"], row["containers"], row["given"]) == (79, [title], False)

        # Only a GPU that NVML reported as lost can come back.
        eventually(lambda: it.said(UNHEARD), "NVML has lost it")
        it.nvml("faults", "")
        assert kubelet.wait_for(RESOURCE, 2) == both
        told = [line["state"] for line in it.said("a device is") if line["device"] == lost]
        # The agent subscribes to its events again later; until then it is suspect but usable.
        assert told.index("unhealthy") < told.index("recovering") < len(told) - 1
        eventually(lambda: it.states()[0] in {"healthy", "suspect"}, "the file has it")
    # The agent has stopped.
    assert it.listed() == [None, None]
    assert it.nvshim("health", "list")[0] == 1


def is_said(it: GpuAgent, event: str, times: int) -> bool:
    return len(it.said(event)) == times


# Without events, samples show it: tests/e2e/test_node_monitor.py.
@pytest.mark.parametrize(
    "fault", ["", pytest.param("nvmlDeviceRegisterEvents=error:3", marks=pytest.mark.thorough)]
)
def test_a_lost_gpu_is_taken_back_and_given_again_though_nobody_asks(
    node: SimulatedNode, tmp_path: Path, fault: str
) -> None:
    """Nothing is in the kernel's log, nothing scrapes metrics, and the next scan is far away."""
    directory = str(tmp_path / "kubelet")
    options = (
        "--kubelet-socket", f"{directory}/kubelet.sock", "--pod-resources", "",
        "--containerd-state", str(tmp_path), "--poll", "1000",
    )  # fmt: skip
    lost, other = (gpu.uuid for gpu in node.scenario.gpus)
    with KubeletPlugins(directory) as kubelet, gpu_agent(node, tmp_path, *options) as it:
        it.nvml("faults", fault)
        kubelet.wait_for(RESOURCE, 2)
        for n in range(2):
            it.nvml("faults", f"{fault} gpu0=error:15")
            assert kubelet.wait_for(RESOURCE, 1) == {other}
            if not fault:
                eventually(partial(is_said, it, UNHEARD, n + 1), "NVML has lost it")
            it.nvml("faults", fault)
            assert kubelet.wait_for(RESOURCE, 2) == {lost, other}
            if not fault:
                eventually(partial(is_said, it, "NVML delivers its events again", n + 1), "again")
        assert not [line for line in it.lines() if "XID" in line["event"]]


def test_an_unhealthy_gpu_outlives_the_agent_and_is_reset_or_put_back_by_hand(
    node: SimulatedNode, tmp_path: Path
) -> None:
    options = ("--kubelet-socket", "", "--containerd-state", str(tmp_path))
    uuid = node.scenario.gpus[1].uuid
    with gpu_agent(node, tmp_path, *options) as it:
        it.nvml("facts", "1 ecc-uncorrected 1\n")

        def is_heard() -> bool:
            it.xid(1, 95, "Uncontained ECC error")
            return bool(it.said("a device is unhealthy"))

        eventually(is_heard, "the error")
        eventually(lambda: it.states() == ["healthy", "unhealthy"], "it is written")
    with (
        KubeletPlugins(str(tmp_path / "kubelet")) as kubelet,
        gpu_agent(node, tmp_path, *options, "--kubelet-socket", kubelet.socket) as it,
    ):
        kubelet.wait_for(RESOURCE, 1)
        assert kubelet.plugins[RESOURCE].lists[0][uuid].health == "Unhealthy"
        eventually(lambda: it.said("a device is unhealthy"), "it is still so")
        eventually(lambda: it.nvshim("health", "list")[1], "it is ready")
        assert it.nvshim("health", "clear", "GPU-")[0] == 1  # which of them?
        status, rows = it.nvshim("health", "clear", uuid[:-3])
        assert (status, [row["uuid"] for row in rows]) == (0, [uuid])
        assert it.states() == ["healthy", "healthy"]
        assert it.said("returned to service by hand")[0]["device"] == uuid
        for name in ("1", node.scenario.gpus[1].pci, "all"):
            it.xid(1, 95, "Uncontained ECC error")
            eventually(lambda: it.states() == ["healthy", "unhealthy"], "it fails again")
            status, rows = it.nvshim("health", "clear", name)
            assert status == 0
            assert uuid in [row["uuid"] for row in rows]
            assert it.states() == ["healthy", "healthy"]
        for name in ("2", "1:0", "", "none"):
            assert it.nvshim("health", "clear", name)[0] == 1
        it.xid(1, 95, "Uncontained ECC error")
        eventually(lambda: it.states() == ["healthy", "unhealthy"], "it fails again")
        counted = cycle([*["1 ecc-uncorrected 1\n"] * 50, *[""] * 50])

        def is_reset() -> bool:
            """Restart the counter from zero, as a reset does, until the agent sees it."""
            it.nvml("facts", next(counted))
            return it.states() == ["healthy", "healthy"]

        eventually(is_reset, "it was reset")


def test_an_error_of_nvlink_that_is_not_fatal_takes_no_gpu_away(
    node: SimulatedNode, tmp_path: Path
) -> None:
    """Each GPU of a domain prints such lines when a neighbour fails (NVIDIA/NVSentinel#1357)."""
    text = (
        "RLW_SRC_TRACK {} XC1 i0 Link 17 "
        "(0x04084507 0x00000004 0x00000000 0x00000000 0x00000000 0x00000000)"
    )
    options = ("--kubelet-socket", "", "--containerd-state", str(tmp_path))
    with gpu_agent(node, tmp_path, *options) as it:
        it.listens()
        for number in range(144, 151):
            it.xid(0, number, text.format("Nonfatal"))
            eventually(partial(it.said, f"XID {number}"), f"{number} is told")
            assert [line["severity"] for line in it.said(f"XID {number}")] == ["ignore"]
        it.xid(1, 145, text.format("Fatal"))
        eventually(lambda: len(it.said("a device is unhealthy")) == 1, "the fatal one")
        (line,) = it.said("a device is unhealthy")
        assert (line["device"], line["xid"]) == (node.scenario.gpus[1].uuid, 145)
        assert [line["device"] for line in it.said("a device is suspect")] == []
        it.process.terminate()
        it.process.wait(timeout=60)
    # A request by index still gets the GPU.
    heeded = ("--enable-healthchecks", "145")
    with gpu_agent(node, tmp_path, *options, *heeded) as it:
        it.listens()
        it.xid(0, 145, text.format("Nonfatal"))
        uuid = node.scenario.gpus[0].uuid

        def is_unhealthy() -> bool:
            """Look into the log: it recovers so soon that the file may never say so."""
            return any(line["device"] == uuid for line in it.said("a device is unhealthy"))

        eventually(is_unhealthy, "it counts")


def test_a_gpu_that_was_exchanged_is_said_to_be_gone_once(tmp_path: Path) -> None:
    options = ("--kubelet-socket", "", "--containerd-state", str(tmp_path))
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        with gpu_agent(node, tmp_path, *options) as it:
            eventually(lambda: it.states() == ["healthy", "healthy"], "both are known")
        gone, new = node.scenario.gpus[1].uuid, "GPU-11111111-2222-4333-8444-555555555555"
        other = Scenario.parse({"gpus": 2, "model": "h100", "gpu": [{"index": 1, "uuid": new}]})
        changed = changed_node(node, other)
        with gpu_agent(changed, tmp_path, *options) as it:
            eventually(lambda: len(it.states()) == 3, "the new one is known as well")
            (line,) = eventually(lambda: it.said("a device is unhealthy"), "it is reported")
            assert (line["device"], line["level"]) == (gone, "error")
        with gpu_agent(changed, tmp_path, *options) as it:
            eventually(lambda: it.listed() == ["healthy", "healthy"], "the agent has started again")
            it.xid(0, 31, "Ch 1, MMU Fault")
            eventually(lambda: it.said("XID 31"), "it watches over the devices")
            assert it.said("a device is unhealthy") == []


def test_a_list_of_errors_that_is_none_keeps_the_agent_from_beginning(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[node]\nstate = "{tmp_path}"\n')
    done = nvshim("node", "--config", str(config), "--disable-healthchecks", "31;79", check=False)
    assert done.code == 1
    assert done.stderr.startswith("NVSHIM-E2755 xid-list-wrong: ")
