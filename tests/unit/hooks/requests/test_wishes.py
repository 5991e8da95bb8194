"""However a pod requests devices, it gets exactly those that the kubelet allocated."""

from __future__ import annotations

from typing import Any

import pytest

from api.errors import NvshimError
from hooks.config import Config
from hooks.errors import MalformedDevice
from hooks.requests.kubelet_record import KubeletRecord
from hooks.requests.policy import judge, read_container
from hooks.requests.request import read_request
from hooks.words import AllDevices, GpuUuid, NamedDevices, NoDevices
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import uuid_of
from tests.unit.hooks.requests.test_policy import CRI

DEVICES = "NVIDIA_VISIBLE_DEVICES"
SWARM = "DOCKER_RESOURCE_GPU"
BELOW = "/var/run/nvidia-container-devices"
PLUGIN = "k8s.device-plugin.nvidia.com/gpu="
THEIRS, MINE = uuid_of(0), uuid_of(1)
NOTHING, GIVEN = KubeletRecord(), KubeletRecord(devices=(GpuUuid(MINE),))
CONFIG = Config(swarm_resources=(SWARM,))


def spec_of(env: dict[str, str], mounts: tuple[str, ...] = (), cdi: str = "") -> dict[str, Any]:
    return {
        "process": {"env": [f"{name}={value}" for name, value in env.items()]},
        "annotations": CRI | ({"cdi.k8s.io/x": cdi} if cdi else {}),
        "mounts": [{"destination": path, "type": "bind", "source": "/dev/null"} for path in mounts],
    }


WAYS = [
    *(
        spec_of({variable: wish})
        for variable in (DEVICES, SWARM)
        for wish in (
            "all", " all ", ",all,", "0", " 0 , 1 ", "0-1", "00", "0000:01:00.0",
            "nvidia.com/gpu=all", "runtime.nvidia.com/gpu=0", "nvidia.com/gpu=gpu0",
            THEIRS, f" {THEIRS.upper()} ", THEIRS[:-1], f"{THEIRS},all", f"{THEIRS},1",
            f"{THEIRS},nvidia.com/gpu=1", f"{MINE},{THEIRS}", f"nvidia.com/gpu={THEIRS}",
            f"runtime.nvidia.com/gpu={THEIRS}", f"{PLUGIN}{THEIRS}",
        )
    ),
    spec_of({SWARM: THEIRS, DEVICES: MINE}),
    *(
        spec_of(env, mounts)
        for env in ({}, {DEVICES: BELOW}, {DEVICES: "all"})
        for mounts in (
            (f"{BELOW}/all",),
            (f"{BELOW}/0", f"{BELOW}/imex/0"),
            (f"{BELOW}/{THEIRS}",),
            (f"{BELOW}/cdi/nvidia.com/gpu/all",),
            (f"{BELOW}/cdi/nvidia.com/gpu/{THEIRS}",),
            (f"{BELOW}/cdi/runtime.nvidia.com/gpu=all",),
            (f"/var/run/./nvidia-container-devices/../nvidia-container-devices/{THEIRS}",),
        )
    ),
    *(
        spec_of({}, cdi=names)
        for names in (f"nvidia.com/gpu={THEIRS}", f"{PLUGIN}{THEIRS}", "nvidia.com/gpu=all")
    ),
]  # fmt: skip


def test_no_way_of_asking_gives_what_the_kubelet_did_not_give() -> None:
    for spec in WAYS:
        request, container = read_request(spec, CONFIG), read_container(spec)
        assert request.wants_injection, spec
        nothing = judge(request, container, CONFIG, NOTHING)
        assert not nothing.allowed.wants_injection, spec
        assert nothing.denials, spec
        # "all" in any form means all allocated devices.
        verdict = judge(request, container, CONFIG, GIVEN)
        if request.devices == AllDevices():
            assert verdict.allowed.devices == NamedDevices(GIVEN.devices), spec
        else:
            assert not verdict.allowed.wants_injection, spec
            assert verdict.denials, spec


def test_none_with_all_is_none() -> None:
    for variable in (DEVICES, SWARM):
        assert read_request(spec_of({variable: "none,all"}), CONFIG).devices == NoDevices()


@pytest.mark.parametrize("wish", ["ALL", "Gpu0", "GPU-*"])
@pytest.mark.parametrize("variable", [DEVICES, SWARM])
def test_a_wish_that_nobody_understands_is_an_error(variable: str, wish: str) -> None:
    with raises(MalformedDevice, match=wish.replace("*", r"\*")):
        read_request(spec_of({variable: wish}), CONFIG)


@pytest.mark.parametrize("value", ["1", "all", " all ", "0-1", "1,void"])
def test_an_annotation_that_names_no_cdi_device_asks_for_none(value: str) -> None:
    assert not read_request(spec_of({}, cdi=value), CONFIG).wants_injection
    own = read_request(spec_of({DEVICES: MINE}, cdi=value), CONFIG)
    assert own.devices == NamedDevices(GIVEN.devices)


@pytest.mark.parametrize("value", ['"all"', "'all'", '"0,1"', "\u201call\u201d", '"0","1"'])
@pytest.mark.parametrize(
    "written",
    [DEVICES, SWARM, "annotation", "NVIDIA_IMEX_CHANNELS", "NVIDIA_DRIVER_CAPABILITIES",
     "NVIDIA_MIG_CONFIG_DEVICES"],
)  # fmt: skip
def test_a_value_in_quotes_is_an_error_that_says_so(written: str, value: str) -> None:
    """docker's --env-file and lists in a Compose file keep quotes."""
    env = {} if written == "annotation" else {DEVICES: "all"} | {written: value}
    cdi = f"nvidia.com/gpu={value}" if written == "annotation" else ""
    with pytest.raises(NvshimError) as caught:
        read_request(spec_of(env, cdi=cdi), CONFIG)
    assert "write it without quotes" in caught.value.found
