"""Creating, finding and removing a node; a failed creation leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cli.app import main as nvshim
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.errors import DevicesForbidden, LibraryNotBuilt, NodeExists, NodeNotFound
from tests.harness.raising import raises


def main(arguments: list[str]) -> int:
    return nvshim(["simulate", *arguments])


@pytest.fixture
def nodev(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system on which device nodes cannot be opened."""
    directory = tmp_path / "nodev"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nodev", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def test_the_configuration_names_the_nodes_roots(two: SimulatedNode) -> None:
    here = two.directory
    assert Path(two.config_path).read_text() == (
        "[node]\n"
        f'driver-root = "{here}/driver"\n'
        f'dev = "{here}/dev"\n'
        f'proc = "{here}/proc"\n'
        f'sys = "{here}/sys"\n'
        f'state = "{here}/state"\n'
        f'layers = "{here}/layers"\n'
        f'drained = "{here}/drained"\n'
    )
    for path in (two.driver_root, two.dev, two.proc, two.sys, two.state):
        assert os.path.isdir(path)


def test_the_configuration_of_an_odd_directory_is_toml(tmp_path: Path) -> None:
    odd = str(tmp_path / 'a "quoted" \\ name')
    with (
        SimulatedNode.create(odd, Scenario.of(1, "t4")) as node,
        open(node.config_path, "rb") as file,
    ):
        assert tomllib.load(file)["node"]["dev"] == f"{odd}/dev"


def test_a_node_is_found_again(mig: SimulatedNode) -> None:
    assert SimulatedNode.open(mig.directory) == SimulatedNode(
        mig.directory,
        Scenario.load(os.path.join(mig.directory, "scenario.toml")),
        mig.driver_version,
    )
    assert SimulatedNode.open(mig.directory).scenario.gpus == mig.scenario.gpus


def test_a_node_is_made_quickly_and_removed_wholly(tmp_path: Path) -> None:
    before = sum(os.times()[:4])
    node = SimulatedNode.create(str(tmp_path / "node"), Scenario.load("eight"))
    # CPU time of this process and the compiler: about 0.7 s, however busy the machine is.
    assert sum(os.times()[:4]) - before < 10
    node.remove()
    assert os.listdir(tmp_path) == []
    node.remove()


def test_a_node_is_removed_when_its_block_is_left(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        SimulatedNode.create(str(tmp_path / "node"), Scenario.of(1, "t4")),
    ):
        _ = 1 / 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "full directory", "dangling link"])
def test_what_is_there_already_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "node"
    if kind == "file":
        path.write_text("mine")
    elif kind == "full directory":
        path.mkdir()
        (path / "mine").write_text("mine")
    else:
        path.symlink_to("nowhere")
    with raises(NodeExists, match="it is not empty"):
        SimulatedNode.create(str(path), Scenario.of())
    assert os.path.lexists(path)
    if kind == "full directory":
        assert os.listdir(path) == ["mine"]


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    with SimulatedNode.create(str(tmp_path), Scenario.of(1, "t4")) as node:
        assert os.path.exists(node.config_path)


def test_nothing_is_left_of_a_node_whose_library_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: SimulatedNode
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", str(binaries))
    unseen = Scenario.of(nvml_lacks=["nvmlOfNoOtherScenario"])  # its library is not built yet
    with raises(LibraryNotBuilt):
        SimulatedNode.create(str(tmp_path / "node"), unseen)
    assert os.listdir(tmp_path) == ["bin"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("x" * 300, "file name too long"),
        ("\udcff", "its path is not UTF-8"),
        ("full/node", "no space left on device"),
    ],
)
def test_a_directory_that_cannot_be_written_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", full], check=True)
    try:
        assert main(["create", f"{tmp_path}/{name}"]) == 1
        assert os.listdir(full) == []
    finally:
        subprocess.run(["umount", full], check=True)
    assert os.listdir(tmp_path) == ["full"]
    line = capfd.readouterr().err.splitlines()[-1]
    assert re.match(f"NVSHIM-E2108 node-unwritten: .*{told}", line)


def test_a_file_system_without_device_nodes_is_refused(nodev: Path) -> None:
    with raises(DevicesForbidden, match="mounted nodev"):
        SimulatedNode.create(str(nodev / "node"), Scenario.of())
    assert os.listdir(nodev) == []


@pytest.mark.parametrize("kind", ["missing", "empty", "moved", "foreign"])
def test_a_directory_that_is_no_node_is_not_found(
    tmp_path: Path, two: SimulatedNode, kind: str
) -> None:
    path = tmp_path / "node"
    if kind != "missing":
        path.mkdir()
    if kind == "moved":
        (path / "config.toml").write_text(Path(two.config_path).read_text())
    if kind == "foreign":
        (path / "config.toml").write_text("[node]\ndev = '/dev'\n")
    with raises(NodeNotFound):
        SimulatedNode.open(str(path))


# --- From a shell


def test_a_node_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "node")
    assert main(["create", directory, "--gpus", "2", "--model", "l4", "--no-drm"]) == 0
    created = capsys.readouterr().out
    assert "GPU 1: NVIDIA L4 (GPU-" in created
    assert f"nvshim list --config {directory}/config.toml" in created
    assert main(["show", directory]) == 0
    assert capsys.readouterr().out == created.partition("\nUse it:")[0]
    assert main(["list", "--in", str(tmp_path), "-o", "json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["items"]
    assert (listed["config"], len(listed["gpus"])) == (f"{directory}/config.toml", 2)
    assert main(["list", "--in", str(tmp_path)]) == 0
    assert "2 of NVIDIA L4" in capsys.readouterr().out
    assert not os.path.exists(f"{directory}/dev/dri")
    assert main(["remove", directory]) == 0
    assert os.listdir(tmp_path) == []


def test_a_node_with_a_name_is_on_the_shelf_and_goes_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = ["--in", str(tmp_path / "shelf")]
    assert main(["create", *shelf, "mine", "--no-drm"]) == 0
    assert main(["create", *shelf, "yours", "--no-drm"]) == 0
    (tmp_path / "shelf/other").mkdir()
    capsys.readouterr()
    assert main(["list", *shelf, "-o", "json"]) == 0
    listed = [node["directory"] for node in json.loads(capsys.readouterr().out)["items"]]
    assert listed == [f"{tmp_path}/shelf/mine", f"{tmp_path}/shelf/yours"]
    (tmp_path / "shelf/other").rmdir()
    assert main(["remove", *shelf, "mine"]) == 0
    assert os.listdir(tmp_path / "shelf") == ["yours"]
    assert main(["remove", *shelf, "yours"]) == 0
    assert os.listdir(tmp_path) == []


def test_every_scenario_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios", "-o", "json"]) == 0
    listed = {row["name"]: row["what"] for row in json.loads(capsys.readouterr().out)["items"]}
    assert {"one", "two", "eight", "sixteen", "mig", "full"} <= set(listed)
    assert all(listed.values())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "{}"], "NVSHIM-E2103"),
        (["remove", "{}"], "NVSHIM-E2103"),
        (["create", "{}", "--model", "voodoo"], "NVSHIM-E2101"),
        (["create", "{}", "--scenario", "nowhere"], "NVSHIM-E2101"),
        (["create", "{}", "--scenario", "two", "--gpus", "3"], "NVSHIM-E2101"),
    ],
)
def test_a_mistake_at_the_shell_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    directory = str(tmp_path / "node")
    assert main([argument.format(directory) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{code} ")
    assert captured.err.count("\n") == 1
    assert os.listdir(tmp_path) == []
