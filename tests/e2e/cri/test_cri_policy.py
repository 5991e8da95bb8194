"""Which pods get a GPU, by the image, the kubelet and the operator's policy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from api.proto import cri_pb2 as pb
from api.proto import deviceplugin_pb2
from integration.cri.client import Cri
from integration.cri.errors import CriRefused
from integration.simulated import Scenario, SimulatedNode
from tests.harness.pods import IDLE, Pod, PodContainer, Pods, import_image
from tests.harness.waiting import eventually
from tools.cri.plugin import CriContainerd
from tools.images import GLIBC, glibc, write_archive

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
WANTS_ALL: Final = "nvshim.local/pods-that-want-all:latest"
SHOW: Final = (
    "sh", "-c", "cd /dev; ls -d nvidia[0-9] nvidia-* gdrdrv nvidia-caps*/* 2>/dev/null; true",
)  # fmt: skip
LISTED: Final = re.compile(r"\(UUID: (GPU-[0-9a-f-]+)\)")


@pytest.fixture(scope="module")
def node(workshop: str) -> Iterator[SimulatedNode]:
    """Return a node with two GPUs, a switch and IMEX channels."""
    scenario = replace(
        Scenario.load("two"), imex_channels=(0, 3), companion_drivers=("gdrcopy", "nvswitch")
    )
    with SimulatedNode.create(f"{workshop}/cri-policy", scenario) as node:
        yield node


@pytest.fixture(scope="module", autouse=True)
def _image(cri_containerd: CriContainerd, workshop: str) -> None:
    """Create an image that asks for every GPU of the node."""
    environment = {DEVICES: "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    archive = write_archive(
        os.path.join(workshop, "wants-all.tar"), [glibc().named(WANTS_ALL, environment=environment)]
    )
    with Cri(cri_containerd.address) as cri:
        import_image(cri, cri_containerd, archive, WANTS_ALL)
    os.unlink(archive)


@pytest.fixture
def set_policy(
    pods: Pods, node: SimulatedNode, configure: Callable[..., None]
) -> Callable[..., None]:
    """Return a function that writes a policy; the shim reads it for each container."""
    if not pods.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    with open(node.config_path) as file:
        ours = file.read()

    def write(*lines: str) -> None:
        configure("\n".join([ours, "[policy]", *lines, ""]))

    write()
    return write


def test_image_that_wants_all_gpus_starts_without_any_and_it_is_said(
    pods: Pods, set_policy: Callable[..., None]
) -> None:
    container = pods.run().start(*IDLE, image=WANTS_ALL)
    script = "ls -R /dev; ldconfig -p; cat /proc/self/mountinfo; ls /usr/bin /etc/ld.so.conf.d"
    seen = container.exec("sh", "-c", script).stdout.lower()
    assert "libc.so.6" in seen
    for trace in ("nvidia", "libcuda", "nvshim-gpu", "/dri"):
        assert trace not in seen, trace
    assert container.exec("env").lines.count(f"{DEVICES}=all") == 1
    assert "NVIDIA_CTK_LIBCUDA_DIR" not in container.exec("env").stdout
    bundle = container.bundle
    with open(os.path.join(bundle, "config.json")) as file:
        spec = json.load(file)
    assert not [d for d in spec["linux"].get("devices") or [] if "nvidia" in d["path"]]
    assert not os.path.lexists(os.path.join(bundle, "nvidia"))
    record = _record(container)
    assert record["request"]["devices"] == "all"
    assert record["policy"]["namespace"] == "tests"
    (denied,) = record["policy"]["denied"]
    assert f"{DEVICES}=all" in denied

    def said() -> list[str]:
        lines = pods.containerd.log().splitlines()
        return [line for line in lines if "does not get" in line and container.id in line]

    # containerd copies the shim's log to its own with a delay.
    assert "unprivileged" in eventually(said, "it is reported")[0]


def test_kubelet_operator_and_privilege_are_believed(
    pods: Pods, node: SimulatedNode, set_policy: Callable[..., None]
) -> None:
    every = [gpu.uuid for gpu in node.scenario.gpus]
    pod = pods.run()
    by_kubelet = pod.start(*IDLE, image=WANTS_ALL, granted={DEVICES: every[1]})
    assert _listed(by_kubelet) == [every[1]]
    assert _listed(pod.start(*IDLE, image=GLIBC, env=_env("1"))) == []
    set_policy('trusted-namespaces = ["tests"]')
    assert _listed(pod.start(*IDLE, image=WANTS_ALL)) == every
    set_policy('mode = "nvidia"')
    assert _listed(pod.start(*IDLE, image=WANTS_ALL)) == every
    assert _listed(pod.start(*IDLE, image=GLIBC, env=_env("1"))) == [every[1]]
    set_policy('mode = "strict"')
    assert _listed(pod.start(*IDLE, image=GLIBC, env=_env(every[1]))) == []
    assert _listed(pod.start(*IDLE, image=GLIBC, granted=_env(every[1]))) == [every[1]]
    pod.remove()
    set_policy()
    pod = pods.run(security=pb.LinuxSandboxSecurityContext(privileged=True))
    mine = pb.LinuxContainerSecurityContext(privileged=True)
    assert _listed(pod.start(*IDLE, image=WANTS_ALL, security=mine)) == every


def test_with_one_gpu_an_image_gets_no_switch_and_not_every_channel(
    pods: Pods, node: SimulatedNode, set_policy: Callable[..., None]
) -> None:
    granted = {
        **_env(node.scenario.gpus[0].uuid),
        "NVIDIA_IMEX_CHANNELS": "0",
        "NVIDIA_GDRCOPY": "enabled",
    }
    greedy = {"NVIDIA_IMEX_CHANNELS": "all", "NVIDIA_NVSWITCH": "enabled"}
    pod = pods.run()
    container = pod.start(*IDLE, image=GLIBC, granted=granted, env=greedy)
    assert container.exec(*SHOW).lines == ["gdrdrv", "nvidia0"]
    denied = _record(container)["policy"]["denied"]
    denied_for = [line.partition(":")[0] for line in denied]
    assert denied_for == ["nvswitch", "IMEX channels (every one)"]
    # A device plugin names a channel with the same variable; there is no other.
    numbered = pod.start(*IDLE, image=GLIBC, granted=granted)
    assert "nvidia-caps-imex-channels/channel0" in numbered.exec(*SHOW).lines
    for channels in (" 0 , channel3", ",".join(map(str, range(2048)))):
        more = {**greedy, "NVIDIA_IMEX_CHANNELS": channels}
        other = pod.start(*IDLE, image=GLIBC, granted=granted, env=more)
        assert other.exec(*SHOW).lines == ["gdrdrv", "nvidia0"]
    steering = {**granted, "NVIDIA_MIG_CONFIG_DEVICES": "all"}
    _expect_refusal(pod, "NVSHIM-E0223", "mig-config", granted=steering)
    set_policy('trusted-namespaces = ["tests"]')
    seen = pod.start(*IDLE, image=GLIBC, env={**granted, **greedy}).exec(*SHOW).lines
    assert {"nvidia-nvswitchctl", "nvidia-caps-imex-channels/channel0"} <= set(seen)


def test_annotations_of_nvidias_toolkit_give_devices_in_trusted_namespaces_alone(
    pods: Pods, set_policy: Callable[..., None]
) -> None:
    annotations = {
        "nvidia.cdi.k8s.io": "nvidia.com/gpu=0",
        "nvidia.cdi.k8s.io/container.manager": "management.nvidia.com/gpu=all",
    }
    pod = pods.run(handler="handing on", annotations=annotations)
    void = {DEVICES: "void"}
    manager = pod.start(*IDLE, image=GLIBC, env=void, name="manager")
    assert manager.exec(*SHOW).lines == []
    manager.remove()
    set_policy('trusted-namespaces = ["tests"]')
    seen = pod.start(*IDLE, image=GLIBC, env=void).exec(*SHOW).lines
    assert {"nvidia0", "nvidia1"}.intersection(seen) == {"nvidia0"}
    manager = pod.start(*IDLE, image=GLIBC, env=void, name="manager")
    assert {"nvidia0", "nvidia1"} <= set(manager.exec(*SHOW).lines)


def test_a_gpu_of_the_kubelets_brings_nothing_that_only_the_image_asked_for(
    pods: Pods, node: SimulatedNode, set_policy: Callable[..., None]
) -> None:
    greedy = {
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
        **{f"NVIDIA_{name}": "enabled" for name in ("GDS", "MOFED", "GDRCOPY", "NVSWITCH")},
        "NVIDIA_IMEX_CHANNELS": "0,3",
    }
    set_policy('mode = "strict"')
    pod = pods.run(handler="annotated")
    try:
        alone = pod.start(*IDLE, image=GLIBC, env=greedy, granted=_annotated("nvidia.com/gpu=0"))
    except CriRefused as refused:
        if "unresolvable CDI devices" not in refused.said:
            raise
        pytest.skip("this containerd supports CDI and resolves the names itself")
    assert alone.exec(*SHOW).lines == ["nvidia0"]
    denied = [line.partition(":")[0] for line in _record(alone)["policy"]["denied"]]
    assert denied == ["gdrcopy", "gds", "mofed", "nvswitch", "IMEX channels (0, 3)"]
    # Devices that the kubelet itself names are granted.
    named = "nvidia.com/gpu=0,nvidia.com/gdrcopy=all,nvidia.com/imex-channel=3"
    both = pod.start(*IDLE, image=GLIBC, env=greedy, granted=_annotated(named))
    seen = set(both.exec(*SHOW).lines)
    assert seen >= {"gdrdrv", "nvidia0", "nvidia-caps-imex-channels/channel3"}
    assert "nvidia-caps-imex-channels/channel0" not in seen


BELOW: Final = "/var/run/nvidia-container-devices"


def _bound(*names: str) -> list[pb.Mount]:
    """Return mounts of /dev/null, as hostPath volumes produce them."""
    return [pb.Mount(host_path="/dev/null", container_path=name) for name in names]


def test_an_unprivileged_pod_takes_no_device_by_mounts_until_the_operator_says_so(
    pods: Pods,
    node: SimulatedNode,
    set_policy: Callable[..., None],
    configure: Callable[..., None],
) -> None:
    first, second = (gpu.uuid for gpu in node.scenario.gpus)
    pod = pods.run()
    for env, names in (
        ({DEVICES: BELOW}, [f"{BELOW}/cdi/nvidia.com/gpu/all", f"{BELOW}/imex/0"]),
        ({DEVICES: "all"}, [
            f"/var/run/./nvidia-container-devices/../nvidia-container-devices/{second}"
        ]),
    ):  # fmt: skip
        container = pod.start(*IDLE, image=GLIBC, env=env, mounts=_bound(*names))
        assert container.exec(*SHOW).lines == [], (names, env)
        (denied,) = _record(container)["policy"]["denied"]
        assert "accept-mounts" in denied
        container.stop()
    _accept_mounts(configure, node)
    told = pod.start(*IDLE, image=GLIBC, mounts=_bound(f"{BELOW}/{second}"))
    assert _listed(told) == [second]
    set_policy()
    pod.remove()
    pod = pods.run(security=pb.LinuxSandboxSecurityContext(privileged=True))
    mine = pb.LinuxContainerSecurityContext(privileged=True)
    mounts = _bound(f"{BELOW}/{first}")
    assert _listed(pod.start(*IDLE, image=GLIBC, mounts=mounts, security=mine)) == [first]


def test_denied_container_fails_in_one_line_if_that_is_set(
    pods: Pods, node: SimulatedNode, set_policy: Callable[..., None]
) -> None:
    set_policy('denied = "fail"')
    pod = pods.run()
    _expect_refusal(pod, "NVSHIM-E0221", f"{DEVICES}=all", image=WANTS_ALL)
    uuid = node.scenario.gpus[0].uuid
    assert _listed(pod.start(*IDLE, image=WANTS_ALL, granted={DEVICES: uuid})) == [uuid]


def test_excluded_gpu_is_given_to_nobody(
    pods: Pods, node: SimulatedNode, set_policy: Callable[..., None]
) -> None:
    first, second = node.scenario.gpus
    set_policy('mode = "nvidia"', f'exclude-gpus = ["{first.uuid.upper()}"]')
    pod = pods.run()
    container = pod.start(*IDLE, image=WANTS_ALL)
    assert _listed(container) == [second.uuid]
    nodes = container.exec("sh", "-c", "echo /dev/nvidia[0-9] /dev/dri/card*").stdout
    assert nodes == "/dev/nvidia1 /dev/dri/card1\n"
    # Indexes do not change: GPU 1 is the GPU that nvidia-smi calls 1 on the node.
    assert _listed(pod.start(*IDLE, image=GLIBC, env=_env("1"))) == [second.uuid]
    for name in (first.uuid, "0"):
        _expect_refusal(pod, "NVSHIM-E0222", first.uuid, env=_env(name))
    set_policy('mode = "nvidia"', f'exclude-gpus = ["{second.pci}"]')
    assert _listed(pod.start(*IDLE, image=WANTS_ALL)) == [first.uuid]


def _accept_mounts(configure: Callable[..., None], node: SimulatedNode) -> None:
    configure("[requests]\naccept-mounts = true\n", node=node)


def _env(devices: str) -> dict[str, str]:
    return {DEVICES: devices, "NVIDIA_DRIVER_CAPABILITIES": "utility"}


def _listed(container: PodContainer) -> list[str]:
    """Return the GPUs that a container sees, and stop it."""
    done = container.exec("sh", "-c", "command -v nvidia-smi >/dev/null && nvidia-smi -L")
    found = LISTED.findall(done.stdout)
    assert bool(found) == (done.code == 0), done.stdout + done.stderr
    return found


def _annotated(names: str) -> deviceplugin_pb2.ContainerAllocateResponse:
    """Return the answer of a device plugin that uses annotations."""
    return deviceplugin_pb2.ContainerAllocateResponse(annotations={"cdi.k8s.io/kubelet": names})


def _expect_refusal(pod: Pod, code: str, named: str, *, image: str = GLIBC, **fields: Any) -> None:
    container = pod.create("true", image=image, **fields)
    with pytest.raises(CriRefused, match=code) as refused:
        container.start()
    assert named in refused.value.said
    assert "\n" not in refused.value.said
    # containerd 1 appends the text of our status, where the remedy should be last.
    assert "invalid argument" not in refused.value.said
    container.remove()


def _record(container: PodContainer) -> dict[str, Any]:
    with open(os.path.join(container.bundle, "nvidia.json")) as file:
        record: dict[str, Any] = json.load(file)
    return record
