"""Lost GPUs and the reason: lists, requests and the kubelet agree."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.exposition import read_told
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import Answer, nvshim
from tests.harness.waiting import eventually, settled

RESOURCE: Final = "nvidia.com/gpu"
# NVML's order differs from the bus order, as on some boards with L40S.
BUSES: Final = ("0000:da:00.0", "0000:4b:00.0", "0000:31:00.0", "0000:ca:00.0")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    gpus = [{"index": n, "pci": bus, "minor": 3 - n} for n, bus in enumerate(BUSES)]
    directory = str(tmp_path_factory.mktemp("four") / "node")
    with SimulatedNode.create(directory, Scenario.of(4, "l40s", gpu=gpus)) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
        yield node


class Nvml:
    """Controls the node's NVML."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.path = f"{node.state}/nvml-faults"

    def suffers(self, *faults: str) -> None:
        with open(self.path, "w", encoding="ascii") as file:
            file.write("\n".join(faults))

    def listed(self) -> list[Any]:
        # No containerd: others run on this machine.
        where = ("--config", self.node.config_path, "--containerd-state", self.node.dev)
        rows = nvshim("list", *where, "-o", "json").items
        assert [row["index"] for row in rows] == [0, 1, 2, 3]
        return list(rows)

    def asked_for(self, devices: str, directory: Path) -> Answer:
        """Return what a container that requests devices would get."""
        spec = {
            "ociVersion": "1.1.0",
            "process": {
                "args": ["true"],
                "cwd": "/",
                "user": {"uid": 0, "gid": 0},
                "env": [f"NVIDIA_VISIBLE_DEVICES={devices}", "NVIDIA_DRIVER_CAPABILITIES=utility"],
            },
            "root": {"path": "rootfs"},
            "linux": {},
        }
        path = directory / "config.json"
        path.write_text(json.dumps(spec))
        config = ("--config", self.node.config_path)
        return nvshim("explain", str(path), *config, "-o", "json", check=False)

    def refusal(self, devices: str, directory: Path) -> dict[str, str]:
        """Return why a container that requests devices is refused."""
        answer = self.asked_for(devices, directory)
        assert answer.code == 1
        error: dict[str, str] = json.loads(answer.stderr)["error"]
        assert error["code"] == "NVSHIM-E0103"
        return error


@pytest.fixture
def nvml(four: SimulatedNode) -> Iterator[Nvml]:
    """Return the node's NVML, without cached answers."""
    yield Nvml(four)
    for path in Path(four.state).iterdir():
        if path.is_file():
            path.unlink()


def test_each_lost_gpu_has_its_own_reason(nvml: Nvml, tmp_path: Path) -> None:
    nvml.suffers("gpu1=error:15", "gpu3=error:16")
    rows = nvml.listed()
    assert [row["fault"] for row in rows] == [None, "GPU is lost", None, "GPU requires restart"]
    assert [row["pci"] for row in rows if not row["fault"]] == [BUSES[0], BUSES[2]]
    told = " ".join(nvshim("info", "--config", nvml.node.config_path).stdout.split())
    assert told.count("GPU is lost") == told.count("GPU requires restart")
    for index, reason in ((1, "GPU is lost"), (3, "GPU requires restart")):
        error = nvml.refusal(str(index), tmp_path)
        assert error["asked"] == f"GPU {index} ({rows[index]['uuid']})"
        assert error["found"] == f"it is lost: {reason}"
        assert error["do"] == "reset the GPU (nvidia-smi --gpu-reset), or reboot the node"
    given = nvml.asked_for("all", tmp_path).document["record"]["grant"]
    assert [gpu["index"] for gpu in given["gpus"]] == [0, 2]


def test_all_gpus_lost_are_lost_and_not_given_for_want_of_an_answer(
    nvml: Nvml, tmp_path: Path
) -> None:
    nvml.suffers(*(f"gpu{n}=error:15" for n in range(4)))
    assert [row["fault"] for row in nvml.listed()] == ["GPU is lost"] * 4
    error = nvml.refusal("all", tmp_path)
    assert error["found"].count("it is lost: GPU is lost") == 4
    assert error["do"].startswith("reset the GPU")


@pytest.mark.parametrize("what", ["a file", "another minor", "a link"])
def test_a_gpu_whose_node_is_wrong_needs_its_node_and_no_reset(
    nvml: Nvml, tmp_path: Path, what: str
) -> None:
    """NVML opens a GPU through its node, and does not count one that it cannot open."""
    node = Path(nvml.node.dev, "nvidia2")
    own = node.lstat()
    node.unlink()
    if what == "a file":
        node.touch()
    elif what == "a link":
        node.symlink_to("nvidia1")
    else:
        os.mknod(node, own.st_mode, os.makedev(os.major(own.st_rdev), 77))
    try:
        faults = {row["pci"]: row["fault"] for row in nvml.listed()}
        fault = faults.pop(BUSES[1])
        assert fault.startswith(f"{node} is ")
        assert not any(faults.values())
        error = nvml.refusal(BUSES[1], tmp_path)
        assert error["found"] == fault
        assert error["do"].startswith("remove what stands in the node's place")
        told = nvshim("doctor", "--config", nvml.node.config_path, "-o", "json", check=False)
        found = {each["code"]: each["found"] for each in told.document["findings"]}
        assert found["NVSHIM-D009"] == f"/dev/nvidia2: {fault}"
        # D005 also warns of an NVML that was slow to answer, as on a busy machine.
        errors = {f["code"] for f in told.document["findings"] if f["severity"] == "error"}
        assert "NVSHIM-D009" in errors
        assert errors.isdisjoint({"NVSHIM-D004", "NVSHIM-D005", "NVSHIM-D016"})
    finally:
        node.unlink()
        os.mknod(node, own.st_mode, own.st_rdev)
        node.chmod(own.st_mode)


HANGS: Final = "it does not answer"
CRASHES: Final = "NVML crashes when it is asked"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("gpu1=hang", HANGS),
        ("gpu1.nvmlDeviceGetMemoryInfo=crash", CRASHES),
    ],
)
def test_a_gpu_on_which_nvml_hangs_or_crashes_is_lost_alone(
    nvml: Nvml, tmp_path: Path, fault: str, why: str
) -> None:
    nvml.suffers(fault)
    assert [row["fault"] for row in nvml.listed()] == [None, why, None, None]
    assert nvml.refusal("1", tmp_path)["found"] == f"it is lost: {why}"
    given = nvml.asked_for("all", tmp_path).document["record"]["grant"]
    assert [gpu["index"] for gpu in given["gpus"]] == [0, 2, 3]


def test_nor_are_the_mig_devices_of_others_forgotten(tmp_path: Path) -> None:
    gpus = [{"index": n, "mig": ["1g.10gb", "1g.10gb"]} for n in range(2)]
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.of(2, gpu=gpus)) as node:
        nvml = Nvml(node)
        nvml.suffers("gpu0=crash")
        given = nvml.asked_for("1:1", tmp_path).document["record"]["grant"]
        assert [(each["gpu"], each["index"]) for each in given["mig_devices"]] == [(1, 1)]


@pytest.mark.parametrize(
    ("error", "functions"),
    [
        (999, ("MemoryInfo", "UUID", "PciInfo", "MinorNumber")),
        (43, ("Name", "Brand", "CudaComputeCapability", "MigMode")),
    ],
)
def test_one_question_that_fails_costs_one_value(
    nvml: Nvml, tmp_path: Path, error: int, functions: tuple[str, ...]
) -> None:
    expected = nvml.listed()
    nvml.suffers(*(f"gpu{n}.nvmlDeviceGet{each}=error:{error}" for n, each in enumerate(functions)))
    if functions[0] == "MemoryInfo":
        expected[0]["memory_bytes"] = None
    assert nvml.listed() == expected
    given = nvml.asked_for("all", tmp_path).document["record"]["grant"]
    assert [gpu["uuid"] for gpu in given["gpus"]] == [row["uuid"] for row in expected]


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        ("gpu1.nvmlDeviceGetUUID=error:999", False),
        pytest.param("gpu1.nvmlDeviceGetHandleByIndex=error:999", True, marks=pytest.mark.thorough),
        ("count=3", None),
    ],
)
def test_every_part_has_one_judgement_of_a_gpu(
    nvml: Nvml, tmp_path: Path, fault: str, *, lost: bool | None
) -> None:
    """Of the lister, the engine, the kubelet and the metrics; with None, of the last GPU."""
    nvml.suffers(fault)
    uuids = [gpu.uuid for gpu in nvml.node.scenario.gpus]
    ill = {uuids[3] if lost is None else uuids[1]} if lost is not False else set()
    assert {row["uuid"] for row in nvml.listed() if row["fault"]} == ill
    given = nvml.asked_for("all", tmp_path).document["record"]["grant"]
    assert {gpu["uuid"] for gpu in given["gpus"]} == set(uuids) - ill
    more = ("--metrics", "127.0.0.1:0", "--containerd-state", str(tmp_path))
    with (
        KubeletPlugins(str(tmp_path / "kubelet")) as kubelet,
        NodeAgent(nvml.node, str(tmp_path), kubelet.socket, *more) as agent,
    ):
        (served,) = eventually(lambda: agent.said("serving metrics"), "metrics")
        address = served["address"]

        def up() -> dict[str, bool]:
            with urlopen(f"http://{address}/metrics", timeout=60) as answer:
                told = read_told(answer.read().decode())
            series = told["nvshim_gpu_up"].series if "nvshim_gpu_up" in told else {}
            return {dict(labels)["uuid"]: bool(value) for (_, labels), value in series.items()}

        expected = {uuid: uuid not in ill for uuid in uuids}
        eventually(lambda: up() == expected, f"metrics say {expected}")
        assert kubelet.wait_for(RESOURCE, 4 - len(ill)) == set(uuids) - ill
        assert kubelet.devices(RESOURCE).keys() == set(uuids)

        def not_given() -> set[str] | None:
            health = nvshim("list", "--health", "--config", nvml.node.config_path, "-o", "json",
                            check=False)  # fmt: skip
            rows = health.items if health.stdout else None
            return None if rows is None else {row["uuid"] for row in rows if not row["given"]}

        # The agent records it after it has reported to the kubelet.
        assert settled(not_given, ill) == ill
