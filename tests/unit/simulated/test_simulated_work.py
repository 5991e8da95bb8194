"""The simulated NVML reports busy GPUs from files that tests write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.pynvml_calls import needs
from tests.unit.simulated.conftest import GPU_IS_LOST, AskNvml, MakeNode

NONE = 0xFFFFFFFF


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SimulatedNode]]:
    """Return a function that makes a node with these files in its state directory."""
    nodes: dict[str, SimulatedNode] = {}

    def make(scenario: str, **files: str) -> SimulatedNode:
        if scenario not in nodes:
            directory = tmp_path_factory.mktemp(scenario) / "node"
            nodes[scenario] = SimulatedNode.create(str(directory), Scenario.load(scenario))
        node = nodes[scenario]
        for name in ("processes", "facts", "nvlinks", "faults"):
            Path(node.state, f"nvml-{name}").write_text(files.get(name, ""))
        return node

    yield make
    for node in nodes.values():
        node.remove()


def test_processes_and_what_they_use(busy: Callable[..., SimulatedNode], ask_nvml: AskNvml) -> None:
    node = busy(
        "two",
        processes="# none\n0 4711 1048576 60 20 5 0\n0 12 2097152\ng 0 13 7\nm 0 14 8 50 0 0 1\n"
        "1 99 5\nnonsense\n9 1 1\n",
    )
    found = ask_nvml(
        node,
        """
        h = nvmlDeviceGetHandleByIndex(0)
        read = lambda p: [p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId]
        rates = nvmlDeviceGetUtilizationRates(h)
        answer([
            [read(p) for p in nvmlDeviceGetComputeRunningProcesses(h)],
            [read(p) for p in nvmlDeviceGetGraphicsRunningProcesses(h)],
            [p.pid for p in nvmlDeviceGetMPSComputeRunningProcesses(h)],
            sorted([u.pid, u.smUtil, u.memUtil, u.encUtil, u.decUtil]
                   for u in nvmlDeviceGetProcessUtilization(h, 0)),
            [rates.gpu, rates.memory, *nvmlDeviceGetEncoderUtilization(h)],
            nvmlDeviceGetMemoryInfo(h, version=nvmlMemory_v2).used,
            nvmlDeviceGetPowerUsage(h),
        ])
        """,
    )
    assert found == [
        [[4711, 1 << 20, NONE, NONE], [12, 1 << 21, NONE, NONE]],
        [[13, 7, NONE, NONE]],
        [14],
        [[14, 50, 0, 0, 1], [4711, 60, 20, 5, 0]],
        [100, 20, 5, 100000],
        3 * (1 << 20) + 15,
        700000,
    ]


def test_processes_of_mig_devices(busy: Callable[..., SimulatedNode], ask_nvml: AskNvml) -> None:
    node = busy("mig", processes="1 7 1048576 2 0\n1 8 1048576 2 1\n")
    found = ask_nvml(
        node,
        """
        gpu = nvmlDeviceGetHandleByIndex(1)
        device = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
        read = lambda p: [p.pid, p.gpuInstanceId, p.computeInstanceId]
        try: nvmlDeviceGetProcessUtilization(gpu, 0)
        except NVMLError as error: unsupported = error.value
        answer([[read(p) for p in nvmlDeviceGetComputeRunningProcesses(gpu)],
                [read(p) for p in nvmlDeviceGetComputeRunningProcesses(device)],
                nvmlDeviceGetMemoryInfo(device, version=nvmlMemory_v2).used, unsupported])
        """,
    )
    assert found == [[[7, 2, 0], [8, 2, 1]], [[8, 2, 1]], 1 << 20, 3]


def test_facts_and_energy_that_grows(busy: Callable[..., SimulatedNode], ask_nvml: AskNvml) -> None:
    told = {
        "gpu": 12,
        "temperature": 66,
        "milliwatts": 345000,
        "throttle": 4,
        "millijoules": 10**15,
    }
    counts = {"ecc-corrected": 3, "ecc-uncorrected": 1, "rows-pending": 1, "rows-failed": 1}
    node = busy(
        "two", facts="".join(f"1 {name} {value}\n" for name, value in {**told, **counts}.items())
    )
    code = """
        h = nvmlDeviceGetHandleByIndex(1)
        answer([nvmlDeviceGetUtilizationRates(h).gpu, nvmlDeviceGetTemperature(h, 0),
                nvmlDeviceGetPowerUsage(h), nvmlDeviceGetCurrentClocksThrottleReasons(h),
                nvmlDeviceGetTotalEccErrors(h, 0, 0), nvmlDeviceGetTotalEccErrors(h, 1, 0),
                list(nvmlDeviceGetRemappedRows(h)), nvmlDeviceGetTotalEnergyConsumption(h)])
    """
    *found, energy = ask_nvml(node, code)
    assert found == [12, 66, 345000, 4, 3, 1, [0, 0, 1, 1]]
    assert energy > 10**15
    assert ask_nvml(node, code)[-1] > energy


def test_links_between_gpus(busy: Callable[..., SimulatedNode], ask_nvml: AskNvml) -> None:
    node = busy("two", nvlinks="0 1 2\n0 s 1\n")
    found = ask_nvml(
        node,
        """
        def link(h, n):
            try:
                return [nvmlDeviceGetNvLinkState(h, n), nvmlDeviceGetNvLinkRemoteDeviceType(h, n),
                        nvmlDeviceGetNvLinkRemotePciInfo(h, n).bus]
            except NVMLError as error: return error.value
        a, b = (nvmlDeviceGetHandleByIndex(n) for n in (0, 1))
        answer([[link(a, n) for n in range(4)], [link(b, n) for n in range(3)], link(a, 36),
                nvmlDeviceGetP2PStatus(a, b, NVML_P2P_CAPS_INDEX_NVLINK)])
        """,
    )
    two, one = [1, 0, 0x2A], [1, 0, int(node.scenario.gpus[0].pci.split(":")[1], 16)]
    assert found == [[two, two, [1, 2, 0xC2], 3], [one, one, 3], 2, 0]


def test_a_fault_that_comes_later_and_goes(
    busy: Callable[..., SimulatedNode], ask_nvml: AskNvml
) -> None:
    node = busy("two")
    found = ask_nvml(
        node,
        f"""
        def uuid(n):
            try: return nvmlDeviceGetUUID(handles[n])[:3]
            except NVMLError as error: return error.value
        def fault(text):
            with open({node.state + "/nvml-faults"!r}, "w") as file: file.write(text)
            return [uuid(0), uuid(1)]
        handles = [nvmlDeviceGetHandleByIndex(n) for n in (0, 1)]
        answer([fault(""), fault("gpu1=error:15"), fault("any=error:999"), fault("")])
        """,
    )
    assert found == [["GPU"] * 2, ["GPU", GPU_IS_LOST], [999, 999], ["GPU"] * 2]


def test_waiting_for_an_event_costs_nothing_and_ends_when_the_gpu_is_lost(
    make_node: MakeNode, ask_nvml: AskNvml
) -> None:
    node = make_node(Scenario.load("two"))
    found = ask_nvml(
        node,
        f"""
        import threading, time
        events = nvmlEventSetCreate()
        nvmlDeviceRegisterEvents(nvmlDeviceGetHandleByIndex(1), 8, events)
        def lose():
            with open({node.state + "/nvml-faults"!r}, "w") as file: file.write("gpu1=error:15")
        def wait(timeout):
            try: nvmlEventSetWait_v2(events, timeout)
            except NVMLError as error: return error.value
        start = time.process_time()
        first, used = wait(1000), time.process_time() - start
        threading.Timer(0.1, lose).start()
        answer([first, wait(20000), used])
        """,
    )
    *errors, used = found
    assert errors == [10, GPU_IS_LOST]
    assert used < 0.1  # of a second: it slept


def test_a_file_that_is_replaced_is_seen(make_node: MakeNode, ask_nvml: AskNvml) -> None:
    node = make_node(Scenario.load("two"))
    path = f"{node.state}/nvml-processes"
    found = ask_nvml(
        node,
        f"""
        import os
        count = lambda: len(nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(0)))
        before = count()
        with open({path!r} + ".new", "w") as file:
            file.write("".join(f"0 {{pid}} 1\\n" for pid in range(1, 3001)))
        os.rename({path!r} + ".new", {path!r})
        answer([before, count()])
        """,
    )
    assert found == [0, 3000]


def test_fields_have_a_type_each_and_those_without_a_fact_are_not_supported(
    busy: Callable[..., SimulatedNode], ask_nvml: AskNvml
) -> None:
    node = busy("two", facts="0 memory-temperature 71\n0 nvlink-sent-kib 5000000000\n")
    found = ask_nvml(
        node,
        """
        every = (1 << 32) - 1
        fields = [82, (138, every), (139, every), 29, 94, 230, 1]
        answer([[f.nvmlReturn, f.valueType, f.value.ullVal] for f in
                nvmlDeviceGetFieldValues(nvmlDeviceGetHandleByIndex(0), fields)])
        """,
    )
    assert found[:2] == [[0, 1, 71], [0, 3, 5_000_000_000]]
    assert [each[0] for each in found] == [0, 0, 3, 3, 0, 0, 3]


CLUSTER = "00000000-0000-0000-0000-0000000000ab"
COMPLETED = "0 fabric-state 3\n0 fabric-cluster 171\n0 fabric-clique 32766\n"
NOT_COMPLETED = {"state": "in-progress", "health": ""}
WITHOUT_V3 = "del pynvml.c_nvmlGpuFabricInfo_v3_t"


@needs("nvmlDeviceGetGpuFabricInfoV")
@pytest.mark.parametrize(
    ("facts", "before", "expected"),
    [
        ("", "", None),
        ("0 fabric-state 0\n", "", None),
        (COMPLETED + "0 fabric-health 3\n", "",
         {"state": "completed", "health": "limited-capacity", "cluster_uuid": CLUSTER,
          "clique": 32766}),
        # An older library, an older pynvml, and both from before versioned structures.
        (COMPLETED + "0 fabric-version 2\n0 fabric-health 3\n", "",
         {"state": "completed", "health": "", "cluster_uuid": CLUSTER, "clique": 32766}),
        (COMPLETED, WITHOUT_V3,
         {"state": "completed", "health": "", "cluster_uuid": CLUSTER, "clique": 32766}),
        (COMPLETED, WITHOUT_V3 + "; del pynvml.c_nvmlGpuFabricInfo_v2_t",
         {"state": "completed", "health": "", "cluster_uuid": CLUSTER, "clique": 32766}),
        ("0 fabric-state 3\n", "", {"state": "completed", "health": ""}),  # HGX: no cluster
        ("0 fabric-state 2\n0 fabric-cluster 171\n", "", NOT_COMPLETED),
        (COMPLETED + "0 fabric-status 999\n", "",
         {"state": "completed", "health": "", "failure": "Unknown Error"}),
    ],
)  # fmt: skip
def test_the_place_in_an_nvlink_fabric(
    busy: Callable[..., SimulatedNode], ask_nvml: AskNvml, facts: str, before: str, expected: object
) -> None:
    found = ask_nvml(
        busy("two", facts=facts),
        f"""
        import pynvml
        from hooks.node.nvml_probe import GpuAsker
        from integration.nvml.child_fabric import fabric_of
        {before}
        asker = GpuAsker(pynvml, 0)
        answer([fabric_of(pynvml, asker, nvmlDeviceGetHandleByIndex(0)), asker.notes])
        """,
    )
    assert found == [expected, []]
