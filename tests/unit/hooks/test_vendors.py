"""GPUs of AMD and Intel, on nodes without NVIDIA's driver."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hooks import engine, vendors
from hooks.config import Config, load_config
from hooks.edits.exclusions import refuse_excluded
from hooks.errors import GpuExcluded
from hooks.plan import Device
from hooks.requests.request import Request
from hooks.vendors import amd, intel
from hooks.vendors.gpus import VendorGpu
from hooks.vendors.names import Range, VendorRequest, parse
from hooks.words import Void
from integration.cli.app import main
from integration.simulated import Scenario, SimulatedNode
from tests.harness.raising import raises
from tests.unit.hooks.golden import Golden, outcome

MakeNode = Callable[..., SimulatedNode]

# Two AMD GPUs, the second of them in eight partitions, and two Intel GPUs.
MIXED = {"amd": ["mi210", "mi300x/8"], "intel": ["flex170", "uhd770"]}


@contextmanager
def nodes(directory: Path) -> Iterator[MakeNode]:
    """Return a function that makes nodes, and remove them at the end."""
    with ExitStack() as made:

        def make(**table: Any) -> SimulatedNode:
            scenario = Scenario.parse({"nvidia": False, **table})
            node = SimulatedNode.create(tempfile.mkdtemp(dir=directory) + "/node", scenario)
            made.callback(node.remove)
            return node

        yield make


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Make a node once, which tests must not change."""
    with nodes(tmp_path_factory.mktemp("mixed")) as make:
        yield make(**MIXED)


def config_of(node: SimulatedNode) -> Config:
    return load_config(node.config_path)


# --- What a container gets: vendors.json has the result of each case


@dataclass(frozen=True, slots=True)
class Case:
    """A request on a node.

    Attributes:
        amd, intel: values of the vendors' variables.
        cdi: names of CDI devices.
        change: changes the node first.
        excluded: PCI addresses.
        table: the node's GPUs.
    """

    amd: str = ""
    intel: str = ""
    cdi: tuple[str, ...] = ()
    change: Callable[[SimulatedNode], Any] | None = None
    excluded: tuple[str, ...] = ()
    table: dict[str, list[str]] = field(default_factory=lambda: MIXED)


def without(*names: str) -> Callable[[SimulatedNode], None]:
    """Return a function that removes nodes below /dev/dri."""

    def change(node: SimulatedNode) -> None:
        for name in names:
            os.unlink(f"{node.dev}/dri/{name}")

    return change


def open_to_all(node: SimulatedNode) -> None:
    for name in ("kfd", "dri/card0", "dri/renderD128"):
        os.chmod(f"{node.dev}/{name}", 0o666)


def no_driver(node: SimulatedNode) -> None:
    for name in os.listdir(f"{node.sys}/class/drm"):
        os.unlink(f"{node.sys}/class/drm/{name}")


def another_gpus_node(node: SimulatedNode) -> None:
    """A node under a granted GPU's name would bypass the grant."""
    without("renderD137")(node)
    os.link(f"{node.dev}/dri/renderD138", f"{node.dev}/dri/renderD137")


def kfd_is_a_file(node: SimulatedNode) -> None:
    os.unlink(f"{node.dev}/kfd")
    Path(node.dev, "kfd").touch()


def kfd_lists_more_than_drm(node: SimulatedNode) -> None:
    os.unlink(f"{node.sys}/class/drm/renderD128")


def damaged(content: str) -> Callable[[SimulatedNode], None]:
    def change(node: SimulatedNode) -> None:
        path = Path(node.sys, "class/kfd/kfd/topology/nodes/1/properties")
        path.chmod(0o644)
        path.write_text(content, "latin-1")

    return change


AMD = {"amd": ["mi210"]}
AMD_NAMES = (
    "all", "0", "0,2", "2 , 0", "0-2", "1-2,2,1", "00", "60:00.0", "0000:60:00.0", "0000:61:00.0",
    "renderD130", "RENDERD130,card0", "none,all", "all,none", "ALL", "0,void", " , ",
)  # fmt: skip
INTEL_NAMES = ("all", "1", "0000:40:00.0", "0000-41-00-0-0x4680", "card9,renderD138")
NOT_THERE = ("1", "0-1", "0-999999", "0,nonsense", "-1", "0x0", "2-1")
SECOND = ("0000:61:00.0",)
CASES = {
    **{f"amd {names!r}": Case(amd=names) for names in AMD_NAMES},
    **{f"intel {names!r}": Case(intel=names) for names in INTEL_NAMES},
    **{f"amd {names!r} of one": Case(amd=names, table=AMD) for names in NOT_THERE},
    "both": Case(amd="0", intel="0"),
    "CDI": Case(cdi=("amd.com/gpu=0", "amd.com/gpu=8", "intel.com/gpu=all")),
    "AMD without its driver": Case(amd="all", table={"intel": ["b580"]}),
    "no Intel": Case(intel="all", table=AMD),
    "no Intel, by name": Case(intel="0", table=AMD),
    "Intel without its driver": Case("", "all", change=no_driver, table={"intel": ["arc770"]}),
    "nodes open to all": Case(amd="0", change=open_to_all),
    "no render node": Case(intel="all", change=without("renderD137")),
    "no render node, by name": Case(intel="0,1", change=without("renderD137")),
    "no render nodes": Case(intel="all", change=without("renderD137", "renderD138")),
    "no card node": Case(intel="0", change=without("card9")),
    "another GPU's node": Case(intel="0", change=another_gpus_node),
    "file as kfd": Case(amd="all", change=kfd_is_a_file),
    "KFD knows one more": Case(amd="all", change=kfd_lists_more_than_drm),
    "properties empty": Case(amd="all", change=damaged("")),
    "properties without number": Case(amd="all", change=damaged("location_id\n")),
    "properties with a word": Case(amd="all", change=damaged("drm_render_minor x\n")),
    "properties of garbage": Case(amd="all", change=damaged("\0\xff\n" * 100)),
    "excluded": Case(intel="all", excluded=("0000:41:00.0",)),
    "excluded, by index": Case(intel="1", excluded=("0000:41:00.0",)),
    "excluded, in a range": Case(intel="0-1", excluded=("0000:41:00.0",)),
    "excluded, by address": Case(intel="0000:41:00.0", excluded=("0000:41:00.0",)),
    "partitions excluded": Case(amd="all", excluded=SECOND),
    "partitions excluded, by index": Case(amd="1", excluded=SECOND),
    "partitions excluded, in a range": Case(amd="0-3", excluded=SECOND),
    "partitions excluded, by node": Case(amd="renderD136", excluded=SECOND),
    "partitions excluded, by address": Case(amd="0000:61:00.0", excluded=SECOND),
    "all excluded": Case(amd="all", excluded=("0000:60:00.0", *SECOND)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_container_gets(make_node: MakeNode, mixed: SimulatedNode, name: str) -> None:
    case = CASES[name]
    node = mixed
    if case.change is not None or case.table != MIXED:
        node = make_node(**case.table)
    if case.change is not None:
        case.change(node)
    config = replace(config_of(node), excluded_gpus=case.excluded)
    request = Request(Void(), amd_devices=case.amd, intel_devices=case.intel)
    assert all(map(vendors.known_kind, case.cdi))
    found = outcome(
        lambda: vendors.contribute(request, config, case.cdi), config.dev, {config.dev: "DEV"}
    )
    Golden("vendors.json").compare(name, found)


# --- The GPUs of a node


def test_every_amd_gpu_and_partition_has_an_index(mixed: SimulatedNode) -> None:
    gpus, notes = amd.find(config_of(mixed))
    assert notes == []
    assert [gpu.index for gpu in gpus] == list(range(9))
    assert [gpu.address for gpu in gpus] == ["0000:60:00.0", *["0000:61:00.0"] * 8]
    assert gpus[1].device.name == "0000:61:00.0"
    assert gpus[2].device.name == "amdgpu_xcp_0"


@pytest.mark.parametrize("form", ["0x{:x}", "0X{:X}", "{:016x}", "GPU-{:x}", "gpu-{:016X}"])
def test_unique_id_names_all_partitions_of_an_amd_gpu(mixed: SimulatedNode, form: str) -> None:
    request = Request(Void(), amd_devices=form.format(mixed.scenario.others[1].unique_id))
    (contribution,) = vendors.contribute(request, config_of(mixed))
    assert len(contribution.granted) == 8
    assert all("0000:61:00.0" in name for name in contribution.granted)


@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu=0", "amd.com/nic=0", "amd.com/gpus=0", "intel.com/cxl=0", "0", ""]
)
def test_other_kinds_are_not_looked_up_here(name: str) -> None:
    assert not vendors.known_kind(name)


def test_cdi_file_gives_no_partition_of_an_excluded_gpu(mixed: SimulatedNode) -> None:
    config = replace(config_of(mixed), excluded_gpus=SECOND)
    gpus, _ = amd.find(config)

    def refuse(gpu: VendorGpu) -> None:
        for name in gpu.device.minors:
            number = os.stat(f"{mixed.dev}/dri/{name}").st_rdev
            planned = Device("/dev/x", os.major(number), os.minor(number))
            refuse_excluded([planned], config, None)

    refuse(gpus[0])
    for partition in gpus[1:]:
        with raises(GpuExcluded, match="0000:61:00"):
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


def test_node_without_sysfs_has_none(tmp_path: Path, mixed: SimulatedNode) -> None:
    config = replace(config_of(mixed), sys=f"{tmp_path}/nothing")
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
    assert parse(value, "AMD_VISIBLE_DEVICES") == VendorRequest(
        items, f"AMD_VISIBLE_DEVICES={value}"
    )


def test_a_second_look_sees_a_gpu_that_has_come(make_node: MakeNode) -> None:
    node = make_node(intel=["arc770", "b580"])
    link = f"{node.sys}/class/drm/renderD129"
    target = os.readlink(link)
    os.unlink(link)
    assert len(intel.find(config_of(node))) == 1
    os.symlink(target, link)
    assert len(intel.find(config_of(node))) == 2


def test_explanation_says_what_is_given_of_whom(
    make_node: MakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_node(**MIXED)
    spec = {
        "process": {"env": ["AMD_VISIBLE_DEVICES=0", "INTEL_VISIBLE_DEVICES=all"], "user": {}},
    }
    without("renderD137")(node)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec))
    assert main(["explain", str(path), "--config", node.config_path]) == 0
    told = capsys.readouterr().out
    assert "granted    AMD GPU 0 (0000:60:00.0), Intel GPU 1 (0000:41:00.0)" in told
    assert main(["explain", "-v", str(path), "--config", node.config_path]) == 0
    told = capsys.readouterr().out
    assert "AMD: AMD GPU 0 (0000:60:00.0)" in told
    assert "Intel: Intel GPU 1 (0000:41:00.0)" in told
    assert "note: Intel GPU 0" in told
    assert "/dev/kfd" in told
