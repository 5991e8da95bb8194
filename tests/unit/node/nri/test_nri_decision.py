"""The devices that NRI grants: only the kubelet's record decides, and nothing that a pod writes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.proto import deviceplugin_pb2
from api.proto import nri_pb2 as pb
from hooks.config import Mode
from hooks.errors import OutOfService
from hooks.node.drained import path_of
from hooks.node.inventory import Inventory
from hooks.requests.kubelet_record import CHECKPOINT
from integration.agent_errors import NriUndecided, NriUnlimited, NriUnmapped, NriVariableLost
from integration.containers.nri_records import record_path
from integration.node.services.nri import records
from integration.node.services.nri.decision import NOTHING, Decision, decide
from tests.harness.kubelet_root import KubeletRoot
from tests.harness.own_process import restored
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import Node, nvml_gpu, uuid_of

DEVICES = "NVIDIA_VISIBLE_DEVICES"
FIRST, SECOND = uuid_of(0), uuid_of(1)
VICTIM = "11111111-2222-3333-4444-555555555555"
MINE = "99999999-2222-3333-4444-555555555555"
LIBRARIES = "/dev/containerd-shim-nvidia/x86_64"
MOUNTS = (
    pb.Mount(destination="/proc", type="proc", source="proc"),
    pb.Mount(destination="/dev", type="tmpfs", source="tmpfs", options=["mode=755"]),
)


class World:
    """A node, and its kubelet's record: the first GPU for ``main`` of one pod."""

    def __init__(self, node: Node, directory: Path) -> None:
        self.kubelet = KubeletRoot(str(directory / "kubelet"))
        self.config = replace(node.config, kubelet_root=self.kubelet.directory)
        self.inventory: Inventory | None = node.take_inventory(nvml_gpu(0), nvml_gpu(1))
        self.give({DEVICES: FIRST})

    def give(self, variables: Mapping[str, str], **answer: Any) -> None:
        given = deviceplugin_pb2.ContainerAllocateResponse(envs=variables, **answer)
        self.kubelet.record(VICTIM, "main", given)

    def ask(
        self,
        *env: str,
        uid: str = VICTIM,
        name: str = "main",
        handler: str = "",
        mounts: tuple[pb.Mount, ...] = (),
        **fields: Any,
    ) -> Decision:
        pod = pb.PodSandbox(name="pod", uid=uid, namespace="tests", runtime_handler=handler)
        container = pb.Container(
            id="c1", name=name, env=["PATH=/bin", *env], mounts=[*MOUNTS, *mounts], **fields
        )
        return decide(pod, container, self.config, self.inventory)

    def kept(self) -> list[str]:
        directory = os.path.join(self.config.state, "nri")
        return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


@pytest.fixture
def world(node: Node, tmp_path: Path) -> World:
    return World(node, tmp_path)


def devices(decision: Decision) -> list[str]:
    assert decision.adjustment is not None
    return [node.path for node in decision.adjustment.linux.devices]


def test_the_grant_becomes_devices_mounts_and_variables(world: World) -> None:
    decision = world.ask(f"{DEVICES}={FIRST}", "LD_LIBRARY_PATH=/own")
    assert decision.devices == (FIRST,)
    adjust = decision.adjustment
    assert adjust is not None
    assert "/dev/nvidia0" in devices(decision)
    assert "/dev/nvidia1" not in devices(decision)
    (node,) = (each for each in adjust.linux.devices if each.path == "/dev/nvidia0")
    assert (node.type, node.major, node.minor, node.file_mode.value) == ("c", 195, 0, 0o666)
    variables = {each.key: each.value for each in adjust.env}
    assert variables[DEVICES] == "void"
    assert variables["LD_LIBRARY_PATH"] == f"/own:{LIBRARIES}"
    sources = {mount.destination: mount.source for mount in adjust.mounts}
    assert sources[LIBRARIES].startswith(f"{world.config.state}/nri/c1/")
    assert all("ro" in mount.options for mount in adjust.mounts)
    # Readers learn the record's path from the spec that the runtime writes.
    spec = {"mounts": [{"source": source} for source in sources.values()]}
    with open(record_path(spec, "c1"), encoding="utf-8") as file:
        record = json.load(file)
    assert [gpu["uuid"] for gpu in record["grant"]["gpus"]] == [FIRST]
    assert all(file["state"].startswith("not covered") for file in record["proc_files"])
    assert record_path(spec, "c2") == ""


def test_a_variable_that_the_engine_would_not_change_is_no_silent_loss(world: World) -> None:
    """An image's and a pod's are both in the spec; the engine lets NRI replace the first."""
    with raises(NriVariableLost) as refused:
        world.ask(f"{DEVICES}=all", "LD_LIBRARY_PATH=/image", "LD_LIBRARY_PATH=/pod")
    assert "LD_LIBRARY_PATH twice" in str(refused.value)
    assert world.kept() == []
    # What does not have to grow may be there twice, and an entry without a value is no variable.
    found = world.ask(f"{DEVICES}=all", f"{DEVICES}={FIRST}", "LD_LIBRARY_PATH", "A=1", "A=2")
    assert found.devices == (FIRST,)
    already = world.ask("LD_LIBRARY_PATH=/image", f"LD_LIBRARY_PATH={LIBRARIES}:/pod")
    assert already.devices == (FIRST,)


def test_whose_records_there_are_only_root_sees(world: World) -> None:
    with restored():
        os.umask(0)
        world.ask(f"{DEVICES}={FIRST}")
    above = os.path.join(world.config.state, "nri")
    for path in (above, os.path.join(above, "c1")):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700, path


OF_ANOTHER = {
    "io.kubernetes.cri.sandbox-uid": VICTIM,
    "io.kubernetes.pod.uid": VICTIM,
    "io.kubernetes.cri.container-name": "main",
    "cdi.k8s.io/x": "nvidia.com/gpu=0",
}
NULL = pb.Mount(
    destination="/var/run/nvidia-container-devices/all", type="bind", source="/dev/null"
)


@pytest.mark.parametrize(
    "tried",
    [
        {"env": [f"{DEVICES}=all"]},
        {"env": [f"{DEVICES}=0,1"]},
        {"env": [f"{DEVICES}={FIRST}"]},
        {"env": ["CUDA_VERSION=12.4"]},  # a legacy image, which requests all GPUs
        {"env": [f"{DEVICES}={FIRST}", "NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=all"]},
        {"env": ["NVIDIA_MIG_CONFIG_DEVICES=all", f"{DEVICES}=all"]},
        {"env": ["AMD_VISIBLE_DEVICES=all", "INTEL_VISIBLE_DEVICES=all"]},
        {"annotations": {"cdi.k8s.io/x": f"nvidia.com/gpu={FIRST}"}},
        {"annotations": OF_ANOTHER},
        {"mounts": (NULL,)},
        {"mounts": (NULL,), "env": [f"{DEVICES}=/var/run/nvidia-container-devices"]},
        {"env": [f"{DEVICES}={FIRST}"], "uid": ""},
        {"env": [f"{DEVICES}={FIRST}"], "uid": VICTIM, "name": "another"},
        # The kubelet made the cgroup, and it belongs to another pod.
        {
            "env": [f"{DEVICES}={FIRST}"], "uid": VICTIM,
            "linux": pb.LinuxContainer(cgroups_path=f"/kubepods/pod{MINE}/c1"),
        },
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("trusting", [False, True])
def test_nothing_that_a_pod_can_write_gets_it_a_gpu(
    world: World, tried: dict[str, Any], *, trusting: bool
) -> None:
    if trusting:  # a policy with which the shim would trust it
        world.config = replace(
            world.config, mode=Mode.NVIDIA, accept_mounts=True, trusted_namespaces=("tests",)
        )
    asked = {"uid": MINE, **tried}
    env = asked.pop("env", [])
    assert world.ask(*env, **asked) == NOTHING
    assert world.kept() == []


@pytest.mark.parametrize("value", ["all", FIRST, f"{FIRST}"])
def test_what_is_more_than_the_grant_is_narrowed_to_it(world: World, value: str) -> None:
    assert world.ask(f"{DEVICES}={value}").devices == (FIRST,)


@pytest.mark.parametrize("value", [SECOND, f"{FIRST},{SECOND}", "0,1"])
def test_another_gpu_than_the_granted_is_denied_and_said(world: World, value: str) -> None:
    decision = world.ask(f"{DEVICES}={value}")
    assert decision.adjustment is None
    assert value in decision.denied
    assert world.kept() == []


def test_variables_of_a_container_with_a_grant_bring_nothing_else(world: World) -> None:
    more = ("NVIDIA_GDRCOPY=enabled", "NVIDIA_NVSWITCH=enabled", "NVIDIA_IMEX_CHANNELS=0")
    found = devices(world.ask(f"{DEVICES}={FIRST}", *more))
    assert not [path for path in found if "gdr" in path or "switch" in path or "imex" in path]


def test_a_grant_by_a_name_that_the_engine_does_not_read_is_given(world: World) -> None:
    name = f"k8s.device-plugin.nvidia.com/gpu={SECOND}"
    world.kubelet.record(
        MINE, "main", deviceplugin_pb2.ContainerAllocateResponse(
            cdi_devices=[deviceplugin_pb2.CDIDevice(name=name)]
        ),
    )  # fmt: skip
    assert world.ask(uid=MINE).devices == (SECOND,)
    assert world.ask(f"{DEVICES}=void", uid=MINE) == NOTHING  # it opts out


def test_what_the_engine_gave_by_cdi_is_left_alone(world: World) -> None:
    nodes = [pb.LinuxDevice(path="/dev/nvidia0", type="c", major=195, minor=0)]
    linux = pb.LinuxContainer(devices=nodes)
    library = pb.Mount(destination="/usr/lib64/libcuda.so.535", type="bind", source="/x")
    assert world.ask(f"{DEVICES}=all", linux=linux, mounts=(library,)) == NOTHING
    # A device plugin that passes device nodes does not add the driver.
    found = world.ask(f"{DEVICES}=all", linux=linux)
    assert "/dev/nvidia0" not in devices(found)
    assert "/dev/nvidiactl" in devices(found)


def test_in_doubt_a_container_that_wants_a_gpu_is_refused_and_any_other_starts(
    world: World,
) -> None:
    path = os.path.join(world.kubelet.directory, CHECKPOINT)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"Data": {"PodDeviceEntries": VICTIM}}, file)
    with raises(NriUndecided, match="kubelet_internal_checkpoint"):
        world.ask(f"{DEVICES}={FIRST}")
    assert world.ask() == NOTHING
    # One that has its GPU by CDI needs nothing, whatever its image requests.
    nodes = [pb.LinuxDevice(path="/dev/nvidia0", type="c", major=195, minor=0)]
    library = pb.Mount(destination="/usr/lib64/libcuda.so.535", type="bind", source="/x")
    linux = pb.LinuxContainer(devices=nodes)
    assert world.ask(f"{DEVICES}=all", linux=linux, mounts=(library,)) == NOTHING
    os.unlink(path)  # a node without a device plugin
    assert world.ask(f"{DEVICES}={FIRST}") == NOTHING


def test_a_container_with_a_grant_that_cannot_be_served_is_refused(world: World) -> None:
    world.config = replace(world.config, holders="exclusive")
    with raises(NriUnlimited):
        world.ask(f"{DEVICES}={FIRST}")
    world.config = replace(world.config, holders="any")
    known, world.inventory = world.inventory, None
    with raises(NriUndecided):
        world.ask(f"{DEVICES}={FIRST}")
    world.inventory = known
    os.makedirs(world.config.drained)
    with open(path_of(world.config, FIRST), "w", encoding="utf-8") as file:
        json.dump({"reason": "fan", "since": 1}, file)
    with raises(OutOfService):
        world.ask(f"{DEVICES}={FIRST}")
    assert world.kept() == []
    with pytest.raises(ValueError, match="no id"):
        records.directory_of(world.config.state, "../c1")


def test_a_container_that_could_not_open_its_device_is_refused(world: World) -> None:
    """In a user namespace nodes are bind mounts, and the container's device cgroup denies them."""
    mapped = pb.LinuxContainer(namespaces=[pb.LinuxNamespace(type="user")])
    with raises(NriUnmapped, match="195:255"):
        world.ask(f"{DEVICES}={FIRST}", linux=mapped)
    assert world.kept() == []
    assert world.ask(linux=mapped, uid=MINE) == NOTHING
    # With a device plugin that passes device nodes, the engine allows them.
    passed = world.ask(f"{DEVICES}={FIRST}")
    assert passed.adjustment is not None
    mapped.devices.extend(passed.adjustment.linux.devices)
    assert world.ask(f"{DEVICES}={FIRST}", linux=mapped).devices == (FIRST,)


def test_a_node_of_a_group_is_open_to_the_container(node: Node, tmp_path: Path) -> None:
    for path in (node.dev / "nvidia0", node.dev / "nvidiactl"):
        path.chmod(0o660)
        os.chown(path, 0, 44)
    decision = World(node, tmp_path).ask(f"{DEVICES}={FIRST}")
    assert decision.adjustment is not None
    modes = {each.path: each.file_mode.value for each in decision.adjustment.linux.devices}
    assert modes["/dev/nvidia0"] == modes["/dev/nvidiactl"] == 0o666


def test_records_go_with_their_containers(tmp_path: Path) -> None:
    state = str(tmp_path)
    records.reconcile(state, ())  # none exists yet
    for name in ("here", "gone", "new", "removed"):
        records.write(records.directory_of(state, name), {"format": 1})
        if name != "new":
            os.utime(records.directory_of(state, name), (0, 0))
    records.reconcile(state, {"here", "removed"})
    records.remove(state, "removed")
    records.remove(state, "removed")
    assert sorted(os.listdir(tmp_path / "nri")) == ["here", "new"]


def test_records_that_go_meanwhile_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = str(tmp_path)
    for name in ("a", "b"):
        records.write(records.directory_of(state, name), {"format": 1})
    seen = os.scandir

    def scandir(path: str) -> Any:
        entries = list(seen(path))
        if path == f"{state}/nri":
            os.unlink(f"{entries[0].path}/nvidia.json")
            os.rmdir(entries[0].path)
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    records.reconcile(state, ())
