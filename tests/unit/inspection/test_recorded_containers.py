"""Inspect containers whose devices containerd injected, from specs that a real one wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from integration.cli.app import main
from integration.containers.bundles import TASKS
from integration.simulated import Scenario, SimulatedNode
from tests.harness.launcher import REPOSITORY

RECORDED: Final = f"{REPOSITORY}/tests/recorded/kubernetes-1.36/specs"
CDI: Final = "k8s.device-plugin.nvidia.com/gpu="
PID: Final = 4711


def recorded(name: str, line: str = "2.1.9") -> Any:
    with open(f"{RECORDED}/containerd-{line}/nvidia/{name}.json", encoding="utf-8") as file:
        return json.load(file)


class Tried:
    """A node with one running container, and nvshim on it."""

    def __init__(self, node: SimulatedNode, directory: Path) -> None:
        self.node = node
        self._directory = directory
        self._where = [
            *("--config", node.config_path, "--containerd-state", str(directory / "state")),
            *("--procfs", str(directory / "proc")),
        ]

    def run(self, spec: Any, name: str = "one", **files: str) -> str:
        """Run a container with this spec; return its bundle."""
        bundle = self._directory / "state" / TASKS / "k8s.io" / name
        bundle.mkdir(parents=True)
        for file, text in {
            "config.json": json.dumps(spec), "init.pid": str(PID), **files
        }.items():  # fmt: skip
            (bundle / file).write_text(text)
        process = self._directory / "proc" / str(PID)
        process.mkdir(parents=True, exist_ok=True)
        (process / "stat").write_text(f"{PID} (sleep) S 1 " + "0 " * 40)
        (process / "cgroup").write_text(f"0::/kubepods/pod1/{name}\n")
        return str(bundle)

    def nvshim(self, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        assert main([*words, *self._where]) == 0
        return capsys.readouterr().out

    def holding(self, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
        """Return the UUIDs of the devices in use, according to ``nvshim list``."""
        rows = json.loads(self.nvshim(capsys, "list", "-o", "json", *more))["items"]
        return [row["uuid"] for row in rows if row["containers"]]


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Callable[[str], Tried]]:
    nodes: list[SimulatedNode] = []

    def on(scenario: str) -> Tried:
        made = SimulatedNode.create(str(tmp_path / "node"), Scenario.load(scenario))
        nodes.append(made)
        return Tried(made, tmp_path)

    yield on
    for node in nodes:
        node.remove()


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("two", "gpu-one.main"), ("two", "gpu-init.init-gpu"), ("mig", "mig-a.main")],
)
def test_who_got_its_devices_of_containerd_has_them(
    on: Callable[[str], Tried], capsys: pytest.CaptureFixture[str], scenario: str, name: str
) -> None:
    tried, known = on(scenario), recorded(name)
    given = [each["name"].removeprefix(CDI) for each in known["cri"]["config"]["CDI_devices"]]
    tried.run(known["spec"])
    assert tried.holding(capsys) == given
    told = json.loads(tried.nvshim(capsys, "explain", "one", "-o", "json"))
    assert [each["uuid"] for each in told["given"]["devices"]] == given
    listed = {node["path"] for node in known["spec"]["linux"]["devices"]}
    assert set(told["given"]["nodes"]) == {path for path in listed if "nvidia" in path}
    story = tried.nvshim(capsys, "explain", "one", "-v")
    assert all(uuid in story for uuid in given)
    assert "nothing more requested (NVIDIA_VISIBLE_DEVICES=void)" in story
    short = tried.nvshim(capsys, "explain", "one").splitlines()
    assert len(short) <= 10
    assert max(map(len, short)) <= 80
    kind = "MIG device" if scenario == "mig" else "GPU"
    assert any(line.startswith(f"has        {kind} ") for line in short), short
    # The spec alone, of a container that does not run, gives this line, too.
    path = os.path.join(tried.run(known["spec"], "other"), "config.json")
    assert main(["explain", path, "-v", "--config", tried.node.config_path]) == 0
    alone = capsys.readouterr().out
    # NVML is not queried, so only the device nodes of MIG devices are known.
    assert (scenario == "mig") or all(uuid in alone for uuid in given)
    assert "/dev/nvidia0" in alone or "/dev/nvidia1" in alone


@pytest.mark.parametrize(
    ("name", "line"),
    [("dev-init.main", "2.1.9"), ("gpu-one.main.enable_cdi-unset", "1.7.24")],
)
def test_who_got_nothing_of_ours_has_nothing(
    on: Callable[[str], Tried], capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    tried = on("two")
    tried.run(recorded(name, line)["spec"])
    assert tried.holding(capsys) == []
    told = json.loads(tried.nvshim(capsys, "explain", "one", "-o", "json"))
    assert told["given"] is None
    assert "nothing requested" in told["nothing"]


def claim(node: SimulatedNode, bundle: str, device: str) -> None:
    """Let a container claim a device, as on a node that limits sharing."""
    claims = f"{node.state}/claims"
    os.makedirs(claims)
    kept = {"title": "one", "bundle": bundle, "devices": [device], "parents": []}
    for path, text in ((f"{claims}/0f", json.dumps(kept)), (f"{bundle}/claim", f"{claims}/0f")):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def test_of_a_privileged_container_its_claim_tells_and_not_its_nodes(
    on: Callable[[str], Tried], capsys: pytest.CaptureFixture[str]
) -> None:
    tried = on("two")
    first = tried.node.scenario.gpus[0].uuid
    bundle = tried.run(recorded("privileged.main")["spec"])
    assert tried.holding(capsys) == []
    claim(tried.node, bundle, first)
    assert tried.holding(capsys) == [first]
    assert first in tried.nvshim(capsys, "explain", "one", "-v")


def test_where_nobody_knows_the_devices_the_claim_tells(
    on: Callable[[str], Tried], capsys: pytest.CaptureFixture[str]
) -> None:
    tried, known = on("mig"), recorded("mig-a.main")
    bundle = tried.run(known["spec"])
    part = known["cri"]["config"]["CDI_devices"][0]["name"].removeprefix(CDI)
    # Without NVML, its nodes cannot be matched to MIG devices; and it does not hold the whole GPU.
    assert tried.holding(capsys, "--no-nvml") == []
    claim(tried.node, bundle, part)
    assert part in tried.nvshim(capsys, "explain", "one", "-v")
