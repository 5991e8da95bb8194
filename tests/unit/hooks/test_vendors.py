"""GPUs of AMD and Intel, found on nodes that have nothing of NVIDIA's driver."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from api.values import changed
from hooks import engine, vendors
from hooks.config import Config, load_config
from hooks.edits.plan import Device
from hooks.requests.exclusions import refuse_excluded
from hooks.requests.names import Void
from hooks.requests.policy_errors import GpuExcluded
from hooks.requests.request import Request
from hooks.vendors import amd, intel
from hooks.vendors.errors import (
    MalformedVendorRange,
    NoVendorDriver,
    NoVendorGpus,
    UnknownVendorGpu,
    VendorNodeMissing,
)
from hooks.vendors.names import Asked, Range, parse
from integration.cli.app import main
from integration.simulated import Scenario, SimulatedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hooks.edits.plan import Contribution
    from hooks.errors import InventoryError, RequestError
    from hooks.vendors.gpus import VendorGpu

    MakeNode = Callable[..., SimulatedNode]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[SimulatedNode] = []

    def make(**table: Any) -> SimulatedNode:
        scenario = Scenario.parse({"nvidia": False, **table})
        made.append(SimulatedNode.create(str(tmp_path / f"node-{len(made)}"), scenario))
        return made[-1]

    yield make
    for node in made:
        node.remove()


@pytest.fixture
def mixed(make_node: MakeNode) -> SimulatedNode:
    """Two AMD GPUs, the second of them in eight partitions, and two Intel GPUs."""
    return make_node(amd=["mi210", "mi300x/8"], intel=["flex170", "uhd770"])


def config_of(node: SimulatedNode) -> Config:
    return load_config(node.config_path)


def given(node: SimulatedNode, *, amd: str = "", intel: str = "") -> Contribution:
    request = Request(Void(), amd_devices=amd, intel_devices=intel)
    (contribution,) = vendors.contribute(request, config_of(node))
    return contribution


def paths(contribution: Contribution) -> list[str]:
    return [device.path for device in contribution.plan.devices]


def test_every_amd_gpu_and_partition_has_an_index(mixed: SimulatedNode) -> None:
    gpus, notes = amd.find(config_of(mixed))
    assert notes == []
    assert [gpu.index for gpu in gpus] == list(range(9))
    assert [gpu.address for gpu in gpus] == ["0000:60:00.0", *["0000:61:00.0"] * 8]
    assert gpus[1].device.name == "0000:61:00.0"
    assert gpus[2].device.name == "amdgpu_xcp_0"


def test_all_amd_gpus_are_kfd_and_every_node_of_theirs(mixed: SimulatedNode) -> None:
    contribution = given(mixed, amd="all")
    expected = [f"/dev/dri/card{n}" for n in range(9)]
    expected += [f"/dev/dri/renderD{n}" for n in range(128, 137)]
    assert sorted(paths(contribution)) == sorted(["/dev/kfd", *expected])
    assert contribution.vendor == "AMD"
    assert len(contribution.granted) == 9
    assert contribution.source_roots == ()


@pytest.mark.parametrize(
    ("asked", "renders"),
    [
        ("0", [128]),
        ("0,2", [128, 130]),
        ("2 , 0", [128, 130]),
        ("0-2", [128, 129, 130]),
        ("1-2,2,1", [129, 130]),
        ("00", [128]),
        ("60:00.0", [128]),
        ("0000:60:00.0", [128]),
        ("0000:61:00.0", list(range(129, 137))),
        ("renderD130", [130]),
        ("RENDERD130,card0", [128, 130]),
        ("none,all", []),
        ("all,none", list(range(128, 137))),
        ("ALL", list(range(128, 137))),
        ("0,void", []),
        (" , ", []),
    ],
)
def test_amd_gpus_are_named_as_amds_toolkit_names_them(
    mixed: SimulatedNode, asked: str, renders: list[int]
) -> None:
    request = Request(Void(), amd_devices=asked)
    found = vendors.contribute(request, config_of(mixed))
    minors = sorted(d.minor for each in found for d in each.plan.devices if "render" in d.path)
    assert minors == renders


@pytest.mark.parametrize("form", ["0x{:x}", "0X{:X}", "{:016x}", "GPU-{:x}", "gpu-{:016X}"])
def test_unique_id_names_all_partitions_of_an_amd_gpu(mixed: SimulatedNode, form: str) -> None:
    unique_id = mixed.scenario.others[1].unique_id
    contribution = given(mixed, amd=form.format(unique_id))
    assert len(contribution.granted) == 8
    assert all("0000:61:00.0" in name for name in contribution.granted)


@pytest.mark.parametrize(
    ("asked", "cards"),
    [
        ("all", [9, 10]),
        ("1", [10]),
        ("0000:40:00.0", [9]),
        ("0000-41-00-0-0x4680", [10]),
        ("card9,renderD138", [9, 10]),
    ],
)
def test_intel_gpus_have_render_and_card_nodes(
    mixed: SimulatedNode, asked: str, cards: list[int]
) -> None:
    contribution = given(mixed, intel=asked)
    expected = [f"/dev/dri/{name}" for n in cards for name in (f"card{n}", f"renderD{128 + n}")]
    assert sorted(paths(contribution)) == sorted(expected)
    assert contribution.majors == {226}


def test_nodes_that_not_everybody_may_open_bring_their_groups(mixed: SimulatedNode) -> None:
    contribution = given(mixed, amd="0")
    gids = {os.stat(f"{mixed.dev}/{name}").st_gid for name in ("kfd", "dri/card0")}
    assert set(contribution.plan.additional_gids) == gids
    os.chmod(f"{mixed.dev}/kfd", 0o666)
    for name in ("card0", "renderD128"):
        os.chmod(f"{mixed.dev}/dri/{name}", 0o666)
    assert given(mixed, amd="0").plan.additional_gids == ()


def test_by_path_links_lead_to_the_granted_gpus_alone(mixed: SimulatedNode) -> None:
    (directory,) = given(mixed, intel="1").plan.link_directories
    assert directory.path == "/dev/dri/by-path"
    assert dict(directory.links) == {
        "pci-0000:41:00.0-card": "../card10",
        "pci-0000:41:00.0-render": "../renderD138",
    }


def test_two_vendors_are_two_contributions_with_bounds_of_their_own(mixed: SimulatedNode) -> None:
    request = Request(Void(), amd_devices="0", intel_devices="0")
    ours, theirs = vendors.contribute(request, config_of(mixed))
    kfd = os.major(os.stat(f"{mixed.dev}/kfd").st_rdev)
    assert ours.majors == {226, kfd}
    assert theirs.majors == {226}


def test_cdi_names_mean_what_the_variable_means(mixed: SimulatedNode) -> None:
    names = ["amd.com/gpu=0", "amd.com/gpu=8", "intel.com/gpu=all"]
    assert all(map(vendors.known_kind, names))
    ours, theirs = vendors.contribute(Request(Void()), config_of(mixed), names)
    assert [name.split(" (")[0] for name in ours.granted] == ["AMD GPU 0", "AMD GPU 8"]
    assert len(theirs.granted) == 2


@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu=0", "amd.com/nic=0", "amd.com/gpus=0", "intel.com/cxl=0", "0", ""]
)
def test_other_kinds_are_not_looked_up_here(name: str) -> None:
    assert not vendors.known_kind(name)


@pytest.mark.parametrize(
    ("table", "asked", "error", "named"),
    [
        ({"amd": ["mi210"]}, {"amd": "1"}, UnknownVendorGpu, "0 (0000:60:00.0)"),
        ({"amd": ["mi210"]}, {"amd": "0-1"}, UnknownVendorGpu, "AMD GPU 0-1"),
        ({"amd": ["mi210"]}, {"amd": "0-999999"}, UnknownVendorGpu, "999999"),
        ({"amd": ["mi210"]}, {"amd": "0,nonsense"}, UnknownVendorGpu, "nonsense"),
        ({"amd": ["mi210"]}, {"amd": "-1"}, UnknownVendorGpu, "-1"),
        ({"amd": ["mi210"]}, {"amd": "0x0"}, UnknownVendorGpu, "0x0"),
        ({"amd": ["mi210"]}, {"amd": "2-1"}, MalformedVendorRange, "write 1-2"),
        ({"intel": ["b580"]}, {"amd": "all"}, NoVendorDriver, "amdgpu"),
        ({"amd": ["mi210"]}, {"intel": "all"}, NoVendorGpus, "no Intel GPU"),
        ({"amd": ["mi210"]}, {"intel": "0"}, UnknownVendorGpu, "no Intel GPU"),
    ],
)
def test_what_the_node_does_not_have_is_a_typed_error(
    make_node: MakeNode,
    table: dict[str, list[str]],
    asked: dict[str, str],
    error: type[InventoryError | RequestError],
    named: str,
) -> None:
    with pytest.raises(error) as raised:
        given(make_node(**table), **asked)
    assert named in str(raised.value)


def test_intel_gpu_without_a_driver_is_told_from_none(make_node: MakeNode) -> None:
    node = make_node(intel=["arc770"])
    for name in os.listdir(f"{node.sys}/class/drm"):
        os.unlink(f"{node.sys}/class/drm/{name}")
    with pytest.raises(NoVendorDriver, match=r"0000:40:00\.0"):
        given(node, intel="all")


def test_gpu_without_its_render_node_is_left_out_of_all_and_refused_by_name(
    mixed: SimulatedNode,
) -> None:
    os.unlink(f"{mixed.dev}/dri/renderD137")
    contribution = given(mixed, intel="all")
    assert [name.split(" (")[0] for name in contribution.granted] == ["Intel GPU 1"]
    assert any("renderD137" in note for note in contribution.notes)
    with pytest.raises(VendorNodeMissing, match="renderD137"):
        given(mixed, intel="0,1")
    os.unlink(f"{mixed.dev}/dri/renderD138")
    with pytest.raises(NoVendorGpus, match="renderD138"):
        given(mixed, intel="all")


def test_excluded_gpu_is_left_out_of_all_and_refused_by_name(mixed: SimulatedNode) -> None:
    first, second = intel.find(config_of(mixed))
    config = changed(config_of(mixed), excluded_gpus=(second.address,))
    (contribution,) = vendors.contribute(Request(Void(), intel_devices="all"), config)
    assert contribution.granted == (str(first),)
    assert any("excluded" in note for note in contribution.notes)
    for name in ("1", "0-1", second.address):
        with pytest.raises(GpuExcluded, match=second.address):
            vendors.contribute(Request(Void(), intel_devices=name), config)


def test_excluded_gpu_is_in_no_all_with_all_its_partitions(mixed: SimulatedNode) -> None:
    config = changed(config_of(mixed), excluded_gpus=("0000:61:00.0",))
    (contribution,) = vendors.contribute(Request(Void(), amd_devices="all"), config)
    assert [name.split(" (")[0] for name in contribution.granted] == ["AMD GPU 0"]
    assert len(contribution.notes) == 8
    for named in ("1", "0-3", "renderD136", "0000:61:00.0"):
        with pytest.raises(GpuExcluded):
            vendors.contribute(Request(Void(), amd_devices=named), config)
    config = changed(config, excluded_gpus=("0000:60:00.0", "0000:61:00.0"))
    with pytest.raises(NoVendorGpus, match="excluded by the configuration and 1 more") as raised:
        vendors.contribute(Request(Void(), amd_devices="all"), config)
    assert raised.value.do == ""


def test_cdi_file_gives_no_partition_of_an_excluded_gpu(mixed: SimulatedNode) -> None:
    config = changed(config_of(mixed), excluded_gpus=("0000:61:00.0",))
    gpus, _ = amd.find(config)

    def refuse(gpu: VendorGpu) -> None:
        for name in gpu.device.minors:
            number = os.stat(f"{mixed.dev}/dri/{name}").st_rdev
            planned = Device("/dev/x", os.major(number), os.minor(number))
            refuse_excluded([planned], config, None)

    refuse(gpus[0])
    for partition in gpus[1:]:
        with pytest.raises(GpuExcluded, match="0000:61:00"):
            refuse(partition)


@pytest.mark.parametrize("variable", ["AMD_VISIBLE_DEVICES", "INTEL_VISIBLE_DEVICES"])
@pytest.mark.parametrize("asked", ["all", "0", "0000:60:00.0"])
def test_image_of_an_unprivileged_pod_is_not_believed(variable: str, asked: str) -> None:
    spec = {
        "process": {"env": [f"{variable}={asked}"], "capabilities": {"bounding": []}},
        "annotations": {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-namespace": "default",
        },
    }
    config = Config()
    verdict = engine.judge(spec, engine.read_request(spec, config), config)
    assert not verdict.allowed.wants_injection
    assert f"{variable}={asked}" in verdict.denials[0]
    spec["annotations"] = {}
    verdict = engine.judge(spec, engine.read_request(spec, config), config)
    assert verdict.allowed.wants_injection, "outside of a pod it is a person's word"


def test_missing_card_node_is_noted_and_no_error(mixed: SimulatedNode) -> None:
    os.unlink(f"{mixed.dev}/dri/card9")
    contribution = given(mixed, intel="0")
    assert paths(contribution) == ["/dev/dri/renderD137"]
    assert [missing.what for missing in contribution.plan.missing] == ["/dev/dri/card9"]


def test_node_that_is_another_device_is_not_given(mixed: SimulatedNode) -> None:
    """A node of another GPU under the name of one that was granted would be a way around it."""
    os.unlink(f"{mixed.dev}/dri/renderD137")
    os.link(f"{mixed.dev}/dri/renderD138", f"{mixed.dev}/dri/renderD137")
    with pytest.raises(VendorNodeMissing, match=r"226:138, not 226:137"):
        given(mixed, intel="0")


def test_file_where_kfd_belongs_is_no_driver(mixed: SimulatedNode) -> None:
    os.unlink(f"{mixed.dev}/kfd")
    with open(f"{mixed.dev}/kfd", "w"):
        pass
    with pytest.raises(NoVendorDriver, match="no character device"):
        given(mixed, amd="all")


def test_kfd_node_without_a_render_node_is_noted(mixed: SimulatedNode) -> None:
    os.unlink(f"{mixed.sys}/class/drm/renderD128")
    gpus, notes = amd.find(config_of(mixed))
    assert len(gpus) == 8
    assert "no render node" in notes[0]


@pytest.mark.parametrize("damage", ["", "location_id\n", "drm_render_minor x\n", "\0\xff\n" * 100])
def test_damaged_properties_take_a_gpu_away_and_nothing_else(
    mixed: SimulatedNode, damage: str
) -> None:
    path = f"{mixed.sys}/class/kfd/kfd/topology/nodes/1/properties"
    os.chmod(path, 0o644)
    with open(path, "w", encoding="latin-1") as file:
        file.write(damage)
    assert len(amd.find(config_of(mixed))[0]) == 8


def test_node_without_sysfs_has_none(tmp_path: Path, mixed: SimulatedNode) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[node]\nsys = "{tmp_path}/nothing"\ndev = "{mixed.dev}"\n')
    config = load_config(str(path))
    assert amd.find(config) == ((), [])
    assert intel.find(config) == ()


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("0,1-3", (Range(0, 0), Range(1, 3))),
        ("A,a,b", ("a", "b")),
        ("1234567", ("1234567",)),
        ("٣", ("٣",)),
    ],
)
def test_items_of_a_list(value: str, items: tuple[Range | str, ...]) -> None:
    assert parse(value, "AMD_VISIBLE_DEVICES") == Asked(items, f"AMD_VISIBLE_DEVICES={value}")


def test_a_second_look_sees_a_gpu_that_has_come(make_node: MakeNode) -> None:
    node = make_node(intel=["arc770", "b580"])
    link = f"{node.sys}/class/drm/renderD129"
    target = os.readlink(link)
    os.unlink(link)
    assert len(given(node, intel="all").granted) == 1
    os.symlink(target, link)
    assert len(given(node, intel="all").granted) == 2


def test_explanation_says_what_is_given_of_whom(
    mixed: SimulatedNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "process": {"env": ["AMD_VISIBLE_DEVICES=0", "INTEL_VISIBLE_DEVICES=all"], "user": {}},
    }
    os.unlink(f"{mixed.dev}/dri/renderD137")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec))
    assert main(["explain", str(path), "--config", mixed.config_path]) == 0
    told = capsys.readouterr().out
    assert "AMD: AMD GPU 0 (0000:60:00.0)" in told
    assert "Intel: Intel GPU 1 (0000:41:00.0)" in told
    assert "note: Intel GPU 0" in told
    assert "/dev/kfd" in told
