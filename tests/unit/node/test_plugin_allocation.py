"""Allocate's answers, and that our shim grants exactly the allocated devices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from hooks.config import Config, Mode
from hooks.edits.grant import decide
from hooks.node.gpus import Gpu, MigDevice, Nodes
from hooks.node.inventory import Inventory
from hooks.requests.kubelet_record import RecordFile, record_of
from hooks.requests.policy import Verdict, judge, needs_record, read_container
from hooks.requests.request import read_request
from hooks.words import Node
from integration.agent_errors import (
    CdiDeviceUnwritten,
    ChannelsMissing,
    DeviceGone,
    DeviceUnknown,
    GrantIneffective,
    TooManyShares,
)
from integration.node.services.plugin.allocation import (
    VENDOR,
    AllocationContext,
    allocate,
    refuse_ineffective,
)
from integration.node.services.plugin.resources import resources_of
from integration.node.values.health import HealthState
from integration.node.values.resources import (
    TIME_SLICING,
    DeviceIds,
    DeviceList,
    Mig,
    Resource,
    Settings,
    SharedResource,
    Sharing,
)
from tests.harness.raising import Kind, raises
from tests.unit.hooks.requests.test_kubelet_record import checkpoint_of

if TYPE_CHECKING:
    from api.errors import NvshimError
    from api.proto import deviceplugin_pb2 as pb

GPUS = tuple(f"GPU-{n}0000000-0000-4000-8000-000000000000" for n in range(3))
PART = "MIG-10000000-0000-4000-8000-000000000001"
POD = "8f671f58-f552-4f04-9451-c6da55a39396"
CHANNELS = "/dev/nvidia-caps-imex-channels"


def usable(*paths: str) -> dict[str, Node]:
    return {path: Node(path, 195, 0, 0o666, 0, 0, f"/host{path}") for path in paths}


NODE = Inventory(
    driver=cast("Any", None),
    gpus=tuple(
        Gpu(n, n + 4, uuid, f"0000:{n + 1:02x}:00.0", "H100", mig=n == 1)
        for n, uuid in enumerate(GPUS)
    ),
    mig_devices=(MigDevice(1, 0, PART, 1, 0, "1g.10gb", (12, 13)),),
    nodes=Nodes(
        usable(
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            *(f"/dev/nvidia{n}" for n in (4, 5, 6)),
            *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (12, 13)),
        ),
        {},
        frozenset({195}),
    ),
    sockets={},
)
SHARED = Sharing(
    TIME_SLICING,
    resources=(SharedResource("nvidia.com/gpu", 4), SharedResource("nvidia.com/mig-1g.10gb", 2)),
)
ANNOTATION = "cdi.k8s.io/nvidia-device-plugin_token"


def settings(*strategies: DeviceList, **more: Any) -> Settings:
    return Settings(
        mig_strategy=Mig.MIXED, device_list_strategies=strategies or tuple(DeviceList), **more
    )


def context_of(told: Settings, **more: Any) -> AllocationContext:
    names = [*GPUS, PART, "0", "1", "2", "1:0"]
    specs = {f"{VENDOR}/gpu={name}" for name in names} | {f"{VENDOR}/gds=all"}
    usual: dict[str, Any] = {
        "inventory": NODE, "config": Config(accept_mounts=True), "cdi_devices": frozenset(specs),
        "channels": (0, 1),
    }  # fmt: skip
    return AllocationContext(told, **usual | more)


def resource(told: Settings, name: str = "nvidia.com/gpu") -> Resource:
    return next(each for each in resources_of(NODE, told) if each.name == name)


def answered(
    told: Settings, *ids: str, name: str = "nvidia.com/gpu", **more: Any
) -> pb.ContainerAllocateResponse:
    return allocate(resource(told, name), ids, context_of(told, **more), token="token")


def spec_of(answer: pb.ContainerAllocateResponse, *, engine_has_cdi: bool = False) -> Any:
    """Return the OCI spec that kubelet and containerd make from an answer."""
    env = [f"{name}={value}" for name, value in answer.envs.items()]
    if engine_has_cdi and (answer.cdi_devices or answer.annotations):
        env.append("NVIDIA_VISIBLE_DEVICES=void")  # as in each of our specs
    return {
        "process": {"env": env},
        "mounts": [
            {"source": each.host_path, "destination": each.container_path} for each in answer.mounts
        ],
        "annotations": {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-uid": POD,
            "io.kubernetes.cri.container-name": "main",
            **answer.annotations,
        },
    }


def judged(spec: Any, answer: pb.ContainerAllocateResponse, config: Config) -> Verdict:
    """Return what our shim allows of a spec whose answer the kubelet has recorded."""
    checkpoint = RecordFile("checkpoint", checkpoint_of(POD, "main", answer))
    record = record_of(checkpoint, None, POD, "main", config)
    container = read_container(spec)
    return judge(
        read_request(spec, config), container, config,
        record if needs_record(container, config) else None,
    )  # fmt: skip


def granted(spec: Any, answer: pb.ContainerAllocateResponse, config: Config) -> set[str]:
    """Return the devices that our shim grants, and the names that it looks up in spec files."""
    verdict = judged(spec, answer, config)
    assert not verdict.denials
    grant = decide(verdict.allowed, NODE)
    given = {gpu.uuid for gpu in grant.gpus} | {mig.uuid for mig in grant.mig_devices}
    return given | {name.removeprefix(f"{VENDOR}/gpu=") for name in verdict.allowed.cdi_devices}


MODES = (Mode.DEFAULT, Mode.NVIDIA, Mode.PRIVILEGED, Mode.STRICT)
DEVICES = (("nvidia.com/gpu", GPUS[2], "2"), ("nvidia.com/mig-1g.10gb", PART, "1:0"))


@pytest.mark.parametrize(
    "strategies",
    [
        some
        for count in range(1, len(DeviceList) + 1)
        for some in itertools.combinations(DeviceList, count)
    ],
    ids="+".join,
)
def test_the_shim_gives_what_the_kubelet_has_given_in_every_way_and_mode(
    strategies: tuple[DeviceList, ...],
) -> None:
    for row in itertools.product(DEVICES, DeviceIds, MODES):
        assert_given(strategies, *row)


def assert_given(
    strategies: tuple[DeviceList, ...], asked: tuple[str, str, str], called: DeviceIds, mode: str
) -> None:
    name, device, index = asked
    told = settings(*strategies, device_id_strategy=called, sharing=SHARED)
    config = Config(mode=mode)
    refuse_ineffective(told, config)
    answer = answered(told, f"{device}::0", name=name, config=config)
    cdi = [each.name for each in answer.cdi_devices]
    if strategies == (DeviceList.CDI_CRI,):
        # There the engine injects the devices.
        assert cdi == [f"{VENDOR}/gpu={device if called == DeviceIds.UUID else index}"]
        assert granted(spec_of(answer, engine_has_cdi=True), answer, config) == set()
        return
    believed = not set(strategies) <= {DeviceList.CDI_CRI, DeviceList.ENVVAR}
    if DeviceList.CDI_CRI in strategies and not believed:
        # The engine injects the devices, and the variable is "void" afterwards.
        assert granted(spec_of(answer, engine_has_cdi=True), answer, config) == set()
        return
    given = granted(spec_of(answer), answer, config)
    by_annotation = DeviceList.CDI_ANNOTATIONS in strategies
    assert given == {index if by_annotation and called == DeviceIds.INDEX else device}


@pytest.mark.parametrize("strategy", [DeviceList.ENVVAR, DeviceList.VOLUME_MOUNTS])
def test_what_comes_beside_gpus_is_given_in_every_mode(strategy: DeviceList) -> None:
    told = settings(strategy, gds=True, gdrcopy=True, imex_channels=(0,))
    for mode in MODES:
        config = Config(mode=mode)
        answer = answered(told, GPUS[0], config=config)
        verdict = judged(spec_of(answer), answer, config)
        assert not verdict.denials, mode
        assert verdict.allowed.features == {"gds", "gdrcopy"}
        assert verdict.allowed.imex_channels == (0,)


def test_variables_name_each_device_once_whatever_shares_it_has() -> None:
    told = settings(DeviceList.ENVVAR, sharing=SHARED)
    answer = answered(told, f"{GPUS[0]}::1", f"{GPUS[2]}::0", f"{GPUS[0]}::3")
    assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": f"{GPUS[0]},{GPUS[2]}"}
    assert not answer.mounts
    assert not answer.annotations
    assert not answer.cdi_devices
    assert not answer.devices


def test_no_device_is_asked_and_none_is_given() -> None:
    assert answered(settings(DeviceList.ENVVAR)).envs["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert not answered(settings(DeviceList.CDI_CRI)).cdi_devices


def test_mounts_name_devices_and_channels() -> None:
    told = settings(DeviceList.VOLUME_MOUNTS, imex_channels=(0, 7))
    answer = answered(told, GPUS[0])
    assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}
    assert [(each.host_path, each.container_path) for each in answer.mounts] == [
        ("/dev/null", f"/var/run/nvidia-container-devices/{GPUS[0]}"),
        ("/dev/null", "/var/run/nvidia-container-devices/imex/0"),
    ]


def test_cdi_names_are_in_the_annotation_and_in_the_field() -> None:
    told = settings(
        DeviceList.CDI_ANNOTATIONS, DeviceList.CDI_CRI, gds=True, mofed=True, gdrcopy=True
    )
    answer = answered(told, GPUS[0], GPUS[2])
    names = [f"{VENDOR}/gpu={GPUS[0]}", f"{VENDOR}/gpu={GPUS[2]}", f"{VENDOR}/gds=all"]
    assert dict(answer.annotations) == {ANNOTATION: ",".join(names)}
    assert [each.name for each in answer.cdi_devices] == names
    assert not answer.envs  # CDI has already everything that the variables would add
    other = answered(replace(told, cdi_annotation_prefix="example.com/"), GPUS[0])
    assert list(other.annotations) == ["example.com/nvidia-device-plugin_token"]


def test_features_and_channels_are_variables_beside_a_variable() -> None:
    told = settings(DeviceList.ENVVAR, gds=True, mofed=True, gdrcopy=True, imex_channels=(1, 0, 9))
    assert dict(answered(told, GPUS[0]).envs) == {
        "NVIDIA_VISIBLE_DEVICES": GPUS[0],
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_IMEX_CHANNELS": "1,0",
    }
    required = settings(DeviceList.ENVVAR, imex_channels=(1,), imex_required=True)
    assert answered(required, GPUS[0]).envs["NVIDIA_IMEX_CHANNELS"] == "1"


def test_device_nodes_are_those_of_the_device_and_the_control_nodes_that_are_there() -> None:
    told = settings(DeviceList.ENVVAR, pass_device_specs=True, imex_channels=(1,))
    answer = answered(told, PART, name="nvidia.com/mig-1g.10gb")
    assert [(each.container_path, each.host_path) for each in answer.devices] == [
        ("/dev/nvidiactl", "/host/dev/nvidiactl"),
        ("/dev/nvidia-uvm", "/host/dev/nvidia-uvm"),
        ("/dev/nvidia5", "/host/dev/nvidia5"),
        ("/dev/nvidia-caps/nvidia-cap12", "/host/dev/nvidia-caps/nvidia-cap12"),
        ("/dev/nvidia-caps/nvidia-cap13", "/host/dev/nvidia-caps/nvidia-cap13"),
        (f"{CHANNELS}/channel1", f"{CHANNELS}/channel1"),
    ]
    assert {each.permissions for each in answer.devices} == {"rw"}
    elsewhere = replace(told, dev_root="/run/nvidia/driver/")
    assert answered(elsewhere, GPUS[0]).devices[-2].host_path == "/run/nvidia/driver/dev/nvidia4"
    by_cdi = settings(DeviceList.CDI_CRI, pass_device_specs=True)
    assert not answered(by_cdi, GPUS[0]).devices


ONE_EACH = Sharing(
    TIME_SLICING,
    fail_requests_greater_than_one=True,
    resources=(SharedResource("nvidia.com/gpu", 2),),
)


RENUMBERED = replace(NODE, gpus=(NODE.gpus[0], replace(NODE.gpus[2], index=1)), mig_devices=())


def test_a_device_with_another_index_is_still_named_by_its_uuid() -> None:
    answer = answered(settings(DeviceList.ENVVAR), GPUS[2], inventory=RENUMBERED)
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == GPUS[2]


@pytest.mark.parametrize(
    ("told", "ids", "more", "error", "words"),
    [
        (settings(), ["GPU-none"], {}, DeviceUnknown, "GPU-none"),
        (settings(sharing=SHARED), [GPUS[0]], {}, DeviceUnknown, "none of the 8 devices"),
        (settings(), [GPUS[0]], {"inventory": None}, DeviceGone, GPUS[0]),
        (
            settings(), [GPUS[0], GPUS[2]], {"inventory": replace(NODE, gpus=NODE.gpus[1:])},
            DeviceGone, GPUS[0],
        ),
        (
            settings(device_id_strategy=DeviceIds.INDEX), [GPUS[2]],
            {"inventory": RENUMBERED}, DeviceGone, "its index 2 has just become 1",
        ),
        (
            settings(), [GPUS[0]], {"cdi_devices": frozenset()}, CdiDeviceUnwritten,
            f"the CDI device {VENDOR}/gpu={GPUS[0]}: no CDI spec",
        ),
        (
            settings(DeviceList.CDI_CRI, imex_channels=(0,), imex_required=True), [GPUS[0]], {},
            CdiDeviceUnwritten, f"the CDI device {VENDOR}/imex-channel=0: no CDI spec",
        ),
        (
            settings(imex_channels=(0, 5), imex_required=True), [GPUS[0]], {}, ChannelsMissing,
            "the IMEX channels 0, 5: the node lacks 5",
        ),
        (
            settings(sharing=ONE_EACH), [f"{GPUS[0]}::0", f"{GPUS[2]}::0"], {}, TooManyShares,
            "2",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused(
    told: Settings, ids: list[str], more: dict[str, Any], error: Kind[NvshimError], words: str
) -> None:
    with raises(error, match=words):
        allocate(resource(told), ids, context_of(told, **more), token="token")


def test_a_device_that_has_become_unhealthy_is_given_as_nvidias_plugin_does() -> None:
    told = settings(DeviceList.ENVVAR)
    known = resource(told)
    sick = replace(
        known, devices=tuple(each._replace(state=HealthState.UNHEALTHY) for each in known.devices)
    )
    answer = allocate(sick, [GPUS[0]], context_of(told), token="token")
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == GPUS[0]


def test_a_way_that_the_shim_would_not_go_by_is_said() -> None:
    deaf = Config(accept_mounts=False)
    refuse_ineffective(settings(DeviceList.ENVVAR), deaf)
    refuse_ineffective(settings(DeviceList.CDI_CRI), deaf)
    refuse_ineffective(settings(DeviceList.VOLUME_MOUNTS), Config())
    with raises(GrantIneffective):
        refuse_ineffective(settings(DeviceList.VOLUME_MOUNTS), deaf)
