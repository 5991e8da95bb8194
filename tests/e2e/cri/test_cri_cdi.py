"""A kubelet that names CDI devices, on a containerd that applies CDI itself."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from api.proto import cri_pb2 as pb
from api.proto import deviceplugin_pb2
from integration.simulated import SimulatedNode
from tests.harness import engine_cdi
from tests.harness.engine_cdi import trap
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE, Pods, pods_of
from tests.harness.releases import UNSTABLE
from tests.harness.runtime import OURS
from tools.cri.plugin import CriPlugin
from tools.images import GLIBC, PAUSE, glibc, pause
from tools.parts import Parts

pytestmark = pytest.mark.newest

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
NODES: Final = ("nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
# The handler's settings decide which annotations containerd passes on.
HANDLER: Final = {"runtime_type": OURS, "container_annotations": ["cdi.k8s.io/*"]}


@pytest.fixture(scope="module")
def specs(workshop: str, two_gpus: SimulatedNode) -> str:
    """Return a directory with a CDI spec like nvidia-ctk's, without its hooks."""
    library = f"libcuda.so.{two_gpus.driver_version}"
    directory = next("/" + os.path.dirname(p) for p in glibc().tree if p.endswith("/libc.so.6"))
    (source,) = (
        os.path.join(top, library)
        for top, _, names in os.walk(two_gpus.driver_root)
        if library in names
    )
    edits = {
        "deviceNodes": [{"path": f"/dev/{n}", "hostPath": f"{two_gpus.dev}/{n}"} for n in NODES],
        "env": [f"{DEVICES}=void"],
        "mounts": [
            {
                "hostPath": source,
                "containerPath": f"{directory}/{library}",
                "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
            }
        ],
    }
    devices = [{"name": "1", "containerEdits": edits}]
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}
    os.makedirs(f"{workshop}/cri-cdi")
    with open(f"{workshop}/cri-cdi/nvidia.json", "w") as file:
        json.dump(spec, file)
    program, _ = trap(Path(workshop))
    hooks = [
        {"hookName": stage, **hook}
        for stage in ("createContainer", "prestart", "poststart")
        for hook in engine_cdi.hooks(two_gpus, program)
    ]
    with_hooks = [{"name": "1", "containerEdits": {**edits, "hooks": hooks}}]
    with open(f"{workshop}/cri-cdi/hooked.json", "w") as file:
        json.dump({**spec, "kind": "nvidia.com/hooked", "devices": with_hooks}, file)
    return f"{workshop}/cri-cdi"


@pytest.fixture
def pods(shim_directory: str, two_gpus: SimulatedNode, specs: str) -> Iterator[Pods]:
    """Return pods of a containerd 2, which supports CDI."""
    plugin = CriPlugin({"nvidia": HANDLER}, PAUSE, "nvidia", cdi_directories=(specs,))
    with pods_of(
        plugin,
        glibc(),
        pause(),
        shim_directory=shim_directory,
        shim_config=two_gpus.config_path,
        parts=Parts.of_release(UNSTABLE),
    ) as pods:
        yield pods


def spec_of(bundle: str) -> Any:
    with open(os.path.join(bundle, "config.json")) as file:
        return json.load(file)


def test_what_containerd_has_given_is_not_given_twice(pods: Pods, two_gpus: SimulatedNode) -> None:
    pod = pods.run()
    annotations = {"cdi.k8s.io/nvidia-device-plugin_x": "nvidia.com/gpu=1"}
    granted = deviceplugin_pb2.ContainerAllocateResponse(annotations=annotations)
    both = pod.start(*IDLE, image=GLIBC, granted=granted, env={DEVICES: "all"})
    spec = spec_of(both.bundle)
    assert f"{DEVICES}=void" in spec["process"]["env"], "containerd has not applied CDI"
    for entries, key in (
        (spec["linux"]["devices"], "path"),
        (spec["mounts"], "destination"),
    ):
        assert [name for name, times in Counter(e[key] for e in entries).items() if times > 1] == []
    paths = {entry["path"] for entry in spec["linux"]["devices"]}
    assert paths == {f"/dev/{name}" for name in NODES}
    rules = [json.dumps(rule) for rule in spec["linux"]["resources"]["devices"]]
    assert len(rules) == len(set(rules))
    done = both.exec("sh", "-c", "nvidia-smi -L && probe dlopen libcuda.so.1 && ls /dev")
    assert done.code == 0, done.stdout + done.stderr
    assert two_gpus.scenario.gpus[1].uuid in done.stdout
    assert two_gpus.scenario.gpus[0].uuid not in done.stdout
    with open(os.path.join(both.bundle, "nvidia.json")) as file:
        assert json.load(file)["request"]["origin"] == "annotations"

    # With the CRI's own field, only containerd applies the devices.
    fields = {"CDI_devices": [pb.CDIDevice(name="nvidia.com/gpu=1")]}
    alone = pod.start(*IDLE, image=GLIBC, **fields)
    assert not os.path.exists(os.path.join(alone.bundle, "nvidia.json"))
    assert {entry["path"] for entry in spec_of(alone.bundle)["linux"]["devices"]} == paths


def test_capabilities_beyond_those_of_the_engines_spec_are_added_for_its_devices_alone(
    pods: Pods, two_gpus: SimulatedNode
) -> None:
    pod = pods.run()
    fields = {"CDI_devices": [pb.CDIDevice(name="nvidia.com/gpu=1")]}
    show = ("sh", "-c", "cat /proc/self/mountinfo; ls /dev /dev/dri 2>&1")
    library = f"libnvidia-encode.so.{two_gpus.driver_version}"
    usual = {"NVIDIA_DRIVER_CAPABILITIES": " utility,compute "}
    plain = pod.start(*IDLE, image=GLIBC, env=usual, **fields)
    assert library not in plain.exec(*show).stdout
    assert not os.path.exists(os.path.join(plain.bundle, "nvidia.json"))
    more = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video,graphics"}
    asking = pod.start(*IDLE, image=GLIBC, env=more, **fields)
    seen = asking.exec(*show).stdout
    assert library in seen
    lines = seen.splitlines()
    assert {"nvidia1", "card1"} <= set(lines)
    assert not {"nvidia0", "card0"} & set(lines)
    assert asking.exec("probe", "dlopen", "libnvidia-encode.so.1").code == 0
    with open(os.path.join(asking.bundle, "nvidia.json")) as file:
        record = json.load(file)
    assert record["request"]["origin"] == "spec"
    assert [gpu["uuid"] for gpu in record["grant"]["gpus"]] == [two_gpus.scenario.gpus[1].uuid]
    # An invalid request does not take away what the engine has applied.
    odd = pod.start(*IDLE, image=GLIBC, env={"NVIDIA_DRIVER_CAPABILITIES": "grafics"}, **fields)
    assert "nvidia1" in odd.exec(*show).stdout.splitlines()
    # Capabilities alone do not request a device.
    none = pod.start(*IDLE, image=GLIBC, env=more)
    assert "nvidia" not in none.exec(*show).stdout


def test_commands_tell_what_containerd_alone_has_given(pods: Pods, two_gpus: SimulatedNode) -> None:
    where = (
        "--config",
        two_gpus.config_path,
        "--containerd-state",
        f"{pods.containerd.directory}/state",
    )
    pod = pods.run()
    fields = {"CDI_devices": [pb.CDIDevice(name="nvidia.com/gpu=1")]}
    alone = pod.start(*IDLE, image=GLIBC, name="alone", **fields)
    pod.start(*IDLE, image=GLIBC, name="none")
    assert not os.path.exists(os.path.join(alone.bundle, "nvidia.json"))
    uuid = two_gpus.scenario.gpus[1].uuid
    rows = nvshim("list", "-o", "json", *where).items
    assert {row["uuid"]: [c["id"] for c in row["containers"]] for row in rows} == {
        two_gpus.scenario.gpus[0].uuid: [], uuid: [alone.id],
    }  # fmt: skip
    shims = nvshim("ps", "-o", "json", *where).items
    (row,) = [row for row in shims if row["pid"] in pod.shims]
    assert {c["name"]: c["gpus"] for c in row["containers"]} == {"alone": [uuid], "none": []}
    assert row["gpus"] == [uuid]
    told = nvshim("explain", f"tests/{pod.config.metadata.name}/alone", "-v", *where).stdout
    assert f"GPU 1: {two_gpus.scenario.gpus[1].model.name}" in told
    assert uuid in told
    none = nvshim("explain", f"{pod.config.metadata.name}/none", *where).stdout
    assert "nothing requested" in none
    # The commands also work when the configuration cannot be read.
    blind = nvshim("ps", "-o", "json", "--config", "/nonexistent", *where[2:])
    assert pod.shims[0] in [row["pid"] for row in blind.items]
    assert blind.stderr.startswith("NVSHIM-E0")


def test_hooks_of_a_spec_that_containerd_has_applied_do_not_run(
    pods: Pods, two_gpus: SimulatedNode, workshop: str
) -> None:
    pod = pods.run()
    fields = {"CDI_devices": [pb.CDIDevice(name="nvidia.com/hooked=1")]}
    alone = pod.start(*IDLE, image=GLIBC, **fields)
    assert not any(spec_of(alone.bundle).get("hooks", {}).values())
    assert not list(Path(workshop).glob("*.log"))
    with open(os.path.join(alone.bundle, "nvidia.json")) as file:
        record = json.load(file)
    assert len(record["spec_hooks"]["done"]) == 3 * 8
    assert alone.exec("probe", "dlopen", "libcuda.so", "libcuda.so.1").code == 0
    # Devices that the engine applied count for the limits too.
    where = ("--containerd-state", f"{pods.containerd.directory}/state")
    rows = nvshim("list", "-o", "json", "--config", two_gpus.config_path, *where).items
    held = {row["uuid"] for row in rows if row["containers"]}
    assert held == {two_gpus.scenario.gpus[1].uuid}
