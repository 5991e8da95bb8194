from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hooks.config import load_config
from hooks.errors import DriverNotFound
from hooks.node.inventory import survey, take_inventory
from integration import exits
from integration.cli.app import main
from integration.containers.bundles import Container
from integration.inspection.gpus import gpu_rows, list_gpus
from integration.inspection.node import describe_node
from integration.simulated import Scenario, SimulatedNode
from tests.unit.hooks.fake_node import VERSION, Node, nvml_gpu, uuid_of

ABSENT = "GPU-00000000-0000-4000-8000-00000000dead"


def container(name: str, *, pid: int = 1, **record: Any) -> Container:
    return Container(name, "k8s.io", f"/b/{name}", None, "", name, False, pid, record)


def granted(*uuids: str, mig: tuple[str, ...] = (), paths: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "grant": {
            "gpus": [{"uuid": uuid, "index": 9, "model": "gone"} for uuid in uuids],
            "mig_devices": [{"uuid": uuid, "gpu": 1, "index": 0} for uuid in mig],
        },
        "edits": {"devices": [{"path": path} for path in paths]},
    }


def holders(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {row["uuid"]: [c["id"] for c in row["containers"]] for row in rows}


def told(*gpus: dict[str, Any]) -> bytes:
    return json.dumps({"driver": VERSION, "gpus": gpus}).encode()


def test_containers_are_listed_with_what_they_hold(node: Node) -> None:
    containers = [
        container("first", **granted(uuid_of(0), paths=("/dev/nvidia0",))),
        container("both", **granted(uuid_of(0), uuid_of(1))),
        # By a CDI spec: the record has only the nodes of its devices.
        container("cdi", grant=None, edits={"devices": [{"path": "/dev/nvidia1"}]}),
        container("denied", policy={}),
        container("absent", **granted(ABSENT)),
    ]
    rows = gpu_rows(survey(node.config), node.config, containers)
    assert holders(rows) == {
        uuid_of(0): ["first", "both"],
        uuid_of(1): ["both", "cdi"],
        ABSENT: ["absent"],
    }
    assert rows[2]["fault"] == "a container holds it, but the node no longer has it"
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


@pytest.mark.parametrize(
    "record",
    [
        {"grant": 5, "vendors": 3, "edits": []},
        {"grant": {"gpus": [5, {"uuid": [1]}]}, "edits": {"devices": [7, {}]}},
        {"grant": {"mig_devices": {"uuid": "x"}}, "edits": {"devices": 7}},
    ],
)
def test_a_record_of_another_shape_holds_nothing(node: Node, record: dict[str, Any]) -> None:
    rows = list_gpus(node.config, [container("odd", **record)], nvml=False)
    assert rows
    assert all(row["containers"] == [] for row in rows)


def test_what_has_ended_holds_nothing(node: Node) -> None:
    ended = container("ended", pid=0, **granted(uuid_of(0)))
    assert holders(list_gpus(node.config, [ended], nvml=False))[uuid_of(0)] == []


def test_who_may_not_know_of_containers_is_told_of_gpus(node: Node) -> None:
    rows = list_gpus(node.config, None, nvml=False)
    assert [(row["uuid"], row["containers"]) for row in rows] == [
        (uuid_of(0), None), (uuid_of(1), None),
    ]  # fmt: skip


def test_who_has_a_mig_device_has_not_its_gpu(node: Node) -> None:
    mig = "MIG-11111111-0000-4000-8000-000000000000"
    device = {
        "index": 0, "uuid": mig, "gpu_instance": 1, "compute_instance": 0, "profile": "1g.10gb",
    }  # fmt: skip
    gpu = {**nvml_gpu(1), "mig": True, "mig_devices": [device]}
    inventory = take_inventory(node.config, told(nvml_gpu(0), gpu))
    holder = container("part", **granted(mig=(mig,), paths=("/dev/nvidia1",)))
    rows = gpu_rows(inventory, node.config, [holder])
    assert [(row["kind"], row["index"], row["mig_index"]) for row in rows] == [
        ("gpu", 0, None), ("gpu", 1, None), ("mig", 1, 0),
    ]  # fmt: skip
    assert holders(rows) == {uuid_of(0): [], uuid_of(1): [], mig: ["part"]}
    assert rows[2]["profile"] == "1g.10gb"
    assert rows[2]["name"].endswith("MIG 1g.10gb")


def test_a_gpu_without_a_node_has_a_fault(node: Node) -> None:
    (node.base / "dev/nvidia1").unlink()
    rows = list_gpus(node.config, [], nvml=False)
    assert rows[0]["fault"] is None
    assert "No such file or directory" in rows[1]["fault"]


def test_without_a_driver_it_is_one_line(
    bare_node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DriverNotFound):
        list_gpus(bare_node.config, [])
    found = describe_node(bare_node.config)
    assert found["driver"] is None
    assert found["driver_error"]["code"] == "NVSHIM-E0102"
    assert (found["gpus"], found["devices"], found["inventory"]) == ([], [], None)
    assert not any(root["chosen"] for root in found["roots"])
    monkeypatch.setattr("hooks.config.load_config", lambda path: bare_node.config)
    assert main(["list", "--containerd-state", "/nonexistent"]) == exits.FAILED
    assert capsys.readouterr().err.startswith("NVSHIM-E0102 ")
    assert main(["info"]) == exits.OK
    assert "NVSHIM-E0102" in capsys.readouterr().out


def test_space_of_layers_is_told_by_what_it_is(node: Node) -> None:
    node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    layer = Path(node.config.layers, f"01234567-{64 * '0'}/fs/usr/lib")
    layer.mkdir(parents=True)
    copies = Path(node.config.layers, ".files")
    copies.mkdir()
    libcuda = next(node.driver.rglob("libcuda.so.*"))
    (layer / "libcuda.so").hardlink_to(libcuda)
    for name, size in (("copied", 3 << 20), ("other", 1 << 20)):
        (layer / name).write_bytes(bytes(size))
    (copies / "x").hardlink_to(layer / "copied")
    found = describe_node(node.config, nvml=False)["layers"]
    assert (found["directory"], found["layers"]) == (node.config.layers, 1)
    assert found["linked_bytes"] == libcuda.stat().st_blocks * 512
    assert (found["copied_bytes"], found["other_bytes"]) == (3 << 20, 1 << 20)
    assert found["driver_layer"]


def test_freshness_says_where_it_comes_from_and_why_it_is_stale(node: Node) -> None:
    found = describe_node(node.config, nvml=False)["inventory"]
    assert (found["source"], found["kept"], found["stale"]) == ("procfs", False, "nothing was kept")
    assert found["key"] is None
    assert found["nvml"] == "NVML was not asked"
    take_inventory(node.config, told(nvml_gpu(0), nvml_gpu(1)))
    found = describe_node(node.config, nvml=False)["inventory"]
    assert (found["source"], found["kept"], found["stale"]) == ("kept", True, None)
    assert 0 <= found["age_seconds"] < 60
    assert found["key"]["observations"] > 10
    node.add_gpu(2)
    found = describe_node(node.config, nvml=False)["inventory"]
    assert found["source"] == "procfs"
    assert found["stale"].endswith("/proc/driver/nvidia/gpus is not as it was")
    with open(found["file"], "w") as file:
        file.write("{")
    assert describe_node(node.config, nvml=False)["inventory"]["stale"] == "it is damaged"


@pytest.mark.parametrize(
    ("platform", "vendor"), [("tegra", "NVIDIA Tegra"), ("wsl", "NVIDIA WSL2")]
)
def test_a_driver_that_counts_no_gpus_is_one(node: Node, platform: str, vendor: str) -> None:
    config = replace(node.config, platform=platform)
    holder = container("has", vendors=[{"vendor": vendor, "granted": ["GPU 0"]}])
    other = container("none", vendors=[{"vendor": vendor, "granted": []}])
    (row,) = list_gpus(config, [holder, other])
    assert (row["vendor"], row["uuid"], row["index"]) == (vendor, None, None)
    assert [c["id"] for c in row["containers"]] == ["has"]
    assert list(row) == list(gpu_rows(survey(node.config), node.config, [])[0])
    found = describe_node(config)
    assert (found["platform"], found["driver"], found["driver_error"]) == (platform, None, None)


def test_gpus_of_other_vendors_need_no_driver_of_nvidias(tmp_path: Path) -> None:
    scenario = Scenario.parse({"gpus": 0, "nvidia": False, "amd": ["mi300x"], "intel": ["flex170"]})
    with SimulatedNode.create(str(tmp_path / "node"), scenario) as simulated:
        config = load_config(simulated.config_path)
        holder = container("has", edits={"devices": [{"path": "/dev/dri/renderD129"}]})
        rows = list_gpus(config, [holder])
    assert [row["vendor"] for row in rows] == ["AMD", "Intel"]
    assert all(row["pci"] and row["name"] for row in rows)
    assert sorted(len(row["containers"]) for row in rows) == [0, 1]


def test_nothing_is_changed_by_looking(node: Node) -> None:
    def everything() -> set[tuple[str, float]]:
        return {(str(path), path.lstat().st_mtime) for path in node.base.rglob("*")}

    before = everything()
    list_gpus(node.config, [])
    describe_node(node.config)
    assert everything() == before
